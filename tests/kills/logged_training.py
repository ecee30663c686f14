"""``python -m mpicoll.train`` with a log of the steps that rank 0 has taken, see :mod:`tests.kills.step_log`.

The trainer, and MPI with it, is imported inside the function, as by the command line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll.train.command_line import run_on_all_ranks
from mpicoll.train.options import parse
from tests.kills.step_log import LOG, StepLog

if TYPE_CHECKING:
    from mpi4py import MPI


def _train(world: MPI.Intracomm) -> None:
    from mpicoll.train.assembly import make_communicator
    from mpicoll.train.loop import Loop
    from mpicoll.train.training_run import Observer, run

    class Logger(Observer):
        """Writes the steps of each loop on its rank 0."""

        loop: Loop | None = None

        def on_step(self, loop: Loop, done: int) -> None:
            if loop is not self.loop:
                self.loop, self.log = loop, StepLog(Path(os.environ[LOG]), loop.first_step)
            self.log.note(done // loop.coordination.shares_per_step)

    config = parse(sys.argv[1:])
    run(config, make_communicator(config, world), observer=Logger())


if __name__ == "__main__":
    sys.exit(run_on_all_ranks(_train))
