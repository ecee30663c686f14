"""Study of distillation: a small model that learns from a larger one, beside the same model with the labels alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bench import text_tables
from bench.studies.distillation_task import ALONE, DISTILLED, STUDENT_HIDDEN, TEACHER, TEACHER_HIDDEN, VALIDATION
from bench.studies.study_definition import Outcomes, Study, accuracy_cell, chosen, container, interval_cell, names_of
from bench.studies.study_runs import StudyOutcome, StudyRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = 2
TEMPERATURES, ALPHAS, DECAYS = (1, 2, 4, 8), (0.5, 0.9), (0.0005, 0.005, 0.02)
_TICKS = (-1, 0, 1, 2, 5, 10, 20)
_LONGER = 3
"""Times the epochs of a distilled student that a student alone may train."""


@dataclass(frozen=True)
class DistillationTask:
    """A data set, and what students know of it.

    Attributes
    ----------
    dataset
        Name of the data set.
    train
        Training samples, without those for validation.
    epochs
        Epochs of the teacher and of distilled students.
    labeled
        Training samples whose labels students see; None for all.
    """

    dataset: str
    train: int
    epochs: int
    labeled: int | None = None

    @property
    def longest(self) -> int:
        """Epochs of a student alone that takes as many steps as a distilled one, or three times as many."""
        return self.epochs * _LONGER if self.labeled is None else self.epochs * self.train // self.labeled


TASKS = {
    "clouds": DistillationTask("clouds", 12288, 20),
    "clouds, 1,000 labels": DistillationTask("clouds", 12288, 20, labeled=1000),
    "digits": DistillationTask("digits", 1078, 40),
    "digits, 100 labels": DistillationTask("digits", 1078, 40, labeled=100),
    "50 classes": DistillationTask("synthetic:20000x64x50", 7500, 20),
}


def runs(seed: int) -> list[StudyRun]:
    """Return the runs of a seed: for each task a teacher, students alone, and distilled students."""
    found = []
    for name, task in TASKS.items():
        teacher = {"dataset": task.dataset, "epochs": task.epochs}
        found.append(StudyRun(TEACHER, name, seed, RANKS, teacher))
        common = {"dataset": task.dataset, "teacher_epochs": task.epochs, "labeled": task.labeled}
        for epochs, decay in itertools.product((task.epochs, task.longest), DECAYS):
            own = {"epochs": epochs, "weight_decay": decay, "alpha": 0.0, "temperature": 1}
            found.append(StudyRun(ALONE, name, seed, RANKS, common | own))
        for alpha, temperature, decay in itertools.product(ALPHAS, TEMPERATURES, DECAYS):
            own = {"epochs": task.epochs, "weight_decay": decay, "alpha": alpha, "temperature": temperature}
            found.append(StudyRun(DISTILLED, name, seed, RANKS, common | own))
    return found


def best(outcomes: Outcomes, variant: str, group: str, **fixed: Any) -> list[StudyOutcome]:
    """Return the outcomes of the setting with the best mean accuracy on validation samples, ordered by seed.

    Parameters
    ----------
    fixed
        Options that the settings must have.
    """
    found = [each for each in chosen(outcomes, variant, group) if fixed.items() <= each.run.options.items()]
    settings: dict[str, list[StudyOutcome]] = {}
    for each in found:
        settings.setdefault(repr(sorted(each.run.options.items())), []).append(each)
    ranked = sorted(settings.values(), key=lambda own: -fmean(each.validation or 0.0 for each in own))
    return sorted(ranked[0], key=lambda each: each.run.seed) if ranked else []


def gains(outcomes: Outcomes, group: str, **fixed: Any) -> list[float]:
    """Return by how many points distilled students are above students alone, for each seed."""
    distilled, alone = best(outcomes, DISTILLED, group, **fixed), best(outcomes, ALONE, group)
    if not distilled:
        return []
    return [100 * (one.accuracy - other.accuracy) for one, other in zip(distilled, alone, strict=True)]


def tables(outcomes: Outcomes) -> list[str]:
    """Return the tables of accuracies, of the chosen settings, and of gains by temperature."""
    groups = names_of(outcomes, "group")
    rows: list[Sequence[str]] = [("task", "teacher", "student alone", "distilled student", "gain, points")]
    settings: list[Sequence[str]] = [("task", "size", "student alone", "distilled student")]
    temperatures: list[Sequence[str]] = [("task", *(f"T = {each}" for each in TEMPERATURES))]
    for group in groups:
        teacher, alone, distilled = (best(outcomes, variant, group) for variant in (TEACHER, ALONE, DISTILLED))
        rows.append((group, *map(accuracy_cell, (teacher, alone, distilled)), _gain_cell(outcomes, group)))
        size = f"{alone[0].parameters / teacher[0].parameters:.0%}"
        settings.append((group, size, _setting(alone), _setting(distilled)))
        temperatures.append((group, *(_gain_cell(outcomes, group, temperature=each) for each in TEMPERATURES)))
    return [
        *("Test accuracy in percent, and the gain with the same seed:", "", *_table(rows)),
        *("", "Share of the teacher's parameters that a student has, and the settings chosen:", "", *_table(settings)),
        *("", "Gain in points by temperature, the other settings chosen:", "", *_table(temperatures)),
    ]


def _gain_cell(outcomes: Outcomes, group: str, **fixed: Any) -> str:
    found = gains(outcomes, group, **fixed)
    return interval_cell(found, "+.2f") if found else ""


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    return container(text_tables.markdown(rows))


def _setting(found: Outcomes) -> str:
    options = found[0].run.options
    teaching = f"T = {options['temperature']}, weight {options['alpha']}, " if options["alpha"] else ""
    return f"{teaching}weight decay {options['weight_decay']:g}, {options['epochs']} epochs"


def draw(figure: Figure, outcomes: Outcomes) -> None:
    """Draw the accuracy of each model, and the gain by temperature."""
    left, right = figure.subplots(1, 2)
    groups = names_of(outcomes, "group")
    for variant, offset in ((TEACHER, -0.2), (ALONE, 0.0), (DISTILLED, 0.2)):
        points = [
            (100 * each.accuracy, row + offset)
            for row, group in enumerate(groups)
            for each in best(outcomes, variant, group)
        ]
        left.plot(*zip(*points, strict=True), "o", markersize=4, label=variant)
    left.set_yticks(range(len(groups)), groups)
    left.invert_yaxis()
    left.set(xlabel="test accuracy, %")
    for group in groups:
        values = [fmean(gains(outcomes, group, temperature=each)) for each in TEMPERATURES]
        right.plot(TEMPERATURES, values, marker=".", label=group)
    right.set_xscale("log", base=2)
    right.set_xticks(TEMPERATURES, map(str, TEMPERATURES))
    right.set_yscale("symlog", linthresh=2)
    right.set_yticks(_TICKS, map(str, _TICKS))
    right.set(xlabel="temperature", ylabel="mean gain, points")
    right.axhline(0, color="black", linewidth=0.5)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")


STUDY = Study(
    name="distillation",
    title="Distillation",
    question="How much more accurate is a small model that learns from a larger one than the same model that learns "
    "from the labels alone?",
    setting=f"Teachers are perceptrons with hidden layers of {TEACHER_HIDDEN.replace(',', ' and ')} elements that "
    f"learn from all labels; students have {STUDENT_HIDDEN.replace(',', ' and ')}. `python -m mpicoll.deploy distill` "
    f"trains them all. {VALIDATION:.0%} of the training samples are held out for validation. Of temperatures from "
    f"{TEMPERATURES[0]} to {TEMPERATURES[-1]}, weights of the teacher of {ALPHAS[0]} and {ALPHAS[1]} and weight "
    f"decays from {DECAYS[0]:g} to {DECAYS[-1]:g}, a distilled student has those with the best mean accuracy of all "
    "seeds on the validation samples. The student alone has the same choice of weight decays, and of training as many "
    f"epochs as the distilled one or {_LONGER} times as many. Where only some samples have labels, it may train on "
    "these for as many steps as the distilled one takes on all samples, for the others of which that has the teacher's "
    "logits. Test samples take no part in the choice. *digits* has 360 test samples, so that one of them is 0.28 "
    "points; *50 classes* are 10,000 training and 10,000 test samples in overlapping classes.",
    runs=runs,
    tables=tables,
    draw=draw,
    caption="Test accuracy of teachers, students alone and distilled students, and the gain by temperature",
    conclusions=(
        "With all labels, the gain is 1.5 points with 50 overlapping classes. It is 0.6 points on *clouds*, where the "
        "student alone is 1.5 points below its teacher and trains three times as long. On *digits* there is none: "
        "the student alone is as good as its teacher.",
        "With few labels, students gain 9 points on *digits* and 17 on *clouds*. The teacher has seen all labels; its "
        "logits on samples without labels are what the student gains from. Most of that comes from these samples and "
        "not from the temperature: T = 1 gives nearly as much.",
        "With all labels, the temperature matters. T = 1 gains nothing, T = 2 to 4 is best, and T = 8 is hardly worse.",
        "With 50 classes the student alone is better than its teacher, and the distilled student better than both: "
        "logits of a teacher that has learned its training samples too well are still a better target than the labels.",
        "A comparison with a student alone whose weight decay was not chosen mixes up distillation and regularisation: "
        "with the trainer's weight decay of 0.0005, the student alone with 50 classes is 7 points worse.",
    ),
)
