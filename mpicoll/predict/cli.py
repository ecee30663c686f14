"""Command line of predictions: ``python -m mpicoll predict ring --size 1024 --nbytes 64MB``.

With the name of an algorithm it prints time, bandwidth and the components of the time; without one, the fastest
algorithm for each number of ranks and each message size. Only ``--fit`` needs MPI: it measures the machine that it runs
on, and later predictions are for that machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mpicoll.environment import launched_rank, obstacle_to_write, silent_unless
from mpicoll.errors import MachineFileError, MpicollError
from mpicoll.help_text import without_markup
from mpicoll.predict.predictor import PredictedCase, Prediction, blocks, extrapolates, names, predict, taken
from mpicoll.quantities import format_nbytes, format_seconds, parse_nbytes, positive, positive_number, table
from mpicoll.schedules import ALGORITHMS, find_any
from mpicoll.schedules import machine as machines
from mpicoll.schedules.machine import MachineDescription, Wire
from mpicoll.unused_options import refuse

SPECIAL = ("shared", "hierarchy")
_MOST_RANKS = 1 << 15
"""The simulation of algorithms with as many steps as ranks takes minutes there."""
_LENGTHS = tuple(8 << (2 * power) for power in range(13))


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll predict",
        description=without_markup(__doc__),
        epilog="With --training it predicts steps of training: python -m mpicoll predict --training --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", help="algorithm, such as ring; without it, all algorithms of a collective are compared")
    add("--collective", choices=list(ALGORITHMS), help="default: allreduce, or a collective with that algorithm")
    add("--size", type=positive, nargs="+", default=[4], metavar="RANKS", help="numbers of ranks (default: 4)")
    lengths = "message sizes, such as 64K or 1MB (default: 8 B to 128 MB)"
    add("--nbytes", "--bytes", type=parse_nbytes, nargs="+", metavar="BYTES", help=lengths)
    add("--ranks-per-node", type=positive, default=1, metavar="R", help="ranks on each node (default: 1)")
    add("--segments", type=positive, help="segments of a pipelined algorithm (default: as a call uses)")
    described = "file of a machine description (default: the one of --fit, else a textbook machine)"
    add("--machine", type=Path, metavar="FILE", help=described)
    pays = "print the message size above which each compressor pays, and its gain at 128 MB; measures their speed here"
    add("--compression", nargs="+", default=[], metavar="SPEC", help=pays)
    ratio = "compressed size over original size, for a predicted algorithm (default: 1)"
    add("--wire-ratio", type=positive_number, default=1.0, metavar="X", help=ratio)
    speed = "speed of encoding and of decoding, in 10^9 bytes per second (default: unlimited)"
    add("--codec-gbps", type=positive_number, metavar="X", help=speed)
    add("--plot", type=Path, metavar="FILE", help="plot time over message size as .svg or .png; needs mpicoll[plot]")
    add("--fit", action="store_true", help="measure this machine; under mpirun")
    add("--save", type=Path, metavar="FILE", help="file that --fit writes (default: in the user's cache directory)")
    add("--seconds", type=positive_number, default=60.0, help="approximate time of --fit in seconds (default: 60)")
    add("--deadline", type=positive_number, default=600.0, help="seconds after which --fit gives up (default: 600)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 0, 2 for unusable arguments, 1 for ``--fit`` on one rank."""
    parser = make_parser()
    try:
        with silent_unless(launched_rank() == 0):
            arguments = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        if arguments.fit:
            return _fit(arguments)
        refuse(arguments, "predictions, without --fit", "save", "seconds", "deadline", defaults=_defaults())
        lines = _answer(arguments)
    except (MpicollError, ValueError, OSError) as error:
        if launched_rank() == 0:
            sys.stderr.write(f"mpicoll predict: {error}\n")
        return 2
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    """Measure this machine; return the exit status, 2 if the file cannot be written, which is tried before."""
    from mpi4py import MPI

    from mpicoll.consensus import said_on_all
    from mpicoll.predict import calibration

    names = ("name", "collective", "size", "nbytes", "ranks_per_node", "segments", "machine", "compression",
             "wire_ratio", "codec_gbps", "plot")  # fmt: skip
    refuse(arguments, "--fit", *names, defaults=_defaults())
    path, option = arguments.save or machines.default_path(), "--save" if arguments.save else ""
    world = MPI.COMM_WORLD
    if world.size > 1 and said_on_all(world, "predict", lambda: obstacle_to_write(path, option)):
        return 2
    return calibration.run(arguments)


