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
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpicoll.train.command_line import run_on_all_ranks
from mpicoll.train.config import TrainConfig
from mpicoll.train.options import parse

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Rank 0 prints an error that all ranks raise, in one line. An error on one rank is printed by that rank and ends the
    job.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return run_on_all_ranks(lambda world: _run(parse(arguments), world))


def _run(config: TrainConfig, world: MPI.Intracomm) -> None:
    from mpicoll.train.assembly import make_communicator
    from mpicoll.train.training_run import run

    run(config, make_communicator(config, world))


if __name__ == "__main__":
    sys.exit(main())
