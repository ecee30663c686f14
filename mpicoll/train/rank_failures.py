"""Training that goes on without ranks that have died: the others agree on a step, make their state whole, and go on.

The replicas of the replicated strategy are equal up to the last step that all have applied. A rank may have applied one
step more: an Allreduce may end on one rank, and on another with an error. The state of such a rank is taken over by the
others, so that no step is applied twice, and at most one is taken again.

With parameter servers the ranks go on from the newest copy of each server's shard, as from a checkpoint
(:meth:`~mpicoll.train.asynchronous.work_sharing.WorkSharing.rescued`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import share
from mpicoll.errors import MpicollError, TrainingError, UsageError
from mpicoll.progress.failed_ranks import agree_on_success, failed_ranks, is_failure, raise_if_failed, survives_failures
from mpicoll.train.assembly import make_communicator
from mpicoll.train.asynchronous.asynchronous_state import ResumedState
from mpicoll.train.asynchronous.work_sharing import WorkSharing
from mpicoll.train.config import TrainConfig
from mpicoll.train.lockstep import Lockstep
from mpicoll.train.loop import Loop
from mpicoll.train.metrics import EpochRecord, StepRecord, wrong_loss
from mpicoll.train.run_start import RunStart
from mpicoll.train.spare_ranks import SpareRanks
from mpicoll.train.synchronous_state import load_from_memory, state_in_memory

_NOTICE_SECONDS = 5.0
"""Longest time between an error that a death has caused and the library's notice of the death."""
_POLL_SECONDS = 0.01
_RECORDS = 1000
"""Largest number of records that travel together."""

MakeLoop = Callable[[Intracomm, ResumedState | None], Loop]
"""Makes a new loop on a communicator, an asynchronous one with the state from which it goes on; collective."""


def check_possible(config: TrainConfig) -> None:
    """Refuse ``--on-failure shrink`` where the MPI library ends the job when a rank dies.

    Raises
    ------
    UsageError
        On every rank.
    """
    if config.goes_on and not survives_failures():
        option = f"--replicas {config.replicas}" if config.replicas > 1 else "--on-failure shrink"
        raise UsageError(
            f"{option}: the MPI library must go on without dead ranks (ULFM), as Open MPI 5 does when the "
            f"job is started by mpirun --with-ft ulfm; this is {_library()}"
        )


def _library() -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}" + " without that option" * (name == "Open MPI")


def can_go_on(config: TrainConfig, comm: MPI.Intracomm, error: BaseException) -> bool:
    """Return True if `error` came of a rank's death, and the options ask the others to go on.

    Ranks learn of a death at different times, so that the library's notice is waited for.
    """
    if not config.goes_on or isinstance(error, TrainingError):
        return False
    carrier = comm.channel.comm if isinstance(comm, Intracomm) else comm
    until = time.monotonic() + _NOTICE_SECONDS
    while not is_failure(error) and time.monotonic() < until:
        if failed_ranks(carrier) or carrier.Is_revoked():
            return True
        time.sleep(_POLL_SECONDS)
    return is_failure(error)


