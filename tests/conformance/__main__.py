"""Run mpi4py's own tests on mpicoll's communicators: ``python -m tests.conformance --ranks 1 3 5``.

The source release of the installed mpi4py is downloaded once. Its tests run unchanged; only ``MPI.COMM_WORLD`` and
``MPI.COMM_SELF`` are :class:`mpicoll.Intracomm`, and so are the communicators made from them. The MPI library is that
of the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.scope import LEFT_OUT_MODULES, MODULES, QUICK
from tests.conformance.sources import Unavailable, folder_of_tests
from tests.mpirun import run

PROGRAM = Path(__file__).with_name("program.py")


@dataclass
class Report:
    """How the tests ended on some number of ranks.

    Attributes
    ----------
    passed, skipped, failed, left_out
        By name of the test: nothing, why mpi4py skips it, each failing rank's traceback, why it is not run.
    seconds
        How long each took on rank 0.
    trouble
        What ended the run before its end, or nothing.
    """

    ranks: int
    passed: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    trouble: str = ""

    @property
    def good(self) -> bool:
        return bool(self.passed) and not self.failed and not self.trouble

    def summary(self) -> str:
        ran = len(self.passed) + len(self.failed)
        return (
            f"{self.ranks} ranks: {ran} ran, {len(self.passed)} passed, {len(self.failed)} failed, "
            f"{len(self.skipped)} skipped by mpi4py, {len(self.left_out)} left out"
        )

    def details(self) -> str:
        """Return the failures, and the reasons of the others."""
        lines = [f"=== FAILED {name}\n{text}" for name, text in self.failed.items()]
        lines += [self.trouble] if self.trouble else []
        for title, entries in (("skipped by mpi4py", self.skipped), ("left out", self.left_out)):
            reasons = Counter(entries.values())
            lines += [f"  {count} {title}: {reason}" for reason, count in sorted(reasons.items())]
        return "\n".join(lines)


def collect(report: Report, folder: Path) -> None:
    """Read what the ranks have written into `report`.

    A test fails if it fails on some rank, and is skipped if it is on all.
    """
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    for name in ranks[0]["entries"] if ranks else ():
        entries = [rank["entries"].get(name, ["failed", "it did not run here"]) for rank in ranks]
        failures = [f"--- rank {rank}\n{text}" for rank, (kind, text) in enumerate(entries) if kind == "failed"]
        if failures:
            report.failed[name] = "\n".join(failures)
        elif all(kind == "skipped" for kind, _ in entries):
            report.skipped[name] = entries[0][1]
        else:
            report.passed.add(name)
    if ranks:
        report.left_out.update(ranks[0]["left_out"])
        report.seconds.update(ranks[0]["seconds"])


def conform(ranks: int, modules: Sequence[str], *, timeout: float = 900.0) -> Report:
    """Run the tests of `modules`, as far as this mpi4py has them, on so many ranks.

    Raises
    ------
    Unavailable
        If mpi4py's source release cannot be downloaded.
    """
    folder, report = folder_of_tests(), Report(ranks)
    present = [name for name in modules if (folder / f"{name}.py").exists()]
    with tempfile.TemporaryDirectory(prefix="mpicoll-conformance-") as results:
        outcome = run(ranks, [str(PROGRAM), str(folder), results, *present], timeout=timeout, test_timeout=120.0)
        collect(report, Path(results))
        if outcome.returncode or outcome.hung or len(list(Path(results).iterdir())) != ranks:
            report.trouble = f"the run ended with status {outcome.returncode}\n{outcome.text[-20000:]}"
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[3], help="numbers of ranks, one run for each")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each run")
    parser.add_argument("--slowest", type=int, default=0, help="print how long so many tests took")
    parser.add_argument("--quick", action="store_true", help="only what mpicoll overrides")
    parser.add_argument("--modules", nargs="+", help="these modules of mpi4py's tests only")
    arguments = parser.parse_args(argv)
    modules = arguments.modules or (QUICK if arguments.quick else MODULES)
    good = True
    for ranks in arguments.ranks:
        try:
            report = conform(ranks, modules, timeout=arguments.timeout)
        except Unavailable as error:
            print(error)
            return 1
        print(report.summary(), report.details(), sep="\n", flush=True)
        for name in sorted(report.seconds, key=report.seconds.__getitem__, reverse=True)[: arguments.slowest]:
            print(f"  {report.seconds[name]:.1f} s {name}")
        good = good and report.good
    print(f"modules left out: {', '.join(LEFT_OUT_MODULES)}; tests/conformance/scope.py says why")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
