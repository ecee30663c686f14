"""Command line of predicted training: ``python -m mpicoll predict --training --hosts 1 2 4 8 --rate 1gbit``.

A table over numbers of hosts: seconds that a rank computes in a step, which are measured now, on this machine, for the
share of one rank; seconds that it communicates, simulated, with the algorithms that "auto" takes and the buckets of the
trainer; and of these the seconds in which it waits, since the others overlap with computation. All options of
python -m mpicoll.train that say what is trained, and how, are taken, too: --model, --batch, --strategy, ...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.errors import MpicollError
from mpicoll.help_text import without_markup
from mpicoll.quantities import (
    counted,
    format_seconds,
    parse_rate,
    parse_seconds,
    positive,
    positive_number,
    table,
)
from mpicoll.schedules.machine import MachineDescription
from mpicoll.train import options
from mpicoll.train.config import TrainConfig
from mpicoll.train.process_facts import limit_threads
from mpicoll.train.strategies import strategy_name

if TYPE_CHECKING:
    from mpicoll.train.prediction.training_prediction import PredictedHosts, TrainingCase


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; it leaves the options of the trainer to that."""
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll predict --training",
        usage="%(prog)s [options] [options of python -m mpicoll.train]",
        description=without_markup(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--training", action="store_true", help="predict steps of training, not collectives")
    add("--hosts", type=positive, nargs="+", default=[1, 2, 4, 8, 16], metavar="N",
        help="numbers of hosts (default: 1 2 4 8 16)")  # fmt: skip
    add("--ranks-per-node", type=positive, default=1, metavar="R", help="ranks on each host (default: 1)")
    add("--machine", type=Path, metavar="FILE",
        help="file of a machine description (default: the one of predict --fit, else a textbook machine)")  # fmt: skip
    add("--rate", type=parse_rate, metavar="RATE",
        help="rate of each host's link, each way, such as 1gbit or 100mbit (default: that of the machine)")  # fmt: skip
    add("--delay", type=parse_seconds, metavar="TIME", help="time that a message takes from host to host beyond that "
        "of the machine, such as 5ms or 200us (default: 0)")  # fmt: skip
    add("--compression", nargs="+", default=[], metavar="SPEC",
        help="compressors, each of which is compared with uncompressed training")  # fmt: skip
    add("--weak", action="store_true", help="--batch is the batch of each rank (default: of all ranks together)")
    add("--seconds", type=positive_number, default=1.0, metavar="X",
        help="approximate seconds of measurement for each row (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the prediction as JSON")
    add("--plot", type=Path, metavar="FILE", help="plot samples a second and steps as .svg or .png; "
        "needs mpicoll[plot]")  # fmt: skip
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit status: 0, 1 if steps fail, 2 for unusable arguments."""
    try:
        arguments, rest = make_parser().parse_known_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    limit_threads(ranks=arguments.ranks_per_node)
    try:
        lines = _answer(arguments, rest)
    except options.HelpRequested as text:
        lines = [str(text)]
    except (MpicollError, ValueError, OSError) as error:
        sys.stderr.write(f"mpicoll predict: {error}\n")
        return int(getattr(error, "exit_status", 2))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _answer(arguments: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    # These import NumPy, which reads the number of threads.
    from mpicoll.predict.cli import the_machine
    from mpicoll.train.prediction import training_prediction

    config = parsed(rest, arguments.compression)
    training_prediction.check(config)
    case = training_prediction.TrainingCase(
        config=config,
        machine=_network(the_machine(arguments.machine), arguments),
        hosts=tuple(sorted(set(arguments.hosts))),
        ranks_per_node=arguments.ranks_per_node,
        compressions=(None, *dict.fromkeys(arguments.compression)),
        weak=arguments.weak,
        seconds=arguments.seconds,
    )
    _check_files(arguments)
    rows, parameters = _measured(case)
    if arguments.json:
        content = {**training_prediction.as_json(case, rows, parameters), "strategy": _strategy(config)}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    lines = [*_heading(case, parameters), "", *_table(rows), *_notes(case, rows)]
    if arguments.plot:
        from mpicoll.train.prediction import plot_training

        plot_training.draw(arguments.plot, rows, case.machine.name)
        lines.append(f"plot written to {arguments.plot}")
    return lines


def parsed(rest: Sequence[str], compressions: Sequence[str]) -> TrainConfig:
    """Return the options of the trainer without compression, checked with each of the compressors.

    Raises
    ------
    UsageError
        If an option is unknown, out of range, or contradicts another one.
    """
    checked = [options.parse([*rest, "--compression", spec]) for spec in compressions]
    return replace(checked[0], compression=None) if checked else options.parse(rest)


def _network(machine: MachineDescription, arguments: argparse.Namespace) -> MachineDescription:
    """Return the machine with the links of ``--rate`` and ``--delay``."""
    if arguments.rate is None and arguments.delay is None:
        return machine
    if arguments.rate == 0:
        raise ValueError("--rate: 0 is not a positive rate")
    per_byte = machine.between.classes[-1].per_byte if arguments.rate is None else 8e-9 / arguments.rate
    delay = arguments.delay or 0.0
    links = [] if arguments.rate is None else [f"{arguments.rate:g} Gbit/s"]
    if delay > 0:
        links.append(f"{format_seconds(delay)} more")
    named = replace(machine.with_network(per_byte, delay), name=f"{machine.name}; links of {', '.join(links)}")
    return named if links else machine


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuse outputs that could not be written, before anything is measured."""
    from mpicoll.predict.plot_predictions import new_figure
    from mpicoll.train.run_report import check_writable

    if arguments.plot is not None:
        new_figure(arguments.plot, panels=2)
    files = {"--json": arguments.json, "--plot": arguments.plot}
    check_writable({option: None if path is None else str(path) for option, path in files.items()})


def _measured(case: TrainingCase) -> tuple[list[PredictedHosts], int]:
    """Return the rows, and the number of the model's parameters."""
    from mpi4py import MPI

    from mpicoll import Intracomm
    from mpicoll.train.prediction.training_prediction import predict_training
    from mpicoll.train.training_run import named
    from mpicoll.train.warm_kernels import compile_kernels

    comm = Intracomm(MPI.COMM_SELF)
    dataset, model = named(case.config, comm)
    for spec in case.compressions:
        compile_kernels(model, dataset, comm, replace(case.config, compression=spec))
    note = _note if sys.stderr.isatty() else (lambda text: None)
    return predict_training(case, dataset, model, note), model.parameter_count


def _note(text: str) -> None:
    sys.stderr.write(f"measuring: {text}\n")


def _strategy(config: TrainConfig) -> str:
    name = strategy_name(config.mode, config.shard)
    return f"{name}, averages after {counted(config.sync_every, 'step')}" if config.mode == "local" else name


def _heading(case: TrainingCase, parameters: int) -> list[str]:
    config = case.config
    each = "of each rank" if case.weak else "of all ranks"
    return [
        f"machine: {case.machine.name}",
        f"{config.model} of {parameters} parameters, {config.dataset}, {_strategy(config)}, "
        f"{counted(config.step_batch, 'sample')} a step {each}",
        f"ranks per node: {case.ranks_per_node}",
        "computation measured on this machine, communication simulated",
    ]


def _table(rows: Sequence[PredictedHosts]) -> list[str]:
    head = [
        "compression",
        "hosts",
        "ranks",
        "computation",
        "communication",
        "waiting",
        "step",
        "samples/s",
        "efficiency",
    ]
    cells: list[list[Any]] = [head]
    for row in rows:
        times = [row.time.computation, row.time.communication, row.time.waiting, row.time.seconds]
        counts = [str(row.hosts), str(row.ranks)]
        pace = [f"{row.samples_per_second:.0f}", f"{row.efficiency:.0%}"]
        cells.append([row.compression or "none", *counts, *map(format_seconds, times), *pace])
    return table(cells)


def _hosts(numbers: Iterable[int]) -> str:
    """Return numbers of hosts for messages: ``1 host``, ``2, 4 hosts``."""
    *others, last = sorted(numbers)
    return ", ".join([*map(str, others), counted(last, "host")])


def _notes(case: TrainingCase, rows: Sequence[PredictedHosts]) -> list[str]:
    """Return the lines below the table: where compressors win, and what was not measured."""
    from mpicoll.train.prediction.training_prediction import doubts, wins_from

    lines = []
    for spec in filter(None, case.compressions):
        hosts = wins_from(rows, spec)
        lines.append(
            f"{spec} wins from {counted(hosts, 'host')} on" if hosts else f"{spec} does not win on these hosts"
        )
    for why in dict.fromkeys(row.extrapolates for row in rows if row.extrapolates):
        beyond = _hosts({row.hosts for row in rows if row.extrapolates == why})
        lines.append(f"{why} on {beyond}: the error of communication there is not known")
    if doubtful := doubts(rows):
        lines.append(
            f"warning: computation on {_hosts(doubtful)} differs by a factor of up to "
            f"{max(doubtful.values()):.1f} between repetitions, or exceeds that on fewer hosts; "
            "measure on an idle machine, or with more --seconds"
        )
    return ["", *lines] if lines else []
