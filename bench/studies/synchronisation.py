"""Study of synchronisation: accuracy, bytes and distance of the replicas, from each step to none at all."""

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
    median_cell,
    median_curve,
    names_of,
)
from bench.studies.study_runs import StudyRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS, EPOCHS, BATCH, RATE = 8, 8, 256, 0.1
NONE = "no synchronisation, mean"
VARIANTS: dict[str, dict[str, Any]] = {
    "each step": {},
    **{f"average every {steps}": {"mode": "local", "sync_every": steps} for steps in (4, 16, 64)},
    "elastic every 16": {"mode": "local", "sync_every": 16, "averaging": "elastic"},
    NONE: {"mode": "local", "averaging": "final"},
    **{f"gossip, {graph}": {"mode": "gossip", "graph": graph} for graph in ("ring", "exponential", "complete")},
    **{f"server, staleness {bound}": {"mode": "ps", "servers": 1, "staleness": bound} for bound in (0, 1, 4, 16)},
    "server, no bound": {"mode": "ps", "servers": 1},
}


def runs(seed: int) -> list[StudyRun]:
    """Return the runs of a seed."""
    common = {"lr": RATE, "hidden": (128,), "epochs": EPOCHS, "batch": BATCH, "evaluate_every": EPOCHS}
    return [StudyRun(name, "", seed, RANKS, common | own) for name, own in VARIANTS.items()]


def _mean_distance(outcomes: Outcomes) -> list[float | None]:
    return [median(distance for _, distance in each.distances) if each.distances else None for each in outcomes]


def tables(outcomes: Outcomes) -> list[str]:
    """Return the page's table."""
    head = ("synchronisation", "accuracy, %", "from each step", "kB a step", "gradients late", "distance")
    rows: list[tuple[str, ...]] = [head]
    base = {each.run.seed: each.accuracy for each in chosen(outcomes, "each step")}
    for name in names_of(outcomes, "variant"):
        found = chosen(outcomes, name)
        pairs = [100 * (each.accuracy - base[each.run.seed]) for each in found if each.run.seed in base]
        rows.append(
            (
                name,
                accuracy_cell(found),
                interval_cell(pairs, "+.2f") if pairs else "",
                f"{median(each.sent_nbytes for each in found) / 1e3:.2f}",
                median_cell([each.late for each in found], ".1f"),
                median_cell(_mean_distance(found), ".3g"),
            )
        )
        if found and all(each.replicas for each in found):
            rows.append(("no synchronisation, each replica", *_replica_cells(found, base)))
    what = (
        f"Test accuracy after {EPOCHS} epochs, and its difference from averaging gradients in each step with the same "
        "seed; what a rank sends in a step; by how many updates gradients were late; median distance of the replicas "
        "from their mean while training goes on, just before they are averaged."
    )
    return [what, "", *container(text_tables.markdown(rows))]


def _replica_cells(found: Outcomes, base: dict[int, float]) -> tuple[str, ...]:
    """Return the cells of single replicas: the median replica of each seed."""
    values = [(each.run.seed, median(each.replicas)) for each in found]
    pairs = [100 * (value - base[seed]) for seed, value in values if seed in base]
    own = interval_cell([100 * value for _, value in values], ".2f")
    return own, interval_cell(pairs, "+.2f") if pairs else "", "0.00", "", ""


def draw(figure: Figure, outcomes: Outcomes) -> None:
    """Draw the distance between replicas over time, and accuracy against bytes."""
    left, right = figure.subplots(1, 2)
    for name in names_of(outcomes, "variant"):
        found = chosen(outcomes, name)
        x, y = median_curve(found, "distances", 1)
        if x:
            left.plot(x, y, marker=".", label=name)
    left.set(xlabel="steps", ylabel="distance of replicas to their mean", yscale="log", title="just before averages")
    if left.lines:
        left.legend(fontsize="x-small")
    left.grid(alpha=0.3)
    for number, name in enumerate(names_of(outcomes, "variant")):
        found = chosen(outcomes, name)
        nbytes = max(median(each.sent_nbytes for each in found) / 1e3, 1e-2)
        values = [100 * each.accuracy for each in found]
        middle = median(values)
        errors = [[middle - min(values)], [max(values) - middle]]
        color, marker = f"C{number % 10}", "o" if number < 10 else "s"
        right.errorbar([nbytes], [middle], yerr=errors, fmt=marker, color=color, label=name, capsize=2)
    right.set(xlabel="kB that a rank sends in a step", ylabel="test accuracy, %", xscale="log")
    right.legend(fontsize="x-small")
    right.grid(alpha=0.3)


STUDY = Study(
    name="synchronisation",
    title="Less synchronisation",
    question="What does it cost to synchronise rarely, with some ranks only, with late gradients, or not at all, and "
    "how far do the replicas drift apart?",
    setting=f"A perceptron with 128 hidden elements, {BATCH} samples in a step over all ranks, momentum 0.9 with "
    f"learning rate {RATE}, which decays to 0. Ranks of gossip and of a server take steps when they can; *late* is by "
    "chance of the machine, and shorter on ranks with cores of their own. Distances are root mean squares over the "
    "ranks. All replicas of local steps are averaged at the end of an epoch, but without synchronisation only to "
    "evaluate the mean, which is all that is sent there.",
    runs=runs,
    tables=tables,
    draw=draw,
    caption="Distance between replicas against steps, and accuracy against bytes",
    conclusions=(
        "Averaging replicas every 64 steps sends 64 times fewer bytes and costs no accuracy on this task: the "
        "models are 0.75 points better than with averages of gradients in each step, and better for each of "
        "the five seeds.",
        "Without any synchronisation the mean of the replicas is 5 points worse than a synchronous model, and "
        "3 points worse than a single replica. The replicas are 15 from their mean then, and 3 if they are "
        "averaged every 64 steps.",
        "Gossip sends half of the bytes of averaged gradients and loses 0.2 points. The graph makes no "
        "difference on 8 ranks.",
        "Gradients that are four updates late lose nothing that five seeds can show, whatever the bound.",
    ),
)
