"""Communicator that records the collectives of a strategy instead of executing them.

One process stands for rank 0 of many: a strategy that is given this communicator divides its state and its gradients
as on that many ranks, and what it calls, and how long it computes in between, is recorded.
"""

# mypy: disable-error-code="override"
# The methods take the arguments that strategies pass, which are fewer than those of mpi4py.

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm

_SUMMED_ITEMSIZE = 4
"""Elements of fewer bytes are not added up: a sum of 16-bit elements over many ranks may overflow."""


class Event(enum.Enum):
    """Kinds of events: a blocking call, the start of a nonblocking one, and a wait for the latter."""

    CALL = "call"
    START = "start"
    WAIT = "wait"


class CollectiveEvent(NamedTuple):
    """A collective call of rank 0, or a wait for one.

    Attributes
    ----------
    kind
        Kind of event.
    computed
        Seconds that the rank computed since the event before.
    collective
        Name of the collective, such as ``"allreduce"``; empty for a wait.
    nbytes
        Message size: bytes of the whole vector, of all ranks' parts where ranks own parts; in alltoall those that a
        rank sends.
    compressed
        True if the messages are payloads that the collective itself encodes and decodes.
    request
        Number of the nonblocking call; -1 for a blocking one.
    """

    kind: Event
    computed: float
    collective: str = ""
    nbytes: int = 0
    compressed: bool = False
    request: int = -1


class RecordedStep(NamedTuple):
    """Events of a step in their order, and the seconds that the rank computed after the last one."""

    events: tuple[CollectiveEvent, ...]
    computed: float


