"""The options of a training run: one frozen record, and the command line that makes it. No MPI.

NumPy is imported only where ``--compression`` is given, to see whether there is such a compressor.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from mpicoll import __version__
from mpicoll.train.failures import UsageError

MODELS = ("mlp", "logistic", "conv")
SCHEDULES = ("cosine", "constant", "step")
DTYPES = ("float32", "float64")
FEEDBACK = {"auto": None, "on": True, "off": False}
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class HelpRequested(Exception):
    """Not an error: the user asked for a text, which is the message."""


@dataclass(frozen=True)
class Synthetic:
    """``synthetic:N[xF][xC]``: N samples with F features in C classes."""

    count: int
    features: int = 64
    classes: int = 10


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run; ranks must hold equal ones.

    Attributes
    ----------
    batch
        Samples a step over all ranks together.
    hidden, filters
        For the model that has them; empty and 0 otherwise.
    steps
        Stop after so many steps; None for all epochs.
    warmup
        Steps during which the learning rate rises.
    compression
        How gradients are compressed on their way; None if they are not.
    error_feedback
        ``"auto"``, ``"on"`` or ``"off"``: whether what that loses comes with the next step.
    warmup_dense
        Steps at the beginning that are not compressed.
    timeout
        Seconds that a collective may wait for a rank.
    """

    dataset: str = "digits"
    labels: str | None = None
    test_fraction: float = 0.2
    model: str = "mlp"
    hidden: tuple[int, ...] = (256, 128)
    filters: int = 0
    dtype: str = "float32"
    epochs: int = 40
    steps: int | None = None
    batch: int = 64
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    warmup: int = 20
    schedule: str = "cosine"
    seed: int = 0
    algorithm: str = "auto"
    bucket_bytes: int = 4 << 20
    compression: str | None = None
    error_feedback: str = "auto"
    warmup_dense: int = 0
    timeout: float = 60.0
    json: str | None = None
    log_steps: str | None = None
    progress: bool = True
    quiet: bool = False


_HIDDEN = (256, 128)
_FILTERS = 16
_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}

_DESCRIPTION = """\
Train a model with data-parallel stochastic gradient descent: every rank takes its part of each batch, gradients are
added up by mpicoll, and all ranks hold the same model, bit for bit. A run gives the same loss curve on any number of
ranks, up to rounding."""

