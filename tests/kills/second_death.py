"""``python -m mpicoll.train`` whose rank 0 dies after ten steps, and a second rank while the others go on without it.

The second one, given by its number in ``SECOND_TO_DIE``, dies in the midst of making the communicator of those that are
left, where the others wait for it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from mpicoll.train.command_line import run_on_all_ranks
from mpicoll.train.options import parse

if TYPE_CHECKING:
    from mpi4py import MPI

SECOND = "SECOND_TO_DIE"
_STEPS = 10


def _die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _train(world: MPI.Intracomm) -> None:
    from mpicoll.shared_memory import peers
    from mpicoll.train import rank_failures
    from mpicoll.train.assembly import make_communicator
    from mpicoll.train.loop import Loop
    from mpicoll.train.training_run import Observer, run

    class FirstToDie(Observer):
        """Ends rank 0 after some steps."""

        def on_step(self, loop: Loop, done: int) -> None:
            if world.rank == 0 and done >= _STEPS:
                _die()

    def make(*arguments: Any) -> Any:
        if world.rank == int(os.environ[SECOND]):
            peers._exchanged = _die  # type: ignore[assignment]
        return make_communicator(*arguments)

    rank_failures.make_communicator = make  # type: ignore[attr-defined]
    config = parse(sys.argv[1:])
    run(config, make_communicator(config, world), observer=FirstToDie())


if __name__ == "__main__":
    sys.exit(run_on_all_ranks(_train))
