"""Destination of standard error: a terminal or a pipe that somebody reads, or a file, maybe behind a launcher's pipe.

A launcher gives ranks pipes, and copies what arrives there to its own standard error. Linux shows which process reads a
pipe: where that is a launcher from which this process stems, its standard error is looked at in turn. Where the reader
is another program, on another host, or cannot be seen, the pipe is the destination.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
_LAUNCHERS = ("mpirun", "mpiexec", "hydra", "prte", "orte", "srun", "slurm")
"""Beginnings of the names of launchers' processes: MPICH's, Open MPI's, Intel MPI's and Slurm's."""


def reaches_a_reader() -> bool:
    """Return True if standard error ends in a terminal, or in a pipe that standard output does not go to."""
    if sys.stderr.isatty():
        return True
    try:
        error, output = os.fstat(sys.stderr.fileno()), os.fstat(sys.stdout.fileno())
    except (OSError, ValueError):
        return False
    process = os.getpid()
    while not stat.S_ISREG(error.st_mode) and not os.path.samestat(error, output):
        reader = _reader(error, process)
        if reader is None:
            return True
        process = reader
        try:
            if os.readlink(_place(process, 2)).startswith(_TERMINALS):  # noqa: PTH115
                return True
            output, error = (os.stat(_place(process, number)) for number in (1, 2))  # noqa: PTH116 - pipes, too
        except OSError:
            return True
    return False


def _place(process: int, number: int) -> str:
    """Return the path of a process's open file."""
    return f"/proc/{process}/fd/{number}"


def _reader(pipe: os.stat_result, process: int) -> int | None:
    """Return the launcher that reads a pipe, from which a process stems; None if none is seen."""
    for parent in _parents(process):
        try:
            is_launcher = Path(f"/proc/{parent}/comm").read_text().startswith(_LAUNCHERS)
            if is_launcher and any(_reads(file, pipe) for file in Path(f"/proc/{parent}/fd").iterdir()):
                return parent
        except OSError:
            return None
    return None


def _reads(file: Path, pipe: os.stat_result) -> bool:
    try:
        readable, writable = (file.lstat().st_mode & bit for bit in (stat.S_IRUSR, stat.S_IWUSR))
        return bool(readable) and not writable and os.path.samestat(file.stat(), pipe)
    except OSError:
        return False


def _parents(process: int) -> Iterator[int]:
    """Yield the parent of a process, its parent, and so on, as far as they can be seen."""
    while process > 1:
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        yield process
