"""Study of the batch: accuracy after equally many epochs, by rules for the learning rate and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.studies.study_definition import (
    Outcomes,
    Study,
    accuracy_cell,
    chosen,
    grid_table,
    line_with_interval,
    names_of,
)
from bench.studies.study_runs import TRAIN, StudyRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (32, 128, 512, 2048, 8192)
EPOCHS, RANKS, BASE_RATE = 10, 2, 0.05
RULES: dict[str, dict[str, Any]] = {
    "no scaling": {},
    "linear": {"scale_lr": "linear"},
    "linear, warm-up": {"scale_lr": "linear", "warmup": 0.15},
    "square root": {"scale_lr": "sqrt"},
    "square root, warm-up": {"scale_lr": "sqrt", "warmup": 0.15},
    "LARS, linear, warm-up": {"optimizer": "lars", "lr": 2.0, "scale_lr": "linear", "warmup": 0.15},
    "LARS, square root, warm-up": {"optimizer": "lars", "lr": 2.0, "scale_lr": "sqrt", "warmup": 0.15},
    "LAMB, square root, warm-up": {"optimizer": "lamb", "lr": 0.01, "scale_lr": "sqrt", "warmup": 0.15},
}
"""Options of each row; `warmup` is a fraction of the steps."""


def runs(seed: int) -> list[StudyRun]:
    """Return the runs of a seed."""
    found = []
    for batch in BATCHES:
        steps = EPOCHS * -(-TRAIN // batch)
        for name, own in RULES.items():
            options = {"lr": BASE_RATE, "hidden": (128,), "epochs": EPOCHS, "batch": batch, "evaluate_every": EPOCHS}
            options |= own | {"warmup": round(own.get("warmup", 0) * steps)}
            found.append(StudyRun(name, str(batch), seed, RANKS, options))
    return found


def tables(outcomes: Outcomes) -> list[str]:
    """Return the page's tables."""
    groups = names_of(outcomes, "group")
    steps = {group: max(each.steps for each in outcomes if each.run.group == group) for group in groups}
    known = ", ".join(f"{count} at {group}" for group, count in steps.items() if count)
    return [
        f"Test accuracy in percent by the batch, after {EPOCHS} epochs; steps: {known}.",
        "",
        *grid_table(outcomes, "batch", "", accuracy_cell),
    ]


def draw(figure: Figure, outcomes: Outcomes) -> None:
    """Draw accuracy against the batch."""
    axes = figure.subplots()
    for name in names_of(outcomes, "variant"):
        groups = names_of(chosen(outcomes, name), "group")
        values = [[100 * each.accuracy for each in chosen(outcomes, name, group)] for group in groups]
        line_with_interval(axes, [int(group) for group in groups], values, label=name)
    axes.set(xlabel="samples in a batch", ylabel="test accuracy, %", ylim=(40, None))
    axes.set_xscale("log", base=2)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


STUDY = Study(
    name="batch-size",
    title="Batch size and learning rate",
    question="How large may a batch be before the model gets worse, with the same number of epochs? Which rule for the "
    "learning rate, and which optimizer, keeps the accuracy?",
    setting=f"A perceptron with 128 hidden elements, momentum 0.9, learning rate {BASE_RATE} at batch 64 (LARS: 2, "
    "LAMB: 0.01) with `--scale-lr`, cosine decay to 0; a warm-up is 15 % of the steps.",
    runs=runs,
    tables=tables,
    draw=draw,
    caption="Test accuracy against the batch, for each rule",
    conclusions=(
        "Without scaling, every fourfold batch costs more accuracy than the one before: 2 points from 32 to "
        "128, 25 points from 2048 to 8192.",
        "Linear scaling keeps the accuracy up to batch 512 (0.2 points below batch 32), and with a warm-up up "
        "to 2048 (1.4 points). The warm-up makes no difference before 2048.",
        "At batch 8192 the 20 steps of linear scaling have too large a rate, 6.4, and end below no scaling. "
        "The square root is better there and worse before.",
        "LARS with linear scaling is the best at 128 and 512, by 0.6 and 1.3 points, and fails at 2048. With "
        "the square root it equals linear scaling with warm-up at 2048.",
        "LAMB with the square root loses least over the whole range, and leads by 9 points at 8192. A rate "
        "that is tuned for each batch may change this order.",
    ),
)
