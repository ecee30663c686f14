"""Messages between the leaders of groups and rank 0: records as JSON, one request and one reply at a time."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.errors import SearchError

Record = dict[str, Any]
_REQUEST, _REPLY = 1, 2
QUIET = "quiet"
"""Entry of a request that gets no reply."""
_SHORTEST_NAP, _LONGEST_NAP = 0.0002, 0.002


def thread_level() -> int:
    """Return the level of threads that the MPI library supports."""
    return MPI.Query_thread()


class Hub(Protocol):
    """Source of replies; :class:`~mpicoll.search.coordinator.StudyCoordinator`.

    Attributes
    ----------
    failure
        Reason why the study cannot go on, or None.
    """

    failure: str | None

    def handle(self, leader: int, request: Record) -> Record:
        """Return the reply to a request of a leader, given by its rank; calls do not overlap."""

    def all_dismissed(self) -> bool:
        """Return whether every leader knows that the study has ended."""


class Naps:
    """Pauses between two looks at something, each twice as long as the one before, up to 2 ms."""

    def __init__(self) -> None:
        self._seconds = _SHORTEST_NAP

    def pause(self) -> None:
        """Sleep."""
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST_NAP)


def _send(comm: MPI.Intracomm, record: Record, rank: int, tag: int) -> tuple[MPI.Request, np.ndarray]:
    """Start to send a record; the array must live until the request is complete."""
    data = np.frombuffer(json.dumps(record).encode(), np.uint8).copy()
    return comm.Isend(data, rank, tag), data


def _receive(comm: MPI.Intracomm, source: int, tag: int) -> tuple[int, Record] | None:
    """Return rank and record of a message that has arrived; None if there is none."""
    status = MPI.Status()
    message = comm.Improbe(source, tag, status)
    if message is None:
        return None
    data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
    message.Recv(data)
    return status.Get_source(), json.loads(data.tobytes())


class RemoteCoordinator:
    """The coordinator as a leader sees it that is not rank 0.

    Parameters
    ----------
    comm
        Communicator of all ranks, for these messages alone.
    timeout
        Seconds that rank 0 may take to answer.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        self._comm, self._timeout = comm, timeout
        self._posted: list[tuple[MPI.Request, np.ndarray]] = []

    def post(self, record: Record) -> None:
        """Send a request whose reply nobody needs; local."""
        self._forget_posted()
        self._posted.append(_send(self._comm, {**record, QUIET: True}, 0, _REQUEST))

    def _forget_posted(self) -> None:
        self._posted = [pair for pair in self._posted if not pair[0].Test()]

    def request(self, record: Record) -> Record:
        """Return the reply to a request; what was posted before is handled before.

        Raises
        ------
        SearchError
            If rank 0 does not answer in time.
        """
        sent, _data = _send(self._comm, record, 0, _REQUEST)
        naps, deadline = Naps(), time.monotonic() + self._timeout
        while True:
            found = _receive(self._comm, 0, _REPLY) if sent.Test() else None
            if found is not None:
                self._forget_posted()
                return found[1]
            if time.monotonic() > deadline:
                raise SearchError(f"rank 0, which coordinates the study, has not answered in {self._timeout:g} s")
            naps.pause()

    def poll(self) -> None:
        """Do nothing: rank 0 answers."""

    def close(self, failure: str | None = None) -> None:
        """Do nothing."""


class LocalCoordinator:
    """The coordinator on rank 0, which answers its own leader and, from a thread, those of the other groups.

    Where the MPI library lets only one thread of a process call it at a time (a level below MPI_THREAD_MULTIPLE), there
    is no thread, and others are answered in :meth:`poll`, which is also part of each request of this rank's own.

    Parameters
    ----------
    hub
        Makes the replies.
    """

    def __init__(self, comm: MPI.Intracomm, hub: Hub, timeout: float) -> None:
        self._comm, self._hub, self._timeout = comm, hub, timeout
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._sending: list[tuple[MPI.Request, np.ndarray]] = []
        self._thread: threading.Thread | None = None
        if thread_level() == MPI.THREAD_MULTIPLE and comm.Get_size() > 1:
            self._thread = threading.Thread(target=self._serve, name="mpicoll-search", daemon=True)
            self._thread.start()

    def request(self, record: Record) -> Record:
        """Return the reply to a request of this rank; see :meth:`RemoteCoordinator.request`."""
        if not self._lock.acquire(timeout=self._timeout):
            raise SearchError(f"the study has been busy with another request for {self._timeout:g} s")
        try:
            reply = self._hub.handle(0, record)
        finally:
            self._lock.release()
        self.poll()
        return reply

    def post(self, record: Record) -> None:
        """Handle a request of this rank whose reply nobody needs; see :meth:`RemoteCoordinator.post`."""
        self.request({**record, QUIET: True})

    def poll(self) -> None:
        """Answer those who have asked, if no thread does."""
        if self._thread is None:
            while self._answer_one():
                pass

    def _answer_one(self) -> bool:
        """Answer a request, and forget replies that have left; by the thread alone, if there is one."""
        self._sending = [pair for pair in self._sending if not pair[0].Test()]
        found = _receive(self._comm, MPI.ANY_SOURCE, _REQUEST)
        if found is None:
            return False
        source, record = found
        with self._lock:
            reply = self._hub.handle(source, record)
            if QUIET not in record:
                self._sending.append(_send(self._comm, reply, source, _REPLY))
        return True

    def _serve(self) -> None:
        naps = Naps()
        while not self._ended.is_set():
            if self._answer_one():
                naps = Naps()
            else:
                naps.pause()

    def close(self, failure: str | None = None) -> None:
        """End, when every leader knows that the study has ended, or the timeout is over; local.

        Parameters
        ----------
        failure
            Reason why the study cannot go on, which the others are told; None if it has ended.
        """
        self._hub.failure = self._hub.failure or failure
        naps, deadline = Naps(), time.monotonic() + self._timeout
        while time.monotonic() < deadline and not self._is_done():
            self.poll()
            naps.pause()
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._timeout)

    def _is_done(self) -> bool:
        with self._lock:
            return self._hub.all_dismissed() and not self._sending


Coordinator = RemoteCoordinator | LocalCoordinator
