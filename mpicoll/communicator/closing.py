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
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mpi4py import MPI

from mpicoll.communicator.predefined import SELF
from mpicoll.progress import progress_engine
from mpicoll.progress.message_drain import Drain

PATIENCE_SECONDS = 0.01
"""How long a rank waits for the others to free a communicator, too."""
_END_SECONDS = 1.0
"""How long it waits for them at its end; they usually come at once."""


class Closable(Protocol):
    """A :class:`~mpicoll.communicator.channel.Channel`, as far as this module is concerned."""

    @property
    def has_failed(self) -> bool:
        """True if a failure broke it."""
        ...

    def start_anew(self, is_used: bool) -> None:
        """Give the counters the values that they have on a new channel."""

    def end(self, drain: Drain, is_drained: bool) -> None:
        """Free everything."""


class Closing:
    """A channel that is being closed.

    Parameters
    ----------
    keep
        Function that keeps it as a spare, None if it cannot be one.
    is_used
        Whether there was a collective on it.

    Attributes
    ----------
    is_over
        Whether all ranks have freed the communicator, or one has failed.
    """

    __slots__ = ("_is_busy", "_is_used", "_keep", "channel", "drain", "is_over")

    def __init__(self, channel: Closable, drain: Drain, keep: Callable[[], None] | None, is_used: bool) -> None:
        self.channel, self.drain, self._keep, self._is_used = channel, drain, keep, is_used
        self._is_busy = self.is_over = False

    def advance(self) -> bool:
        """Go on without waiting; return whether the channel is closed, or kept as a spare."""
        if self.is_over or self._is_busy:  # busy: the garbage collector frees a communicator meanwhile
            return self.is_over
        self._is_busy = True
        try:
            outcome = self.drain.look()
        finally:
            self._is_busy = False
        if outcome is not None:
            self.is_over = True  # an interrupt in what follows must not repeat it
            if outcome.all_willing and self._keep is not None and not self.channel.has_failed:
                self.channel.start_anew(self._is_used)
                self._keep()
            else:
                self.channel.end(self.drain, outcome.everything)
        return self.is_over


_closing: list[Closing] = []
_kept: list[Closing] = []
"""Those that an exception has ended, whose memory others may still use."""
_lock = threading.RLock()
_is_going_on = False
_process = os.getpid()


def has(channel: Closable) -> bool:
    """Return whether a channel is being closed."""
    return any(closing.channel is channel for closing in (*_closing, *_kept))


def close(closing: Closing) -> None:
    """Close a channel, now if the other ranks come soon, or later, also where an exception ends the wait for them."""
    until = time.monotonic() + PATIENCE_SECONDS
    _closing.append(closing)
    while not _advance(closing):
        if time.monotonic() > until:
            _finish_before_mpi()
            return
        progress_engine.progress()  # another rank may wait for an operation elsewhere before it comes here
        os.sched_yield()


def _advance(closing: Closing) -> bool:
    """Go on with a channel; return whether it is closed. It stays in memory if an exception ends that."""
    with _lock:
        try:
            is_over = closing.advance()
        except BaseException as error:
            if closing.is_over or isinstance(error, MPI.Exception):  # else it goes on later
                _kept.append(closing)
                _remove(closing)
            raise
        if is_over:
            _remove(closing)
        return is_over


def _remove(closing: Closing) -> None:
    with contextlib.suppress(ValueError):  # another thread has
        _closing.remove(closing)


def go_on() -> None:
    """Close the channels whose communicators all other ranks have freed meanwhile; local."""
    global _is_going_on
    if not _closing or os.getpid() != _process:
        return
    with _lock:
        if _is_going_on:  # the garbage collector frees a communicator in the loop
            return
        _is_going_on = True
        try:
            for closing in tuple(_closing):
                with contextlib.suppress(MPI.Exception):
                    _advance(closing)
        finally:
            _is_going_on = False


@functools.cache
def _finish_before_mpi() -> None:
    """Call :func:`_finish` where the program itself finalises MPI: that first deletes attributes of COMM_SELF."""
    SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda comm, keyval, value: _finish()), True)


@atexit.register
def _finish() -> None:
    """Before MPI is finalised, end what the MPI library is about to do, and tell the others that this rank ends."""
    ends = sys.is_finalizing() or not MPI.Is_initialized() or MPI.Is_finalized()
    if ends or os.getpid() != _process:
        return
    until = time.monotonic() + _END_SECONDS
    go_on()
    while _closing and time.monotonic() < until:
        time.sleep(1e-3)
        go_on()
    for closing in tuple(_closing):
        if not closing.drain.is_counting:  # else the others would count messages without this rank when they come
            closing.drain.leave()
    go_on()
    for closing in _closing:  # MPI may still write to its memory
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(closing))
