"""Training of one model of the study of distillation: a teacher, or a student with or without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.compressed_training import clouds
from bench.studies.study_runs import TEST, TRAIN, StudyOutcome, StudyRun

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.data.datasets import Dataset
    from mpicoll.deploy.deployed_model import DeployedModel

TEACHER_HIDDEN, STUDENT_HIDDEN = "256,128", "72,48"
TEACHER, ALONE, DISTILLED = VARIANTS = "teacher", "student alone", "distilled student"
VALIDATION = 0.25
"""Share of the training samples on which no model is trained."""
_VALIDATION_SEED = 0x7E57
_TEST_FRACTIONS = {"digits": 0.2, "synthetic:20000x64x50": 0.5}


def execute(run: StudyRun, world: MPI.Intracomm) -> StudyOutcome:
    """Train a model, and return its accuracy on validation and on test samples; collective."""
    options = run.options
    fit, validation = _samples(options["dataset"], run.seed)
    if run.variant == TEACHER:
        model = _teacher(options["dataset"], options["epochs"], run.seed, world)
    else:
        words = ["--hidden", STUDENT_HIDDEN, "--weight-decay", f"{options['weight_decay']:f}"]
        words += ["--alpha", str(options["alpha"]), "--temperature", str(options["temperature"])]
        if options["labeled"] is not None:
            words += ["--labeled", str(options["labeled"])]
        teacher = _teacher(options["dataset"], options["teacher_epochs"], run.seed, world)
        model = _trained(teacher, fit, run.seed, words, options["epochs"], world)
    return StudyOutcome(
        run,
        accuracy=_accuracy(model, fit, world),
        validation=_accuracy(model, validation, world),
        parameters=len(model.flat()),
    )


@cache
def _samples(name: str, seed: int) -> tuple[Dataset, Dataset]:
    """Return a data set without the validation samples, and one whose test samples those are."""
    from mpi4py import MPI

    from mpicoll.data.datasets import load
    from mpicoll.train.config import TrainConfig

    if name == "clouds":
        return divided(clouds(TRAIN, TEST), seed)
    config = TrainConfig(dataset=name, test_fraction=_TEST_FRACTIONS[name], seed=seed)
    return divided(load(config, MPI.COMM_SELF), seed)


def divided(dataset: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Return a data set without the validation samples, and one whose test samples those are."""
    from mpicoll.data.datasets import StoredSamples
    from mpicoll.data.sample_subsets import subset

    samples = dataset.train
    assert isinstance(samples, StoredSamples)
    order = np.random.default_rng((seed, _VALIDATION_SEED)).permutation(samples.count)
    held_out = round(VALIDATION * samples.count)
    fit, validation = subset(samples, np.sort(order[held_out:])), subset(samples, np.sort(order[:held_out]))
    return replace(dataset, train=fit), replace(dataset, train=fit, test=validation)


_teachers: dict[tuple[str, int, int], DeployedModel] = {}


def _teacher(name: str, epochs: int, seed: int, world: MPI.Intracomm) -> DeployedModel:
    """Return the teacher of a seed, which is trained on all labels by the first run that needs it."""
    key = name, epochs, seed
    if key not in _teachers:
        _teachers[key] = _trained_teacher(*key, world)
    return _teachers[key]


def _trained_teacher(name: str, epochs: int, seed: int, world: MPI.Intracomm) -> DeployedModel:
    from mpicoll.deploy.model_sources import new_model
    from mpicoll.train.config import TrainConfig

    fit, _ = _samples(name, seed)
    nobody = new_model(TrainConfig(hidden=(1,)), fit)  # of which nothing is used
    return _trained(nobody, fit, seed, ["--alpha", "0", "--hidden", TEACHER_HIDDEN], epochs, world)


def _trained(
    teacher: DeployedModel, dataset: Dataset, seed: int, words: Sequence[str], epochs: int, world: MPI.Intracomm
) -> DeployedModel:
    """Return the model that ``python -m mpicoll.deploy distill`` makes."""
    from mpicoll.deploy.deploy_commands import distill
    from mpicoll.deploy.deploy_options import parse_deploy

    command = ["distill", "--teacher", "-", "-o", "student.safetensors", "--epochs", str(epochs), *words]
    options = parse_deploy([*command, "--quiet", "--no-progress"])
    data: dict[str, Any] = {"dataset": "digits", "seed": seed}  # the samples are given
    return distill(teacher, dataset, replace(options, data=data), world)


def _accuracy(model: DeployedModel, dataset: Dataset, world: MPI.Intracomm) -> float:
    from mpicoll.deploy.evaluation import accuracy
    from mpicoll.deploy.inference import Runtime

    return accuracy(Runtime(model), dataset, world) or 0.0
