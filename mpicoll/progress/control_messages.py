"""Control messages between the ranks of a communicator: short JSON texts on a tag of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.progress import progress_engine
from mpicoll.progress.failed_ranks import is_failure
from mpicoll.progress.running_clock import RunningClock
from mpicoll.shared_memory.announcements import Announcements

CONTROL_TAG = 0
_MAX_NBYTES = 16384
DRAIN_SECONDS = 60.0
"""A rank may be late to free a communicator."""
_LEFT = "left"
"""Kind of the last message of a rank for which the communicator is broken."""
_FLUSH_SECONDS = 0.1


class Drained(NamedTuple):
    """Outcome of :meth:`Mailbox.drain`: no message is left in flight; and then, all ranks were willing."""

    everything: bool
    all_willing: bool


class Mailbox:
    """Sender and receiver of control messages; only one thread at a time may use it.

    Parameters
    ----------
    session
        A number that identifies this communicator on all its ranks. Messages that were not received before a
        communicator was freed may arrive on a later one, because MPI libraries reuse its context.
    """

    def __init__(self, comm: MPI.Intracomm, session: int) -> None:
        self._comm, self._session = comm, session
        self._outbox: list[tuple[MPI.Request, bytes]] = []
        self._sent = np.zeros(comm.size, np.int64)
        self._received = 0
        self._draining: tuple[MPI.Request, np.ndarray, np.ndarray] | None = None
        self._is_silent = True
        """True if this rank has sent nothing that may be in flight."""
        self.somebody_left = False
        """True if a rank has told that it takes no part in :meth:`drain`."""

    def tell(self, peer: int, news: dict[str, Any]) -> None:
        """Send `news` to rank `peer`; a text that is too long is truncated."""
        news = {"session": self._session, **news}
        text = json.dumps(news).encode()
        if len(text) > _MAX_NBYTES:
            text = json.dumps({**news, "text": str(news["text"])[: _MAX_NBYTES // 8] + " ..."}).encode()
        # A message that nobody reads must not hold up this rank: it is kept until it is gone.
        try:
            self._outbox.append((self._comm.Isend([text, MPI.BYTE], peer, CONTROL_TAG), text))
        except MPI.Exception as error:
            if not is_failure(error):  # a dead rank reads nothing
                raise
            return
        self._sent[peer] += 1
        self._is_silent = False

    def tell_all(self, news: dict[str, Any]) -> None:
        """Send `news` to all other ranks."""
        for peer in range(self._comm.size):
            if peer != self._comm.rank:
                self.tell(peer, news)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Receive all messages that have arrived; return them with their senders, except those of :meth:`drain`."""
        self._sweep()
        status, found = MPI.Status(), []
        # Matched, so that no other receive can take the message between the look and the receive.
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, CONTROL_TAG, status)) is not None:
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            message.Recv([data, MPI.BYTE])
            news = json.loads(data.tobytes())
            if news["session"] != self._session:
                continue
            self._received += 1
            if news["kind"] == _LEFT:
                self.somebody_left = True
            else:
                found.append((status.Get_source(), news))
        return found

    def flush(self) -> None:
        """Wait at most 0.1 s for sends to complete, since the program may end right after."""
        until = time.monotonic() + _FLUSH_SECONDS
        while self._outbox and time.monotonic() < until:
            self._sweep()

    def drain(
        self,
        broken: bool,
        willing: bool,
        breaks: Callable[[int, dict[str, Any]], bool],
        announcements: Announcements | None = None,
    ) -> Drained:
        """Receive all messages that were sent to this rank; collective.

        Return whether no message is left in flight, and whether all ranks are `willing`. Messages are left if some rank
        is `broken`, also by a message for which `breaks`, given it and its sender, returns True, or if other ranks do
        not take part within a minute. What is freed afterwards is freed by all ranks or by none, so that a rank must
        not give up on one that is merely late. A message that arrived after the communicator was freed would count as
        one on the next communicator with its context: Open MPI ends the job if that one is smaller.

        By `announcements`, if the ranks share memory, they learn that all are willing and none has sent a message,
        which ends most drains. The memory must last longer: other ranks may still read it.

        A broken rank tells the others and does not wait. It takes no part in the collective that counts messages: an
        earlier one of the MPI library, which not all ranks have called, may be in flight, and then none completes.
        """
        if broken:
            return self._leave()
        if self._comm.size == 1:
            return Drained(True, willing)
        clock = RunningClock()
        if announcements is not None:
            complete = announcements.start(willing and self._is_silent)
            while not complete:
                if self._is_to_end(clock, breaks):
                    return Drained(False, False)
                complete = announcements.is_complete()
            if all(announcements.told[:, 0].tolist()):
                return Drained(True, True)
        return self._count(willing, clock, breaks)

    def _count(self, willing: bool, clock: RunningClock, breaks: Callable[[int, dict[str, Any]], bool]) -> Drained:
        """Learn how many messages were sent to this rank, and receive them; see :meth:`drain`."""
        given, coming, counted = np.empty((self._sent.size, 2), np.int64), np.zeros(2, np.int64), False
        given[:, 0], given[:, 1] = self._sent, willing
        request = self._comm.Ireduce_scatter_block(given, coming)
        self._draining = request, given, coming  # where a rank comes late, MPI uses them when nobody waits any more
        while not counted or self._received < coming[0] or self._outbox:
            if self._is_to_end(clock, breaks):
                return Drained(False, False)
            counted = counted or bool(request.Test())
        self._is_silent = True
        return Drained(True, int(coming[1]) == self._sent.size)

    def _is_to_end(self, clock: RunningClock, breaks: Callable[[int, dict[str, Any]], bool]) -> bool:
        """Read what has arrived; return True if a wait in :meth:`drain` has to end without its aim."""
        heard = [breaks(*message) for message in self.read()]  # all of them
        if any(heard):
            self._leave()
        if any(heard) or self.somebody_left or clock.read() > DRAIN_SECONDS:
            return True
        progress_engine.progress()  # another rank may wait for an operation elsewhere before it comes here
        os.sched_yield()
        return False

    def _leave(self) -> Drained:
        self.tell_all({"kind": _LEFT})
        self.flush()
        return Drained(False, False)

    def _sweep(self) -> None:
        self._outbox = [entry for entry in self._outbox if not _is_over(entry[0])]


def _is_over(request: MPI.Request) -> bool:
    """Return True if a message has been sent, or its receiver is dead."""
    try:
        return bool(request.Test())
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        return True
