"""Abort of the job after an uncaught exception on one rank."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType
from typing import NoReturn

from mpi4py import MPI

from mpicoll.communicator.predefined import WORLD

_FLUSH_SECONDS = 0.25
"""Time for the launcher to read the output before it kills the ranks."""

_installed = False


def install() -> None:
    """Install an excepthook that aborts the job, once, unless Python is interactive or ``MPICOLL_ABORT=0`` is set.

    Without it the failed rank would wait in MPI_Finalize for ranks that wait for it.
    """
    global _installed
    if _installed or hasattr(sys, "ps1") or os.environ.get("MPICOLL_ABORT") == "0":
        return
    _installed = True
    previous, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if os.getpid() != process:  # a forked child, which is no rank
            return
        if MPI.Is_initialized() and not MPI.Is_finalized() and WORLD.size > 1:
            end(f"mpicoll: rank {WORLD.rank} failed; the job ends\n")

    sys.excepthook = hook


def leave_to_caller() -> None:
    """Install no excepthook from now on: the caller ends the job by :func:`end`."""
    global _installed
    _installed = True


def end_job(error: BaseException) -> NoReturn:
    """Print `error` and end all ranks; for an error inside a call of the MPI library, where it cannot be raised."""
    import traceback

    rank, text = WORLD.rank, "".join(traceback.format_exception(error))
    end(f"{text}mpicoll: rank {rank} failed in a reduction; the job ends\n")
    os._exit(1)  # MPICH's Abort returns, and the reduction would go on with what is in memory


def end(text: str, status: int = 1) -> None:
    """Print `text` to standard error and end all ranks with exit status `status`."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        time.sleep(_FLUSH_SECONDS)
    finally:
        WORLD.Abort(status)
