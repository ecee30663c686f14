"""Study of slow links: time to an accuracy by every strategy at 0.1, 1 and 10 Gbit/s."""

from __future__ import annotations

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
    lines = []
    for group in names_of(outcomes, "group"):
        rows: list[tuple[str, ...]] = [("strategy", f"seconds to {GOAL:.0%}", "seconds", "kB a step", "accuracy, %")]
        for name in names_of(outcomes, "variant"):
            if found := chosen(outcomes, name, group):
                rows.append((name, *_cells(found)))
        lines += [f"{group}:", "", *container(text_tables.markdown(rows)), ""]
    return lines[:-1]


def _cells(found: Outcomes) -> tuple[str, ...]:
    goals = [seconds for each in found if (seconds := seconds_to_goal(each)) is not None]
    return (
        interval_cell(goals, ".2f") if len(goals) == len(found) else f"{len(goals)} of {len(found)} runs",
        interval_cell([each.seconds for each in found], ".2f"),
        f"{median(each.sent_nbytes for each in found) / 1e3:.1f}",
        accuracy_cell(found),
    )


def draw(figure: Figure, outcomes: Outcomes) -> None:
    """Draw accuracy against seconds, a panel for each rate."""
    groups = names_of(outcomes, "group")
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
    setting=f"A perceptron with two hidden layers of 256 elements (76,554 parameters) on {HOSTS} emulated hosts with "
    f"one rank each, {BATCH} samples in a step over all hosts, {EPOCHS} epochs, momentum 0.9 with learning rate "
    f"{RATE}, which decays to 0. The hosts share the cores, so that computation takes longer than on real ones: at 10 "
    "Gbit/s the seconds say little. {doc}`../benchmarks/method` describes the emulation, which needs Linux and root.",
    runs=runs,
    tables=tables,
    draw=draw,
    caption="Test accuracy against seconds at each rate",
    conclusions=(),
)