def the_machine(path: Path | None) -> MachineDescription:
    """Return the machine of a file; without one, the machine that ``--fit`` saved, else a textbook machine."""
    if path is not None:
        try:
            return machines.load(path)
        except MachineFileError as error:
            raise MachineFileError(f"--machine {error}") from None
    kept = machines.default_path()
    return machines.load(kept) if kept.exists() else machines.textbook()


def _answer(arguments: argparse.Namespace) -> list[str]:
    if max(arguments.size) > _MOST_RANKS:
        raise ValueError(
            f"--size: {max(arguments.size)} ranks are more than {_MOST_RANKS}, the most that are simulated"
        )
    if arguments.plot:
        from mpicoll.predict.plot_predictions import check_file

        check_file(arguments.plot)
    machine = the_machine(arguments.machine)
    if arguments.compression:
        return _crossovers(machine, arguments)
    coding = 1e-9 / arguments.codec_gbps if arguments.codec_gbps else 0.0
    wire = Wire(arguments.wire_ratio, coding, coding)
    collective = arguments.collective or "allreduce"
    if arguments.name is not None and arguments.name not in SPECIAL:
        collective = find_any(arguments.name, arguments.collective, SPECIAL).collective
    _check_segments(arguments, collective)
    cases = [
        [PredictedCase(collective, blocks(size, arguments.ranks_per_node), nbytes) for size in arguments.size]
        for nbytes in arguments.nbytes or _LENGTHS
    ]

    def price(case: PredictedCase, name: str) -> Prediction:
        _show(f"simulating {name} on {case.size} ranks, {format_nbytes(case.nbytes)}")
        return predict(machine, case, name, wire=wire, segments=arguments.segments, split=arguments.name is not None)

    lines = [*_heading(machine, arguments, wire), ""]
    every = [case for row in cases for case in row]
    try:
        if arguments.plot:
            return [*lines, *_plot(machine, cases, price, arguments), *_left_out(machine, every)]
        if arguments.name is not None:
            lines += _details(machine, [price(case, arguments.name) for case in every])
        else:
            lines += _winners(machine, cases, price)
    finally:
        _show("")
    return lines + _left_out(machine, every) + _limits(machine, every)


def _show(text: str) -> None:
    """Rewrite the last line of a terminal, as compiling does; without the kernels, which need Numba installed."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def _defaults() -> dict[str, Any]:
    return vars(make_parser().parse_args([]))


def _crossovers(machine: MachineDescription, arguments: argparse.Namespace) -> list[str]:
    """Return each compressor's crossover: a line for each compressor, a column for each number of ranks."""
    from mpicoll.compression import codec_speed as speed
    from mpicoll.predict.crossover import LONGEST, crossover, describe, two_shot_codec

    if arguments.name is not None or arguments.collective not in (None, "allreduce"):
        given = arguments.name or arguments.collective
        raise ValueError(f"--compression: only for allreduce, without the name of an algorithm; got {given!r}")
    names = "nbytes", "plot", "segments", "codec_gbps", "wire_ratio"
    refuse(arguments, "--compression", *names, defaults=_defaults())
    layouts = [blocks(size, arguments.ranks_per_node) for size in arguments.size]
    rows = [["pays from", "left", "encoding", "decoding", *(f"{size} ranks" for size in arguments.size)]]
    for spec in arguments.compression:
        wire = speed.known(two_shot_codec(spec))
        rows.append(describe(spec, wire, [crossover(machine, nodes, wire) for nodes in layouts]))
    every = [PredictedCase("allreduce", nodes, LONGEST) for nodes in layouts]
    return [*_heading(machine, arguments, machines.IDENTITY), "", *table(rows), *_limits(machine, every)]


def _heading(machine: MachineDescription, arguments: argparse.Namespace, wire: Wire) -> list[str]:
    lines = [f"machine: {machine.name}"]
    if machine.fitted is not None:
        known = machine.fitted
        span = f"{format_nbytes(known.min_nbytes)} to {format_nbytes(known.max_nbytes)}"
        sizes = ", ".join(map(str, known.ranks))
        lines.append(
            f"measured on {sizes} ranks, {known.nodes} node{'s' * (known.nodes > 1)}, {span}; "
            f"median error {known.median_error:.0%} on measurements left out of the fit"
        )
    lines.append(f"ranks per node: {arguments.ranks_per_node}")
    if wire != machines.IDENTITY:
        speed = f"at {arguments.codec_gbps:g} GB/s" if arguments.codec_gbps else "in no time"
        lines.append(f"compressed to {wire.ratio:g} of the bytes, encoded and decoded {speed}")
    return lines


