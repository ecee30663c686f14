"""Command line of a training run. Needs no MPI, and NumPy only to check ``--compression``."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from mpicoll import __version__
from mpicoll.errors import UsageError
from mpicoll.train.config import (
    AVERAGINGS,
    BALANCES,
    BASE_BATCH,
    END,
    FAILURES,
    FEEDBACK,
    GRAPHS,
    MODES,
    OPTIMIZERS,
    PIPELINE_SCHEDULES,
    PUSHES,
    SCALINGS,
    SCHEDULES,
    SHARDINGS,
    SILENCES,
    TrainConfig,
)
from mpicoll.train.model_options import DATASETS, add_data, add_model
from mpicoll.train.option_checks import DEFAULTS, LATER, complete
from mpicoll.train.option_types import integer, nbytes, real
from mpicoll.train.strategies import STRATEGIES

_OF_OPTIMIZERS = {
    "momentum": f"momentum and lars: decay of the momentum (default: {DEFAULTS['momentum']})",
    "beta1": "adam, adamw and lamb: decay of the mean of gradients (default: 0.9)",
    "beta2": "adam, adamw and lamb: decay of the mean of their squares (default: 0.999)",
    "epsilon": "adagrad, adam, adamw and lamb: number added to the divisor (default: 1e-10, 1e-8, 1e-8, 1e-6)",
    "trust": "lars: factor of each array's trust ratio (default: 0.001)",
}
_DESCRIPTION = """\
Train a model with data-parallel stochastic gradient descent: every rank takes its part of each batch, gradients are
summed by mpicoll, and all ranks hold the same model, bit for bit. The loss curve is the same on any number of ranks, up
to rounding. Some strategies differ from this, see --strategy."""

_EPILOG = f"""\
{DATASETS}

examples:
  mpirun -n 8 python -m mpicoll.train
  mpirun -n 8 python -m mpicoll.train --model conv --epochs 10 --json result.json
  mpirun -n 8 python -m mpicoll.train --dataset synthetic:100000x784x10 --hidden 512,256 --batch 1024
  mpirun -n 8 python -m mpicoll.train --dataset ~/mnist --algorithm ring --epochs 5
  mpirun -n 8 python -m mpicoll.train --model transformer --dataset text:book.txt --clip 1
  mpirun -n 8 python -m mpicoll.train --compression sign --warmup-dense 100
  mpirun -n 8 python -m mpicoll.train --strategy parameter_server --servers 2 --staleness 4 --compression int8
  mpirun -n 8 python -m mpicoll.train --dataset x.npy --labels y.npy --model logistic"""


class HelpRequested(Exception):
    """Raised for ``--help`` and ``--version``; the message is the text to print."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=integer(1), metavar="N", help="passes over the data (default: %(default)s)")
    group.add_argument("--steps", type=integer(1), metavar="N", help="stop after N steps, if epochs do not end sooner; "
                       "this, or the end of the epochs, is also the end of --schedule")  # fmt: skip
    group.add_argument("--batch", type=integer(1), metavar="N",
                       help="samples in a batch, over all ranks (default: %(default)s)")  # fmt: skip
    group.add_argument("--optimizer", choices=OPTIMIZERS, help="update rule; parameter_server and peer_to_peer have "
                       "sgd to adam, gossip has momentum; not lars and lamb: --tensor "
                       "(default: momentum; adamw for --model transformer without asynchrony)")  # fmt: skip
    group.add_argument("--lr", type=real(0), metavar="X", help="largest learning rate (default: 0.1 for sgd "
                       "and momentum, 0.01 for adagrad and lamb, 0.001 for adam and adamw, 1 for lars)")  # fmt: skip
    group.add_argument("--scale-lr", choices=SCALINGS, help="multiply --lr by the samples of a step over --base-batch, "
                       "or by the square root of that (default: %(default)s)")  # fmt: skip
    group.add_argument("--base-batch", type=integer(1), metavar="N",
                       help=f"samples of a step for which --lr is meant (default: {BASE_BATCH})")  # fmt: skip
    for name, text in _OF_OPTIMIZERS.items():
        in_range = real(0, open_start=True) if name in ("epsilon", "trust") else real(0, 1)
        group.add_argument(f"--{name}", type=in_range, metavar="X", help=text)
    group.add_argument("--nesterov", action="store_true", help="Nesterov's momentum")
    group.add_argument("--weight-decay", type=real(0), metavar="X",
                       help="L2 penalty, added to the gradient of weights but not of biases "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--warmup", type=integer(0), metavar="STEPS",
                       help="steps over which the learning rate rises from 0 (default: %(default)s)")  # fmt: skip
    group.add_argument("--schedule", choices=SCHEDULES, help="learning rate after the warmup: cosine decay to 0, "
                       "constant, or decay to a tenth at one half and again at three quarters of the run "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--accumulate", type=integer(1), metavar="N", help="batches in a step: gradients are summed "
                       "over the ranks after the last one only (default: %(default)s)")  # fmt: skip
    group.add_argument("--clip", type=real(0, open_start=True), metavar="X",
                       help="largest L2 norm of all gradients together; larger ones are scaled down "
                       "(default: none)")  # fmt: skip
    group.add_argument("--seed", type=integer(0), metavar="N", help="seed of initial weights, of the order of "
                       "samples and of the split (default: %(default)s)")  # fmt: skip


