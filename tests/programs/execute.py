"""Runs of a program's tests under plain mpi4py and with mpicoll, in turns."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests import mpirun
from tests.programs.outcomes import Comparison, Run, compare, read
from tests.programs.sources import folder_of, require_installed
from tests.programs.table import Program

PLUGIN = Path(__file__).with_name("plugin")
WITH_MPICOLL = ("-m", "mpicoll", "run", "--timeout", "120")
TEST_SECONDS = 180.0


def execute(program: Program, folder: Path, ranks: int, *, mpicoll: bool) -> Run:
    """Run the tests of `program` once in `folder`."""
    options = ("-q", "-p", "rank_outcomes", "-p", "no:cacheprovider", "-p", "no:xdist", *program.arguments)
    command = [*(WITH_MPICOLL if mpicoll else ()), "-m", "pytest", *options]
    with tempfile.TemporaryDirectory(prefix="mpicoll-programs-") as results:
        paths = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PROGRAM_OUTCOMES": results, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": "agg"}
        ended = mpirun.run(
            ranks,
            command,
            timeout=program.seconds,
            test_timeout=TEST_SECONDS,
            environment=variables,
            folder=folder,
        )
        run = read(Path(results), ranks, "mpicoll" if mpicoll else "mpi4py")
    if run.trouble or ended.hung:
        run.trouble = f"{run.trouble}\nstatus {ended.returncode}\n{ended.text[-8000:]}"
    return run


@dataclass
class Measurement:
    """All runs of a program on some number of ranks."""

    program: Program
    ranks: int
    plain: list[Run] = field(default_factory=list)
    ours: list[Run] = field(default_factory=list)

    @property
    def comparison(self) -> Comparison:
        return compare(self.plain, self.ours)

    def record(self) -> dict[str, Any]:
        """Return what goes to a JSON file."""
        found = self.comparison
        sides = {
            side: {**runs[0].counts(), "seconds": [round(run.seconds, 3) for run in runs]}
            for side, runs in (("mpi4py", self.plain), ("mpicoll", self.ours))
        }
        return {
            "program": self.program.requirement,
            "ranks": self.ranks,
            **sides,
            "worse": {f"{name} on rank {rank}": text for (rank, name), text in found.worse.items()},
            "failed_plain": sorted({name for _, name in found.failed_plain}),
            "troubles": found.troubles,
        }

    def row(self) -> str:
        """Return a row of the table."""
        found = self.comparison
        plain, ours = (median(run.seconds for run in runs) for runs in (self.plain, self.ours))
        passed = [runs[0].counts()["passed"] for runs in (self.plain, self.ours)]
        outcome = "same" if found.good else f"{len(found.worse)} worse" if found.worse else "did not end"
        ratio = f"{ours / plain:.2f}" if plain and ours else "-"
        return (
            f"{self.program.requirement:<20} {self.ranks:>5} {passed[0]:>13} {passed[1]:>14} {outcome:>12} "
            f"{plain:>9.1f} {ours:>10.1f} {ratio:>6}"
        )


HEADER = (
    f"{'program':<20} {'ranks':>5} {'passed mpi4py':>13} {'passed mpicoll':>14} {'outcome':>12} "
    f"{'s mpi4py':>9} {'s mpicoll':>10} {'ratio':>6}"
)


def measure(program: Program, ranks: int, times: int) -> Measurement:
    """Run `program` so often on each side, in turns.

    Raises
    ------
    Unavailable
        If it is not installed, or its tests cannot be had.
    """
    require_installed(program)
    folder, result = folder_of(program), Measurement(program, ranks)
    for _ in range(times):
        result.plain.append(execute(program, folder, ranks, mpicoll=False))
        result.ours.append(execute(program, folder, ranks, mpicoll=True))
    return result