def _details(machine: MachineDescription, found: Iterable[Prediction]) -> list[str]:
    rows = [["algorithm", "ranks", "length", "time", "algbw", "busbw", "latency", "sending", "reducing"]]
    for one in found:
        parts = [f"{part / one.seconds:.0%}" for part in (one.latency, one.sending, one.reducing)]
        speeds = [f"{speed / 1e9:.3g} GB/s" for speed in (one.algbw, one.busbw)]
        length = format_nbytes(one.case.nbytes)
        time = format_seconds(one.seconds) + _mark(machine, one.case)
        rows.append([one.algorithm, str(one.case.size), length, time, *speeds, *parts])
    return table(rows)


def _winners(
    machine: MachineDescription,
    cases: Sequence[Sequence[PredictedCase]],
    price: Callable[[PredictedCase, str], Prediction],
) -> list[str]:
    """Return the fastest algorithm and its time: a line for each length, a column for each number of ranks."""
    first = cases[0]
    rows = [[first[0].collective, *(f"{case.size} ranks" for case in first)]]
    for line in cases:
        best = [min((price(case, name) for name in names(machine, case)), key=lambda one: one.seconds) for case in line]
        cells = [f"{one.algorithm} {format_seconds(one.seconds)}{_mark(machine, one.case)}" for one in best]
        rows.append([format_nbytes(line[0].nbytes), *cells])
    return table(rows)


def _mark(machine: MachineDescription, case: PredictedCase) -> str:
    return "*" if machine.fitted is not None and extrapolates(machine, case) else ""


def _check_segments(arguments: argparse.Namespace, collective: str) -> None:
    """Refuse a number of segments for algorithms without segments."""
    chosen = ALGORITHMS[collective].values() if arguments.name is None else [ALGORITHMS[collective].get(arguments.name)]
    if not any(row is not None and row.segmented for row in chosen):
        refuse(arguments, f"{arguments.name or collective}, which has no segments to choose", "segments")


def _left_out(machine: MachineDescription, cases: Iterable[PredictedCase]) -> list[str]:
    """Return a note on what "auto" takes where that is not among the algorithms whose time can be predicted."""
    found: dict[str, set[int]] = {}
    for case in cases:
        name = taken(case)
        if name in SPECIAL and name not in names(machine, case):
            found.setdefault(name, set()).add(case.size)
    if not found:
        return []
    places = (f"{name} on {', '.join(map(str, sorted(sizes)))} ranks" for name, sizes in found.items())
    return ["", f'algorithms by messages only: "auto" takes {" and ".join(places)}, whose time is not predicted']


def _limits(machine: MachineDescription, cases: Iterable[PredictedCase]) -> list[str]:
    """Return notes on predictions outside the range of the measurements."""
    found: dict[str, list[PredictedCase]] = {}
    for case in cases:
        found.setdefault(extrapolates(machine, case), []).append(case)
    lines = []
    for why, beyond in found.items():
        if why and machine.fitted is not None:
            sizes = ", ".join(str(size) for size in sorted({case.size for case in beyond}))
            lines.append(f"* {why}: {sizes} ranks; the error there is not known")
    if machine.fitted is None:
        lines.append("not measured: mpirun -n ... python -m mpicoll predict --fit measures your machine")
    return ["", *lines] if lines else []


def _plot(
    machine: MachineDescription,
    cases: Sequence[Sequence[PredictedCase]],
    price: Callable[[PredictedCase, str], Prediction],
    arguments: argparse.Namespace,
) -> list[str]:
    from mpicoll.predict import plot_predictions

    one_of_each = cases[0]
    panels = []
    for column, case in enumerate(one_of_each):
        own = [line[column] for line in cases]
        chosen = [arguments.name] if arguments.name else names(machine, case)
        curves = {name: [price(one, name) for one in own] for name in chosen}
        panels.append((f"{case.collective}, {case.size} ranks", curves))
    plot_predictions.draw(arguments.plot, panels, machine.name)
    return [f"plot written to {arguments.plot}"]
