"""Log of the steps that rank 0 has taken, which outlives SIGKILL. Knows no MPI.

``TRAINING_LOG`` names a folder. Each start of a job that takes a step has a file there: the step from which it went on,
and the number of steps taken. A job that goes on without dead ranks begins a new file.
"""

from __future__ import annotations

import os
from pathlib import Path

LOG = "TRAINING_LOG"
_WIDTH = 12


class StepLog:
    """Writer of a new file in `folder`, for a start that goes on from the step `first`."""

    def __init__(self, folder: Path, first: int) -> None:
        path = folder / f"start-{len(list(folder.glob('start-*'))):04d}"
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        self._write(0, first)

    def note(self, steps: int) -> None:
        """Write that so many steps have been taken."""
        self._write(1, steps)

    def _write(self, line: int, step: int) -> None:
        os.pwrite(self._file, f"{step:{_WIDTH - 1}d}\n".encode(), line * _WIDTH)


def read_log(folder: Path) -> list[tuple[int, int]]:
    """Return first step and steps taken of each start, in order; a start killed while its file was made is left out."""
    words = [path.read_text().split() for path in sorted(folder.glob("start-*"))]
    return [(int(first), int(taken)) for first, taken in (each for each in words if len(each) == 2)]
