"""``python -m mpicoll explain ring --size 4`` and ``algorithms``; the help of all commands. Nothing here needs MPI."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from mpicoll import __version__
from mpicoll.errors import MpicollError
from mpicoll.quantities import counted, format_nbytes, parse_nbytes, positive
from mpicoll.schedules import ALGORITHMS, Schedule, find_any
from mpicoll.schedules.collective_table import COLLECTIVES
from mpicoll.schedules.cost import Machine
from mpicoll.schedules.render_schedule import cost_table, data_after_each_step, explain, goal
from mpicoll.schedules.replay import ScheduleError
from mpicoll.schedules.verify_schedule import verify
from mpicoll.unused_options import refuse

_MAX_COLUMNS = 8
_MOST_RANKS = 1024
"""The steps of a ring on so many ranks take a minute to make; ``predict`` reaches further."""
_ON_NODE = ("shared", "single_copy")
_OF_PARTS = ("gatherv", "scatterv")
"""Names that are explained though no algorithm by messages has them, as is hierarchy."""
_COSTS = ("alpha", "beta", "gamma")
_SLOT_NBYTES = 16 << 10
"""About the longest vector, in bytes, that passes through slots where every rank has a core."""
_VALUE_NBYTES = 8
"""Bytes of each of the --values, for traffic and cost."""
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "max": max,
    "min": min,
    "join": lambda a, b: f"{a}{b}",
}


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _cost(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")


def parse_values(text: str) -> list[list[int | float | str]]:
    """Parse ``'17,11;5,13'``: one vector a rank, separated by semicolons."""
    rows = [[_number(cell.strip()) for cell in row.split(",")] for row in text.strip().strip(";").split(";")]
    if len({len(row) for row in rows}) != 1 or any(cell == "" for row in rows for cell in row):
        raise argparse.ArgumentTypeError(f"{text!r}: every rank needs the same number of values, none of them empty")
    return rows


def _explain_shared(arguments: argparse.Namespace) -> list[str]:
    """Return the lines that show plans of a collective on shared memory."""
    from mpicoll.plans import draw

    collective, size, root = arguments.collective or "allreduce", arguments.size or 4, arguments.root
    shown = _shown_ranks(arguments, size, range(min(size, 2)))
    long = arguments.bytes > _SLOT_NBYTES and collective != "barrier"
    way = "in chunks or parts, on the buffers themselves" if long else "through slots, each rank by itself"
    title = f"{collective} · {arguments.name}: loads and stores in memory that the ranks of a node share, {way}"
    lines = [title, f"{counted(size, 'rank')}, {format_nbytes(arguments.bytes)}"]
    single_copy = arguments.name == "single_copy"
    if single_copy:
        lines.append("the system copies private memory from process to process")
    for rank in shown:
        lines += ["", *draw(collective, size, rank, root=root, long=long, single_copy=single_copy)]
    return lines + _proof(arguments, collective, size)


def _explain_counted(arguments: argparse.Namespace) -> list[str]:
    """Return the lines that show plans of a Gatherv or Scatterv on shared memory."""
    from mpicoll.plans import draw_counted

    if arguments.algorithm not in (None, "shared"):
        raise MpicollError(f"--algorithm: {arguments.name} has shared only; gather and scatter have others")
    kind, size, root = arguments.name, arguments.size or 4, arguments.root
    shown = _shown_ranks(arguments, size, [root, (root + 1) % size][:size])
    lines = [
        f"{kind} · shared: one round in memory that the ranks of a node share; only the root knows all counts",
        f"{counted(size, 'rank')}",
    ]
    for rank in shown:
        lines += ["", *draw_counted(kind.removesuffix("v"), rank, root=root)]
    return lines + _proof(arguments, kind, size)


def _shown_ranks(arguments: argparse.Namespace, size: int, first: Sequence[int]) -> Sequence[int]:
    """Return the ranks to show, by default `first`; raise MpicollError for a rank or root that is none."""
    shown = first if arguments.rank is None else [arguments.rank]
    for name, rank in (("--root", arguments.root), *(("--rank", rank) for rank in shown)):
        if not 0 <= rank < size:
            raise MpicollError(f"{name}: {rank} is not in 0..{size - 1}")
    return shown


def _proof(arguments: argparse.Namespace, collective: str, size: int) -> list[str]:
    """Return the lines that say what was proved, if that is asked for."""
    if not arguments.verify:
        return []
    from mpicoll.plans.verify_plan import prove_collective

    number = prove_collective(collective, size)
    if not number:
        raise MpicollError(f"--verify: the simulated slots have no room for the table of {size} ranks; 16 ranks fit")
    ranks = counted(size, "rank")
    return ["", f"verified for {ranks}: {number} sequences of one and two operations, in every interleaving"]


def _explain_hierarchy(arguments: argparse.Namespace) -> list[str]:
    """Return the lines that show a collective over several nodes."""
    from mpicoll.schedules import node_composition
    from mpicoll.schedules.render_composition import draw

    collective, size = arguments.collective or "allreduce", arguments.size or 4
    if collective not in node_composition.COLLECTIVES:
        names = ", ".join(node_composition.COLLECTIVES)
        raise MpicollError(f"hierarchy: there is none for {collective}; collectives are {names}")
    if not 0 <= arguments.root < size:
        raise MpicollError(f"--root: {arguments.root} is not in 0..{size - 1}")
    each = arguments.ranks_per_node or -(-size // 2)
    sizes = [min(each, size - first) for first in range(0, size, each)]
    if collective in ("allgather", "reduce_scatter") and len(set(sizes)) > 1:
        raise MpicollError(f"--ranks-per-node: {collective} needs nodes of equal size, not {sizes}")
    segments = node_composition.segments_for(arguments.bytes) if collective == "allreduce" else 1
    ranks = f"{counted(size, 'rank')} on {counted(len(sizes), 'node')}"
    lines = [
        f"{collective} · hierarchy: shared memory inside nodes, messages along lanes",
        f"{ranks}, {format_nbytes(arguments.bytes)}",
        "",
        *draw(collective, sizes, segments=segments),
    ]
    if arguments.verify:
        node_composition.verify(collective, sizes, root=arguments.root, segments=segments)
        lines += ["", f"verified for {ranks}, given that its parts are correct"]
    return lines


def _explain_collective(arguments: argparse.Namespace) -> list[str]:
    """Return the lines that compare the algorithms of a collective."""
    collective, size = arguments.name, arguments.size or 4
    rows = cost_table(
        list(ALGORITHMS[collective].values()),
        size,
        arguments.bytes,
        arguments.machine,
        root=arguments.root,
        segments=arguments.segments,
    )
    return [
        f"{collective} · algorithms by messages, the cheapest first",
        f"{counted(size, 'rank')}, {arguments.machine.describe(arguments.bytes)}",
        "",
        *rows,
        "",
        f"draw one: python -m mpicoll explain {collective} --algorithm {next(iter(ALGORITHMS[collective]))}",
        f"on one node: python -m mpicoll explain {collective} --algorithm shared",
    ]


def _settle(arguments: argparse.Namespace, collective: str, segmented: str | None) -> None:
    """Refuse options of roots, segments and operations where there are none; set these, and the length, if not given.

    Parameters
    ----------
    segmented
        What has no segments; None if it has some.
    """
    if not COLLECTIVES[collective].rooted:
        refuse(arguments, f"{collective}, which has no root", "root")
    if segmented is not None:
        refuse(arguments, f"{segmented}, which has no segments to choose", "segments")
    if arguments.op is not None and arguments.values is None:
        raise MpicollError("--op has no meaning without --values")
    arguments.root, arguments.segments = arguments.root or 0, arguments.segments or 1
    arguments.op = arguments.op or "sum"
    arguments.machine = Machine(**{name: cost for name in _COSTS if (cost := getattr(arguments, name)) is not None})
    if arguments.bytes is None:
        arguments.bytes = 1 << 20 if arguments.values is None else _VALUE_NBYTES * len(arguments.values[0])


def _explain(arguments: argparse.Namespace) -> list[str]:
    if (arguments.size or 0) > _MOST_RANKS:
        raise MpicollError(
            f"--size: {arguments.size} ranks are more than {_MOST_RANKS}, the most whose steps are shown; "
            "python -m mpicoll predict tells the time of more"
        )
    if arguments.name in _OF_PARTS:
        refuse(arguments, arguments.name, "goal", "values", "ranks_per_node", "collective", *_COSTS)
        _settle(arguments, arguments.name.removesuffix("v"), arguments.name)
        return _explain_counted(arguments)
    if arguments.name in ALGORITHMS:
        refuse(arguments, f"{arguments.name}, which is a collective itself", "collective")
        if arguments.algorithm is None:
            what = f"{arguments.name} without --algorithm, which compares its algorithms"
            refuse(arguments, what, "verify", "goal", "values", "rank", "ranks_per_node")
            some = any(row.segmented for row in ALGORITHMS[arguments.name].values())
            _settle(arguments, arguments.name, None if some else arguments.name)
            return _explain_collective(arguments)
        arguments.collective, arguments.name = arguments.name, arguments.algorithm
    elif arguments.algorithm is not None:
        raise MpicollError(f"--algorithm is for the name of a collective, not {arguments.name}")
    if arguments.name in _ON_NODE:
        refuse(arguments, arguments.name, "goal", "values", "ranks_per_node", *_COSTS)
        _settle(arguments, arguments.collective or "allreduce", arguments.name)
        return _explain_shared(arguments)
    if arguments.name == "hierarchy":
        refuse(arguments, arguments.name, "goal", "values", "rank", *_COSTS)
        _settle(arguments, arguments.collective or "allreduce", arguments.name)
        return _explain_hierarchy(arguments)
    refuse(arguments, "algorithms by messages", "ranks_per_node")
    return _explain_schedules(arguments)


def _explain_schedules(arguments: argparse.Namespace) -> list[str]:
    """Return the lines that show an algorithm by messages."""
    algorithm = find_any(arguments.name, arguments.collective, (*_ON_NODE, "hierarchy", *_OF_PARTS))
    _settle(arguments, algorithm.collective, None if algorithm.segmented else arguments.name)
    values = arguments.values
    size = arguments.size or (len(values) if values else 4)
    if values and len(values) != size:
        raise MpicollError(f"--values: {len(values)} vectors were given for --size {size}")
    schedules = [
        algorithm.schedule(size, rank, root=arguments.root, segments=arguments.segments) for rank in range(size)
    ]
    if arguments.goal:
        refuse(arguments, "--goal, which prints nothing else", "verify", "values", "rank", *_COSTS)
        return goal(schedules, arguments.bytes)
    lines = explain(algorithm, schedules, _shown(schedules, arguments.rank), arguments.bytes, arguments.machine)
    if values:
        lines += ["", *_data(schedules, values, arguments.op)]
    if arguments.verify:
        verify(algorithm, size, root=arguments.root, segments=arguments.segments)
        lines += ["", f"verified for {counted(size, 'rank')}"]
    return lines


def _shown(schedules: Sequence[Schedule], rank: int | None) -> Sequence[Schedule]:
    if rank is None:
        return schedules[:_MAX_COLUMNS]
    if not 0 <= rank < len(schedules):
        raise MpicollError(f"--rank: {rank} is not in 0..{len(schedules) - 1}")
    return schedules[rank : rank + 1]


def _data(schedules: Sequence[Schedule], values: list[list[Any]], op: str) -> list[str]:
    """Return the lines that show the chunks of every rank's vector after each step."""
    first = schedules[0]
    if first.collective == "barrier":
        raise MpicollError("--values: a barrier moves no data")
    bounds = first.bounds(len(values[0]))
    chunks = [[tuple(row[start:stop]) for start, stop in pairwise(bounds)] for row in values]
    combine = _COMBINE[op]
    return data_after_each_step(
        schedules, chunks, lambda left, right: tuple(combine(a, b) for a, b in zip(left, right, strict=True))
    )


