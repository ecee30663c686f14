"""Remote memory by messages, for jobs that outlive dead ranks.

The owner of a region executes all accesses: another rank sends a request, and the owner replies when it has been
executed. A rank executes requests whenever it accesses or waits for remote memory itself (:func:`progress_all`).

Windows do not outlive a rank. MPI libraries guard accumulates by locks in shared memory, and one that is held by a rank
when it dies is never released: the others wait for it without end, inside of an MPI call. Open MPI documents one-sided
communication as not fault tolerant ("User-Level Fault Mitigation (ULFM)" in its manual); messages are.
"""

from __future__ import annotations

import math
import time
from enum import IntEnum
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.parameter_server.polling import Pause
from mpicoll.parameter_server.remote_memory import Memory, Region, aligned
from mpicoll.progress.failed_ranks import raise_if_failed

CHUNK_NBYTES = 1 << 22
"""Largest payload of a request or a reply in bytes; longer vectors take several."""
_REQUEST_TAG, _FIRST_REPLY_TAG, _REPLY_TAGS = 11, 12, 1000
"""Successive replies have other tags, since a signal handler may make a request while a reply is awaited."""
_WORDS = 6
_LOOK_SECONDS = 0.1
"""Time between two looks for dead ranks."""
_LONGEST_SLEEP = 100e-6
_DTYPES = (np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.float64))
_live: list[MessageMemory] = []
_abandoned: list[MessageMemory] = []


class _Access(IntEnum):
    """Kinds of access."""

    READ, WRITE, ADD, FETCH_ADD, DECIDE = range(5)


def progress_all() -> bool:
    """Execute requests to all regions of this rank; return whether there were any. Local; raises as `progress`."""
    found = [memory.poll() for memory in tuple(_live)]
    return any(found)


def abandon_all() -> None:
    """Abandon all memory that there is, that of unfinished constructors included."""
    for memory in tuple(_live):
        memory.abandon()


