"""Command line of a search. Needs no MPI, no Optuna and no NumPy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mpicoll.errors import UsageError
from mpicoll.search.search_space import Parameter, parse_space
from mpicoll.train.option_types import integer
from mpicoll.train.options import HelpRequested

SAMPLERS = ("tpe", "random", "grid", "cmaes")
PRUNERS = ("none", "asha", "hyperband", "median")
METRICS = {"test_accuracy": "maximize", "test_loss": "minimize", "train_loss": "minimize"}
"""Results of the trainer that can be optimised, and the direction."""
_DESCRIPTION = """\
Search for the trainer's options: trials on groups of ranks, several at a time. Samplers and pruners are Optuna's;
rank 0 asks it, and trains as all others do. A trial gives the same bits as the same run of python -m mpicoll.train
alone."""
_EPILOG = """\
search space (--space, several options):
  lr=log:1e-4..1e-1      real numbers, on a logarithmic scale
  momentum=0..0.99       real numbers
  hidden=int:16..256     whole numbers; int:16..256:16 in steps of 16; logint:16..256 on a logarithmic scale
  batch=32,64,128        one of these values
  hidden=64;128,64       one of these values, which contain commas
  nesterov=true,false    an option that is given or not
  Options that have a meaning with some models or optimizers only (hidden, filters, momentum, beta1, ...) are chosen in
  trials with those.

All other options are the trainer's, the same in all trials: see python -m mpicoll.train --help. In names of files
there, {trial} stands for the number of the trial. Trials are compared by test samples, see --test-fraction
there; what is found is a little better on them than on samples that no trial has seen.

examples:
  mpirun -n 8 python -m mpicoll.search --space lr=log:1e-3..1 batch=32,64,128 --trials 32 --epochs 10
  mpirun -n 8 python -m mpicoll.search --group 2 --pruner asha --storage study.journal --plot plots \\
      --space lr=log:1e-3..1 model=mlp,conv hidden=int:16..256 -- --epochs 27 --seed 1
  mpirun -n 4 python -m mpicoll.search --sampler grid --space optimizer=sgd,momentum lr=0.01,0.1 --epochs 5
  mpirun -n 8 python -m mpicoll.search --population 16 --space lr=log:1e-3..1 weight-decay=log:1e-5..1e-2 --epochs 30"""


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Attributes
    ----------
    space
        The parameters that trials choose.
    group
        Ranks of a trial.
    trials
        Number of trials; None for all points of the grid.
    metric
        Result of the trainer that is optimised.
    points
        Values of a range without a step on a grid.
    reduction
        Factor between the numbers of epochs at which asha and hyperband compare trials.
    storage, study
        Journal file, and name of the study in it.
    sampler_seed
        Seed of the sampler.
    plot, best, json
        Folder of plots, folder of the checkpoint of the best member of a population, and file of the results.
    population, interval, quantile
        Members of population-based training, epochs between two generations, and fraction of the members that are
        replaced; None, 1 and 0.25 for a study of trials.
    trainer
        The trainer's options.
    """

    space: tuple[Parameter, ...]
    group: int
    trials: int | None
    sampler: str
    pruner: str
    metric: str
    points: int
    reduction: int
    storage: str | None
    study: str
    sampler_seed: int
    plot: str | None
    best: str | None
    json: str | None
    progress: bool
    quiet: bool
    population: int | None
    interval: int
    quantile: float
    trainer: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction above 0 and at most 0.5")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m mpicoll.search",
        usage="mpirun -n RANKS python -m mpicoll.search --space NAME=VALUES ... [options] [--] [trainer's options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    _add_search(parser)
    _add_study(parser)
    _add_population(parser)
    _add_output(parser)
    return parser


