"""Run a benchmark: time the contenders of every case in turn, check their results, show and keep what came out.

A program yields *contests*; the rest is done here, once for all of them: warm-up, turns, checking, warnings, progress,
tables, files and exit status.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from bench import metadata, progress, result_table, timing
from bench.cluster import VARIABLE
from bench.result_files import BACK_TO_BACK, SINGLE, Case, Result, ResultSet, save_csv, save_in
from mpicoll.measure import SAMPLE_SECONDS

_SPREAD, _FEW, _FEW_SINGLE, _SKEW, _NAMED = 0.25, 15, 100, 0.25, 3
CLUSTER_SAMPLE_SECONDS = 20e-3
"""On an emulated cluster: a link that has rested sends its first half millisecond at once, which must not count."""
SKEW = "start_skew"
"""A detail: by how many seconds the last rank began late, median over single calls."""
QUIET = "MPICOLL_BENCH_QUIET"
"""Set by a program that starts others and shows their results together."""


class Contest(Protocol):
    """One case and its contenders; made, timed, checked and closed before the next one is made.

    Attributes
    ----------
    calls
        By name, what to time; a call may be repeated without end.
    before : mapping, optional
        By name, what to do before each call and not to time.
    notes : list of str, optional
        What a reader has to know, such as why a contender is missing.
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
        With what `bench.benchmark_options.add_shared` adds.

    Returns
    -------
    int
        The exit status: 1 if any element was wrong.
    """
    facts = metadata.collect(plain, list(argv))
    begin = time.perf_counter()
    results: list[Result] = []
    notes: list[str] = []
    for make in progress.bar(contests, "case", plain.rank):
        contest = make()
        results += _measure(contest, arguments, plain)
        notes += getattr(contest, "notes", ())
        contest.close()
    facts["seconds"] = round(time.perf_counter() - begin, 1)
    facts["warnings"] = metadata.warnings(facts["ranks_on_node"], facts["cores"]) + _warnings(results)
    facts["warnings"] += list(dict.fromkeys(notes))
    done = ResultSet(program, facts, results)
    if plain.rank == 0:
        _keep(done, arguments)
    return 1 if done.wrong else 0


def _measure(contest: Contest, arguments: argparse.Namespace, plain: MPI.Intracomm) -> list[Result]:
    paces = dict.fromkeys(getattr(arguments, "calls", None) or [BACK_TO_BACK])
    return [result for pace in paces for result in _at_pace(contest, pace, arguments.seconds / len(paces), plain)]


def _at_pace(contest: Contest, pace: str, seconds: float, plain: MPI.Intracomm) -> list[Result]:
    sample_seconds = CLUSTER_SAMPLE_SECONDS if VARIABLE in os.environ else SAMPLE_SECONDS
    before = getattr(contest, "before", {})
    contenders = {name: timing.Contender(call, before.get(name)) for name, call in contest.calls.items()}
    timings = timing.compare(plain, contenders, seconds, pace, sample_seconds)
    medians = {name: one.median for name, one in timings.items()}
    case = dataclasses.replace(contest.case, pace=pace)
    return [
        Result(case, name, one.samples, one.calls, contest.wrong(name), {**contest.detail(name, medians), **_skew(one)})
        for name, one in timings.items()
    ]


def _skew(one: timing.TurnTimes) -> dict[str, float]:
    return {} if one.skew is None else {SKEW: float(f"{one.skew:.3g}")}


def _warnings(results: Sequence[Result]) -> list[str]:
    """Return what speaks against believing the numbers."""
    single = [result for result in results if result.case.pace == SINGLE]
    lines = [
        (
            [result for result in results if result.spread > _SPREAD],
            f"quartiles are more than {_SPREAD:.0%} apart in {{}}: the machine was not quiet",
        ),
        (
            [result for result in results if result.samples.size < _FEW],
            f"fewer than {_FEW} samples of {{}}: give more --seconds",
        ),
        (
            [result for result in single if _FEW <= result.samples.size < _FEW_SINGLE],
            f"fewer than {_FEW_SINGLE} samples of {{}}: the 99th percentile is about the largest",
        ),
        (
            [result for result in single if result.detail.get(SKEW, 0.0) > _SKEW * result.median],
            f"ranks began more than {_SKEW:.0%} of the time apart in {{}}",
        ),
    ]
    return [line.format(_some(found)) for found, line in lines if found]


def _some(results: Sequence[Result]) -> str:
    different = list(dict.fromkeys(result_table.describe(result.case) for result in results))
    more = f" and {len(different) - _NAMED} more cases" if len(different) > _NAMED else ""
    return ", ".join(different[:_NAMED]) + more


def _keep(done: ResultSet, arguments: argparse.Namespace) -> None:
    if not os.environ.get(QUIET):
        result_table.show([done], markdown=arguments.markdown, long=arguments.long)
    if arguments.output:
        save_in(arguments.output, done)
    if arguments.csv:
        with arguments.csv.open("w") as stream:
            save_csv([done], stream)
