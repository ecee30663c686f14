"""Control messages between the ranks of a communicator: short JSON texts on a tag of their own."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.progress.failed_ranks import is_failure

CONTROL_TAG = 0
_MAX_NBYTES = 16384
_LEFT = "left"
"""Kind of the last message of a rank for which the communicator is broken."""
_FLUSH_SECONDS = 0.1


class Mailbox:
    """Sender and receiver of control messages; only one thread at a time may use it.

    Parameters
    ----------
    session
        A number that identifies this communicator on all its ranks. Messages that were not received before a
        communicator was freed may arrive on a later one, because MPI libraries reuse its context.

    Attributes
    ----------
    comm, size
        The communicator, and its number of ranks.
    sent
        Number of messages that this rank has sent to each, int64 of shape (size,).
    is_silent
        Whether this rank has sent nothing that may be in flight.
    somebody_left
        Whether a rank has told that it takes no part in a drain; see :mod:`mpicoll.progress.message_drain`.
    """

    def __init__(self, comm: MPI.Intracomm, session: int) -> None:
        self.comm, self.size, self._session = comm, comm.size, session
        self._outbox: list[tuple[MPI.Request, bytes]] = []
        self.sent = np.zeros(comm.size, np.int64)
        self._received = 0
        self.is_silent = True
        self.somebody_left = False

    def tell(self, peer: int, news: dict[str, Any]) -> None:
        """Send `news` to rank `peer`; a text that is too long is truncated."""
        news = {"session": self._session, **news}
        text = json.dumps(news).encode()
        if len(text) > _MAX_NBYTES:
            text = json.dumps({**news, "text": str(news["text"])[: _MAX_NBYTES // 8] + " ..."}).encode()
        # A message that nobody reads must not hold up this rank: it is kept until it is gone.
        try:
            self._outbox.append((self.comm.Isend([text, MPI.BYTE], peer, CONTROL_TAG), text))
        except MPI.Exception as error:
            if not is_failure(error):  # a dead rank reads nothing
                raise
            return
        self.sent[peer] += 1
        self.is_silent = False

    def tell_all(self, news: dict[str, Any]) -> None:
        """Send `news` to all other ranks."""
        for peer in range(self.comm.size):
            if peer != self.comm.rank:
                self.tell(peer, news)

    def read(self) -> list[tuple[int, dict[str, Any]]]:
        """Receive all messages that have arrived; return them with their senders, except those of :meth:`leave`."""
        self._sweep()
        status, found = MPI.Status(), []
        # Matched, so that no other receive can take the message between the look and the receive.
        while (message := self.comm.Improbe(MPI.ANY_SOURCE, CONTROL_TAG, status)) is not None:
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

    def has(self, count: int) -> bool:
        """Return whether so many messages have been received, and all that this rank has sent are gone."""
        self._sweep()
        return self._received >= count and not self._outbox

    def leave(self) -> None:
        """Tell the others that this rank takes no part in a drain."""
        self.tell_all({"kind": _LEFT})
        self.flush()

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
