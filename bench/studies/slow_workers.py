"""Study of slow workers: synchronous and asynchronous training with 0, 1 and 3 of them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from bench.studies.study_definition import Outcomes, Study, accuracy_cell, chosen, grid_table, interval_cell, names_of
from bench.studies.study_runs import StudyRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS, STEPS, BATCH, RATE = 8, 128, 256, 0.1
STEP_SECONDS, FACTOR = 0.006, 5.0
SLOW = (0, 1, 3)
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "synchronous, balanced": {"balance": "auto"},
    "local 16": {"mode": "local", "sync_every": 16},
    "server": {"mode": "ps", "servers": 1},
    "server, staleness 4": {"mode": "ps", "servers": 1, "staleness": 4},
    "server, 1 backup": {"mode": "ps", "servers": 1, "staleness": 0, "backup": 1},
    "server, 3 backups": {"mode": "ps", "servers": 1, "staleness": 0, "backup": 3},
    "peer to peer": {"mode": "p2p"},
    "gossip": {"mode": "gossip"},
}


def runs(seed: int) -> list[StudyRun]:
    """Return the runs of a seed."""
    found = []
    for slow in SLOW:
        options = {"lr": RATE, "hidden": (128,), "epochs": 2, "steps": STEPS, "batch": BATCH, "evaluate_every": 2,
                   "step_seconds": STEP_SECONDS, "slow": tuple((1 + rank, FACTOR) for rank in range(slow))}  # fmt: skip
        for name, own in VARIANTS.items():
            found.append(StudyRun(name, f"{slow} slow", seed, RANKS, options | own))
    return found


def _late(found: Outcomes) -> str:
    values = [each.late for each in found if each.late is not None]
    return interval_cell(values, ".1f") if values and len(values) == len(found) else ""


def _pace(found: Outcomes) -> str:
    return interval_cell([each.samples_per_second for each in found], ",.0f") if found else ""


def tables(outcomes: Outcomes) -> list[str]:
    """Return the tables of accuracy, pace and lateness."""
    lines = [f"Test accuracy in percent after {STEPS} steps:", "", *grid_table(outcomes, "training", "", accuracy_cell)]
    lines += ["", "Training samples a second:", "", *grid_table(outcomes, "training", "", _pace)]
    late = [each for each in outcomes if each.late is not None]
    if late:
        what = "Mean number of updates by which gradients were late:"
        lines += ["", what, "", *grid_table(late, "training", "", _late)]
    return lines


def draw(figure: Figure, outcomes: Outcomes) -> None:
    """Draw pace and accuracy, a group of bars for each way of training."""
    names, groups = names_of(outcomes, "variant"), names_of(outcomes, "group")
    left, right = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(groups)
    for number, group in enumerate(groups):
        found = {name: chosen(outcomes, name, group) for name in names}
        there = [name for name in names if found[name]]
        places = [names.index(name) + (number - (len(groups) - 1) / 2) * height for name in there]
        pace = [median(each.samples_per_second for each in found[name]) for name in there]
        accuracy = [100 * median(each.accuracy for each in found[name]) for name in there]
        left.barh(places, pace, height * 0.9, label=group)
        right.plot(accuracy, places, "o", label=group)
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set(xlabel="training samples a second")
    right.set(xlabel="test accuracy, %")
    left.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)


STUDY = Study(
    name="slow-workers",
    title="Slow workers",
    question="What do slow workers cost in synchronous and in asynchronous training, in time and in accuracy?",
    setting=f"A perceptron with 128 hidden elements, {BATCH} samples in a step over all ranks, momentum 0.9 with "
    f"learning rate {RATE}, which decays to 0. Gradients take {1e3 * STEP_SECONDS:g} ms on every rank, slept, and "
    f"{FACTOR:g} times as long on slow ones: artificial delays, as if the model were larger. A server is one of the "
    "ranks.",
    runs=runs,
    tables=tables,
    draw=draw,
    caption="Training samples a second and test accuracy with 0, 1 and 3 slow workers",
    conclusions=(
        "One worker that is five times as slow takes 56 % of the pace of synchronous training, and three take "
        "hardly more: the others wait for the slowest in any case. `--balance auto` gives slow ranks smaller "
        "parts, keeps 73 % of the pace with one and 67 % with three, and does not change the accuracy.",
        "A server without a bound and peer-to-peer training do not wait for slow workers, and have the "
        "accuracy of synchronous training. Their gradients are five updates late.",
        "With a bound of four steps all workers go as fast as the slowest one, as in synchronous training.",
        "One backup worker keeps the pace with one slow worker, at 0.6 points, but not with three. Three "
        "backups lose 3 to 7 points after equally many steps, since gradients are left out.",
        "Gossip keeps its pace and loses accuracy: 1.5 points without slow workers, 6 with three, whose "
        "replicas are old when they are averaged.",
    ),
)
