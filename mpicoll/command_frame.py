"""Frame of the commands: an interrupt, a closed pipe or a full disk ends them with one line or none, not a traceback.

Nothing here needs MPI; where a command has started it, the other ranks end, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable

from mpicoll.errors import RemoteError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_INTERRUPTED = 128 + signal.SIGINT
_CLOSED = 128 + signal.SIGPIPE
"""Exit status that shells report of programs which a closed pipe ends, as it does those not written in Python."""

_RANK_0_SECONDS = 1.5
"""Time that the other ranks leave rank 0 to report an interrupt; Python may be slow to notice it on busy cores."""


class OutputFailed(Exception):
    """Standard output cannot be written; its cause is an OSError that :func:`end_output` knows."""


def run_framed(name: str, work: Callable[[], int]) -> int:
    """Call `work` and return its exit status.

    It is 130 after an interrupt, 141 where nobody reads the output, and 1 where there is no room for it.

    Parameters
    ----------
    name
        The command, such as ``mpicoll tune``.
    """
    try:
        try:
            return work()
        except RemoteError:  # the rank that gave up reports why and ends the job
            time.sleep(2 * _RANK_0_SECONDS)
            raise
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _end_interrupted(name)
    except OutputFailed as failure:
        return end_output(name, failure.__cause__)
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno not in _NO_ROOM:
            raise
        return end_output(name, error)


def end_output(name: str, error: BaseException | None) -> int:
    """Write no more output after an error of it; return the exit status."""
    _discard_output()
    if isinstance(error, BrokenPipeError):
        return _CLOSED
    sys.stderr.write(f"{name}: output could not be written: {getattr(error, 'strerror', error)}\n")
    return 1


def _discard_output() -> None:
    """Let nothing come of what is left in standard output's buffer, which Python writes at the end."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _end_interrupted(name: str) -> int:
    """Say that the command was interrupted, on one rank, and end the job; return the exit status.

    A launcher interrupts all ranks at about the same time. The others let rank 0 say so and end them, since one that
    ended the job first would leave it no time to. Where they are still here after it, rank 0 was not interrupted, or
    waits in the MPI library, where Python does not notice an interrupt.
    """
    line = "\n" * sys.stderr.isatty() + f"{name}: interrupted\n"
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        from mpicoll.communicator import abort
        from mpicoll.communicator.predefined import WORLD

        if WORLD.size > 1:
            if WORLD.rank:
                line = f"{name}: rank {WORLD.rank}: interrupted\n"
                with contextlib.suppress(KeyboardInterrupt):  # a second one ends the job at once
                    time.sleep(_RANK_0_SECONDS)
            abort.end(line, _INTERRUPTED)
            return _INTERRUPTED
    sys.stderr.write(line)
    return _INTERRUPTED