_EPILOG = """\
data sets (files are read as data only, never unpickled):
  digits               8 x 8 images of digits, from scikit-learn
  DIRECTORY            the four IDX files of MNIST and its relatives, gzipped or not
  FILE.npz             arrays x_train, y_train, x_test, y_test; or x and y, which are split
  FILE.npy             samples by row, mapped into memory; needs --labels
  synthetic:N[xF][xC]  N samples, F features (64), C classes (10), computed when they are used
  Unsigned bytes are divided by 255, other numbers are taken as they are.

examples:
  mpirun -n 8 python -m mpicoll.train
  mpirun -n 8 python -m mpicoll.train --model conv --epochs 10 --json result.json
  mpirun -n 8 python -m mpicoll.train --dataset synthetic:100000x784x10 --hidden 512,256 --batch 1024
  mpirun -n 8 python -m mpicoll.train --dataset ~/mnist --algorithm ring --epochs 5
  mpirun -n 8 python -m mpicoll.train --compression sign --warmup-dense 100
  mpirun -n 8 python -m mpicoll.train --dataset x.npy --labels y.npy --model logistic"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _integer(least: int) -> Any:
    def convert(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return convert


def _real(least: float, below: float = math.inf, *, open_start: bool = False) -> Any:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value < below) or (open_start and value == least):
            start = "above" if open_start else "of at least"
            end = "" if below == math.inf else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {start} {least:g}{end}")
        return value

    return convert


def _widths(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths such as 64 or 128,64")
    return tuple(int(width) for width in text.split(","))


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,12})([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 65536, 64K or 4M")
    return int(match[1]) * _UNITS[match[2]]


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--dataset", metavar="NAME", help="what to learn, see below (default: %(default)s)")
    group.add_argument("--labels", metavar="FILE.npy", help="the labels of a --dataset FILE.npy, integers from 0")
    group.add_argument(
        "--test-fraction", type=_real(0, 1), metavar="X", help="part that is held out for testing, chosen by --seed, "
        "where the data set has no test part of its own (default: %(default)s)"
    )  # fmt: skip


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", choices=MODELS, help="multilayer perceptron, logistic regression, or 3 x 3 "
                       "convolution, ReLU, pooling and a dense layer (default: %(default)s)")  # fmt: skip
    group.add_argument("--hidden", type=_widths, default=None, metavar="N[,N...]",
                       help=f"widths of the hidden layers of mlp (default: {','.join(map(str, _HIDDEN))})")  # fmt: skip
    group.add_argument("--filters", type=_integer(1), default=None, metavar="N",
                       help=f"filters of conv (default: {_FILTERS})")  # fmt: skip
    group.add_argument("--dtype", choices=DTYPES, help="of parameters and gradients (default: %(default)s)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=_integer(1), metavar="N", help="passes over the data (default: %(default)s)")
    group.add_argument("--steps", type=_integer(1), metavar="N", help="stop after N steps, if epochs do not end before")
    group.add_argument("--batch", type=_integer(1), metavar="N",
                       help="samples a step, all ranks together (default: %(default)s)")  # fmt: skip
    group.add_argument("--lr", type=_real(0), metavar="X", help="learning rate at its highest (default: %(default)s)")
    group.add_argument("--momentum", type=_real(0, 1), metavar="X", help="0 for none (default: %(default)s)")
    group.add_argument("--nesterov", action="store_true", help="look ahead along the momentum")
    group.add_argument("--weight-decay", type=_real(0), metavar="X",
                       help="L2 penalty, added to the gradient of weights but not of biases "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--warmup", type=_integer(0), metavar="STEPS",
                       help="steps over which the learning rate rises from 0 (default: %(default)s)")  # fmt: skip
    group.add_argument("--schedule", choices=SCHEDULES, help="what the learning rate does then: fall to 0 along a "
                       "cosine, stay, or fall to a tenth at one half and again at three quarters of the run "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--seed", type=_integer(0), metavar="N",
                       help="decides initial weights, order and split (default: %(default)s)")  # fmt: skip


def _add_communication(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("communication")
    group.add_argument("--algorithm", metavar="NAME", help="how gradients are added up: auto, native (the MPI "
                       "library), ring, ...; `python -m mpicoll explain` has ours (default: %(default)s)")  # fmt: skip
    group.add_argument("--bucket-bytes", type=_nbytes, metavar="BYTES",
                       help="the most that one Allreduce takes, such as 64K or 4M (default: 4M)")  # fmt: skip
    group.add_argument("--compression", metavar="SPEC", help="how gradients (float32) are compressed on their way: "
                       "fp16, int8, int4:block=128, sign, ... (default: not at all)")  # fmt: skip
    group.add_argument("--error-feedback", choices=tuple(FEEDBACK), help="whether what compression loses is kept and "
                       "comes with the next step; auto: if the compressor needs it (default: %(default)s)")  # fmt: skip
    group.add_argument("--warmup-dense", type=_integer(0), metavar="STEPS",
                       help="steps before compression begins (default: %(default)s)")  # fmt: skip
    group.add_argument("--timeout", type=_real(0, open_start=True), metavar="SECONDS",
                       help="how long a collective waits for a rank (default: %(default)s)")  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write results, options and versions")
    group.add_argument("--log-steps", metavar="FILE.csv", help="write step, epoch, learning rate, loss and accuracy")
    group.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    group.add_argument("-h", "--help", action="store_true", help="print this text")
    group.add_argument("--version", action="store_true", help="print the version")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mpicoll.train",
        usage="mpirun -n RANKS python -m mpicoll.train [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    for add in (_add_data, _add_model, _add_training, _add_communication, _add_output):
        add(parser)
    parser.set_defaults(**{name: value for name, value in _DEFAULTS.items() if name not in ("hidden", "filters")})
    return parser


def parse(argv: Sequence[str]) -> TrainConfig:
    """Read the command line.

    Raises
    ------
    UsageError
        If an option is unknown, out of range, or contradicts another one; the message is one line.
    HelpRequested
        If ``--help`` or ``--version`` was given; the message is the text to print.
    """
    parser = _parser()
    options = vars(parser.parse_args(argv))
    if options.pop("help"):
        raise HelpRequested(parser.format_help().rstrip())
    if options.pop("version"):
        raise HelpRequested(f"mpicoll {__version__}")
    _check_model(options)
    _check_data(options)
    _check_compression(options)
    if options["nesterov"] and not options["momentum"]:
        raise UsageError("--nesterov needs a --momentum above 0")
    return TrainConfig(**options)


def _check_model(options: dict[str, Any]) -> None:
    model = options["model"]
    if options["hidden"] is not None and model != "mlp":
        raise UsageError(f"--hidden is for --model mlp, not {model}")
    if options["filters"] is not None and model != "conv":
        raise UsageError(f"--filters is for --model conv, not {model}")
    options["hidden"] = options["hidden"] or (_HIDDEN if model == "mlp" else ())
    options["filters"] = options["filters"] or (_FILTERS if model == "conv" else 0)


def _check_data(options: dict[str, Any]) -> None:
    dataset, labels = options["dataset"], options["labels"]
    if dataset.endswith(".npy") and labels is None:
        raise UsageError(f"--dataset {dataset} needs --labels FILE.npy")
    if labels is not None and not dataset.endswith(".npy"):
        raise UsageError(f"--labels is for a --dataset FILE.npy, not {dataset}")
    if dataset.startswith("synthetic"):
        parse_synthetic(dataset)


def _check_compression(options: dict[str, Any]) -> None:
    spec, feedback = options["compression"], options["error_feedback"]
    if spec is None:
        if feedback != "auto" or options["warmup_dense"]:
            name = "--warmup-dense" if feedback == "auto" else "--error-feedback"
            raise UsageError(f"{name} has no meaning without --compression")
        return
    from mpicoll.compression import compressor

    try:
        made = compressor(spec)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if options["dtype"] != "float32":
        raise UsageError(f"--compression is for --dtype float32, not {options['dtype']}")
    if feedback == "on" and made.unbiased:
        raise UsageError(f"--error-feedback on is not for --compression {spec}, which is unbiased")


def parse_synthetic(text: str) -> Synthetic:
    """Read ``synthetic:N[xF][xC]``.

    Raises
    ------
    UsageError
        If that is not what `text` is, or a number is out of range.
    """
    match = re.fullmatch(r"synthetic:(\d{1,15})(?:x(\d{1,9}))?(?:x(\d{1,5}))?", text)
    if match is None:
        raise UsageError(f"--dataset {text} is not of the form synthetic:N[xF][xC], such as synthetic:10000x64x10")
    found = Synthetic(*(int(number) for number in match.groups() if number is not None))
    if found.count < 2 or found.features < 1 or found.classes < 2:
        raise UsageError(f"--dataset {text} needs at least 2 samples, 1 feature and 2 classes")
    return found
