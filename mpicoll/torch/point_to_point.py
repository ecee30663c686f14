"""Messages between two ranks of a group: send, receive, and receive from any rank."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpicoll.communicator.channel import Channel
from mpicoll.errors import CollectiveTimeout
from mpicoll.progress import progress_engine
from mpicoll.torch.group_work import PendingWork
from mpicoll.torch.tensor_memory import is_plain, memory, plain_copy, waited_for

_POLLS = 200
_SECONDS_BEFORE_NAP = 0.005
_NAP_SECONDS = 0.0002
_PACE_SECONDS = 0.001
"""Time between two looks of the thread that advances messages which nobody waits for."""


_unsent: list[Any] = []
"""Messages that were given up before their receivers came, which MPI may read for as long as the process lives."""


class Message(PendingWork):
    """A message on its way; it advances while any call of mpicoll waits, and in the thread of messages."""

    is_driven = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has been sent or received; return True.

        Parameters
        ----------
        timeout
            Time after which the message is given up, as with gloo; None and zero leave it to the group's timeout. The
            error is that of every later wait, too. A message that comes later is for the next call that receives one,
            and one that is being sent may still arrive. :meth:`is_completed` asks without giving up.

        Raises
        ------
        CollectiveTimeout
            If the message was given up.
        ValueError
            If it has another number of bytes than the tensor.
        """
        return super().wait(timeout)

    def __init__(self, what: str, tensor: torch.Tensor, room: torch.Tensor, seconds: float) -> None:
        super().__init__(what, [tensor])
        self._tensor, self._room, self._seconds = tensor, room, seconds
        self._source = -1
        self._request = MPI.REQUEST_NULL
        self._status = MPI.Status()
        self._expected: int | None = None

    def send(self, comm: MPI.Intracomm, peer: int, tag: int) -> Message:
        """Start to send the tensor."""
        return self._begin(comm.Isend(_bytes_of(self._room), peer, tag))

    def receive(self, comm: MPI.Intracomm, peer: int, tag: int) -> Message:
        """Start to receive the tensor."""
        self._expected = self._room.nbytes
        return self._begin(comm.Irecv(_bytes_of(self._room), peer, tag))

    def _begin(self, request: MPI.Request) -> Message:
        self._request = request
        if not self.step():
            progress_engine.add(self)
            _advance_messages()
        return self

    def step(self) -> bool:
        """Advance; return whether the message has arrived or failed."""
        if self.is_completed():
            return True
        try:
            if not self._request.Test(self._status):
                return False
        except Exception as error:
            self._end_in_step(error)
            return True
        self._arrive()
        return True

    def _end_in_step(self, error: Exception | None = None) -> None:
        """End while the progress engine advances messages: it would not advance others while callbacks run."""
        self.note_end(error)
        if self.has_callers:
            threading.Thread(target=self.settle, name="mpicoll callbacks", daemon=True).start()
        else:
            self.settle()

    def complete_on(self, channel: Channel) -> None:
        """Do nothing: a message is on a communicator without a channel."""

    def _arrive(self) -> None:
        try:
            self._receive_completely()
        except Exception as error:
            self._end_in_step(error)
        else:
            self._end_in_step()

    def _receive_completely(self) -> None:
        if self._expected is None:
            return
        self._source = self._status.Get_source()
        nbytes = self._status.Get_elements(MPI.BYTE)
        if nbytes != self._expected:
            raise ValueError(f"{self.what}: {nbytes} bytes have come for a tensor of {self._expected}")
        if self._room is not self._tensor:
            self._tensor.detach().copy_(self._room)

    def _await(self, seconds: float) -> None:
        limit = seconds if seconds > 0 else self._seconds
        for _ in range(_POLLS):
            progress_engine.progress()
            if self.is_completed():
                return
        began = time.monotonic()
        while not self.is_completed():
            progress_engine.progress()
            waited = time.monotonic() - began
            if waited > limit:
                self._give_up(limit)
                return
            time.sleep(_NAP_SECONDS if waited > _SECONDS_BEFORE_NAP else 0)

    def _give_up(self, seconds: float) -> None:
        progress_engine.remove(self)
        if self.is_completed():
            return
        if self._expected is not None:
            self._request.Cancel()
            self._request.Wait(self._status)  # returns at once: the message has come, or never will
            if not self._status.Is_cancelled():
                self._arrive()
                return
        else:
            _unsent.append((self._request, self._room))
        self.end(CollectiveTimeout(f"{self.what}: it has not ended after {seconds:g} s"))

    def source_rank(self) -> int:
        """Return the rank that a received message came from, -1 before that."""
        return self._source

    _source_rank = source_rank


def _bytes_of(tensor: torch.Tensor) -> list[Any]:
    return [memory(tensor).reshape(-1).view(np.uint8), MPI.BYTE]


def send(comm: MPI.Intracomm, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Message:
    """Start to send a tensor; return the work."""
    tensor = waited_for(tensor)
    room = tensor if is_plain(tensor) else plain_copy(tensor)
    made = Message(f"send to rank {peer}, tag {tag}", tensor, room, timeout.total_seconds())
    return made.send(comm, peer, checked_tag(comm, tag))


def receive(comm: MPI.Intracomm, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Message:
    """Start to receive a tensor, from any rank if `peer` is None; return the work."""
    tensor = waited_for(tensor)
    room = tensor if is_plain(tensor) else plain_copy(tensor)
    origin = "any rank" if peer is None else f"rank {peer}"
    made = Message(f"receive from {origin}, tag {tag}", tensor, room, timeout.total_seconds())
    return made.receive(comm, MPI.ANY_SOURCE if peer is None else peer, checked_tag(comm, tag))


def checked_tag(comm: MPI.Intracomm, tag: int) -> int:
    """Return a tag; raise ValueError if MPI has no such tag."""
    largest = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)
    if not 0 <= tag <= largest:
        raise ValueError(f"tag: {tag} is not in 0..{largest}")
    return tag


_wanted = threading.Event()
_thread: threading.Thread | None = None


def _advance_messages() -> None:
    """Have a thread advance what is on its way, in case that this process computes and does not wait."""
    global _thread
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return
    if _thread is None:
        _thread = threading.Thread(target=_advance, name="mpicoll messages", daemon=True)
        _thread.start()
    _wanted.set()


def _advance() -> None:
    while _wanted.wait():
        _wanted.clear()
        while progress_engine.pending() and not MPI.Is_finalized():
            progress_engine.progress()
            time.sleep(_PACE_SECONDS)
