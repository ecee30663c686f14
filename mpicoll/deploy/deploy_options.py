"""Command line of ``python -m mpicoll.deploy``. Needs no MPI and no NumPy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mpicoll import __version__
from mpicoll.errors import UsageError
from mpicoll.train.config import parse_synthetic
from mpicoll.train.option_types import integer, names
from mpicoll.train.options import HelpRequested

_DESCRIPTION = """\
Compress trained models for deployment, and evaluate them. MODEL is a folder of checkpoints of python -m mpicoll.train,
of which the newest is read; a file that a command wrote; or a safetensors file of dense layers with ReLU between them,
named as PyTorch names them: NAME.weight and NAME.bias. Commands run alone or on many ranks under mpirun, and follow
each other on files."""
_EPILOG = """\
examples:
  python -m mpicoll.deploy evaluate runs/a
  mpirun -n 4 python -m mpicoll.deploy prune runs/a --sparsity 0.9 -o sparse.safetensors
  mpirun -n 4 python -m mpicoll.deploy prune runs/a --sparsity 0.5 --structured channels -o half.safetensors
  python -m mpicoll.deploy quantize half.safetensors --weights int8 --activations int8 -o half-int8.safetensors
  mpirun -n 4 python -m mpicoll.deploy distill --teacher runs/a --hidden 32 -o student.safetensors
  python -m mpicoll.deploy export half-int8.safetensors -o half-int8.onnx
  python -m mpicoll.deploy report runs/a sparse.safetensors half-int8.safetensors --html report.html