class Recovery(NamedTuple):
    """Recovery of a run whose ranks may die.

    Attributes
    ----------
    config
        Options of the run.
    make_loop
        Function that makes a new loop on a communicator.
    spares
        Division of the ranks into those that train and spare ones.
    """

    config: TrainConfig
    make_loop: MakeLoop
    spares: SpareRanks

    def go_on(self, comm: MPI.Intracomm, loop: Loop | None, error: BaseException) -> tuple[Intracomm, Loop]:
        """Return a communicator and a loop of the ranks that train from now on. Collective over all that are left.

        Parameters
        ----------
        comm, loop
            Those of the run so far, in which `error` was raised; `loop` is None on a rank that was spare. They stay in
            memory, since freeing them needs all ranks.

        Raises
        ------
        TrainingError
            On every rank, for instance NonFiniteLoss if the loss of a step before the failure is not finite.
        """
        while True:
            assert isinstance(comm, Intracomm)
            comm.channel.revoke(error, comm, loop)
            comm = self._communicator(comm, self._regrouped(comm))
            try:
                return comm, _made_whole(comm, loop, self.make_loop)
            except (MPI.Exception, MpicollError) as another:  # one more rank has died meanwhile
                if not can_go_on(self.config, comm, another):
                    raise
                error = another

    def join(self, team: MPI.Intracomm) -> tuple[Intracomm, Loop]:
        """Return what :meth:`go_on` returns on the training ranks, on one that was spare and is among `team` now."""
        comm = self._communicator(team, team)
        try:
            return comm, _made_whole(comm, None, self.make_loop)
        except (MPI.Exception, MpicollError) as error:
            if not can_go_on(self.config, comm, error):
                raise
            return self.go_on(comm, None, error)

    def _regrouped(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        team = self.spares.regroup(comm)
        assert team is not None  # who trains goes on to train
        return team

    def _communicator(self, comm: MPI.Intracomm, team: MPI.Intracomm) -> Intracomm:
        """Return mpicoll's communicator of `team`, or of those that are left if ranks die meanwhile. Collective.

        Parameters
        ----------
        comm
            The revoked communicator from which `team` was made.
        """
        while True:
            made = None
            try:
                made = make_communicator(self.config, team)
            except (MPI.Exception, MpicollError) as error:
                if not can_go_on(self.config, team, error):
                    raise
                team.Revoke()  # others may still be waiting for this rank in it
            if agree_on_success(team, made is not None) and made is not None:
                return made
            if made is not None:
                made.channel.revoke("a rank died while the communicator was made", made)
            team = self._regrouped(comm)


def _made_whole(comm: Intracomm, before: Loop | None, make_loop: MakeLoop) -> Loop:
    """Return a new loop with the newest state of a rank; `before` is this rank's loop so far, None if it was spare."""
    if before is not None and isinstance(before.coordination, WorkSharing):
        made = _go_on_serving(comm, before, before.coordination, make_loop)
    else:
        made = make_loop(comm, None)
        _take_over(comm, before or made, made)
    wait_for_all(comm)
    return made


def _go_on_serving(comm: Intracomm, before: Loop, sharing: WorkSharing, make_loop: MakeLoop) -> Loop:
    """Return a new loop of a run with parameter servers, from the newest copies of their shards. Collective."""
    made = make_loop(comm, sharing.rescued(comm))
    assert isinstance(made.coordination, WorkSharing)
    made.coordination.take_over(sharing)
    made.take_over(before.start, before.epochs)
    return made


def wait_for_all(comm: MPI.Intracomm) -> None:
    """Return when all ranks have come here, and raise on all of them if one has died before.

    Raises
    ------
    RankFailed, MPI.Exception
        On every rank that is left.
    """
    assert isinstance(comm, Intracomm)
    comm.channel.comm.Agree(1)
    raise_if_failed(comm.channel.comm)


def _take_over(comm: Intracomm, before: Loop, after: Loop) -> None:
    """Give `after` the newest state that a rank holds in `before`. Collective over `comm`.

    Parameters
    ----------
    before
        This rank's loop so far; `after` itself, which has taken no step, on a rank that was spare.
    """
    old, new = before.coordination, after.coordination
    assert isinstance(old, Lockstep)
    assert isinstance(new, Lockstep)
    known = np.array([old.applied, len(old.records), len(before.epochs)])
    table = np.empty((comm.Get_size(), known.size), known.dtype)
    comm.Allgather(known, table)
    steps, (at_step, at_records, at_epochs) = int(table[:, 0].max()), table.argmax(axis=0).tolist()
    state = {name: array.copy() for name, array in state_in_memory(old.strategy).items()}
    for array in state.values():
        comm.Bcast(array, at_step)
    load_from_memory(new.strategy, state)
    records = _shared(comm, old.records, table[:, 1], at_records, StepRecord)
    records += _unsummed(comm, old, records, steps)
    epochs = _shared(comm, before.epochs, table[:, 2], at_epochs, EpochRecord)
    start = np.array(before.start)
    comm.Allreduce(MPI.IN_PLACE, start, MPI.MAX)
    new.take_over(old, steps, records)
    after.take_over(RunStart(*start.tolist()), epochs)


def _shared(comm: Intracomm, own: Sequence[Any], counts: np.ndarray, root: int, kind: Callable[..., Any]) -> list[Any]:
    """Return the records of the rank that has most of them; ranks have equal ones as far as they have any."""
    found = list(own[: int(counts.min())])
    while len(found) < counts[root]:
        stop = len(found) + _RECORDS
        mine = {"newest": [each._asdict() for each in own[len(found) : stop]]} if comm.Get_rank() == root else None
        found += [kind(**each) for each in share(comm, mine, root)["newest"]]
    return found


def _unsummed(comm: Intracomm, old: Lockstep, records: Sequence[StepRecord], steps: int) -> list[StepRecord]:
    """Return records of the steps whose losses had not been summed, over the samples of the ranks that are left."""
    first = len(records)
    sums, plan, mesh, own = np.zeros((steps - first, 3)), old.step_plan, old.mesh, old.metrics.open_sums()
    for step in own.keys() & range(first, steps):
        sums[step - first] = *own[step], len(plan.samples(step, mesh.replicas, mesh.replica)[0])
    comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    found: list[StepRecord] = []
    for step, (loss, correct, count) in enumerate(sums.tolist(), first):
        if not np.isfinite(loss):
            raise wrong_loss(loss, step)
        last = [*records[-1:], *found][-1] if count == 0 and (records or found) else None
        mean, hits = (loss / max(count, 1), correct / max(count, 1)) if last is None else (last.loss, last.accuracy)
        accuracy = hits if plan.config.counts_hits else None
        found.append(StepRecord(step, step // plan.steps_per_epoch, plan.rate(step), mean, accuracy))
    return found
