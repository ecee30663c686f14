"""Turns of processes that need the same kernel: one compiles it, and the others load it from disk.

Nothing here imports Numba, so that processes that only wait do without.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import machine_code
from .compile_lock import CompileLock, in_turn
from .compile_progress import compiling
from .machine_code import Loaded
from .source_stamps import entry_name

FIRST = ("mpicoll.executor.progress", "mpicoll.composition.progress_parts", "mpicoll.dispatch.make_call")
"""Symbols of linked functions that every first collective needs."""
_compile_lock = threading.RLock()
_helping = threading.Event()


def lock_file(function: Callable) -> Path | None:
    """Return the file by which processes take turns; None where there is no folder for it."""
    folder, name = machine_code.folder_to_write(), entry_name(function)
    if folder is None or not name:
        return None  # what cannot be kept on disk is compiled by each process, at the same time
    name = name if function.__closure__ else f"{function.__module__}.{function.__qualname__}"
    return folder / f"{name}.lock"


@contextlib.contextmanager
def turn(function: Callable, look: Callable[[], Loaded | None]) -> Iterator[Loaded | None]:
    """Wait until no other process compiles a function; yield what `look` finds then, None if it is to be compiled."""
    path = lock_file(function)
    with contextlib.nullcontext() if path is None else in_turn(path, _compile_what_is_next), _compile_lock:
        found = look()
        if found is not None:
            yield found
            return
        # A function of the user's is none of the kernels that a warm-up compiles.
        with compiling(entry_name(function)) if function.__closure__ is None else contextlib.nullcontext():
            yield None


def _compile_what_is_next() -> None:
    """Compile one of FIRST that no process is compiling, while another process compiles what is needed now.

    So on a machine with several cores processes compile one each, one less than there are cores; all others wait.
    """
    folder = machine_code.folder_to_write()
    if folder is None or machine_code.obstacle() or _helping.is_set():
        return
    turns = (CompileLock(folder / f"helper-{number}.lock") for number in range(1, os.cpu_count() or 1))
    own = next((lock for lock in turns if lock.try_take()), None)
    if own is None:
        return
    _helping.set()
    try:
        for native in map(machine_code.linked.get, FIRST):
            if native is not None and not native.is_kept and _is_free(native):
                native.address  # noqa: B018, compiles it
                return
    finally:
        _helping.clear()
        own.give()


def _is_free(native: Any) -> bool:
    """Return whether no process is compiling a linked function."""
    path = lock_file(native.function)
    lock = None if path is None else CompileLock(path)
    if lock is None or not lock.try_take():
        return False
    lock.give()
    return True
