"""Objective of the command line: one run of ``python -m mpicoll.train`` on the ranks of a group."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.data.datasets import Dataset, load
from mpicoll.errors import UsageError
from mpicoll.models.sequential import Model
from mpicoll.search.group_trial import Trial, TrialPruned
from mpicoll.search.search_options import METRICS
from mpicoll.search.search_space import OWNERS, Parameter, Value, applies, check_meaning
from mpicoll.search.trial_execution import Interrupted
from mpicoll.train.assembly import make_communicator
from mpicoll.train.config import TrainConfig
from mpicoll.train.loop import Loop
from mpicoll.train.metrics import EpochRecord
from mpicoll.train.options import option_names, parse, without, written
from mpicoll.train.training_run import Observer, model_for, run

_FILES = ("json", "log_steps", "tensorboard", "plot", "trace", "checkpoint")
_NOT_SEARCHED = (*_FILES, "run", "trace_steps", "checkpoint_every", "resume", "progress", "quiet", "timeout")
OF_DATA = (
    "dataset", "labels", "target", "test_fraction", "seed", "share_data", "dtype", "task", "context", "model",
)  # fmt: skip
"""Options on which a data set depends."""
_NUMBER = "{trial}"


class TrainerObjective:
    """Objective that trains with fixed options and those that a trial suggests.

    Parameters
    ----------
    fixed
        Options as the trainer's command line has them; ``{trial}`` in them is replaced by the number of the trial.
    space
        Parameters by their options' names.
    metric
        One of `METRICS`.

    Raises
    ------
    UsageError
        If an option is unknown, a value of the space is refused, or all trials would write the same file.
    """

    def __init__(self, fixed: Sequence[str], space: Sequence[Parameter], metric: str) -> None:
        self._fixed, self._space, self._metric = list(fixed), space, metric
        self._data: tuple[object, Dataset] | None = None
        self.config = self.configured({}, 0)
        self.defaults = asdict(self.config)
        known = option_names()
        for parameter in space:
            option = parameter.name.replace("_", "-")
            if parameter.name not in known or parameter.name in _NOT_SEARCHED:
                raise UsageError(f"--space {option}: not an option of the trainer that a trial can choose")
            wrong = [value for value in parameter.ends() if not isinstance(value, bool)]
            if isinstance(self.defaults.get(parameter.name), bool) and wrong:
                raise UsageError(f"--space {option}={wrong[0]}: true or false, an option that is given or not")
        self._check_files()
        check_meaning(space, self.defaults)
        for values in samples_of_space(space, self.defaults):
            with naming_space(values):
                self.configured(values, 0)

    def _check_files(self) -> None:
        other = self.configured({}, 1)
        for name in _FILES:
            value = getattr(self.config, name)
            if value is not None and value == getattr(other, name):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {value}: the same in all trials; put {_NUMBER} into the name")

    def configured(self, values: Mapping[str, Any], number: int) -> TrainConfig:
        """Return the options of the trial `number` with the values `values`."""
        return replace(parse(self._words(values, number)), quiet=True, progress=False)

    def _words(self, values: Mapping[str, Any], number: int) -> list[str]:
        fixed = [text.replace(_NUMBER, str(number)) for text in self._fixed]
        return with_values(fixed, values)

    def command(self, values: Mapping[str, Any], number: int, ranks: int) -> str:
        """Return the command that repeats a trial alone."""
        return f"mpirun -n {ranks} python -m mpicoll.train {shlex.join(self._words(values, number))}".rstrip()

    def __call__(self, trial: Trial, comm: Intracomm) -> float:
        """Train, and return the metric; collective.

        Raises
        ------
        TrialPruned, Interrupted, TrainingError
            On all ranks.
        """
        values: dict[str, Value] = {}
        for parameter in self._space:
            if applies(parameter.name, {**self.defaults, **values}):
                values[parameter.name] = parameter.suggest(trial)
        config = self.configured(values, trial.number)
        result = run(config, make_communicator(config, comm), self._source, _Reporter(trial, self._metric))
        self._note(trial, result)
        if trial.should_prune() and result["stopped"]:
            raise TrialPruned
        if result["stopped"]:
            raise Interrupted
        value = result[self._metric]
        return math.nan if value is None else float(value)

    def _source(self, config: TrainConfig, comm: MPI.Intracomm) -> tuple[Dataset, Model]:
        """Return data set and model; the data set of the trial before if its options are the same. Collective."""
        options = tuple(getattr(config, name) for name in OF_DATA)
        known = np.array([self._data is not None and self._data[0] == options], np.uint8)
        comm.Allreduce(MPI.IN_PLACE, known, MPI.MIN)  # a rank may have failed while it was loading
        if not known[0]:
            self._data = options, load(config, comm)
        assert self._data is not None
        dataset = self._data[1]
        return dataset, model_for(config, dataset, comm)

    def _note(self, trial: Trial, result: Mapping[str, Any]) -> None:
        for name in (*METRICS, "steps", "samples_per_second", "parameters_sha256"):
            trial.set_user_attr(name, result[name])


class _Reporter(Observer):
    """Reports the metric after each epoch on the group's first rank, and stops the run if the trial is given up."""

    def __init__(self, trial: Trial, metric: str) -> None:
        self._trial, self._metric = trial, metric

    def on_step(self, loop: Loop, done: int) -> None:
        """Answer other groups, where no thread does."""
        self._trial.poll()
        super().on_step(loop, done)

    def on_epoch(self, loop: Loop, record: EpochRecord) -> None:
        """Report, unless the trial was given up before: a run may end with the epoch after."""
        value = getattr(record, self._metric)
        if value is None or self._trial.gives_up:
            return
        self._trial.report(value, record.epoch + 1)
        if self._trial.gives_up and record.steps < loop.step_plan.total_steps:
            loop.ask_to_stop()


def with_values(fixed: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return the trainer's command line with chosen values in place of fixed ones.

    A fixed option is taken out even where its value would be overridden: None and False are written by leaving it out.
    """
    return [*without(fixed, values), *(text for name, value in values.items() for text in written(name, value))]


@contextmanager
def naming_space(values: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the trainer's errors about `values`, by the options' names, are told in the words of --space."""
    try:
        yield
    except UsageError as error:
        text = str(error)
        for name, value in values.items():
            option = name.replace("_", "-")
            if text.startswith(blamed := f"argument --{option}: "):
                raise UsageError(f"--space {option}={value}: {text.removeprefix(blamed)}") from None
        raise UsageError(f"--space: {text}") from None


def samples_of_space(space: Sequence[Parameter], defaults: Mapping[str, Any]) -> Iterator[dict[str, Value]]:
    """Yield values that stand for the whole space: the ends of each parameter, with each choice of its owner."""
    owners = [each for each in space if each.name in {owner for owner, _ in OWNERS.values()}]
    others = [each for each in space if each not in owners]
    for choice in product(*(owner.ends() for owner in owners)):
        own = dict(zip((owner.name for owner in owners), choice, strict=True))
        meant = [each for each in others if applies(each.name, {**defaults, **own})]
        first = {each.name: each.ends()[0] for each in meant}
        yield {**own, **first}
        for each in meant:
            for value in each.ends():
                yield {**own, **first, each.name: value}
