"""Accuracy of a small model that learns from a larger one, beside the same model trained on the labels alone.

``python -m bench.distilled_students`` trains, for each task and seed, a teacher with hidden layers of 256 and 128 units
on all labels, and students with a fifth of its parameters or fewer. Under ``mpirun`` all ranks train.

A quarter of the training samples is held out for validation; no model is trained on them. Temperature and weight of
the teacher are those with the best mean accuracy of all seeds on the validation samples; of the student alone, weight
decay and the number of epochs are chosen in the same way. Test samples take no part in the choice. The
distilled student keeps the trainer's weight decay of 0.0005.

Tasks: *digits* with all labels; *digits, 100 labels*, in which students see the labels of 100 training samples, and
learn from the teacher's logits on the others; *synthetic*, 20,000 samples in 50 overlapping classes, half of them for
testing. Where fewer samples have labels, the student alone may train for more epochs, up to as many steps as the
distilled one. Gains are differences with the same seed; an interval is the 95 % one of the mean, by Student's t.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import intervals, text_tables

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.data.datasets import Dataset
    from mpicoll.deploy.deployed_model import DeployedModel

PROGRAM = "bench.distilled_students"
TEMPERATURES, ALPHAS = (1, 2, 4, 8), (0.5, 0.9)
DECAYS = (0.0005, 0.005, 0.02)
TEACHER, STUDENT = "256,128", "72,48"
ALONE, LARGE = "alone", "teacher"
_VALIDATION, _VALIDATION_SEED = 0.25, 0x7E57


@dataclass(frozen=True)
class Task:
    """A data set, and what students know of it.

    Attributes
    ----------
    dataset, test_fraction, epochs
        Options of the trainer.
    labeled
        Training samples whose labels students see; None for all.
    """

    dataset: str
    test_fraction: float
    epochs: int
    labeled: int | None = None


TASKS = {
    "digits": Task("digits", 0.2, 40),
    "digits, 100 labels": Task("digits", 0.2, 40, labeled=100),
    "synthetic": Task("synthetic:20000x64x50", 0.5, 20),
}


@dataclass(frozen=True)
class StudentOutcome:
    """One trained model.

    Attributes
    ----------
    kind
        `LARGE`, `ALONE`, or "distilled".
    setting
        What is chosen on the validation samples.
    parameters
        Number of parameters.
    validation, test
        Shares of these samples that are classified right.
    """

    task: str
    kind: str
    setting: str
    seed: int
    parameters: int
    validation: float
    test: float


def measure(name: str, seed: int, world: MPI.Intracomm, epochs: int | None = None) -> Iterator[StudentOutcome]:
    """Yield the outcomes of a seed: teacher, students alone, distilled students. Collective over `world`."""
    from mpicoll.data.datasets import load
    from mpicoll.train.config import TrainConfig

    task = TASKS[name]
    task = task if epochs is None else replace(task, epochs=epochs)
    data: dict[str, Any] = {"dataset": task.dataset, "test_fraction": task.test_fraction, "seed": seed}
    fit, validation = _parts(load(TrainConfig(**data), world), seed)
    teacher = _train(None, fit, data, ["--alpha", "0", "--hidden", TEACHER], task.epochs, world)

    def outcome(kind: str, setting: str, model: DeployedModel) -> StudentOutcome:
        found = _accuracies(model, fit, validation, world)
        return StudentOutcome(name, kind, setting, seed, len(model.flat()), *found)

    yield outcome(LARGE, "", teacher)
    common = ["--hidden", STUDENT, *([] if task.labeled is None else ["--labeled", str(task.labeled)])]
    longest = task.epochs if task.labeled is None else task.epochs * fit.train.count // task.labeled
    for count, decay in itertools.product(dict.fromkeys((task.epochs, longest)), DECAYS):
        model = _train(teacher, fit, data, [*common, "--alpha", "0", "--weight-decay", f"{decay:f}"], count, world)
        yield outcome(ALONE, f"{count} epochs, weight decay {decay:g}", model)
    for alpha in ALPHAS:
        for temperature in TEMPERATURES:
            chosen = [*common, "--alpha", str(alpha), "--temperature", str(temperature)]
            model = _train(teacher, fit, data, chosen, task.epochs, world)
            yield outcome("distilled", f"T = {temperature}, weight {alpha}", model)


def _parts(dataset: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Return the data set without the validation samples, and one whose test samples those are."""
    from mpicoll.data.datasets import StoredSamples
    from mpicoll.data.sample_subsets import subset

    samples = dataset.train
    assert isinstance(samples, StoredSamples)
    order = np.random.default_rng((seed, _VALIDATION_SEED)).permutation(samples.count)
    held_out = round(_VALIDATION * samples.count)
    fit, validation = subset(samples, np.sort(order[held_out:])), subset(samples, np.sort(order[:held_out]))
    return replace(dataset, train=fit), replace(dataset, train=fit, test=validation)


