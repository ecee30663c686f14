"""Replacement of ``mpi4py.MPI``'s predefined communicators by mpicoll's, or by ones that record their calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from mpicoll.environment import launched_rank

if TYPE_CHECKING:
    from mpicoll.program.call_recorder import CallRecorder

PREDEFINED = ("COMM_WORLD", "COMM_SELF")


def install(MPI: Any, timeout: float, library_calls: int, recorder: CallRecorder | None) -> None:
    """Replace COMM_WORLD and COMM_SELF by mpicoll's communicators; collective over COMM_WORLD.

    Communicators that the program makes from them begin with `library_calls` collectives of the MPI library.
    """
    from mpicoll.communicator import abort

    abort.leave_to_caller()
    if MPI.Query_thread() in (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED) and _asked_for_threads() and launched_rank() == 0:
        sys.stderr.write(
            "mpicoll: this MPI library does not support calls from several threads: only the main thread may make "
            "collective calls\n"
        )
    from mpicoll.comm import Intracomm
    from mpicoll.program import library_requests

    if not library_requests.may_call_from_threads(MPI.COMM_WORLD, timeout):
        library_requests.leave_to_library()
    if recorder is not None:
        from mpicoll.program import method_wrappers

        method_wrappers.wrap_classes(recorder)
    for name in PREDEFINED:
        setattr(MPI, name, Intracomm(getattr(MPI, name), timeout=timeout))
    if library_calls:
        from mpicoll.program import library_first

        library_first.begin_with_library(library_calls)


def keep_native(MPI: Any, recorder: CallRecorder | None) -> None:
    """Keep the MPI library's COMM_WORLD and COMM_SELF; with a recorder, record their calls. Local."""
    from mpicoll.communicator import predefined  # noqa: F401, before the program gives the names to others

    if recorder is not None:
        from mpicoll.program.native_communicators import observed

        for name in PREDEFINED:
            setattr(MPI, name, observed(getattr(MPI, name), recorder))


def _asked_for_threads() -> bool:
    """Return True if mpi4py asked for calls from several threads when it initialised MPI; by default it does."""
    import mpi4py

    return bool(mpi4py.rc.initialize and mpi4py.rc.threads) and mpi4py.rc.thread_level in ("multiple", "serialized")