def _add_search(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument(
        "--space",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUES",
        help="options of the trainer that trials choose, see below",
    )
    group.add_argument(
        "--group",
        type=integer(1),
        default=1,
        metavar="N",
        help="ranks of a trial; the number of ranks is divisible by it (default: %(default)s)",
    )
    group.add_argument(
        "--trials",
        type=integer(1),
        metavar="N",
        help="trials of the study, those of earlier runs included (default: 32; with --sampler grid all points, "
        "and never more)",
    )
    group.add_argument(
        "--sampler",
        choices=SAMPLERS,
        default="tpe",
        help="tree-structured Parzen estimator, "
        "independent draws, every combination, or CMA-ES, which is for numbers (default: tpe)",
    )
    group.add_argument(
        "--points",
        type=integer(2),
        default=4,
        metavar="N",
        help="with --sampler grid: values of a range without a step (default: %(default)s)",
    )


def _add_study(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pruning, metric and storage")
    group.add_argument(
        "--pruner",
        choices=PRUNERS,
        default="none",
        help="ends trials that fall behind after an "
        "epoch: successive halving, several brackets of it, or below the median of the others "
        "(default: none)",
    )
    group.add_argument(
        "--reduction",
        type=integer(2),
        default=3,
        metavar="N",
        help="asha and hyperband: trials are "
        "compared after 1, N, N * N, ... epochs, and one in N goes on (default: %(default)s)",
    )
    group.add_argument(
        "--metric",
        choices=tuple(METRICS),
        default="test_accuracy",
        help="result that is optimised (default: %(default)s)",
    )
    group.add_argument(
        "--sampler-seed",
        type=integer(0),
        default=0,
        metavar="N",
        help="seed of the sampler, and of a population's decisions (default: %(default)s)",
    )
    group.add_argument(
        "--storage",
        metavar="FILE",
        help="journal that keeps the study, or folder that keeps the population; what is there goes on, "
        "and repeats no trial that has finished (default: none)",
    )
    group.add_argument(
        "--study", default="study", metavar="NAME", help="name of the study in the journal (default: %(default)s)"
    )


def _add_population(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "population-based training",
        "Members train at the same time. After each generation the worst continue from the best, with changed options.",
    )
    group.add_argument(
        "--population",
        type=integer(2),
        metavar="N",
        help="members, at least one for each group; --space then has options that may change between epochs",
    )
    group.add_argument("--interval", type=integer(1), metavar="EPOCHS", help="epochs of a generation (default: 1)")
    group.add_argument(
        "--quantile",
        type=_fraction,
        metavar="X",
        help="fraction of the members that are replaced, one at least, and of those that they continue from "
        "(default: 0.25)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--plot",
        metavar="FOLDER",
        help="draw history, importance of parameters, and parallel coordinates; of a population, "
        "score and parameters of its members over time",
    )
    group.add_argument(
        "--best",
        metavar="FOLDER",
        help="with --population: write the best member's model as a checkpoint, for python -m mpicoll.deploy",
    )
    group.add_argument("--json", metavar="FILE", help="write all trials and the best one")
    group.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors and the best command")
    group.add_argument("-h", "--help", action="store_true", help="print this text")


def parse_search(argv: Sequence[str]) -> SearchOptions:
    """Return the options of a command line.

    Raises
    ------
    UsageError
        If an option is out of range, or there is no search space; the message is one line.
    HelpRequested
        If ``--help`` was given; the message is the text to print.
    """
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    known, others = parser.parse_known_args(words[:cut])
    options = vars(known)
    if options.pop("help"):
        raise HelpRequested(parser.format_help().rstrip())
    if not options["space"]:
        raise UsageError("--space: there is nothing to search for; see --help")
    options["space"] = parse_space(options["space"])
    _complete_population(options)
    if options["trials"] is None and options["sampler"] != "grid":
        options["trials"] = 32
    return SearchOptions(**options, trainer=(*others, *words[cut + 1 :]))


def _complete_population(options: dict[str, Any]) -> None:
    """Fill in the defaults of population-based training; refuse options that have no meaning with it or without it."""
    without = ("interval", "quantile", "best")
    if options["population"] is None:
        for name in without:
            if options[name] is not None:
                raise UsageError(f"--{name} has no meaning without --population")
    else:
        defaults = {"trials": None, "sampler": "tpe", "pruner": "none", "points": 4, "reduction": 3, "study": "study"}
        for name, default in defaults.items():
            if options[name] != default:
                raise UsageError(f"--{name} has no meaning with --population")
    options["interval"] = options["interval"] or 1
    options["quantile"] = options["quantile"] or 0.25
