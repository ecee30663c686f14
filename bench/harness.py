"""Run a benchmark: time the contenders of every case in turn, check their results, show and keep what came out.

A program yields *contests*; the rest is done here, once for all of them: warm-up, turns, checking, warnings, progress,
tables, files and exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from bench import metadata, table
from bench.cluster import VARIABLE
from bench.records import Case, Result, Run, save_csv, save_in
from mpicoll.measure import SAMPLE_SECONDS, compare

_SPREAD, _FEW, _NAMED = 0.25, 15, 3
CLUSTER_SAMPLE_SECONDS = 20e-3
"""On an emulated cluster: a link that has rested sends its first half millisecond at once, which must not count."""
QUIET = "MPICOLL_BENCH_QUIET"
"""Set by a program that starts others and shows their results together."""
PROGRESS = "MPICOLL_BENCH_PROGRESS"
"""Set where somebody watches, though standard error is a pipe to the launcher."""


class Contest(Protocol):
    """One case and its contenders; made, timed, checked and closed before the next one is made.

    Attributes
    ----------
    calls
        By name, what to time; a call may be repeated without end.
    """

    case: Case
    calls: dict[str, Callable[[], None]]

    def wrong(self, contender: str) -> int:
        """Call it once more and return the number of wrong elements on all ranks; collective."""
        ...

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return what else to show, knowing all contenders' seconds; JSON types."""
        ...

    def close(self) -> None:
        """Free what was made; collective."""
        ...


def run(
    program: str,
    arguments: argparse.Namespace,
    contests: Sequence[Callable[[], Contest]],
    argv: Sequence[str],
    plain: MPI.Intracomm,
) -> int:
    """Measure all contests; collective over `plain`, which is plain MPI.

    Parameters
    ----------
    program
        Its name, as in ``python -m bench.collectives``.
    arguments
        With what `bench.options.add_common` adds.

    Returns
    -------
    int
        The exit status: 1 if any element was wrong.
    """
    facts = metadata.collect(plain, list(argv))
    begin = time.perf_counter()
    results = [result for make in _with_bar(contests, plain.rank) for result in _measure(make(), arguments, plain)]
    facts["seconds"] = round(time.perf_counter() - begin, 1)
    facts["warnings"] = metadata.warnings(facts["ranks_on_node"], facts["cores"]) + _warnings(results)
    done = Run(program, facts, results)
    if plain.rank == 0:
        _keep(done, arguments)
    return 1 if done.wrong else 0


def _measure(contest: Contest, arguments: argparse.Namespace, plain: MPI.Intracomm) -> list[Result]:
    sample_seconds = CLUSTER_SAMPLE_SECONDS if VARIABLE in os.environ else SAMPLE_SECONDS
    timings = compare(plain, contest.calls, arguments.seconds, sample_seconds)
    medians = {name: timing.median for name, timing in timings.items()}
    results = [
        Result(contest.case, name, timing.samples, timing.calls, contest.wrong(name), contest.detail(name, medians))
        for name, timing in timings.items()
    ]
    contest.close()
    return results


def _with_bar(contests: Sequence[Callable[[], Contest]], rank: int) -> Iterable[Callable[[], Contest]]:
    """Return the contests behind a progress bar on rank 0, if tqdm is there."""
    if rank or not (sys.stderr.isatty() or os.environ.get(PROGRESS)):
        return contests
    try:
        from tqdm import tqdm
    except ImportError:
        return contests
    tqdm.monitor_interval = 0  # no thread beside MPI
    return tqdm(contests, unit="case", leave=False, dynamic_ncols=True, file=sys.stderr, mininterval=0.5)


def _warnings(results: Sequence[Result]) -> list[str]:
    """Return what speaks against believing the numbers."""
    noisy = [table.describe(result.case) for result in results if result.spread > _SPREAD]
    few = [table.describe(result.case) for result in results if result.samples.size < _FEW]
    lines = [
        (noisy, f"quartiles are more than {_SPREAD:.0%} apart in {{}}: the machine was not quiet"),
        (few, f"fewer than {_FEW} samples of {{}}: give more --seconds"),
    ]
    return [line.format(_some(cases)) for cases, line in lines if cases]


def _some(cases: Sequence[str]) -> str:
    different = list(dict.fromkeys(cases))
    more = f" and {len(different) - _NAMED} more cases" if len(different) > _NAMED else ""
    return ", ".join(different[:_NAMED]) + more


def _keep(done: Run, arguments: argparse.Namespace) -> None:
    if not os.environ.get(QUIET):
        table.show([done], markdown=arguments.markdown, long=arguments.long)
    if arguments.output:
        save_in(arguments.output, done)
    if arguments.csv:
        with arguments.csv.open("w") as stream:
            save_csv([done], stream)