python -m mpicoll.deploy COMMAND --help has the options of a command."""
COMMANDS = {
    "evaluate": "accuracy, bytes, operations, latency and throughput",
    "quantize": "integer weights and activations",
    "prune": "remove weights or channels, and train the others further",
    "distill": "train a smaller model on the logits of another one",
    "lowrank": "replace dense layers by products of two narrower ones",
    "export": "write an ONNX file, and compare its outputs where onnxruntime is installed",
    "report": "compare models in a table, a plot and an HTML page",
}
DEPLOYABLE = ("mlp", "logistic", "conv")
"""Models of the trainer whose layers can be compressed and deployed."""
TABLES = (".csv", ".parquet")
"""Endings of data sets with named columns."""
SHARD_TEACHER = ("auto", "always", "never")
DATA_FIELDS = ("dataset", "labels", "target", "test_fraction", "seed")
"""Options of the trainer that say which samples a model learns from and which ones test it."""


@dataclass(frozen=True)
class DeployOptions:
    """Options of a command; None where the command does not have them.

    Attributes
    ----------
    models
        The models, in the order of the command line.
    data
        Data options that were given, by name.
    chosen
        The other options of the command, by name.
    """

    command: str
    models: tuple[str, ...]
    output: str | None
    json: str | None
    progress: bool
    quiet: bool
    data: dict[str, Any]
    chosen: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _real(least: float, most: float, *, open_start: bool = False, open_end: bool = False):  # type: ignore[no-untyped-def]
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most or (open_start and value == least) or (open_end and value == most):
            start, end = "above" if open_start else "from", "below" if open_end else "to"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {start} {least:g} {end} {most:g}")
        return value

    return convert


def _widths(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 10**9 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths such as 64 or 128,64")
    return tuple(map(int, words))


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--dataset", metavar="NAME", help="data set, see python -m mpicoll.train --help (default: the "
                       "one on which the model was trained)")  # fmt: skip
    group.add_argument("--labels", metavar="FILE.npy", help="the labels of a --dataset FILE.npy")
    group.add_argument("--target", type=names, metavar="NAME", help="column of a --dataset FILE.csv or FILE.parquet "
                       "that holds the labels (default: as when the model was trained, or the last)")  # fmt: skip
    group.add_argument("--test-fraction", type=_real(0, 1, open_end=True), metavar="X",
                       help="fraction that is held out for testing "
                       "(default: as when the model was trained)")  # fmt: skip
    group.add_argument("--seed", type=integer(0), metavar="N", help="seed of the split, of the order of samples and "
                       "of initial weights (default: as when the model was trained)")  # fmt: skip


def _add_output(parser: argparse.ArgumentParser, *, file: str | None) -> None:
    group = parser.add_argument_group("output")
    if file is not None:
        group.add_argument("-o", "--output", metavar=file, required=True, help="file to write; replaced if it is "
                           "there, but never the one that is read")  # fmt: skip
    group.add_argument("--json", metavar="FILE", help="write the results to a JSON file")
    group.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    group.add_argument("--timeout", type=_real(0, 1e6, open_start=True), default=60.0, metavar="SECONDS",
                       help="longest time that a collective waits for a rank (default: %(default)g)")  # fmt: skip
    group.add_argument("-h", "--help", action="store_true", help="print this text")


def _add_training(parser: argparse.ArgumentParser, *, epochs: int | None, rate: float) -> None:
    group = parser.add_argument_group("training")
    if epochs is not None:
        group.add_argument("--epochs", type=integer(0), default=epochs, metavar="N",
                           help="passes over the data (default: %(default)s)")  # fmt: skip
    group.add_argument("--batch", type=integer(1), default=64, metavar="N",
                       help="samples of a step, over all ranks (default: %(default)s)")  # fmt: skip
    group.add_argument("--lr", type=_real(0, 1e6), default=rate, metavar="X",
                       help="largest learning rate; it falls to 0 as a cosine (default: %(default)s)")  # fmt: skip
    group.add_argument("--momentum", type=_real(0, 1, open_end=True), default=0.9, metavar="X",
                       help="decay of the momentum (default: %(default)s)")  # fmt: skip
    group.add_argument("--weight-decay", type=_real(0, 1e6), default=5e-4, metavar="X",
                       help="L2 penalty of weights (default: %(default)s)")  # fmt: skip


def _add_loss(group: argparse._ArgumentGroup, teacher: str, alpha: float) -> None:
    group.add_argument("--alpha", type=_real(0, 1), default=alpha, metavar="X",
                       help=f"weight of the logits of {teacher} in the loss; 0: the labels alone "
                       "(default: %(default)g)")  # fmt: skip
    group.add_argument("--temperature", type=_real(0, 1e6, open_start=True), default=4.0, metavar="T",
                       help=f"temperature of the softmax of {teacher} (default: %(default)g)")  # fmt: skip


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quantisation")
    group.add_argument("--weights", choices=("int8", "int4"), default="int8",
                       help="codes of weights, with a scale for each output (default: %(default)s)")  # fmt: skip
    group.add_argument("--activations", choices=("int8", "none"), default="int8", help="int8: inputs of layers have "
                       "codes of 8 bits, and products are "
                       "computed in integers; none: float32 (default: int8)")  # fmt: skip
    group.add_argument("--calibrate", type=integer(1), default=512, metavar="N",
                       help="training samples whose activations set the ranges (default: %(default)s)")  # fmt: skip
    group.add_argument("--percentile", type=_real(50, 100, open_start=True), default=100.0, metavar="P",
                       help="percent of the activations within the range; 100: minimum and maximum "
                       "(default: %(default)g)")  # fmt: skip
    group.add_argument("--qat", type=integer(0), default=0, metavar="EPOCHS", help="epochs of quantisation-aware "
                       "training (default: %(default)s)")  # fmt: skip
    _add_training(parser, epochs=None, rate=0.01)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pruning")
    group.add_argument("--sparsity", type=_real(0, 1, open_start=True, open_end=True), required=True, metavar="X",
                       help="share of the weights, or of the hidden units and filters, that are removed")  # fmt: skip
    group.add_argument("--scope", choices=("global", "layer"), default="global", help="compare the weights of all "
                       "layers, or remove the same share of each (default: %(default)s)")  # fmt: skip
    group.add_argument("--structured", choices=("none", "channels"), default="none", help="remove single weights, or "
                       "whole hidden units and filters, which makes the matrices smaller (default: none)")  # fmt: skip
    group.add_argument("--schedule", choices=("cubic", "constant"), default="cubic", help="remove more and more in 60 "
                       "percent of the steps, or everything after the first step (default: cubic)")  # fmt: skip
    _add_training(parser, epochs=20, rate=0.05)
    _add_loss(group, "the original", 0.5)


def _add_distill(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distillation")
    group.add_argument("--teacher", required=True, metavar="MODEL", help="model whose logits are learned from")
    group.add_argument("--shard-teacher", choices=SHARD_TEACHER, default="auto", help="always: each rank holds a part "
                       "of every layer of the teacher, and layers are gathered one after the other; never: each rank "
                       "holds the whole teacher; auto: parts if whole teachers would take more than half of the memory "
                       "that is left to a node's ranks (default: auto)")  # fmt: skip
    _add_loss(group, "the teacher", 0.5)
    group.add_argument("--labeled", type=integer(1), metavar="N", help="training samples, drawn by --seed, whose "
                       "labels are used; the others have the teacher's logits alone, and are left out with --alpha 0 "
                       "(default: all)")  # fmt: skip
    group.add_argument("--model", choices=DEPLOYABLE, default="mlp",
                       help="kind of the new model (default: %(default)s)")  # fmt: skip
    group.add_argument("--hidden", type=_widths, metavar="N[,N...]", help="widths of the hidden layers of mlp")
    group.add_argument("--filters", type=integer(1), metavar="N", help="filters of conv")
    _add_training(parser, epochs=40, rate=0.05)


def _add_lowrank(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("factors")
    group.add_argument("--rank", type=integer(1), metavar="R", help="rank of every product")
    group.add_argument("--energy", type=_real(0, 1, open_start=True), metavar="X", help="share of the squares of the "
                       "singular values that a product keeps, such as 0.99")  # fmt: skip
    _add_training(parser, epochs=0, rate=0.02)
    _add_loss(group, "the original", 0.5)


def _add_report(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("page")
    group.add_argument("--html", metavar="FILE", help="write a page with table and plot; needs mpicoll[plot,report]")


def _command_parser(command: str) -> argparse.ArgumentParser:
    model = {"distill": "--teacher MODEL", "report": "MODEL [MODEL ...]"}.get(command, "MODEL")
    parser = _Parser(
        prog=f"python -m mpicoll.deploy {command}",
        usage=f"[mpirun -n RANKS] python -m mpicoll.deploy {command} {model} [options]",
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}.",
        add_help=False,
        allow_abbrev=False,
    )
    if command != "distill":
        parser.add_argument("models", nargs="*", metavar="MODEL", help="folder of checkpoints, or safetensors file")
    if command == "evaluate":
        parser.add_argument("--original", metavar="MODEL", help="model to compare with")
    more = {"quantize": _add_quantize, "prune": _add_prune, "distill": _add_distill, "lowrank": _add_lowrank,
            "report": _add_report}  # fmt: skip
    if command in more:
        more[command](parser)
    _add_data(parser)
    file = {"evaluate": None, "report": None, "export": "FILE.onnx"}.get(command, "FILE.safetensors")
    _add_output(parser, file=file)
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()]
    head = "usage: [mpirun -n RANKS] python -m mpicoll.deploy COMMAND [MODEL ...] [options]"
    return "\n".join([head, "", _DESCRIPTION, "", "commands:", *lines, "", _EPILOG])


def parse_deploy(argv: Sequence[str]) -> DeployOptions:
    """Return the options of a command line.

    Raises
    ------
    UsageError
        If the command or an option is unknown, or out of range; the message is one line.
    HelpRequested
        If ``--help`` or ``--version`` was given; the message is the text to print.
    """
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        raise HelpRequested(_overview())
    if words[0] == "--version":
        raise HelpRequested(f"mpicoll {__version__}")
    command = words[0]
    if command not in COMMANDS:
        raise UsageError(f"{command!r:.80} is not a command; commands are {', '.join(COMMANDS)}")
    parser = _command_parser(command)
    if "-h" in words or "--help" in words:
        raise HelpRequested(parser.format_help().rstrip())
    options = vars(parser.parse_args(words[1:]))
    options.pop("help")
    data = {name: value for name in DATA_FIELDS if (value := options.pop(name)) is not None}
    common = {name: options.pop(name) for name in ("json", "progress", "quiet")}
    models, output = tuple(options.pop("models", ())), options.pop("output", None)
    _check(command, models, output, options, data)
    return DeployOptions(command, models, output, **common, data=data, chosen=options)


def _check(
    command: str, models: tuple[str, ...], output: str | None, chosen: dict[str, Any], data: dict[str, Any]
) -> None:
    """Refuse options that contradict each other, or are missing."""
    if command not in ("distill", "report") and len(models) != 1:
        raise UsageError(f"{command} takes one MODEL, not {len(models)}")
    if command == "report" and not models:
        raise UsageError("report takes at least one MODEL")
    ending = ".onnx" if command == "export" else ".safetensors"
    if output is not None and not output.endswith(ending):
        raise UsageError(f"--output {output}: the name must end in {ending}")
    if command == "lowrank" and (chosen["rank"] is None) == (chosen["energy"] is None):
        raise UsageError("lowrank takes either --rank or --energy")
    if command == "distill":
        if chosen["epochs"] == 0:
            raise UsageError("--epochs 0: a new model has to be trained")
        if (chosen["hidden"] is not None) != (chosen["model"] == "mlp"):
            raise UsageError("--hidden is needed with --model mlp, and for no other")
        if (chosen["filters"] is not None) != (chosen["model"] == "conv"):
            raise UsageError("--filters is needed with --model conv, and for no other")
    dataset = data.get("dataset", "")
    if data.get("labels") is not None and not dataset.endswith(".npy"):
        raise UsageError("--labels is for a --dataset FILE.npy")
    if dataset.endswith(".npy") and "labels" not in data:
        raise UsageError(f"--dataset {dataset} needs --labels FILE.npy")
    if "target" in data and not dataset.endswith(TABLES):
        raise UsageError(f"--target {','.join(data['target'])} is for a --dataset FILE.csv or FILE.parquet")
    if dataset.startswith("synthetic"):
        parse_synthetic(dataset)