def _list_algorithms() -> list[str]:
    lines = []
    for collective, table in ALGORITHMS.items():
        lines.append(f"{collective}:")
        lines += [f"  {name:20s} {row.summary}" for name, row in table.items()]
    return lines


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of these commands, which lists the others, too."""
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll",
        description="Run programs, look at collectives, and tune them.",
        epilog="Training has programs of its own: python -m mpicoll.train, mpicoll.train.supervise and mpicoll.search; "
        "python -m mpicoll.deploy makes trained models smaller.",
    )
    parser.add_argument("--version", action="version", version=f"mpicoll {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("algorithms", help="list the algorithms of every collective")
    commands.add_parser("doctor", add_help=False, help="check MPI library, launcher, cores and memory; under mpirun")
    commands.add_parser(
        "predict", add_help=False, help="predict the time of a collective, or of training, on many ranks"
    )
    commands.add_parser("run", add_help=False, help="run any mpi4py program on mpicoll, and profile it; under mpirun")
    commands.add_parser("tune", add_help=False, help="measure which algorithm is fastest here; under mpirun")
    commands.add_parser("warmup", add_help=False, help="compile kernels and compressors beforehand")
    command = commands.add_parser(
        "explain",
        help="show the steps and the cost of an algorithm",
        description="Print the steps of an algorithm as a table, the bytes that each rank sends, and the cost.",
        epilog="examples: python -m mpicoll explain allreduce --size 8; "
        "python -m mpicoll explain ring --values '17,11,1,9;5,13,23,14;3,6,10,8;12,7,2,12'",
    )
    add = command.add_argument
    add(
        "name",
        help="a collective (compares its algorithms, or draws that of --algorithm), an algorithm (see: python -m "
        "mpicoll algorithms), shared or single_copy (plans on one node), gatherv or scatterv (there, too), or "
        "hierarchy (several nodes)",
    )
    add("--algorithm", metavar="NAME", help="the algorithm, if the first argument is a collective")
    add("--collective", choices=list(ALGORITHMS), help="the collective, if several have an algorithm of this name")
    add("--size", type=positive, help="number of ranks (4, or as many as there are --values)")
    add("--ranks-per-node", type=positive, help="ranks of each node, for hierarchy (otherwise two nodes)")
    add("--root", type=int, help="root of rooted collectives (default: 0)")
    add("--segments", type=positive, help="segments of each chunk of pipelined algorithms (default: 1)")
    add("--rank", type=int, help=f"show only this rank (otherwise the first {_MAX_COLUMNS})")
    nbytes = f"message size, such as 64K (default: 1MB, or {_VALUE_NBYTES} for each of a rank's --values)"
    add("--bytes", "--nbytes", type=parse_nbytes, help=nbytes)
    for name, what in zip(_COSTS, ("message", "byte sent", "byte reduced"), strict=True):
        usual = getattr(Machine, name)
        add(f"--{name}", type=_cost, help=f"seconds per {what} (default: {usual:g})")
    add("--values", type=parse_values, help="vectors of the ranks, such as '1,2;3,4': show the data after each step")
    add(
        "--op",
        choices=sorted(_COMBINE),
        help="reduction for --values; join shows the order (default: sum)",
    )
    add("--goal", action="store_true", help="print the schedules in GOAL, the input language of LogGOPSim, instead")
    add("--verify", action="store_true", help="also prove the algorithm correct for this number of ranks")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one command and return the exit status: 0, or 2 for unusable arguments."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:  # were it required, argparse would not name an option that does not exist
        parser.error("the following arguments are required: COMMAND")
    try:
        lines = _explain(arguments) if arguments.command == "explain" else _list_algorithms()
    except (MpicollError, ScheduleError, ValueError) as error:
        sys.stderr.write(f"mpicoll {arguments.command}: {error}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
