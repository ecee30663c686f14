"""Release of what belongs to the MPI library, with the Python objects that use it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mpi4py import MPI


def release_with(owner: Any, release: Callable[[Any], None], held: Any) -> None:
    """Call ``release(held)`` when `owner` is collected, but not at the end of the process.

    Objects are collected by any thread: nothing is released in one that may not call the MPI library.
    """
    weakref.finalize(owner, _release, release, held).atexit = False


def may_release() -> bool:
    """Return whether this thread may release what belongs to the MPI library."""
    return not MPI.Is_finalized() and (MPI.Query_thread() == MPI.THREAD_MULTIPLE or MPI.Is_thread_main())


def _release(release: Callable[[Any], None], held: Any) -> None:
    if may_release():
        release(held)
