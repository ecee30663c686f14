"""Tuning of the algorithm for each collective and message size: ``mpirun -n 8 python -m mpicoll tune``.

The algorithms are timed in turn, sample by sample; the slowest rank's time counts (:mod:`mpicoll.measure`). An
algorithm replaces the shipped choice of ``"auto"`` only if it is more than 5 % faster. The tuning table is written for
this MPI library, machine and number of ranks; communicators that are created later use it.

The MPI library's own collectives are timed for comparison. They enter the table with ``--library`` only, since they
have neither a deadline nor an error for ranks that make different calls.

``--compression int8 fp16`` measures the message sizes from which these compressors are faster than sending dense
vectors. ``compression="auto:int8"`` then uses the table instead of measuring in the program.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import compression_tuning, select, tuning_rows, tuning_table
from mpicoll.collectives.compression_tuning import PayingRange
from mpicoll.collectives.select import Capabilities
from mpicoll.collectives.tuning_rows import Row
from mpicoll.comm import Intracomm
from mpicoll.compression import compressor
from mpicoll.consensus import said_on_all
from mpicoll.environment import obstacle_to_write, silent_unless
from mpicoll.help_text import without_markup
from mpicoll.measure import compare
from mpicoll.quantities import format_nbytes, positive_number, table, whole_number

COLLECTIVES = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather", "alltoall", "gather", "scatter", "scan")
_FIRST = 8
_REFINED = 2
"""Number of message sizes tried between the largest at which compression loses and the next."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll tune",
        description=without_markup(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    which = "collectives to tune (default: all, or none with --compression)"
    add("--collective", nargs="+", choices=COLLECTIVES, help=which)
    compressors = "compressors to compare with dense messages, such as int8"
    add("--compression", nargs="+", default=[], type=_compressor, metavar="SPEC", help=compressors)
    add(
        "--seconds",
        type=positive_number,
        default=1.0,
        help="seconds of measurement for each size (default: %(default)s)",
    )
    add(
        "--max-mb",
        type=_megabytes,
        default=16,
        help="largest message size in MB; 0 for one size (default: %(default)s)",
    )
    library = "let auto take the MPI library's own collectives where they are the fastest, without a deadline"
    add("--library", action="store_true", help=library)
    add("--dry-run", action="store_true", help="measure and print, but write no table")
    return parser


def _megabytes(text: str) -> int:
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError:
        reason = f"is not a whole number of MB (2^20 bytes); 0 measures {_FIRST} bytes alone"
        raise argparse.ArgumentTypeError(f"{text!r} {reason}") from None


def _compressor(text: str) -> str:
    try:
        compressor(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("compression: ")) from None
    return text


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status; collective over COMM_WORLD."""
    if MPI.COMM_WORLD.rank == 0:
        return run(make_parser().parse_args(argv))
    try:
        with silent_unless(False):
            arguments = make_parser().parse_args(argv)
    except SystemExit as end:  # rank 0 says it
        return int(end.code or 0)
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print on rank 0, and write the table; collective.

    Returns the exit status: 1 on one rank, 2 if the table cannot be written, which is tried before measuring.
    """
    comm, plain = Intracomm(MPI.COMM_WORLD), MPI.COMM_WORLD.Dup()
    if comm.size == 1:
        sys.stdout.write("tuning needs at least two ranks; start this command with mpirun\n")
        return 1
    known = tuning_table.facts(comm.channel)
    if not arguments.dry_run and said_on_all(plain, "tune", lambda: obstacle_to_write(tuning_table.path_for(known))):
        return 2
    shipped = select.means_of(comm.channel)
    rules: tuning_table.Rules = dict(tuning_table.of(comm.channel))
    most = arguments.max_mb << 20
    lengths = tuning_rows.sizes(_FIRST, most)
    for collective in arguments.collective or (() if arguments.compression else COLLECTIVES):
        measure = partial(_measure, comm, plain, shipped, collective, arguments)
        rows = tuning_rows.measured(measure, lengths, partial(_with_bar, comm, collective))
        rules[collective] = tuning_rows.rules_of(rows)
        if comm.rank == 0:
            _print(collective, rows)
    spans = compression_tuning.remembered(comm.channel)
    for spec in arguments.compression:
        gains, spans[spec] = _crossover(comm, plain, spec, most, arguments.seconds)
        if comm.rank == 0:
            _print_crossover(comm, spec, gains, spans[spec])
    if comm.rank == 0 and not arguments.dry_run:
        sys.stdout.write(f"saved to {tuning_table.save(known, rules, spans)}\n")
    return 0


def _with_bar(comm: MPI.Intracomm, collective: str, lengths: Iterable[int]) -> Iterable[int]:
    if comm.rank or not sys.stderr.isatty():
        return lengths
    try:
        from tqdm import tqdm
    except ImportError:
        return lengths
    return tqdm(lengths, desc=collective, unit="length", leave=False)


def _call(comm: Intracomm, collective: str, nbytes: int, name: str) -> Callable[[], None]:
    """Return a function that calls a collective on a whole vector of about `nbytes` bytes."""
    part = max(1, nbytes // 4 // comm.size)
    count = part * comm.size
    whole, other, own = (np.ones(n, np.float32) for n in (count, count, part))
    calls: dict[str, Callable[[], None]] = {
        "allreduce": lambda: comm.Allreduce(whole, other, algorithm=name),
        "reduce": lambda: comm.Reduce(whole, other if comm.rank == 0 else None, algorithm=name),
        "bcast": lambda: comm.Bcast(whole, algorithm=name),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, own, algorithm=name),
        "allgather": lambda: comm.Allgather(own, whole, algorithm=name),
        "alltoall": lambda: comm.Alltoall(whole, other, algorithm=name),
        "gather": lambda: comm.Gather(own, whole if comm.rank == 0 else None, algorithm=name),
        "scatter": lambda: comm.Scatter(whole if comm.rank == 0 else None, own, algorithm=name),
        "scan": lambda: comm.Scan(whole, other, algorithm=name),
    }
    return calls[collective]


def _measure(
    comm: Intracomm,
    plain: MPI.Intracomm,
    shipped: Capabilities,
    collective: str,
    arguments: argparse.Namespace,
    nbytes: int,
) -> Row:
    """Measure all algorithms that are possible for one message size; collective."""
    names = [name for name in comm.algorithms(collective) if shipped.allow(collective, name, nbytes, True)]
    timings = compare(plain, {name: _call(comm, collective, nbytes, name) for name in names}, arguments.seconds)
    seconds = {name: timing.median for name, timing in timings.items()}
    return Row(nbytes, select.choose(collective, nbytes, shipped), seconds, arguments.library)


def _crossover(
    comm: Intracomm, plain: MPI.Intracomm, spec: str, most: int, seconds: float
) -> tuple[dict[int, dict[str, float]], PayingRange]:
    """Return seconds by message size, "dense" and "packed", and the range that pays; the same on all ranks."""
    lengths = tuning_rows.sizes(compression_tuning.SHORTEST, most)
    found: dict[int, dict[str, float]] = {}
    for step in range(len(lengths) + _REFINED):
        if step < len(lengths):
            nbytes = lengths[step]
        else:
            low, high = _bounds(found)
            if not low or not high:
                break
            nbytes = round((low * high) ** 0.5 / 1024) * 1024
        x = np.random.default_rng(comm.rank).standard_normal(nbytes // 4, np.float32)
        y = np.zeros_like(x)
        ways = {"dense": partial(comm.Allreduce, x, y), "packed": partial(comm.Allreduce, x, y, compression=spec)}
        found[nbytes] = {name: timing.median for name, timing in compare(plain, ways, seconds).items()}
    low, high = _bounds(found)
    return found, PayingRange(high, high) if high else PayingRange(low + 1, math.inf)


def _bounds(found: dict[int, dict[str, float]]) -> tuple[int, int]:
    """Return the largest message size at which compression does not pay, and the next; 0 if there is none."""
    losing = [n for n, seconds in found.items() if seconds["packed"] * compression_tuning.MARGIN > seconds["dense"]]
    low = max(losing, default=0)
    return low, min((n for n in found if n > low), default=0)


def _print_crossover(comm: Intracomm, spec: str, found: dict[int, dict[str, float]], span: PayingRange) -> None:
    rows = [["bytes", "dense us", f"{spec} us", "gain"]]
    for nbytes, seconds in sorted(found.items()):
        dense, packed = seconds["dense"], seconds["packed"]
        rows.append([str(nbytes), f"{dense * 1e6:.1f}", f"{packed * 1e6:.1f}", f"{dense / packed:.2f}"])
    several = comm.channel.apart or comm.channel.cluster is not None
    where = "between these nodes" if several else "on this node"
    verdict = f"pays from {format_nbytes(int(span.packed_from))} on" if span.packed_from < math.inf else "does not pay"
    limit = "" if span.packed_from < math.inf else f", up to {format_nbytes(max(found))}"
    lines = "\n".join(table(rows))
    sys.stdout.write(f"\nallreduce of float32\n{lines}\n{spec} {verdict} {where}{limit}\n")
    sys.stdout.flush()


def _print(collective: str, rows: list[Row]) -> None:
    lines = [("bytes", "shipped choice", "us", "best", "us", "gain", "MPI library us")]
    for row in rows:
        was, now, library = (row.seconds[name] * 1e6 for name in (row.shipped, row.best, select.NATIVE))
        times = (row.shipped, f"{was:.1f}", row.best, f"{now:.1f}", f"{row.gain:.2f}", f"{library:.1f}")
        lines.append((str(row.nbytes), *times))
    text = "\n".join(table(lines, names=0))
    losing = [format_nbytes(row.nbytes) for row in rows if row.loses]
    advice = f"the MPI library is faster for {', '.join(losing)}; --library lets auto take it there\n"
    hint = advice if losing else ""
    sys.stdout.write(f"\n{collective}, whole vector\n{text}\n{hint}")
    sys.stdout.flush()