class MessageMemory(Memory):
    """Regions whose accesses travel by messages on `comm`, which is used for nothing else with tags from 11 on.

    Parameters
    ----------
    timeout
        Seconds after which a rank raises CollectiveTimeout that waits for a reply.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        self.comm, self._timeout = comm, timeout
        self._regions: list[MessageRegion] = []
        self._arriving: list[tuple[int, MPI.Request, np.ndarray]] = []
        self._leaving: list[tuple[MPI.Request, np.ndarray]] = []
        self._awaited: dict[int, tuple[Any, ...]] = {}
        self._requests, self._looked, self._is_busy = 0, time.monotonic(), False
        _live.append(self)

    def region(self, owner: int, nbytes: int) -> MessageRegion:
        """See the interface."""
        found = MessageRegion(self, len(self._regions), owner, nbytes)
        self._regions.append(found)
        return found

    def progress(self) -> bool:
        """Execute requests to all regions of this rank, those of other communicators included; see the interface."""
        return progress_all()

    def barrier(self) -> None:
        """See the interface."""
        self._wait_for(self.comm.Ibarrier(), None, "all ranks", ())

    def settle(self) -> None:
        """See the interface."""
        self._wait_for(self.comm.Ibarrier(), self._timeout, "all ranks to make their last requests", ())
        _live.remove(self)

    def abandon(self) -> None:
        """See the interface."""
        if self in _live:
            _live.remove(self)
            _abandoned.append(self)

    def poll(self) -> bool:
        """Execute requests to regions of this communicator; return whether there were any."""
        if self._is_busy:  # called by a signal handler
            return False
        self._is_busy = True
        try:
            self._look()
            self._take()
            return self._execute_arrived()
        finally:
            self._is_busy = False

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            raise_if_failed(self.comm)

    def _take(self) -> None:
        """Start to receive all requests that have been announced."""
        status = MPI.Status()
        while (message := self.comm.Improbe(MPI.ANY_SOURCE, _REQUEST_TAG, status)) is not None:
            buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self._arriving.append((status.Get_source(), message.Irecv([buffer, MPI.BYTE]), buffer))

    def _execute_arrived(self) -> bool:
        if self._leaving:
            self._leaving = [each for each in self._leaving if not each[0].Test()]
        arrived = [each for each in self._arriving if each[1].Test()]
        if not arrived:
            return False
        self._arriving = [each for each in self._arriving if all(each is not other for other in arrived)]
        for source, _, buffer in arrived:
            words = buffer[: 8 * _WORDS].view(np.int64).tolist()
            reply = self._regions[words[0]].execute(words, buffer[8 * _WORDS :])
            self._leaving.append((self.comm.Isend([reply, MPI.BYTE], source, words[2]), reply))
        return True

    def ask(self, owner: int, words: tuple[int, ...], payload: np.ndarray, reply: np.ndarray) -> None:
        """Make a request of a region's owner, and return when its reply has arrived.

        Parameters
        ----------
        words
            Number of the region, kind of access, offset, and a word that depends on the kind: the index of the dtype
            for ADD, the value for FETCH_ADD and DECIDE.
        payload, reply : arrays of uint8
            What follows the words in the request, and the memory of the reply.
        """
        number, self._requests = self._requests, self._requests + 1
        tag = _FIRST_REPLY_TAG + number % _REPLY_TAGS
        region, kind, offset, last = words
        header = np.array([region, kind, tag, offset, last, reply.size], np.int64)
        message = np.concatenate([header.view(np.uint8), payload])
        answer = self.comm.Irecv([reply, MPI.BYTE], owner, tag)
        sent = self.comm.Isend([message, MPI.BYTE], owner, _REQUEST_TAG)
        self._awaited[number] = answer, sent, reply, message  # stays if the wait ends by an exception
        for request in (answer, sent):
            self._wait_for(request, self._timeout, f"rank {owner} to access its memory", (owner,))
        del self._awaited[number]

    def _wait_for(self, request: MPI.Request, timeout: float | None, what: str, ranks: tuple[int, ...]) -> None:
        pause, until = Pause(_LONGEST_SLEEP), math.inf if timeout is None else time.monotonic() + timeout
        while not request.Test():
            if progress_all():
                pause.reset()
            elif time.monotonic() > until:
                text = f"parameter server: rank {self.comm.rank} waited for {what}; it gave up after {timeout:g} s"
                raise CollectiveTimeout(text, ranks)
            else:
                pause.rest()


class MessageRegion(Region):
    """A region of a :class:`MessageMemory`; see the interface for its methods."""

    def __init__(self, memory: MessageMemory, number: int, owner: int, nbytes: int) -> None:
        self._memory, self._number, self._owner = memory, number, owner
        self._is_mine = memory.comm.rank == owner
        room = np.zeros(aligned(nbytes) + aligned(1) if self._is_mine else 0, np.uint8)
        shift = -room.ctypes.data % aligned(1)
        self.local = room[shift : shift + nbytes] if self._is_mine else room

    def read(self, offset: int, out: np.ndarray) -> None:
        """See the interface; each chunk is read at one time."""
        found = out.view(np.uint8)
        for first in range(0, found.size, CHUNK_NBYTES):
            self._access(_Access.READ, offset + first, found[:0], found[first : first + CHUNK_NBYTES])

    def replace(self, offset: int, values: np.ndarray) -> None:
        """See the interface."""
        self._write(offset, values.view(np.uint8))

    def put(self, offset: int, *parts: np.ndarray) -> None:
        """See the interface."""
        self._write(offset, np.concatenate([part.view(np.uint8) for part in parts]))

    def _write(self, offset: int, given: np.ndarray) -> None:
        for first in range(0, given.size, CHUNK_NBYTES):
            self._access(_Access.WRITE, offset + first, given[first : first + CHUNK_NBYTES], given[:0])

    def add(self, offset: int, values: np.ndarray) -> None:
        """See the interface."""
        given, kind = values.view(np.uint8), _DTYPES.index(values.dtype)
        for first in range(0, given.size, CHUNK_NBYTES):
            self._access(_Access.ADD, offset + first, given[first : first + CHUNK_NBYTES], given[:0], kind)

    def fetch_add(self, offset: int, value: int) -> int:
        """See the interface."""
        return self._word(_Access.FETCH_ADD, offset, value)

    def decide(self, offset: int, value: int) -> int:
        """See the interface."""
        return self._word(_Access.DECIDE, offset, value)

    def _word(self, kind: _Access, offset: int, value: int) -> int:
        found = np.empty(1, np.int64)
        self._access(kind, offset, found.view(np.uint8)[:0], found.view(np.uint8), value)
        return int(found[0])

    def refresh(self) -> None:
        """Do nothing: this rank itself writes what others put here."""

    def close(self) -> None:
        """Forget the memory; local."""
        self.local = np.empty(0, np.uint8)

    def _access(self, kind: _Access, offset: int, payload: np.ndarray, reply: np.ndarray, last: int = 0) -> None:
        if not self._is_mine:
            self._memory.ask(self._owner, (self._number, kind, offset, last), payload, reply)
            return
        if kind == _Access.READ:
            progress_all()
        reply[:] = self.execute([self._number, kind, 0, offset, last, reply.size], payload)

    def execute(self, words: list[int], payload: np.ndarray) -> np.ndarray:
        """Execute a request to this region on its owner; return the reply, uint8."""
        _, kind, _, offset, last, nbytes = words
        if kind == _Access.READ:
            return self.local[offset : offset + nbytes].copy()
        if kind == _Access.WRITE:
            self.local[offset : offset + payload.size] = payload
            return payload[:0]
        if kind == _Access.ADD:
            target = self.local[offset : offset + payload.size].view(_DTYPES[last])
            target += payload.view(target.dtype)
            return payload[:0]
        word = self.local[offset : offset + 8].view(np.int64)
        if kind == _Access.FETCH_ADD:
            before = word.copy()
            word += last
            return before.view(np.uint8)
        if word[0] == 0:
            word[0] = last
        return word.copy().view(np.uint8)
