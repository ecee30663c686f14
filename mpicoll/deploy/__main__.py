"""Compress trained models for deployment, and evaluate them.

    python -m mpicoll.deploy evaluate runs/a
    mpirun -n 4 python -m mpicoll.deploy prune runs/a --sparsity 0.9 -o sparse.safetensors
    python -m mpicoll.deploy quantize sparse.safetensors -o sparse-int8.safetensors
    python -m mpicoll.deploy --help

Exit status: 0; 1 if a file is wrong or training failed; 2 if the options are wrong; 130 after an interrupt. NumPy and
Numba are imported inside the functions, after the number of threads is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpicoll.deploy.deploy_options import DeployOptions, parse_deploy
from mpicoll.train.command_line import run_on_all_ranks

if TYPE_CHECKING:
    from mpi4py import MPI


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Rank 0 prints an error that all ranks raise, in one line. An error on one rank is printed by that rank and ends the
    job.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return run_on_all_ranks(lambda world: _run(parse_deploy(arguments), world))


def _run(options: DeployOptions, world: MPI.Intracomm) -> None:
    from mpicoll.deploy.deploy_run import run

    run(options, world)


if __name__ == "__main__":
    sys.exit(main())