def _train(
    teacher: DeployedModel | None, dataset: Dataset, data: dict[str, Any], words: Sequence[str], epochs: int,
    world: MPI.Intracomm,
) -> DeployedModel:  # fmt: skip
    """Return a model that ``distill`` makes; without a teacher, it learns from the labels."""
    from mpicoll.deploy.deploy_commands import distill
    from mpicoll.deploy.deploy_options import parse_deploy
    from mpicoll.deploy.model_sources import new_model
    from mpicoll.train.config import TrainConfig

    command = ["distill", "--teacher", "-", "-o", "student.safetensors", "--epochs", str(epochs), *words]
    options = parse_deploy([*command, "--quiet", "--no-progress"])
    options = replace(options, data=data)
    other = teacher if teacher is not None else new_model(TrainConfig(hidden=(1,)), dataset)  # of which nothing is used
    return distill(other, dataset, options, world)


def _accuracies(model: DeployedModel, fit: Dataset, validation: Dataset, world: MPI.Intracomm) -> tuple[float, float]:
    from mpicoll.deploy.evaluation import accuracy
    from mpicoll.deploy.inference import Runtime

    runtime = Runtime(model)
    return accuracy(runtime, validation, world) or 0.0, accuracy(runtime, fit, world) or 0.0


def best_setting(outcomes: Sequence[StudentOutcome], kind: str) -> list[StudentOutcome]:
    """Return the outcomes of the setting whose mean accuracy on validation samples is the best; the first of equals."""
    found = [each for each in outcomes if each.kind == kind]
    settings = dict.fromkeys(each.setting for each in found)
    best = max(settings, key=lambda setting: fmean(each.validation for each in found if each.setting == setting))
    return sorted((each for each in found if each.setting == best), key=lambda each: each.seed)


def table(outcomes: Sequence[StudentOutcome]) -> list[str]:
    """Return a line for each task."""
    rows = [["task", "teacher", "student alone", "distilled", "gain, points", "size", "chosen"]]
    for task in dict.fromkeys(each.task for each in outcomes):
        own = [each for each in outcomes if each.task == task]
        large, alone, distilled = (best_setting(own, kind) for kind in (LARGE, ALONE, "distilled"))
        gains = [100 * (one.test - other.test) for one, other in zip(distilled, alone, strict=True)]
        mean, half = intervals.of_mean(gains)
        rows.append(
            [
                task,
                *(f"{fmean(each.test for each in kind):.2%}" for kind in (large, alone, distilled)),
                f"{mean:+.2f} ± {half:.2f} ({min(gains):+.2f} to {max(gains):+.2f})",
                f"{alone[0].parameters / large[0].parameters:.0%}",
                f"{distilled[0].setting}; alone {alone[0].setting}",
            ]
        )
    return text_tables.markdown(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS), metavar="TASK",
        help=f"default: all of {', '.join(map(repr, TASKS))}")  # fmt: skip
    add("--seeds", type=int, default=5, metavar="N", help="seeds of each task (default: %(default)s)")
    add("--epochs", type=int, metavar="N", help="epochs in place of the task's, for a quick look")
    add("--json", type=Path, metavar="FILE", help="write every outcome")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1 or (arguments.epochs is not None and arguments.epochs < 1):
        parser.error("--seeds and --epochs are at least 1")
    from mpi4py import MPI

    from mpicoll import Intracomm

    world = Intracomm(MPI.COMM_WORLD)
    outcomes: list[StudentOutcome] = []
    for task in arguments.tasks:
        for seed in range(arguments.seeds):
            for outcome in measure(task, seed, world, arguments.epochs):
                outcomes.append(outcome)
                if world.rank == 0:
                    where = f"{task}, seed {seed + 1} of {arguments.seeds}: {outcome.kind} {outcome.setting}"
                    print(f"{where}: validation {outcome.validation:.2%}", file=sys.stderr, flush=True)
            if world.rank == 0 and arguments.json is not None:
                text = json.dumps([asdict(each) for each in outcomes], indent=1)
                arguments.json.write_text(text + "\n", encoding="utf-8")
    if world.rank == 0:
        print(*table(outcomes), sep="\n", flush=True)


if __name__ == "__main__":
    main()
