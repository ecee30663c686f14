"""Session of one program: installs communicators before it, writes the profile and ends the job after it."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpicoll.environment import launched_rank
from mpicoll.program import import_hook

if TYPE_CHECKING:
    from mpicoll.program.call_recorder import CallRecorder
    from mpicoll.program.end_of_run import EndOfRun

FAILED_SECONDS = 5.0
"""Seconds that a failed rank waits for the others before it writes a profile of its own calls alone."""


class ProgramSession:
    """Work of ``mpicoll run`` around the program: communicators, profile, exit status.

    Parameters
    ----------
    options
        Those of :func:`mpicoll.program.run_command.make_parser`.
    program
        The program and its arguments.
    """

    def __init__(self, options: argparse.Namespace, program: list[str]) -> None:
        self._options, self._program = options, program
        self._recorder: CallRecorder | None = None
        self._end: EndOfRun | None = None
        self._status, self._begun, self._startup = 0, 0.0, 0.0
        self._process, self._wanted = os.getpid(), bool(options.profile)

    def begin(self) -> None:
        """Start the clock and install a hook for the moment at which the program initialises MPI."""
        self._begun = time.perf_counter()
        plain = self._options.native and not self._options.profile and not self._options.shared_arrays
        if not plain:
            # Handlers run in reverse order: after those of the program, which may make calls.
            atexit.register(self.report)
            import_hook.when_mpi_is_initialized(self._set_up)

    def _set_up(self, MPI: Any) -> None:
        begun = time.perf_counter()
        options = self._options
        if options.profile:
            from mpicoll.program.call_recorder import CallRecorder
            from mpicoll.program.end_of_run import EndOfRun

            self._recorder = CallRecorder(MPI)
            self._end = EndOfRun(MPI, self._recorder)
            MPI.Finalize = self._before(MPI.Finalize)
        from mpicoll.program import world_communicators

        if options.native:
            world_communicators.keep_native(MPI, self._recorder)
        else:
            world_communicators.install(MPI, options.timeout, options.library_calls, self._recorder)
        if options.shared_arrays:
            from mpicoll.shared_memory.numpy_allocator import shared_arrays

            shared_arrays().enable()
        self._startup = time.perf_counter() - begun

    def _before(self, finalize: Callable[[], None]) -> Callable[[], None]:
        def report_and_finalize() -> None:
            self.report()
            finalize()

        return report_and_finalize

    def end_with(self, status: int) -> None:
        """Set the exit status; if it is not 0, MPI is aborted with it at the very end, as by ``python -m mpi4py``.

        Nothing happens in a forked child, which is no rank; so it is with :meth:`fail`.
        """
        if os.getpid() != self._process:
            return
        self._status = status
        if status and "mpi4py.MPI" in sys.modules:
            from mpi4py.run import set_abort_status

            set_abort_status(SystemExit(status))

    def fail(self, status: int, *, abort: bool) -> None:
        """Write the profile after an uncaught exception; with `abort`, end the job on all ranks."""
        if os.getpid() != self._process:
            return
        self._status = status
        self.report()
        MPI: Any = sys.modules.get("mpi4py.MPI")
        if MPI is None or not abort or not MPI.Is_initialized() or MPI.Is_finalized():
            return
        from mpicoll.communicator import abort as job
        from mpicoll.communicator.predefined import WORLD

        if WORLD.size > 1:
            job.end(f"mpicoll: rank {WORLD.rank} failed; the job ends\n", status)

    def forget(self) -> None:
        """Write no profile."""
        self._wanted = False

    def report(self) -> None:
        """Write the profile if one is wanted; collective over the ranks that arrive. Later calls do nothing."""
        end, self._end = self._end, None
        wanted, self._wanted = self._wanted, False
        if not wanted or os.getpid() != self._process:  # a forked child ends, too
            return
        if end is None or self._recorder is None:
            if launched_rank() == 0:
                sys.stderr.write("mpicoll profile: there is none, since the program has not initialised MPI\n")
            return
        facts = {
            "program": self._program,
            "mode": "native" if self._options.native else "mpicoll",
            "wall_seconds": time.perf_counter() - self._begun,
            "startup_seconds": self._startup,
            "status": self._status,
            "compare_seconds": self._options.compare,
        }
        self._recorder.stop()
        with contextlib.suppress(BrokenPipeError):
            end.report(self._options, facts, FAILED_SECONDS if self._status else None)
