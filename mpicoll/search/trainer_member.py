"""Members of a population on the command line: runs of ``python -m mpicoll.train``, some epochs at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import CheckpointStore
from mpicoll.consensus import all_succeed
from mpicoll.data.datasets import Dataset, load
from mpicoll.errors import CheckpointError, CheckpointFailed, UsageError
from mpicoll.parallel.mesh import make_mesh
from mpicoll.search.member_transfer import State
from mpicoll.search.population_settings import PopulationResult
from mpicoll.search.search_options import SearchOptions
from mpicoll.search.search_space import Parameter, check_meaning
from mpicoll.search.trainer_objective import naming_space, samples_of_space, with_values
from mpicoll.train.assembly import check_ranks, make_communicator, make_loop
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.lockstep import Lockstep
from mpicoll.train.loop import Loop
from mpicoll.train.metrics import EpochRecord
from mpicoll.train.model_choice import build_model
from mpicoll.train.options import parse
from mpicoll.train.synchronous_state import load_from_memory, state_in_memory, tensors_of
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
        check_meaning(options.space, vars(self.config))
        for values in samples_of_space(options.space, vars(self.config)):
            with naming_space(values):
                self.configured(values)
        self.generations = -(-self.config.epochs // options.interval)
        self._dataset: Dataset | None = None

    def configured(self, values: Mapping[str, Any]) -> TrainConfig:
        """Return the options with the values of a member."""
        return replace(parse(with_values(self._fixed, values)), quiet=True, progress=False)

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
        loop, lockstep = self._loop(params, comm)
        with np.errstate(all="ignore"):  # a loss that is not finite is found by the loop
            loop.step_plan.stop_after(self._epochs + self._interval)
            lockstep.start_after(self._epochs)
            loop.train([])
        self._epochs += self._interval
        self._state = state_in_memory(lockstep.strategy) | {"epochs": np.array([self._epochs])}
        self.record = loop.epochs[-1]
        value = getattr(self.record, self._metric)
        return math.nan if value is None else float(value)

    def _loop(self, params: Mapping[str, Any], comm: Intracomm) -> tuple[Loop, Lockstep]:
        """Return a loop with this member's state, and its coordination; collective."""
        config = self._population.configured(params)
        check_ranks(config, comm.Get_size())
        comm = make_communicator(config, comm)
        with np.errstate(all="ignore"):
            dataset = self._population.dataset(config, comm)
            model = build_model(config, dataset)
            compile_kernels(model, dataset, comm, config)
            loop = make_loop(config, make_mesh(comm, config), dataset, model, Clock())
            lockstep: Any = loop.coordination
            assert isinstance(lockstep, Lockstep)
            if self._state:
                load_from_memory(lockstep.strategy, self._state)
        return loop, lockstep

    def save(self, folder: str, params: Mapping[str, Any], comm: Intracomm) -> None:
        """Write the model as a checkpoint that :mod:`mpicoll.deploy` reads; collective over the group.

        It has no records of steps, so that no run resumes from it.

        Parameters
        ----------
        params
            The member's hyper-parameters in its last generation.

        Raises
        ------
        CheckpointError
            On all ranks of the group.
        """
        loop, lockstep = self._loop(params, comm)
        config = self._population.configured(params)
        steps = min(self._epochs, config.epochs) * loop.step_plan.steps_per_epoch
        facts = {"config": asdict(config), "ranks": comm.Get_size(), "epochs": [], "step": steps}
        with CheckpointStore(folder, comm) as store:
            store.save(steps, tensors_of(lockstep.mesh, lockstep.strategy, []), facts)

    def state(self) -> State:
        """See :class:`~mpicoll.search.Member`."""
        return self._state

    def load(self, state: State) -> None:
        """See :class:`~mpicoll.search.Member`."""
        self._state, self._epochs = dict(state), int(state["epochs"][0]) if state else 0


def check_best(folder: str | None) -> None:
    """Refuse a folder for the best member that cannot be written, or has checkpoints, before hours of training.

    Raises
    ------
    UsageError
    """
    if folder is None:
        return
    try:
        with CheckpointStore(folder, Intracomm(MPI.COMM_SELF)) as store:
            found = store.steps()
    except CheckpointError as error:
        raise UsageError(f"--best {folder}: {error}") from None
    if found:
        raise UsageError(f"--best {folder}: has checkpoints already; name another folder")


def save_best(folder: str, result: PopulationResult, comm: Intracomm) -> None:
    """Write the best member's model as a checkpoint. Collective over all ranks of the population.

    Raises
    ------
    CheckpointFailed
        On every rank.
    """
    if result.best_number is None:
        return
    member = result.members.get(result.best_number)
    plain = MPI.Intracomm(MPI.Intracomm(comm).Split(int(member is not None), comm.rank))
    part, params = Intracomm(plain, timeout=comm.timeout), result.schedule()[-1]
    all_succeed(comm, lambda: None if member is None else _saved(member, folder, params, part))
    plain.Free()


def _saved(member: TrainerMember, folder: str, params: Mapping[str, Any], comm: Intracomm) -> None:
    try:
        member.save(folder, params, comm)
    except CheckpointError as error:
        raise CheckpointFailed(f"--best {folder}: {error}") from None


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