class RecordedCommunicator(Intracomm):
    """Communicator of `pretended` ranks, all of which hold what this process, rank 0, does; not collective.

    Results are those of such ranks: a gather repeats this rank's part, a sum is this rank's vector times the number of
    ranks. Calls are recorded from :meth:`begin` to :meth:`end`, and take no time of the record.

    Parameters
    ----------
    pretended
        Number of ranks.
    """

    def __new__(cls, pretended: int) -> RecordedCommunicator:
        """Make a second handle of ``MPI.COMM_SELF``."""
        made = super().__new__(cls, MPI.COMM_SELF)
        assert isinstance(made, RecordedCommunicator)
        return made

    def __init__(self, pretended: int) -> None:
        super().__init__(MPI.COMM_SELF)
        self._pretended = pretended
        self._events: list[CollectiveEvent] = []
        self._requests, self._mark, self._computed = 0, 0.0, 0.0

    def Get_size(self) -> int:
        """Return the number of pretended ranks."""
        return self._pretended

    @property
    def size(self) -> int:
        """Number of pretended ranks."""
        return self._pretended

    def begin(self) -> None:
        """Begin the record of a step."""
        self._events.clear()
        self._requests, self._mark = 0, time.perf_counter()

    def end(self) -> RecordedStep:
        """Return the record of the step since :meth:`begin`."""
        self.pause()
        return RecordedStep(tuple(self._events), self._computed)

    def pause(self) -> None:
        """Take the time since the last event as computation of the next one."""
        self._computed = time.perf_counter() - self._mark

    def _note(self, collective: str, nbytes: int, *, compressed: bool = False) -> None:
        """Record a blocking call, and go on with the time."""
        self._events.append(CollectiveEvent(Event.CALL, self._computed, collective, nbytes, compressed))
        self._mark = time.perf_counter()

    def _started(self, collective: str, nbytes: int, *, compressed: bool = False) -> RecordedRequest:
        number = self.note_start(collective, nbytes, compressed)
        return RecordedRequest(self, collective, nbytes, compressed, number)

    # ---- blocking ---------------------------------------------------------------------------------------------------

    def Allreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: MPI.Op = MPI.SUM, *, compression: Any = None) -> None:
        """See :meth:`mpicoll.Intracomm.Allreduce`."""
        self.pause()
        self._reduce(sendbuf, recvbuf, op)
        self._note("allreduce", recvbuf.nbytes, compressed=compression is not None)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: np.ndarray, counts: Sequence[int], op: MPI.Op = MPI.SUM) -> None:
        """See :meth:`mpicoll.Intracomm.Reduce_scatter`; rank 0 has the first part."""
        self.pause()
        source = recvbuf if sendbuf is MPI.IN_PLACE else sendbuf
        self._reduce(source[: counts[0]].copy(), recvbuf[: counts[0]], op)
        self._note("reduce_scatter", source.nbytes)

    def Reduce_scatter_block(self, sendbuf: np.ndarray, recvbuf: np.ndarray, op: MPI.Op = MPI.SUM) -> None:
        """See :meth:`mpicoll.Intracomm.Reduce_scatter_block`; rank 0 has the first part."""
        self.pause()
        self._reduce(sendbuf.reshape(-1)[: recvbuf.size], recvbuf.reshape(-1), op)
        self._note("reduce_scatter", sendbuf.nbytes)

    def Allgather(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        """See :meth:`mpicoll.Intracomm.Allgather`."""
        self.pause()
        _repeat(sendbuf, recvbuf)
        self._note("allgather", recvbuf.nbytes)

    def Allgatherv(self, sendbuf: Any, recvbuf: Sequence[Any]) -> None:
        """See :meth:`mpicoll.Intracomm.Allgatherv`; the parts of other ranks stay as they are."""
        self.pause()
        self._note("allgather", recvbuf[0].nbytes)

    def Alltoall(self, sendbuf: Sequence[Any], recvbuf: Sequence[Any]) -> None:
        """See :meth:`mpicoll.Intracomm.Alltoall`; every rank sends to rank 0 what that sends to itself."""
        self.pause()
        recvbuf[0][...] = sendbuf[0][:1]
        self._note("alltoall", sendbuf[0].nbytes)

    def Bcast(self, buf: np.ndarray, root: int = 0) -> None:
        """See :meth:`mpicoll.Intracomm.Bcast`."""
        self.pause()
        self._note("bcast", buf.nbytes)

    def _reduce(self, sendbuf: Any, recvbuf: np.ndarray, op: MPI.Op) -> None:
        if sendbuf is not MPI.IN_PLACE:
            recvbuf[...] = sendbuf
        if op == MPI.SUM and recvbuf.dtype.itemsize >= _SUMMED_ITEMSIZE:
            recvbuf *= recvbuf.dtype.type(self._pretended)

    # ---- nonblocking and persistent ---------------------------------------------------------------------------------

    def Iallreduce(self, sendbuf: Any, recvbuf: np.ndarray, op: MPI.Op = MPI.SUM, *, compression: Any = None) -> Any:
        """See :meth:`mpicoll.Intracomm.Iallreduce`; the sum is there at once."""
        self.pause()
        self._reduce(sendbuf, recvbuf, op)
        return self._started("allreduce", recvbuf.nbytes, compressed=compression is not None)

    def Ireduce_scatter(self, sendbuf: Any, recvbuf: np.ndarray, counts: Sequence[int], op: MPI.Op = MPI.SUM) -> Any:
        """See :meth:`mpicoll.Intracomm.Ireduce_scatter`; the sum is there at once."""
        self.pause()
        self._reduce(recvbuf[: counts[0]].copy(), recvbuf[: counts[0]], op)
        return self._started("reduce_scatter", recvbuf.nbytes)

    def Iallgather(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> Any:
        """See :meth:`mpicoll.Intracomm.Iallgather`; the parts are there at once."""
        self.pause()
        _repeat(sendbuf, recvbuf)
        return self._started("allgather", recvbuf.nbytes)

    def Allreduce_init(self, sendbuf: Any, recvbuf: np.ndarray, op: MPI.Op = MPI.SUM) -> Any:
        """See :meth:`mpicoll.Intracomm.Allreduce_init`; sums stay as they are."""
        return RecordedRequest(self, "allreduce", recvbuf.nbytes, compressed=False)

    def Allgather_init(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> Any:
        """See :meth:`mpicoll.Intracomm.Allgather_init`; the parts are repeated once."""
        _repeat(sendbuf, recvbuf)
        return RecordedRequest(self, "allgather", recvbuf.nbytes, compressed=False)

    def note_start(self, collective: str, nbytes: int, compressed: bool) -> int:
        """Record the start of a nonblocking call; return its number."""
        self._requests += 1
        event = CollectiveEvent(Event.START, self._computed, collective, nbytes, compressed, self._requests)
        self._events.append(event)
        self._mark = time.perf_counter()
        return self._requests

    def note_wait(self, request: int) -> None:
        """Record a wait for the nonblocking call of a number."""
        self._events.append(CollectiveEvent(Event.WAIT, self._computed, request=request))
        self._mark = time.perf_counter()


def _repeat(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
    recvbuf.reshape(-1, sendbuf.size)[...] = sendbuf.reshape(-1)


class RecordedRequest:
    """Request of a :class:`RecordedCommunicator`, nonblocking or persistent."""

    def __init__(
        self, comm: RecordedCommunicator, collective: str, nbytes: int, compressed: bool, number: int = -1
    ) -> None:
        self._comm, self._call, self._number = comm, (collective, nbytes, compressed), number

    def Start(self) -> None:
        """Record the start of a persistent operation."""
        self._comm.pause()
        self._number = self._comm.note_start(*self._call)

    def Test(self) -> bool:
        """Return False: a replay decides when it ends."""
        return False

    def Wait(self) -> None:
        """Record the wait."""
        self._comm.pause()
        self._comm.note_wait(self._number)
