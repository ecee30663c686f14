"""Frame of the commands: an interrupt, a closed pipe or a full disk ends them with one line or none, not a traceback.

Nothing here needs MPI; where a command has started it, the other ranks end, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_INTERRUPTED = 128 + signal.SIGINT
_CLOSED = 128 + signal.SIGPIPE
"""Exit status that shells report of programs which a closed pipe ends, as it does those not written in Python."""


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
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _end_interrupted(name)
    except BrokenPipeError:
        _discard_output()
        return _CLOSED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _discard_output()
        sys.stderr.write(f"{name}: output could not be written: {error.strerror}\n")
        return 1


def _discard_output() -> None:
    """Let nothing come of what is left in standard output's buffer, which Python writes at the end."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _end_interrupted(name: str) -> int:
    """Say that the command was interrupted, on rank 0 only, and end the job; return the exit status."""
    line = "\n" * sys.stderr.isatty() + f"{name}: interrupted\n"
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        from mpicoll.communicator import abort
        from mpicoll.communicator.predefined import WORLD

        if WORLD.size > 1:
            abort.end("" if WORLD.rank else line, _INTERRUPTED)
            return _INTERRUPTED
    sys.stderr.write(line)
    return _INTERRUPTED
