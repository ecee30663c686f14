"""Drain of a communicator's control messages, by which its ranks agree on what they do with it when it is freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.progress.control_messages import Mailbox
from mpicoll.shared_memory.announcements import Announcements


class Drained(NamedTuple):
    """Outcome of a drain: no message is left in flight; and then, all ranks were willing."""

    everything: bool
    all_willing: bool


_FAILED = Drained(False, False)


class Drain:
    """Receipt of all messages that were sent to this rank; all ranks of the communicator make one.

    No rank has to wait for the others in it: :meth:`look` goes as far as it can. Messages are left if some rank is
    `broken`, also by a message for which `breaks`, given it and its sender, returns True. What is freed afterwards is
    freed by all ranks or by none, so that a rank does not give up on one that is merely late. A message that arrived
    after the communicator was freed would count as one on the next communicator with its context: Open MPI ends the job
    if that one is smaller.

    By `announcements`, if the ranks share memory, they learn that all are willing and none has sent a message, which
    ends most drains. The memory must last longer: other ranks may still read it.

    A broken rank tells the others and does not wait. It takes no part in the collective that counts messages: an
    earlier one of the MPI library, which not all ranks have called, may be in flight, and then none completes.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        broken: bool,
        willing: bool,
        breaks: Callable[[int, dict[str, Any]], bool],
        announcements: Announcements | None = None,
    ) -> None:
        self._mailbox, self._willing, self._breaks = mailbox, willing, breaks
        self._announcements = announcements
        self._counting: MPI.Request | None = None
        self._outcome: Drained | None = None
        if broken:
            self.leave()
        elif mailbox.size == 1:
            self._outcome = Drained(True, willing)
        elif announcements is not None:
            announcements.start(willing and mailbox.is_silent)

    @property
    def is_counting(self) -> bool:
        """True while a collective of the MPI library is under way."""
        return self._outcome is None and self._counting is not None

    def leave(self) -> None:
        """End the drain for this rank, and tell the others."""
        self._mailbox.leave()
        self._outcome = _FAILED

    def look(self) -> Drained | None:
        """Go on; return the outcome, None if there is none yet."""
        if self._outcome is None:
            self._outcome = self._meet() or self._count()
        if self._outcome is None and self._is_to_end():
            self._outcome = _FAILED
        return self._outcome

    def _meet(self) -> Drained | None:
        """Look for the others' announcements."""
        announcements = self._announcements
        if announcements is not None and announcements.is_complete():
            self._announcements = None
            return Drained(True, True) if all(announcements.told[:, 0].tolist()) else None
        return None

    def _count(self) -> Drained | None:
        """Learn how many messages were sent to this rank, and whether all have arrived."""
        mailbox = self._mailbox
        if self._announcements is not None:
            return None
        if self._counting is None:
            self._given, self._coming = np.empty((mailbox.size, 2), np.int64), np.zeros(2, np.int64)
            self._given[:, 0], self._given[:, 1], self._is_counted = mailbox.sent, self._willing, False
            self._counting = mailbox.comm.Ireduce_scatter_block(self._given, self._coming)
        self._is_counted = self._is_counted or bool(self._counting.Test())
        if not self._is_counted or not mailbox.has(int(self._coming[0])):
            return None
        mailbox.is_silent = True
        return Drained(True, int(self._coming[1]) == mailbox.size)

    def _is_to_end(self) -> bool:
        """Read what has arrived; return True if the drain has to end without its aim."""
        heard = [self._breaks(*message) for message in self._mailbox.read()]  # all of them
        if any(heard):
            self._mailbox.leave()
        return any(heard) or self._mailbox.somebody_left
