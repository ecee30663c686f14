"""Population-based training: members on groups of ranks, of which bad ones continue from good ones."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import all_succeed, share, wait_politely
from mpicoll.errors import TrainingError, UsageError
from mpicoll.search.group_trial import Group, Trial
from mpicoll.search.member_transfer import State, transfer
from mpicoll.search.population_member import Member
from mpicoll.search.population_selection import Replacement, first_params, replacements
from mpicoll.search.population_settings import (
    COPIED,
    FAILED,
    TRAINED,
    MemberRecord,
    PopulationResult,
    PopulationSettings,
)
from mpicoll.search.population_storage import PopulationStorage
from mpicoll.search.search_space import parse_space
from mpicoll.search.trial_execution import COMPLETE, INTERRUPTED, TrialExecutor


def run_population(
    factory: Callable[[int], Member],
    space: Sequence[str],
    *,
    members: int = 8,
    generations: int = 10,
    comm: MPI.Intracomm | None = None,
    group: int = 1,
    direction: str = "maximize",
    quantile: float = 0.25,
    resample: float = 0.25,
    seed: int = 0,
    storage: str | None = None,
    timeout: float = 60.0,
    told: Callable[[list[MemberRecord]], None] | None = None,
) -> PopulationResult:
    """Train a population, and adapt its hyper-parameters meanwhile. Collective over `comm`.

    After each generation the worst members, and those that failed, continue from the states of the best, with perturbed
    hyper-parameters (Jaderberg et al., "Population based training of neural networks", arXiv:1711.09846, 2017). States
    go between ranks by messages. Rank 0 decides, by random numbers that depend on `seed` and the generation alone.

    Parameters
    ----------
    factory
        ``factory(number)`` returns a :class:`Member`; called for each member on the ranks that hold it.
    space
        Hyper-parameters as on the command line, such as ``["lr=log:1e-3..1", "batch=32,64"]``.
    members, generations
        Number of members, at least one for each group, and of generations, those of earlier runs included.
    comm, group
        All ranks, ``MPI.COMM_WORLD`` by default; ranks that train a member together, a divisor of their number.
    direction
        ``"maximize"`` or ``"minimize"`` the score.
    quantile, resample
        Fraction of the members that are replaced, one at least, and of those that they continue from, above 0, at most
        0.5; probability with which a hyper-parameter is drawn anew instead of perturbed.
    storage
        Folder in which the population is saved after each generation, and from which it goes on; None for none.
    timeout
        Seconds that collectives of members wait for a rank, and transfers for a message.
    told
        Called on rank 0 with the records of each generation.

    Raises
    ------
    mpicoll.errors.UsageError
        On every rank, if an argument is wrong, or the storage is of another population.
    CheckpointError
        On every rank, if the storage cannot be written or read.
    mpicoll.errors.TrainingError
        On every rank, if all members have failed.
    SearchError
        If a transfer fails.
    """
    settings = PopulationSettings(
        parse_space(space), members, generations, direction, quantile, resample, seed, storage
    )
    world = MPI.COMM_WORLD if comm is None else comm
    return train_population(factory, settings, world, group, timeout, told)


def train_population(
    factory: Callable[[int], Member],
    settings: PopulationSettings,
    comm: MPI.Intracomm,
    group: int,
    timeout: float,
    told: Callable[[list[MemberRecord]], None] | None = None,
) -> PopulationResult:
    """Train a population as :func:`run_population` does, with all its settings in one record."""
    settings.check(comm.Get_size(), group)
    if not timeout > 0:
        raise UsageError(f"--timeout {timeout}: is not a positive number of seconds")
    with _communicators(comm, group, timeout) as (meeting, channel, members):
        population = _Population(factory, settings, meeting, channel, members, timeout)
        with contextlib.closing(population):
            return population.run(told or (lambda records: None))


@contextlib.contextmanager
def _communicators(comm: MPI.Intracomm, group: int, timeout: float) -> Iterator[tuple[Intracomm, MPI.Intracomm, Group]]:
    plain, rank = MPI.Intracomm(comm), comm.Get_rank()
    channel, part = plain.Dup(), MPI.Intracomm(plain.Split(rank // group, rank))
    members = Group(part, None, timeout)
    yield Intracomm(comm, timeout=2 * timeout), channel, members
    members.close()
    part.Free()
    channel.Free()


class _Population:
    """The population on one rank, which holds every member whose number leaves its group's number as remainder.

    Collective over all ranks: construction, and `run`.
    """

    def __init__(
        self,
        factory: Callable[[int], Member],
        settings: PopulationSettings,
        comm: Intracomm,
        channel: MPI.Intracomm,
        group: Group,
        timeout: float,
    ) -> None:
        self._settings, self._comm, self._channel, self._timeout = settings, comm, channel, timeout
        self._group, self._size = group, group.control.size
        self._executor = TrialExecutor(group, timeout)
        self._groups = comm.size // self._size
        mine = range(comm.rank // self._size, settings.members, self._groups)
        self.members: dict[int, Member] = {number: factory(number) for number in mine}
        self._params = first_params(settings.space, settings.members, settings.seed)
        self._history: list[MemberRecord] = []
        self._storage = PopulationStorage(settings, comm, self._size)
        found = self._storage.find()
        if found is not None:
            self._history, self._params = found.history, found.params
            all_succeed(comm, lambda: self._load(found.states(list(self.members))))

    def close(self) -> None:
        """Free the executor's communicator and the storage."""
        self._executor.close()
        self._storage.close()

    def _load(self, states: Mapping[int, State]) -> None:
        for number, state in states.items():
            self.members[number].load(state)

    def run(self, told: Callable[[list[MemberRecord]], None]) -> PopulationResult:
        """Train all generations that are left."""
        first = self._history[-1].generation + 1 if self._history else 0
        began, done, stopped = time.monotonic(), 0, False
        for generation in range(first, self._settings.generations):
            outcomes = {number: self._train(number) for number in self.members}
            scores, reasons, stopped = self._agree(outcomes)
            if stopped:  # not all members have finished the generation, which is trained again
                break
            if len(reasons) == len(scores):
                raise TrainingError(f"all members have failed in generation {generation}; member 0: {reasons[0]}")
            records = self._records(generation, scores, reasons)
            self._history += records
            done += 1
            if self._comm.rank == 0:
                told(records)
            self._storage.save(generation + 1, self.members, self._history, self._params)
        return self._result(done, time.monotonic() - began, stopped)

    def _train(self, number: int) -> tuple[int, float, str]:
        member, params = self.members[number], dict(self._params[number])
        found = self._executor.run(lambda _, comm: member.train(params, comm), Trial(self._group, number))
        value = math.nan if found.value is None or found.kind != COMPLETE else found.value
        return found.kind, value, found.reason

    def _agree(self, outcomes: Mapping[int, tuple[int, float, str]]) -> tuple[list[float], dict[int, str], bool]:
        """Return scores and reasons of failures of all members, and True if a rank was asked to stop; collective."""
        comm, leads = self._comm, self._group.control.rank == 0
        wait_politely(self._channel)  # groups take different times
        table = np.zeros((self._settings.members, 3))
        for number, (kind, score, _) in outcomes.items():
            if leads:
                table[number] = np.nan_to_num(score), kind == COMPLETE, kind == INTERRUPTED
        comm.Allreduce(MPI.IN_PLACE, table, MPI.SUM)
        scores = [float(score) if complete else math.nan for score, complete, _ in table]
        reasons = {}
        for number in np.flatnonzero(table[:, 1] == 0).tolist():
            root = number % self._groups * self._size
            mine = {"reason": outcomes[number][2]} if comm.rank == root else None
            reasons[number] = str(share(comm, mine, root)["reason"])
        return scores, reasons, bool(table[:, 2].any())

    def _records(self, generation: int, scores: list[float], reasons: Mapping[int, str]) -> list[MemberRecord]:
        """Replace members, and return the records of the generation; collective."""
        plan = self._plan(generation, scores)
        self._replace(plan)
        sources = {each.target: each.source for each in plan}
        records = []
        for number, score in enumerate(scores):
            state = FAILED if number in reasons else COPIED if number in sources else TRAINED
            source, reason = sources.get(number, number), reasons.get(number, "")
            records.append(MemberRecord(generation, number, score, self._params[number], state, source, reason))
        for each in plan:
            self._params[each.target] = each.params
        return records

    def _plan(self, generation: int, scores: list[float]) -> list[Replacement]:
        """Return the decisions of rank 0 on all ranks; none after the last generation."""
        settings = self._settings
        plan: list[Replacement] = []
        if self._comm.rank == 0 and generation + 1 < settings.generations:
            generator = random.Random(f"{settings.seed} generation {generation}")
            maximize = settings.direction == "maximize"
            plan = replacements(scores, self._params, settings.space, generator, maximize=maximize,
                                quantile=settings.quantile, resample=settings.resample)  # fmt: skip
        found = share(self._comm, {"plan": plan} if self._comm.rank == 0 else None)
        return [Replacement(*each) for each in found["plan"]]

    def _replace(self, plan: Sequence[Replacement]) -> None:
        """Let the targets continue from their sources' states."""
        place = self._group.control.rank
        members = [(each.source, each.target) for each in plan]
        copies = [tuple(number % self._groups * self._size + place for number in pair) for pair in members]
        # Only ranks with this place in their group take part in these copies.
        received = transfer(
            self._channel, [(pair[0], pair[1]) for pair in copies],
            lambda number: self.members[members[number][0]].state(), self._timeout,
        )  # fmt: skip
        for number, state in received.items():
            self.members[members[number][1]].load(state)

    def _result(self, done: int, seconds: float, stopped: bool) -> PopulationResult:
        last = [] if not self._history else [
            each for each in self._history
            if each.generation == self._history[-1].generation and not math.isnan(each.score)
        ]  # fmt: skip
        sign = -1 if self._settings.direction == "maximize" else 1
        best = min(last, key=lambda record: (sign * record.score, record.member), default=None)
        number, score = (None, math.nan) if best is None else (best.member, best.score)
        return PopulationResult(number, score, self._history, done, seconds, stopped, dict(self.members))
