"""Members of a population on the command line: runs of ``python -m mpicoll.train``, some epochs at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.data.datasets import Dataset, load
from mpicoll.errors import UsageError
from mpicoll.parallel.mesh import make_mesh
from mpicoll.search.member_transfer import State
from mpicoll.search.search_options import SearchOptions
from mpicoll.search.search_space import Parameter
from mpicoll.search.trainer_objective import options_of, samples_of_space
from mpicoll.train.assembly import check_ranks, make_communicator, make_loop
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.lockstep import Lockstep
from mpicoll.train.metrics import EpochRecord
from mpicoll.train.model_choice import build_model
from mpicoll.train.options import parse
from mpicoll.train.synchronous_state import load_from_memory, state_in_memory
from mpicoll.train.warm_kernels import compile_kernels

CHANGEABLE = ("lr", "momentum", "weight_decay", "beta1", "beta2", "epsilon", "trust", "batch", "clip", "dropout",
              "warmup", "sync_every")  # fmt: skip
"""Options of the trainer that can change between epochs: parameters and optimizer state keep their shapes."""
_FILES = ("json", "log_steps", "tensorboard", "plot", "trace", "checkpoint")


class TrainerPopulation:
    """Source of members that train with fixed options and those of the population's space.

    Attributes
    ----------
    config
        Options without those of the space.
    generations
        Number of intervals of `interval` epochs in the run.

    Raises
    ------
    UsageError
        If an option is unknown or refused, cannot change while a member trains, or would have all members write the
        same file, or if the strategy is asynchronous.
    """

    def __init__(self, options: SearchOptions) -> None:
        self._fixed, self._metric, self._interval = list(options.trainer), options.metric, options.interval
        self.config = self.configured({})
        check_space(options.space, CHANGEABLE)
        for name in _FILES:
            if getattr(self.config, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')}: is not for --population, whose members train together")
        if self.config.is_asynchronous or self.config.tensor * self.config.pipeline > 1:
            raise UsageError("--population: members train by synchronous strategies, without --tensor and --pipeline")
        if self.config.steps is not None:
            raise UsageError("--steps: is not for --population; give --epochs")
        for values in samples_of_space(options.space, vars(self.config)):
            self.configured(values)
        self.generations = -(-self.config.epochs // options.interval)
        self._dataset: Dataset | None = None

    def configured(self, values: Mapping[str, Any]) -> TrainConfig:
        """Return the options with the values of a member."""
        return replace(parse([*self._fixed, *options_of(values)]), quiet=True, progress=False)

    def member(self, number: int) -> TrainerMember:
        """Return a new member."""
        return TrainerMember(self, self._metric, self._interval)

    def dataset(self, config: TrainConfig, comm: MPI.Intracomm) -> Dataset:
        """Return the data set, which all members of this rank share; collective at the first call."""
        if self._dataset is None:
            self._dataset = load(config, comm)
        return self._dataset


class TrainerMember:
    """Member that trains `interval` epochs in each generation; a :class:`~mpicoll.search.Member`.

    Attributes
    ----------
    record : EpochRecord or None
        Losses and accuracies after the last generation.
    """

    def __init__(self, population: TrainerPopulation, metric: str, interval: int) -> None:
        self._population, self._metric, self._interval = population, metric, interval
        self._state: State = {}
        self._epochs = 0
        self.record: EpochRecord | None = None

    def train(self, params: Mapping[str, Any], comm: Intracomm) -> float:
        """See :class:`~mpicoll.search.Member`; returns the metric after the last epoch.

        Raises
        ------
        TrainingError
            On all ranks.
        """
        config = self._population.configured(params)
        check_ranks(config, comm.Get_size())
        comm = make_communicator(config, comm)
        with np.errstate(all="ignore"):  # a loss that is not finite is found by the loop
            dataset = self._population.dataset(config, comm)
            model = build_model(config, dataset)
            compile_kernels(model, dataset, comm, config)
            loop = make_loop(config, make_mesh(comm, config), dataset, model, Clock())
            lockstep: Any = loop.coordination
            assert isinstance(lockstep, Lockstep)
            if self._state:
                load_from_memory(lockstep.strategy, self._state)
            loop.step_plan.stop_after(self._epochs + self._interval)
            lockstep.start_after(self._epochs)
            loop.train([])
        self._epochs += self._interval
        self._state = state_in_memory(lockstep.strategy) | {"epochs": np.array([self._epochs])}
        self.record = loop.epochs[-1]
        value = getattr(self.record, self._metric)
        return math.nan if value is None else float(value)

    def state(self) -> State:
        """See :class:`~mpicoll.search.Member`."""
        return self._state

    def load(self, state: State) -> None:
        """See :class:`~mpicoll.search.Member`."""
        self._state, self._epochs = dict(state), int(state["epochs"][0]) if state else 0


def population_facts(trainer: Sequence[str], metric: str, interval: int) -> str:
    """Return what a population must have in common with the one in its storage, beside its own settings."""
    return " ".join([f"metric={metric}", f"interval={interval}", *trainer])


def check_space(space: Sequence[Parameter], allowed: Sequence[str]) -> None:
    """Raise if a hyper-parameter cannot change while a member trains.

    Raises
    ------
    UsageError
        Naming it.
    """
    for parameter in space:
        if parameter.name not in allowed:
            option = parameter.name.replace("_", "-")
            names = ", ".join(name.replace("_", "-") for name in allowed)
            raise UsageError(f"--space {option}: cannot change while a member trains; with --population: {names}")
