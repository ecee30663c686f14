"""Lock of the calls on a communicator, of which one is made at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mpicoll.errors import CommunicatorBusy

Result = TypeVar("Result")


class Alone:
    """A lock that is held while a function is called.

    A signal handler's exception cannot leave it held: Python runs handlers where a function of Python begins and where
    a call returns, of which there are none between taking the lock and the ``try`` statement that gives it back.

    Parameters
    ----------
    busy
        A word that is 1 while the lock is held, for compiled code to see.
    """

    __slots__ = ("_busy", "_lock")
    _lock: threading.Lock | threading.RLock

    def __init__(self, busy: memoryview) -> None:
        self._lock = threading.Lock()
        self._busy = busy

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return ``function(*arguments)``, during which other calls raise CommunicatorBusy.

        Raises
        ------
        CommunicatorBusy
            If a collective is being called, by any thread.
        """
        if self._busy[0]:
            raise CommunicatorBusy
        return self.call_later(function, *arguments)

    def call_later(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Wait for the lock, for a call that compiled code has started; the present holder will be refused."""
        with self._lock:
            self._busy[0] = 1
            try:
                return function(*arguments)
            finally:
                self._busy[0] = 0


class Nested(CommunicatorBusy):
    """A call on a communicator of one rank from a signal handler or finaliser that interrupts another one."""


class InTurn(Alone):
    """The lock of a communicator with one rank, for which other threads wait: its calls end without other ranks.

    `call` raises :class:`Nested` in the thread that holds it.
    """

    __slots__ = ()

    def __init__(self, busy: memoryview) -> None:
        self._lock = threading.RLock()
        self._busy = busy

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """See :meth:`Alone.call`."""
        with self._lock:
            if self._busy[0]:
                raise Nested
            return self.call_later(function, *arguments)


def lock_of_calls(busy: memoryview, size: int) -> Alone:
    """Return the lock for a communicator of `size` ranks."""
    return Alone(busy) if size > 1 else InTurn(busy)