def _add_communication(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("communication")
    group.add_argument("--balance", choices=BALANCES, help="parts of each batch: of equal size, or by the measured "
                       "pace of the ranks, so that none waits for a slow one (default: %(default)s)")  # fmt: skip
    group.add_argument("--algorithm", metavar="NAME", help="algorithm of collectives: auto, native (the MPI library), "
                       "ring, ... (see python -m mpicoll algorithms); noop: gradients are not summed, which shows the "
                       "cost of communication (default: %(default)s)")  # fmt: skip
    group.add_argument("--bucket-bytes", type=nbytes, metavar="BYTES",
                       help="largest number of bytes of one Allreduce, such as 64K or 4M; with a sharded strategy, "
                       "smallest number of bytes of a parameter group; not for strategies without common steps "
                       "(default: 4M)")  # fmt: skip
    group.add_argument("--compression", metavar="SPEC", help="compressor of float32 gradients: fp16, int8, "
                       "int4:block=128, sign, ... (default: none)")  # fmt: skip
    group.add_argument("--error-feedback", choices=tuple(FEEDBACK), help="whether the error of compression is added "
                       "to the next step; auto: if the compressor needs it (default: %(default)s)")  # fmt: skip
    group.add_argument("--warmup-dense", type=integer(0), metavar="STEPS",
                       help="steps before compression begins (default: %(default)s)")  # fmt: skip
    group.add_argument("--timeout", type=real(0, open_start=True), metavar="SECONDS",
                       help="longest time that a collective waits for a rank (default: %(default)s)")  # fmt: skip


def _add_sharing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model parallelism and overlap")
    group.add_argument("--tensor", type=integer(1), metavar="N",
                       help="tensor parallelism: ranks that share each layer (default: %(default)s)")  # fmt: skip
    group.add_argument("--pipeline", type=integer(1), metavar="N", help="pipeline parallelism: stages, each with "
                       "some of the layers (default: %(default)s)")  # fmt: skip
    group.add_argument("--microbatches", type=integer(1), metavar="N",
                       help="micro-batches of a rank's samples in a pipeline (default: 4 with one)")  # fmt: skip
    group.add_argument("--pipeline-schedule", choices=PIPELINE_SCHEDULES, help="alternate forward and backward "
                       "passes, or all forward passes first, which needs more memory (default: 1f1b)")  # fmt: skip
    group.add_argument("--overlap", choices=("auto", "on", "off"), help="whether gradients are sent while others are "
                       "computed; auto: between hosts; no effect with sharded_gradients, with compression of "
                       "sharded_optimizer, and with lossy compression of replicated with --clip; with sharded, whether "
                       "parameters are gathered while others are used; auto: yes (default: %(default)s)")  # fmt: skip


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("strategy")
    group.add_argument("--strategy", choices=tuple(STRATEGIES), help="replicated: every rank holds the model, and all "
                       "take each step together; sharded_optimizer, sharded_gradients, sharded: ranks divide the "
                       "optimizer state, also the gradients, also the parameters; local: ranks take steps of their "
                       "own, and replicas are averaged periodically; parameter_server: workers push gradients to "
                       "servers without waiting for each other; peer_to_peer: to each other; gossip: each rank sends "
                       "half of its weight and replica to one other rank (default: replicated)")  # fmt: skip
    group.add_argument("--mode", choices=MODES, help="older names of strategies: sync, local, ps (parameter_server), "
                       "p2p (peer_to_peer), gossip")  # fmt: skip
    group.add_argument("--shard", choices=SHARDINGS, help="older names of strategies: none (replicated), optimizer "
                       "(sharded_optimizer), gradients (sharded_gradients), parameters (sharded)")  # fmt: skip
    group.add_argument("--offload", metavar="FOLDER", help="sharded strategies: keep the optimizer state in files of "
                       "this folder, without names, that are mapped into memory")  # fmt: skip
    group.add_argument("--recompute", type=integer(1), metavar="LAYERS", help="keep only the inputs of segments of so "
                       "many layers for the backward pass, and compute the rest once more: less memory for "
                       "activations, the same results")  # fmt: skip
    group.add_argument("--sync-every", type=integer(1), metavar="STEPS",
                       help="local: steps between two averages (default: 16)")  # fmt: skip
    group.add_argument("--averaging", choices=AVERAGINGS, help="local: replace replicas with their mean; move "
                       "replicas and a common centre towards each other; or only take the mean to evaluate it, and at "
                       "the end of training (default: periodic)")  # fmt: skip
    group.add_argument("--graph", choices=GRAPHS, help="gossip: ranks to which a rank sends in turn: those at "
                       "distances 1, 2, 4, ...; the next one; or all others (default: exponential)")  # fmt: skip
    group = parser.add_argument_group("strategy parameter_server")
    group.add_argument("--servers", type=integer(1), metavar="N", help="the last N ranks are servers, each of a "
                       "part of the parameters (default: 1)")  # fmt: skip
    group.add_argument("--replicas", type=integer(1), metavar="N", help="with --on-failure shrink: number of copies of "
                       "each part, on N servers, so that N - 1 servers may die (default: 1)")  # fmt: skip
    group.add_argument("--staleness", type=integer(0), metavar="STEPS", help="largest number of steps that a worker "
                       "may be ahead of the slowest one; 0: synchronous steps (default: no limit)")  # fmt: skip
    group.add_argument("--backup", type=integer(1), metavar="N", help="with --staleness 0: number of backup workers; "
                       "the last N gradients of each step are left out (default: 0)")  # fmt: skip
    group.add_argument("--damping", action="store_true", help="lower the learning rate of stale gradients, "
                       "which --staleness 0 does not have")  # fmt: skip
    group.add_argument("--push", choices=PUSHES, help="gradients go to mailboxes of the server, which applies "
                       "them, or workers add to the parameters directly (default: mailbox)")  # fmt: skip
    group.add_argument("--pull-compression", metavar="SPEC", help="compressor of the deltas by which servers publish "
                       "parameters, with error feedback: int4, topk:0.05, ... (default: none)")  # fmt: skip
    group.add_argument("--on-silence", choices=SILENCES, help="a worker without a sign of life for --timeout seconds "
                       "ends the run if others wait for it (raise), or is dropped (default: raise)")  # fmt: skip


def _slow(text: str) -> tuple[tuple[int, float], ...]:
    pairs = [re.fullmatch(r"(\d{1,9}):(\d{1,9}(?:\.\d{1,9})?)", each) for each in text.split(",")]
    found = tuple((int(pair[1]), float(pair[2])) for pair in pairs if pair is not None)
    if len(found) < len(pairs) or any(factor < 1 for _, factor in found) or len(dict(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 3:5 or 1:2,3:5 with factors from 1 on")
    return found


def _add_experiments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("experiments: artificial stragglers")
    group.add_argument("--slow", type=_slow, metavar="RANK:FACTOR", help="multiply a rank's time of computation by "
                       "FACTOR; several ranks: 1:2,3:5")  # fmt: skip
    group.add_argument("--jitter", type=real(0), metavar="SECONDS", help="mean of an exponentially distributed delay "
                       "of every rank in each step (default: 0)")  # fmt: skip
    group.add_argument("--step-seconds", type=real(0), metavar="SECONDS", help="shortest time of the gradients of a "
                       "step, as if the model were larger (default: 0)")  # fmt: skip


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints and failures")
    group.add_argument("--checkpoint", metavar="FOLDER", help="folder of checkpoints, of which the last two are kept")
    group.add_argument("--checkpoint-every", type=integer(1), metavar="STEPS",
                       help="steps between checkpoints (default: one after every epoch)")  # fmt: skip
    group.add_argument("--background-checkpoints", action="store_true", help="write checkpoints by a thread while "
                       "training goes on; takes memory for a copy of what a rank saves")  # fmt: skip
    group.add_argument("--resume", nargs="?", const="yes", choices=("yes", "fallback"), help="continue from the "
                       "newest checkpoint, on any number of ranks; fallback: from an older one if it is "
                       "damaged. With other --epochs or --steps, learning rates follow a schedule of another length "
                       "than before, unless --schedule is constant")  # fmt: skip
    group.add_argument("--on-failure", choices=FAILURES, default=END, help="a rank that dies ends the run (end), or "
                       "the others take the step again without it and go on (shrink): replicated or parameter_server, "
                       "under Open MPI's mpirun --with-ft ulfm (default: %(default)s)")  # fmt: skip
    group.add_argument("--spares", type=integer(0), metavar="N", help="with --on-failure shrink: number of ranks, the "
                       "last ones, that wait outside of training and take the place of dead ones "
                       "(default: %(default)s)")  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write results, options and versions to a JSON file")
    group.add_argument("--log-steps", metavar="FILE.csv", help="write step, epoch, learning rate, loss and accuracy "
                       "of every step")  # fmt: skip
    group.add_argument("--tensorboard", metavar="FOLDER", help="write event files for TensorBoard while training, in a "
                       "folder of the run's own")  # fmt: skip
    group.add_argument("--run", metavar="NAME", help="name of that folder (default: date and time)")
    group.add_argument("--plot", metavar="FILE.png", help="plot loss, accuracy, throughput and time by phase")
    group.add_argument("--trace", metavar="FILE.json", help="write a timeline of all ranks, for ui.perfetto.dev")
    group.add_argument("--trace-steps", type=integer(1), metavar="N", help="number of steps in the timeline, the last "
                       "ones; memory is bounded in any case (default: %(default)s)")  # fmt: skip
    group.add_argument("--evaluate-every", type=integer(1), metavar="EPOCHS",
                       help="epochs between evaluations of the test part, which is always evaluated at the end "
                       "(default: %(default)s)")  # fmt: skip
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
    groups = (add_data, add_model, _add_training, _add_communication, _add_strategies, _add_sharing, _add_checkpoints,
              _add_output, _add_experiments)  # fmt: skip
    for add in groups:
        add(parser)
    parser.set_defaults(**{name: value for name, value in DEFAULTS.items() if name not in LATER})
    return parser


def parse(argv: Sequence[str]) -> TrainConfig:
    """Return the options of a command line.

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
    complete(options)
    return TrainConfig(**options)


def option_names() -> tuple[str, ...]:
    """Return the names of all options, with underscores, but for ``help`` and ``version``."""
    names = (action.dest for action in _parser()._actions)
    return tuple(name for name in names if name not in ("help", "version"))


def without(argv: Sequence[str], names: Collection[str]) -> list[str]:
    """Return a command line without some options and their values.

    Parameters
    ----------
    names
        Names of the options, with underscores.
    """
    actions, words, found = _parser()._option_string_actions, list(argv), []
    while words:
        word = words.pop(0)
        option, equals, _ = word.partition("=")
        action = actions.get(option)
        if action is None or action.dest not in names:
            found.append(word)
        elif not equals and words and (action.nargs is None or (action.nargs == "?" and not words[0].startswith("-"))):
            words.pop(0)
    return found


def written(name: str, value: Any) -> list[str]:
    """Return an option as the command line has it, nothing where it is left out.

    Parameters
    ----------
    name
        Name of the option, with underscores.
    value
        True for an option without a value; None, False and () leave it out.
    """
    option = f"--{name.replace('_', '-')}"
    if name == "progress":
        return [] if value else ["--no-progress"]
    if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:  # a number of NumPy
        value = value.item()
    if value is None or value is False or value == ():
        return []
    return [option] if value is True else [f"{option}={value}"]
