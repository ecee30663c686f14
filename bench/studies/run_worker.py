"""Ranks of a study's runs: ``python -m bench.studies.run_worker RUNS RESULTS``, started by :mod:`bench.studies`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Take the runs of a file one after the other; rank 0 adds each outcome to the results, and prints a line.

    Returns
    -------
    int
        1 if a run was stopped, which is none of the results; else 0.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from mpi4py import MPI

    from bench.studies import distillation_task, study_task
    from bench.studies.study_runs import StudyError, append, read_runs

    runs, results = read_runs(Path(argv[0])), Path(argv[1])
    for number, run in enumerate(runs, 1):
        task = distillation_task if run.variant in distillation_task.VARIANTS else study_task
        try:
            outcome = task.execute(run, MPI.COMM_WORLD)
        except StudyError as error:
            if MPI.COMM_WORLD.rank == 0:
                sys.stderr.write(f"  {error}\n")
            return 1
        if MPI.COMM_WORLD.rank == 0:
            append(results, outcome)
            found = "diverged" if outcome.diverged else f"{outcome.accuracy:.2%}"
            took = f", {outcome.seconds:.1f} s" if outcome.seconds else ""
            where = " ".join(part for part in (run.variant, run.group) if part)
            sys.stdout.write(f"  {number}/{len(runs)} {where}, seed {run.seed}: {found}{took}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
