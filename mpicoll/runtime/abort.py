"""An exception that nobody catches on one rank ends the whole job, with that traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType

from mpi4py import MPI

_installed = False


def install() -> None:
    """Hook in, once, unless the session is interactive or ``MPICOLL_ABORT=0`` is set.

    Without it the failed rank would wait in MPI_Finalize for ranks that wait for it.
    """
    global _installed
    if _installed or hasattr(sys, "ps1") or os.environ.get("MPICOLL_ABORT") == "0":
        return
    _installed = True
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"mpicoll: rank {MPI.COMM_WORLD.rank} failed; the job ends\n")
                sys.stdout.flush()
                sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)

    sys.excepthook = hook
