"""The selection that ``make bench`` runs: about 25 minutes on 2 and on 8 ranks, and a report at the end.

Every launch leaves a JSON file in ``bench/results/<time>/``, and ``report.html`` beside them shows them all. Everything
is launched several times, so that intervals know how launches differ. Stopped early, it reports what there is.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import baselines, benchmark_options, intervals, result_files, result_table
from bench.result_files import NATIVE, ResultSet
from mpicoll.environment import cores

_RESULTS = Path(__file__).parent / "results"
_START_SECONDS = 30.0
"""What a launch takes beside measuring: start, warm-up and checks; a guess, until it has been launched once."""
_LAUNCHES = 3
_FEW_SIZES = ["8", "1K", "16K", "128K", "1M", "8M"]
_LONGEST = "64M"
"""Left out where ranks outnumber cores: a few calls of each collective would take as long as all else."""
_SHORT = ("8", "1K")
"""Left out of exchanges of distributed arrays, whose blocks have an element or more in every dimension."""
_MANY_SIZES = [str(nbytes) for nbytes in benchmark_options.DEFAULT_SIZES]
_ALLREDUCE = ["--collective", "allreduce", "--sizes", *_MANY_SIZES]
_OTHERS = ["reduce", "bcast", "reduce_scatter", "allgather", "alltoall", "gather", "scatter", "scan"]
_OURS = ["--algorithms", "auto", "plan"]
_WITH_BUFFERS = ("bench.collectives", "bench.overlap")


class BenchStage(NamedTuple):
    """One launch.

    Attributes
    ----------
    cases, weight
        How many cases it measures, and how long each takes in comparison with others.
    """

    title: str
    program: str
    arguments: list[str]
    ranks: int
    cases: int
    weight: float
    python: str
    baseline: baselines.Baseline = baselines.Baseline(NATIVE)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=25.0, help="how long to measure each library, roughly (default: %(default)s)")
    add("--ranks", type=benchmark_options.rank_counts, default=[2, 8], help="rank counts (default: 2,8)")
    benchmark_options.add_buffers(parser)
    add("--also", nargs="*", default=[], metavar="PYTHON", help="interpreters with other MPI libraries to measure too")
    add("--output", type=Path, metavar="FOLDER", help="where results go (default: bench/results/<time>)")
    add("--no-report", action="store_true", help="write no report.html")
    return parser


def stages(ranks: Sequence[int], python: str) -> Iterator[BenchStage]:
    """Yield the launches for one interpreter, those of the same thing far from each other."""
    kernels = ["--only", "reducers", "--dtype", "float32", "int64", "--op", "SUM", "MAX", "--out", "new"]
    for launch in range(1, _LAUNCHES + 1):
        turn = f" {launch}/{_LAUNCHES}"
        for size in ranks:
            for title, program, arguments, cases, weight in _of_collectives(size):
                yield BenchStage(title + turn, program, arguments, size, cases, weight, python)
        yield BenchStage("kernels" + turn, "bench.kernels", kernels, 1, 16, 0.1, python)
    for baseline in baselines.allreduce(python):
        for size in ranks:
            if baseline.yields or size <= cores():
                own = [*_ALLREDUCE, "--algorithms", "--native-name", baseline.name, "--ways", *baseline.ways]
                title = f"{baseline.name} {baseline.thread_level or ''}".strip()
                yield BenchStage(title, "bench.collectives", own, size, len(_MANY_SIZES), 0.2, python, baseline)


def _of_collectives(size: int) -> Iterator[tuple[str, str, list[str], int, float]]:
    """Yield title, program, arguments, number of cases and weight of the launches on `size` ranks."""
    collectives, many, paces = "bench.collectives", len(_MANY_SIZES), 2
    sizes = _FEW_SIZES if size > cores() else [*_FEW_SIZES, _LONGEST]
    few = paces * len(sizes)
    rest = ["--collective", *_OTHERS, "--sizes", *sizes, *_OURS]
    in_place = ["--collective", "allreduce", "--sizes", *sizes, "--in-place", *_OURS]
    # In launches of their own: gloo's threads take turns with the ranks on the cores.
    libraries = [*_ALLREDUCE, "--others", "--algorithms", "--native-name", "native beside others"]
    pencils = ["--form", "pencil2", "pencil3", "--sizes", *(each for each in sizes if each not in _SHORT)]
    objects = ["--collective", "allreduce", "bcast", "allgather", "--objects", "float", "dict", "array", "tuple"]
    yield "allreduce", collectives, [*_ALLREDUCE, "--calls", "back-to-back"], many, 1
    yield "allreduce, single calls", collectives, [*_ALLREDUCE, "--calls", "single", *_OURS], many, 0.4
    yield "other libraries", collectives, libraries, paces * many, 0.1
    yield "other collectives", collectives, rest, few * len(_OTHERS), 0.3
    yield "allreduce in place", collectives, in_place, few, 0.3
    yield "pencils", "bench.exchanges", pencils, 2 * (few - paces * len(_SHORT)), 0.2
    yield "objects", "bench.objects", objects, 10 * paces, 0.2
    yield "overlap", "bench.overlap", [], 5, 0.3


class TimeBudget:
    """Seconds that are left for measuring, shared among the launches to come by their cases and weights.

    What a launch takes beside that is learned when it is launched for the first time.
    """

    def __init__(self, plan: Sequence[BenchStage], seconds: float) -> None:
        self._left, self._seconds = list(plan), seconds
        self._beside: dict[tuple[Any, ...], float] = {}

    def next_share(self) -> float:
        """Return the seconds for each case of the next launch."""
        free = self._seconds - sum(self._beside.get(_kind(stage), _START_SECONDS) for stage in self._left)
        return max(0.05, free * self._left[0].weight / sum(stage.cases * stage.weight for stage in self._left))

    def spent(self, seconds: float, share: float) -> None:
        """Note what the next launch has taken, with that share."""
        stage = self._left.pop(0)
        self._beside[_kind(stage)] = max(0.0, seconds - stage.cases * share)
        self._seconds -= seconds


def _kind(stage: BenchStage) -> tuple[Any, ...]:
    return stage.program, *stage.arguments, stage.ranks, stage.python


def measure(plan: Sequence[BenchStage], minutes: float, folder: Path, buffers: str) -> int:
    """Run all launches, keep what they measure in `folder`, and return the exit status."""
    budget, status, total = TimeBudget(plan, 60 * minutes), 0, len(plan)
    for number, stage in enumerate(plan, 1):
        share = budget.next_share()
        sys.stdout.write(f"[{number:2d}/{total}] {stage.title}, {stage.ranks} rank{'s' * (stage.ranks > 1)} ... ")
        sys.stdout.flush()
        begin = time.monotonic()
        arguments = [*stage.arguments, "--seconds", f"{share:.3f}", "--csv", os.devnull]
        arguments += ["--buffers", buffers] if stage.program in _WITH_BUFFERS else []
        ended, run = benchmark_options.launched(
            stage.program, arguments, stage.ranks, stage.baseline.thread_level, stage.python, stage.baseline.variables
        )
        status = status or ended
        if run is not None:
            result_files.save_in(folder, run)
        taken = time.monotonic() - begin
        budget.spent(taken, share)
        sys.stdout.write(f"{taken:.0f} s; {_in_short(run, ended)}\n")
    return status


def _in_short(run: ResultSet | None, status: int) -> str:
    """Return one line on what came out."""
    if run is None or status:
        wrong = f", {run.wrong} wrong elements" if run is not None else ""
        return f"FAILED with exit status {status}{wrong}"
    together = intervals.collect([run])
    parts = [run.metadata["library"]]
    for name in ("auto", "plan", "ours"):
        values = [ratio for key in together if key.contender == name and (ratio := _against_baseline(together, key))]
        parts += [f"{name} {result_table.geometric_mean(values):.2f}x (least {min(values):.2f})"] if values else []
    return ", ".join(parts)


def _against_baseline(together: dict[intervals.ComparisonKey, Any], key: intervals.ComparisonKey) -> float | None:
    for name in (result_files.NATIVE, result_files.NUMPY):
        base = together.get(key._replace(contender=name))
        if base:
            return intervals.median(base) / intervals.median(together[key])
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selection; exit status 1 if anything was wrong."""
    arguments = make_parser().parse_args(argv)
    folder = arguments.output or _RESULTS / time.strftime("%Y-%m-%d_%H-%M-%S")
    pythons = [sys.executable, *arguments.also]
    plan, minutes = [stage for python in pythons for stage in stages(arguments.ranks, python)], arguments.minutes
    minutes *= len(pythons)
    sys.stdout.write(f"{len(plan)} launches, about {minutes:g} minutes; results go to {folder}\n")
    try:
        status = measure(plan, minutes, folder, arguments.buffers)
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")
        status = 130
    if arguments.no_report or not folder.exists():
        return status
    from bench import report

    return report.main([str(folder)]) or status


if __name__ == "__main__":
    sys.exit(main())
