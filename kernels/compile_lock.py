"""One process after the other: where all ranks of a job need a kernel, one compiles it and the others load it."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a system with such locks: everybody compiles
    fcntl = None

_PATIENCE_SECONDS = 120.0
"""Nothing but time is lost if two processes compile the same."""
_NAP_SECONDS = 0.01


class CompileLock:
    """A lock between processes, by a file that stays empty; the system opens it when a process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the turn; for so long, and not at all where no such file can be made.

        Parameters
        ----------
        meanwhile
            Called once if another process has the turn.
        """
        if self._descriptor is not None or fcntl is None:
            return
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        if _is_locked(descriptor, meanwhile):
            self._descriptor = descriptor
        else:
            os.close(descriptor)

    def try_take(self) -> bool:
        """Take the turn if no process has it; return whether this one has it now."""
        if self._descriptor is None and fcntl is not None:
            with contextlib.suppress(OSError):
                descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._descriptor = descriptor
                except OSError:
                    os.close(descriptor)
        return self._descriptor is not None

    def give(self) -> None:
        """Let the next one have it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_locked(descriptor: int, meanwhile: Callable[[], None]) -> bool:
    """Wait until the file can be locked, and lock it; False where that takes too long or files have no locks."""
    until, idle = time.monotonic() + _PATIENCE_SECONDS, True
    while time.monotonic() < until:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if idle:
                meanwhile()
            idle = False
            time.sleep(_NAP_SECONDS)
        except OSError:  # as on file systems of clusters that are mounted without locks
            return False
        else:
            return True
    return False


@contextlib.contextmanager
def in_turn(path: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a turn in the body; `meanwhile` is called once if another process has it."""
    turn = CompileLock(path)
    turn.take(meanwhile)
    try:
        yield
    finally:
        turn.give()
