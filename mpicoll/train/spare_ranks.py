"""Spare ranks: they wait outside of training, and take the place of ranks that die.

Five ranks, two of them spare::

    everyone    0  1  2  3  4        training: 0 1 2    waiting: 3 4
    1 dies      0  x  2  3  4        everyone is revoked, and shrinks
                0  2  3  4           training: 0 2 3    waiting: 4

Training ranks revoke the communicator of everyone when they find that one of them has died; that is how spare ranks,
which look at it from time to time, learn of it. All that are left then divide themselves anew. The division is repeated
if a rank dies meanwhile, on all of them or on none (``MPI_Comm_agree``).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
from mpi4py import MPI

from mpicoll.errors import TrainingError
from mpicoll.progress.failed_ranks import agree_on_success, failed_ranks, is_failure
from mpicoll.quantities import counted
from mpicoll.train.assembly import make_communicator
from mpicoll.train.config import TrainConfig
from mpicoll.train.run_report import complain

_LOOK_SECONDS = 0.05
_END_TAG = 1
_END_SECONDS = 5.0
"""Longest time that training ranks wait until spare ranks have been told of the end."""


class SpareRanks:
    """Division of a run's ranks into those that train and those that wait; without ``--spares`` all train.

    The constructor is collective over `world`.

    Parameters
    ----------
    world
        All ranks of the run; the last ``--spares`` of them are spare.

    Attributes
    ----------
    is_training
        True if this rank takes part in training.
    """

    def __init__(self, config: TrainConfig, world: MPI.Intracomm) -> None:
        self._config, self._started, self._left = config, world.Get_size(), world.Get_size()
        self._wanted = self._started - config.spares
        # Not freed: messages of the end, one of which is enough for a spare rank, may still be under way then.
        self._everyone = MPI.Intracomm(world).Dup() if config.spares else None
        self._training = list(range(self._wanted))
        self.is_training = world.Get_rank() < self._wanted

    @property
    def lost(self) -> int:
        """Number of ranks that were found dead when the ranks were last divided, spare ones included."""
        return self._started - self._left

    def all_lost(self, comm: MPI.Intracomm) -> int:
        """Return the number of ranks known to have died, spare ones included. Collective over the training ranks."""
        if self._everyone is None:
            return self.lost
        found = np.array([self.lost + len(failed_ranks(self._everyone))])
        comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return int(found[0])

    def describe(self, lost_before: int, step: int) -> str:
        """Return a line on the ranks that died after `lost_before` others, and on those that go on after `step`."""
        dead, size = self.lost - lost_before, self._started - lost_before
        others = (
            f"{size - dead} are left, of which {len(self._training)} train on" if self._everyone else "the others go on"
        )
        return f"{dead} of {counted(size, 'rank')} died; {others} after step {step}"

    def team(self, world: MPI.Intracomm) -> MPI.Intracomm | None:
        """Return a communicator of the training ranks, `world` if all train; None on spare ones. Collective."""
        if self._everyone is None:
            return world
        team = _team(self._everyone, joins=self.is_training)
        return None if team is None else make_communicator(self._config, team)

    def regroup(self, comm: MPI.Intracomm) -> MPI.Intracomm | None:
        """Return a communicator of the ranks that train from now on, as many as before where spare ranks are left.

        Training ranks keep their order, and those that were spare follow them. Collective over the ranks that are left.

        Parameters
        ----------
        comm
            The revoked communicator of the training ranks.

        Returns
        -------
        None on ranks that go on waiting.
        """
        if self._everyone is None:
            left = MPI.Intracomm(comm).Shrink()
            assert isinstance(left, MPI.Intracomm)
            self._left = left.Get_size()
            return left
        everyone, agreed = self._everyone, False
        while not agreed:
            everyone.Revoke()
            shrunk = everyone.Shrink()
            assert isinstance(shrunk, MPI.Intracomm)
            everyone, team = shrunk, None
            try:
                team, is_done = self._divide(everyone), True
            except MPI.Exception as error:
                if not is_failure(error):
                    raise
                is_done = False
            agreed = agree_on_success(everyone, is_done)
        self._everyone, self._left = everyone, everyone.Get_size()
        self.is_training = team is not None
        return team

    def _divide(self, everyone: MPI.Intracomm) -> MPI.Intracomm | None:
        """Return the communicator of the training ranks on these, None on the others."""
        table = np.empty(everyone.Get_size(), np.int32)
        everyone.Allgather(np.array([self.is_training], np.int32), table)
        training, spare = np.flatnonzero(table).tolist(), np.flatnonzero(table == 0).tolist()
        self._training = training + spare[: max(0, self._wanted - len(training))]
        return _team(everyone, joins=everyone.Get_rank() in self._training)

    def wait(self, comm: MPI.Intracomm) -> MPI.Intracomm | None:
        """Wait, asleep, until this spare rank is needed, and return the communicator of the training ranks.

        Returns None at the end of training. There is no deadline, since training may take any time. The first SIGTERM
        is left to the training ranks.

        Raises
        ------
        TrainingError
            On every spare rank, which also prints it, if all training ranks have died.
        """
        with _ignoring_sigterm():
            while True:
                everyone = self._everyone
                assert everyone is not None
                dead = set(failed_ranks(everyone))
                if everyone.Is_revoked():
                    if (team := self.regroup(comm)) is not None:
                        return team
                elif self._has_ended(everyone):
                    return None
                elif dead.issuperset(self._training):
                    message = f"all {len(self._training)} training ranks died"
                    complain(f"error: {message}")  # rank 0, which prints errors of all ranks, is among them
                    raise TrainingError(message)
                time.sleep(_LOOK_SECONDS)

    def _has_ended(self, everyone: MPI.Intracomm) -> bool:
        """Return True if a training rank has told this one of the end."""
        for rank in self._training:
            with contextlib.suppress(MPI.Exception):  # it may be dead
                if everyone.Iprobe(rank, _END_TAG):
                    everyone.Recv(np.empty(0, np.uint8), rank, _END_TAG)
                    return True
        return False

    def dismiss(self) -> None:
        """Tell spare ranks that training has ended; on these do nothing. Not collective: one rank is enough."""
        if self._everyone is None or not self.is_training:
            return
        requests = []
        for rank in set(range(self._everyone.Get_size())) - set(self._training):
            with contextlib.suppress(MPI.Exception):  # it may be dead
                requests.append(self._everyone.Isend(np.empty(0, np.uint8), rank, _END_TAG))
        until = time.monotonic() + _END_SECONDS
        with contextlib.suppress(MPI.Exception):
            while not MPI.Request.Testall(requests) and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS / 10)


def _team(everyone: MPI.Intracomm, *, joins: bool) -> MPI.Intracomm | None:
    """Return a communicator of the ranks that join, in their order; None on the others."""
    found = everyone.Split(0 if joins else MPI.UNDEFINED, everyone.Get_rank())
    return found if joins and isinstance(found, MPI.Intracomm) else None


@contextlib.contextmanager
def _ignoring_sigterm() -> Iterator[None]:
    """Ignore the first SIGTERM, which a launcher passes to all ranks; a second one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL) and None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
