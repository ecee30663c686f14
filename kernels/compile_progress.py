"""Progress of compiling, for the user: one process of each machine tells it, on standard error."""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator

from . import machine_code
from .compile_lock import CompileLock

_PATIENCE_SECONDS = 1.0
"""Compiling that takes less is not worth a word."""
PAUSE_SECONDS = 10.0
"""Between two lines where standard error is no terminal."""
_FIRST = (
    "mpicoll: compiling kernels that this program needs and that are not on disk yet; "
    "python -m mpicoll warmup compiles all of them beforehand, in some minutes"
)


def show(text: str) -> None:
    """Rewrite the last line of a terminal; nothing happens where standard error is none."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


class _Speaker:
    """Count of what this process has compiled; of several processes the first that gets a lock speaks, until it ends.

    Attributes
    ----------
    count
        Kernels that were compiled here.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seconds, self._spoke = 0.0, 0.0
        self._lock: CompileLock | None = None

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Count the kernel that is compiled in the body."""
        self._say(f"now {name}")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start
            self.count += 1
            self._say("")

    def _may_speak(self) -> bool:
        if os.environ.get("MPICOLL_PROGRESS", "on") == "off" or sys.stderr is None:
            return False
        if self._lock is None:
            folder = machine_code.folder_to_write()
            if folder is None:
                return True
            self._lock = CompileLock(folder / "progress.lock")
        return self._lock.try_take()

    def _say(self, what: str) -> None:
        if self._seconds < _PATIENCE_SECONDS or not self._may_speak():
            return
        now, text = time.monotonic(), f"mpicoll: {self.count} kernels compiled in {self._seconds:.0f} s"
        if not self._spoke:
            self._spoke = now
            sys.stderr.write(f"{_FIRST}\n")
            atexit.register(show, "")
        elif not sys.stderr.isatty() and now - self._spoke >= PAUSE_SECONDS:
            self._spoke = now
            sys.stderr.write(f"{text}\n")
        show(f"{text} {what}")
        sys.stderr.flush()


speaker = _Speaker()
compiling = speaker.compiling
