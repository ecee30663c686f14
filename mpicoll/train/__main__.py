"""Train a model on many ranks.

    mpirun -n 8 python -m mpicoll.train
    mpirun -n 8 python -m mpicoll.train --model conv --epochs 10 --json result.json
    mpirun -n 8 python -m mpicoll.train --dataset synthetic:100000x784x10 --hidden 512,256 --batch 1024
    mpirun -n 8 python -m mpicoll.train --help

Exit status: 0; 1 if training could not start or failed; 2 if the options are wrong; 130 after an interrupt.
NumPy and Numba are imported inside the functions, after the number of threads is chosen.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpicoll.environment import launched_rank, launcher_mismatch
from mpicoll.errors import MpicollError, TrainingError
from mpicoll.train.config import TrainConfig
from mpicoll.train.options import HelpRequested, parse
from mpicoll.train.process_facts import limit_threads
from mpicoll.train.run_report import complain, say

if TYPE_CHECKING:
    from mpi4py import MPI

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Rank 0 prints an error that all ranks raise, in one line. An error on one rank is printed by that rank and ends the
    job.
    """
    limit_threads()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    problem = launcher_mismatch(world.size, MPI.get_vendor()[0])
    if problem is not None:
        return _refuse(problem, 1, launched_rank())
    try:
        return _run(parse(sys.argv[1:] if argv is None else argv), world)
    except HelpRequested as text:
        if world.rank == 0:
            say(str(text))
        return 0
    except TrainingError as error:
        return _refuse(str(error), error.exit_status, world.rank)
    except KeyboardInterrupt:
        complain(f"rank {world.rank}: interrupted")
        return _abort(world, _INTERRUPTED)
    except MpicollError as error:
        complain(f"error: rank {world.rank}: {type(error).__name__}: {error}")
        return _abort(world, 1)
    except BaseException:
        complain(f"rank {world.rank}:\n{traceback.format_exc()}")
        return _abort(world, 1)


def _run(config: TrainConfig, world: MPI.Intracomm) -> int:
    from mpicoll.train.assembly import make_communicator
    from mpicoll.train.training_run import run

    run(config, make_communicator(config, world))
    return 0


def _refuse(message: str, status: int, rank: int) -> int:
    if rank == 0:
        complain(f"error: {message}")
    return status


def _abort(world: MPI.Intracomm, status: int) -> int:
    sys.stdout.flush()
    world.Abort(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
