"""``python -m mpicoll.train`` with a log of the steps that rank 0 has taken, which outlives SIGKILL.

``TRAINING_LOG`` names a folder. Each start of the program that reaches its first step writes a file there: the step
from which it went on, and the number of steps taken.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mpi4py import MPI

from mpicoll.train.assembly import make_communicator
from mpicoll.train.command_line import run_on_all_ranks
from mpicoll.train.loop import Loop
from mpicoll.train.options import parse
from mpicoll.train.training_run import Observer, run

LOG = "TRAINING_LOG"
_WIDTH = 12


class StepLog(Observer):
    """Writer of the log of one start. Only rank 0 makes a file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, -1

    def began(self, loop: Loop) -> None:
        if MPI.COMM_WORLD.rank == 0:
            path = self._folder / f"start-{len(list(self._folder.glob('start-*'))):04d}"
            self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            self._write(0, loop.first_step)
            self._write(1, loop.first_step)

    def on_step(self, loop: Loop, done: int) -> None:
        self._write(1, done // loop.coordination.shares_per_step)

    def ended(self, loop: Loop) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _write(self, line: int, step: int) -> None:
        os.pwrite(self._file, f"{step:{_WIDTH - 1}d}\n".encode(), line * _WIDTH)


def read_log(folder: Path) -> list[tuple[int, int]]:
    """Return first step and steps taken of each start, in order; a start killed while its file was made is left out."""
    words = [path.read_text().split() for path in sorted(folder.glob("start-*"))]
    return [(int(first), int(taken)) for first, taken in (each for each in words if len(each) == 2)]


def _train(world: MPI.Intracomm) -> None:
    config = parse(sys.argv[1:])
    run(config, make_communicator(config, world), observer=StepLog(Path(os.environ[LOG])))


if __name__ == "__main__":
    sys.exit(run_on_all_ranks(_train))
