"""Progress thread: it advances nonblocking operations while the program makes no call of mpicoll.

MPI promises that a nonblocking collective goes on while its rank is in any call of MPI. The MPI library's own blocking
calls, ``Recv`` or ``Split``, do not advance operations of mpicoll, and other ranks may wait for those before they make
the matching call::

    rank 0: Iallreduce, Recv from 1 ... Wait
    rank 1: Iallreduce, Wait, Send to 0

The thread sleeps while operations are advanced by calls of the program, and takes over `PERIOD` seconds after the last
one. It needs ``MPI_THREAD_MULTIPLE``, which mpi4py asks for.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

from mpi4py import MPI

PERIOD = 0.01
"""Seconds without progress after which the thread takes over."""
PAUSE = 0.0005
"""Seconds between two turns of the thread."""
IDLE_PERIODS = 100
"""Periods without a new operation after which the thread sleeps until there is one."""


class ProgressThread:
    """A daemon thread that advances what is in flight if nobody else does; started with the first operation.

    Parameters
    ----------
    progress
        Advances all operations in flight.
    pending
        Returns how many need somebody to advance them.
    turns
        Returns how often operations were advanced in this process, by any thread.
    """

    def __init__(self, progress: Callable[[], None], pending: Callable[[], int], turns: Callable[[], int]) -> None:
        self._progress, self._pending, self._turns = progress, pending, turns
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = not is_wanted()
        self.awake = self._ended
        """True if the thread sees a new operation by itself, since waking it takes longer than most operations; always
        true where there is to be no thread."""

    def notice(self) -> None:
        """Let the thread look at a new operation; to be called if it is not awake."""
        self.awake = True
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mpicoll progress", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more, or the interpreter is about to end
                self._ended = True
                return
            self._thread = thread
            atexit.register(self.end)  # before MPI is finalized
        self._wake.set()

    def end(self) -> None:
        """End the thread, and wait until it has ended, a second at most."""
        self._ended = self.awake = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=1)

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait()
            self._wake.clear()
            self._look_on()
            self.awake = self._ended
            if self._pending():  # whoever started it saw the thread awake
                self.awake = True
                self._wake.set()

    def _look_on(self) -> None:
        """Look every period whether operations wait for somebody to advance them, until there are no new ones."""
        idle = 0
        while idle < IDLE_PERIODS and not self._ended:
            seen = self._turns()
            time.sleep(PERIOD)
            idle = idle + 1 if self._turns() == seen else 0
            if idle and self._pending():
                self._take_over()
                idle = 0

    def _take_over(self) -> None:
        """Advance operations until all have ended, or another thread advances them."""
        own = self._turns()
        while self._pending() and self._turns() == own and not (self._ended or MPI.Is_finalized()):
            self._progress()
            own += 1
            time.sleep(PAUSE)


def is_wanted() -> bool:
    """Return whether this process may have the thread."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE and os.environ.get("MPICOLL_PROGRESS_THREAD", "on") != "off"
