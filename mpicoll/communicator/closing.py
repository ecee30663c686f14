"""Channels that are being closed: each is freed, or becomes a spare, when all ranks have freed the communicator.

MPI lets a rank go on from ``Free`` before the others have called it, and programs rely on that: ranks free several
communicators in different orders, as the garbage collector finds them, or one of them before it sends a message that
another one waits for. So a rank waits some milliseconds for the others, which usually come at the same time, and looks
again when it makes or frees another communicator, and at its end::

    rank 0   Free(a) .. goes on       Free(b): a, b are closed
    rank 1        Free(b) .. goes on       Free(a): b, a are closed
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from mpi4py import MPI

from mpicoll.communicator.predefined import SELF
from mpicoll.progress import progress_engine
from mpicoll.progress.message_drain import Drain

PATIENCE_SECONDS = 0.01
"""How long a rank waits for the others to free a communicator, too."""
_END_SECONDS = 1.0
"""How long it waits at its end for collectives of the MPI library that are under way, which usually end at once."""


class Closable(Protocol):
    """A :class:`~mpicoll.communicator.channel.Channel`, as far as this module is concerned."""

    def start_anew(self, is_used: bool) -> None:
        """Give the counters the values that they have on a new channel."""

    def end(self, drain: Drain, is_drained: bool) -> None:
        """Free everything."""


class Closing(NamedTuple):
    """A channel that is being closed.

    Attributes
    ----------
    keep
        Function that keeps it as a spare, None if it cannot be one.
    is_used
        Whether there was a collective on it.
    """

    channel: Closable
    drain: Drain
    keep: Callable[[], None] | None
    is_used: bool

    def advance(self) -> bool:
        """Go on without waiting; return whether the channel is closed, or kept as a spare."""
        outcome = self.drain.look()
        if outcome is None:
            return False
        if outcome.all_willing and self.keep is not None:
            self.channel.start_anew(self.is_used)
            self.keep()
        else:
            self.channel.end(self.drain, outcome.everything)
        return True


_closing: list[Closing] = []
_kept: list[Closing] = []
"""Those on which a rank has died, whose memory others may still use."""
_lock = threading.Lock()


def close(closing: Closing) -> None:
    """Close a channel, now if the other ranks come soon, or later."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not closing.advance():
        if time.monotonic() > until:
            _closing.append(closing)
            _finish_before_mpi()
            return
        progress_engine.progress()  # another rank may wait for an operation elsewhere before it comes here
        os.sched_yield()


def go_on() -> None:
    """Close the channels whose communicators all other ranks have freed meanwhile; local."""
    if not _closing or not _lock.acquire(blocking=False):
        return
    try:
        for closing in tuple(_closing):
            try:
                is_closed = closing.advance()
            except MPI.Exception:
                is_closed = True
                _kept.append(closing)
            if is_closed:
                _closing.remove(closing)
    finally:
        _lock.release()


@functools.cache
def _finish_before_mpi() -> None:
    """Call :func:`_finish` where the program itself finalises MPI: that first deletes attributes of COMM_SELF."""
    SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: _finish()), True)


@atexit.register
def _finish() -> None:
    """Before MPI is finalised, end what the MPI library is about to do, and tell the others that this rank ends."""
    if sys.is_finalizing() or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    until = time.monotonic() + _END_SECONDS
    go_on()
    for closing in _closing:
        if not closing.drain.is_counting:  # else the others would count messages without this rank when they come
            closing.drain.leave()
    while _closing and time.monotonic() < until:
        go_on()
        time.sleep(1e-3)
    for closing in _closing:  # MPI may still write to its memory
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(closing))
