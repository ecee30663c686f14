"""Run programs of others unmodified, on mpi4py and on mpicoll, and compare: ``python -m tests.programs --ranks 2 3``.

Each program's own tests run under plain mpi4py and under ``python -m mpicoll run``, in turns. Every test that passes
with mpi4py has to pass with mpicoll, on every rank. The MPI library is that of the Python that runs this. Seconds are
medians, from the start of rank 0 to the end of its last test; tests passed are counted on every rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.programs.execute import HEADER, Measurement, measure
from tests.programs.sources import Unavailable
from tests.programs.table import PROGRAMS, named


def _details(result: Measurement) -> str:
    found = result.comparison
    lines = [f"=== WORSE {name} on rank {rank}: {text}" for (rank, name), text in found.worse.items()]
    lines += [f"=== {trouble}" for trouble in found.troubles]
    failed = sorted({name for _, name in found.failed_plain})
    lines += [f"  {result.program.name} on {result.ranks} ranks: fails with plain mpi4py: {name}" for name in failed]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; all if none is named")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks, one comparison for each")
    parser.add_argument("--times", type=int, default=1, help="runs on each side")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--list", action="store_true", help="print the programs, and run nothing")
    arguments = parser.parse_args(argv)
    programs = [named(name) for name in arguments.names] or PROGRAMS
    if arguments.list:
        print("\n".join(f"{program.requirement:<20} {program.about}" for program in programs))
        return 0
    results, unavailable = [], []
    print(HEADER, flush=True)
    for program in programs:
        for ranks in [ranks for ranks in arguments.ranks if not program.ranks or ranks in program.ranks]:
            try:
                result = measure(program, ranks, arguments.times)
            except Unavailable as error:
                unavailable.append(str(error))
                break
            results.append(result)
            print(result.row(), flush=True)
    for text in (*map(_details, results), *unavailable):
        if text:
            print(text)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([result.record() for result in results], indent=1))
    return 0 if results and not unavailable and all(result.comparison.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
