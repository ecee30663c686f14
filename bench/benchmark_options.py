"""Command-line options of all benchmarks, and the start of a benchmark under a launcher."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from bench import launch, progress, result_files, result_table
from mpicoll.environment import launched_size
from mpicoll.quantities import parse_nbytes

if TYPE_CHECKING:
    from mpi4py import MPI

    Measure = Callable[[MPI.Intracomm, argparse.Namespace], None]

DEFAULT_SIZES = [8 * 4**power for power in range(12)] + [64 << 20]
LEVELS = ("multiple", "serialized", "funneled", "single")
_PACES = {"back-to-back": result_files.BACK_TO_BACK, "single": result_files.SINGLE}
DEADLINE_SECONDS = 3600.0
"""After which a launch is given up."""


def make_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--ranks",
        type=rank_counts,
        default=[2, 8],
        help="rank counts to start when not run under mpirun (default: 2,8)",
    )
    add("--launches", type=int, default=1, help="times to start each of them; several give honest intervals")
    sizes = "message sizes such as 8 64K 1MB (default: 8 B to 32 MB in powers of 4, and 64 MB)"
    add("--sizes", type=parse_nbytes, nargs="+", default=DEFAULT_SIZES, metavar="BYTES", help=sizes)
    add("--seconds", type=float, default=2.0, help="time per case (default: %(default)s)")
    add("--thread-level", choices=LEVELS, help="what mpi4py asks of the MPI library (default: multiple)")
    add("--long", action="store_true", help="print a line for each contender, with percentiles and bandwidths")
    add("--markdown", action="store_true", help="print the table for a document")
    add("--output", type=Path, metavar="FOLDER", help="write a JSON file for each launch, with all samples")
    add("--csv", type=Path, metavar="FILE", help="write medians, percentiles and bandwidths")
    return parser


def add_buffers(parser: argparse.ArgumentParser) -> None:
    """Add what benchmarks take that have send buffers."""
    text = "whether the owner of a send buffer writes it before each call, outside of the time (default: %(default)s)"
    parser.add_argument(
        "--buffers", choices=(result_files.WRITTEN, result_files.UNTOUCHED), default=result_files.WRITTEN, help=text
    )


def add_calls(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Add what benchmarks take whose calls can be made one after another or one at a time."""
    names = " ".join(name for name, pace in _PACES.items() if pace in default)
    text = f"one after another, or each by itself after a synchronised start; they share the time (default: {names})"
    parser.add_argument(
        "--calls", nargs="+", type=_pace, default=list(default), metavar="PACE", help=f"{' or '.join(_PACES)}: {text}"
    )


def _pace(text: str) -> str:
    if text not in _PACES:
        raise argparse.ArgumentTypeError(f"{text!r} is not {' or '.join(_PACES)}")
    return _PACES[text]


def rank_counts(text: str) -> list[int]:
    """Read ``2,8``."""
    numbers = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(numbers) != len(text.split(",")) or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rank counts such as 2,8")
    return numbers


def is_launcher() -> bool:
    """Say whether this process has still to start the ranks."""
    return launched_size() is None and "mpi4py.MPI" not in sys.modules


def measure_on_ranks(
    program: str, parser: argparse.ArgumentParser, argv: Sequence[str] | None, measure: Measure
) -> int:
    """Call `measure` on the ranks that run this program or, without a launcher, start them for each of ``--ranks``.

    Parameters
    ----------
    measure
        Function of COMM_WORLD and the parsed arguments.

    Returns
    -------
    int
        The exit status.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_launcher():
        return launch.run_on_each(arguments.ranks, program, words)
    from mpi4py import MPI

    measure(MPI.COMM_WORLD, arguments)
    return 0


def relaunch(program: str, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start `program` for each rank count, one launch of each after the other, and show all results together.

    Returns
    -------
    int
        The exit status: that of the first launch that failed, or 0.
    """
    status, runs = 0, []
    for _ in range(arguments.launches):
        for ranks in arguments.ranks:
            ended, run = launched(program, [*argv, "--csv", os.devnull], ranks, arguments.thread_level)
            status = status or ended
            runs += [run] if run else []
    if runs:
        result_table.show(runs, markdown=arguments.markdown, long=arguments.long)
    for run in runs if arguments.output else ():
        result_files.save_in(arguments.output, run)
    if arguments.csv:
        with arguments.csv.open("w") as stream:
            result_files.save_csv(runs, stream)
    return status


def launched(
    program: str,
    argv: Sequence[str],
    ranks: int,
    thread_level: str | None = None,
    python: str = sys.executable,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, result_files.ResultSet | None]:
    """Start `program` once and read what it measured.

    Parameters
    ----------
    python
        The interpreter; its mpirun is used.
    variables
        What to add to the environment.

    Returns
    -------
    (int, Run or None)
        The exit status, and the results if there are any.
    """
    environment = {**launch.clean_environment(), **progress.environment(), "MPICOLL_BENCH_QUIET": "1", **variables}
    if thread_level:
        environment["MPI4PY_RC_THREAD_LEVEL"] = thread_level
    with tempfile.TemporaryDirectory(prefix="mpicoll-bench-") as folder:
        command = launch.command(ranks, ["-m", program, *argv, "--output", folder], python)
        try:
            status = subprocess.run(command, env=environment, check=False, timeout=DEADLINE_SECONDS).returncode
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{program}, {ranks} ranks: given up after {DEADLINE_SECONDS:.0f} s\n")
            return 124, None
        files = sorted(Path(folder).glob("*.json"))
        return status, result_files.load(files[0]) if files else None
