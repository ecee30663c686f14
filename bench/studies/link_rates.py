"""Study of slow links: time to an accuracy by every strategy at 0.1, 1 and 10 Gbit/s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import text_tables
from bench.studies.study_definition import (
    Outcomes,
    Study,
    accuracy_cell,
    chosen,
    container,
    interval_cell,
    median_curve,
    names_of,
)
from bench.studies.study_runs import StudyOutcome, StudyRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOSTS, EPOCHS, BATCH, RATE, GOAL = 4, 3, 256, 0.1, 0.9
RATES = (0.1, 1.0, 10.0)
"""Rates of the links, ascending."""
SMALL_SHARE = 0.1
"""Share of a run's seconds up to which a busy link does not decide how long the run takes."""
DENSE = "replicated"
VARIANTS: dict[str, dict[str, Any]] = {
    DENSE: {},
    "replicated, int8": {"compression": "int8"},
    "replicated, topk:0.01": {"compression": "topk:0.01"},
    "replicated, powersgd:4": {"compression": "powersgd:4"},
    "sharded": {"shard": "parameters"},
    "local 16": {"mode": "local", "sync_every": 16},
    "local 16, int8": {"mode": "local", "sync_every": 16, "compression": "int8"},
    "parameter server": {"mode": "ps", "servers": 1},
    "gossip": {"mode": "gossip"},
}


def runs(seed: int) -> list[StudyRun]:
    """Return the runs of a seed."""
    common = {"lr": RATE, "hidden": (256, 256), "epochs": EPOCHS, "batch": BATCH}
    return [
        StudyRun(name, f"{gbit:g} Gbit/s", seed, HOSTS, common | own, gbit)
        for gbit in RATES
        for name, own in VARIANTS.items()
    ]


def seconds_to_goal(outcome: StudyOutcome) -> float | None:
    """Return the seconds until an epoch ended with the accuracy `GOAL`; None if none did."""
    return next((seconds for _, seconds, accuracy in outcome.curve if accuracy >= GOAL), None)


def tables(outcomes: Outcomes) -> list[str]:
    """Return a table for each rate."""
    lines = [
        f"Seconds until an epoch ended with {GOAL:.0%}, and of the whole run; seconds for which the link of a worker "
        "is busy with what it sends; what a worker sends in a step."
    ]
    timed = timed_groups(outcomes)
    for group in names_of(outcomes, "group"):
        times = (f"seconds to {GOAL:.0%}", "seconds") if group in timed else ()
        rows: list[tuple[str, ...]] = [("strategy", *times, "link busy, s", "kB a step", "accuracy, %")]
        every = [found for name in names_of(outcomes, "variant") if (found := chosen(outcomes, name, group))]
        rows += [(found[0].run.variant, *_cells(found, is_timed=group in timed)) for found in every]
        lines += ["", f"{group}:{_remark(every, is_timed=group in timed)}", "", *container(text_tables.markdown(rows))]
    return lines


def timed_groups(outcomes: Outcomes) -> list[str]:
    """Return the groups whose seconds are shown, from the slowest links on.

    Faster links cannot make a run longer: the first group in which they seem to was slowed by other programs, and from
    there on seconds are left out.
    """
    timed: list[str] = []
    before = math.inf
    for group in names_of(outcomes, "group"):
        found = chosen(outcomes, DENSE, group)
        if not found or (seconds := median(each.seconds for each in found)) > before:
            break
        timed.append(group)
        before = seconds
    return timed


def _remark(every: Sequence[Outcomes], *, is_timed: bool) -> str:
    """Return what has to be known of a group's seconds."""
    if not is_timed:
        return " seconds are left out, since other programs slowed these runs."
    largest = max(_busy(found) / median(each.seconds for each in found) for found in every)
    if largest > SMALL_SHARE:
        return ""
    return (
        f" a link is busy for at most {largest:.0%} of a run. Computation and the start of calls, on cores that the "
        "hosts share, take the time, not the links."
    )


def _busy(found: Outcomes) -> float:
    """Return the seconds for which the link of a worker is busy with what it sends, the median of some runs."""
    return median(each.steps * each.sent_nbytes * 8e-9 / (each.run.gbit or 1) for each in found)


def _cells(found: Outcomes, *, is_timed: bool) -> tuple[str, ...]:
    goals = [seconds for each in found if (seconds := seconds_to_goal(each)) is not None]
    to_goal = interval_cell(goals, ".2f") if len(goals) == len(found) else f"{len(goals)} of {len(found)} runs"
    whole = interval_cell([each.seconds for each in found], ".2f")
    return (
        *((to_goal, whole) if is_timed else ()),
        f"{_busy(found):.3f}",
        f"{median(each.sent_nbytes for each in found) / 1e3:.1f}",
        accuracy_cell(found),
    )


def draw(figure: Figure, outcomes: Outcomes) -> None:
    """Draw accuracy against seconds, a panel for each rate whose seconds are shown."""
    groups = timed_groups(outcomes)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        for name in names_of(outcomes, "variant"):
            found = chosen(outcomes, name, group)
            if found:
                _, accuracies = median_curve(found, "curve", 2)
                seconds = [median(each.curve[place][1] for each in found) for place in range(len(accuracies))]
                axes.plot(seconds, [100 * each for each in accuracies], marker=".", label=name,
                          color="black" if name == DENSE else None)  # fmt: skip
        axes.axhline(100 * GOAL, color="grey", linewidth=1)
        axes.set(xscale="log", xlabel="seconds", title=group)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="test accuracy, %")
    panels[-1].legend(fontsize="x-small")


STUDY = Study(
    name="link-rates",
    title="Strategies over slow links",
    question="Which strategy trains fastest over links of 0.1, 1 and 10 Gbit/s, and from which rate on is it enough to "
    "send all gradients as they are?",
    setting=f"A perceptron with two hidden layers of 256 elements (76,810 parameters) on {HOSTS} emulated hosts with "
    f"one rank each, {BATCH} samples in a step over all hosts, {EPOCHS} epochs, momentum 0.9 with learning rate "
    f"{RATE}, which decays to 0. The hosts share the cores, so that computation takes longer than on "
    "real ones, and other programs used them too. "
    "{doc}`../benchmarks/method` describes the emulation, which needs Linux and root.",
    runs=runs,
    tables=tables,
    draw=draw,
    caption="Test accuracy against seconds",
    conclusions=(
        "At 0.1 Gbit/s local steps take a seventh of the time of averaging all gradients, and a tenth with `int8`, at "
        "the same accuracy.",
        "Of the strategies that communicate in each step, those with compressed gradients are two to three times as "
        "fast at 0.1 Gbit/s. `int8` loses nothing, `topk:0.01` loses 2 points in three epochs.",
        "At 1 Gbit/s compressed gradients gain nothing here: to compress them takes longer, on cores that four hosts "
        "share, than to send them as they are. Local steps are still the fastest.",
        "A parameter server is slower than averages of gradients at both rates, since its one link carries the "
        "parameters of all workers.",
        "At 10 Gbit/s the link of a host is busy for less than 0.1 s of the run with all gradients as they are, so "
        "that nothing is left to gain.",
    ),
)
