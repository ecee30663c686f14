"""Trials a minute of a study, beside the same trials trained alone.

``python -m bench.search_pace`` starts itself on 8 ranks. In each round, a study runs in groups of ranks, and then the
same groups train the same trials (options, seeds and epochs) one after the other without a study: each group those with
numbers that leave its own as remainder. Both have the same processes, with all imports done and kernels loaded; the
seconds that this takes are shown apart. All trials are equally long, so that groups end together.

``ratio`` is the study's trials a minute over those alone. ``of training`` is stricter: it compares with groups that do
nothing but the steps and evaluations of their trials, without any preparation. Ratios are taken within rounds, so that
what else the machine does meets both sides; the last line has their median, and the values that it lies between.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import intervals, launch, text_tables
from bench.benchmark_options import is_launcher

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll import Intracomm
    from mpicoll.search.study_run import StudyResult
    from mpicoll.search.trainer_objective import TrainerObjective

PROGRAM = "bench.search_pace"
SPACE = ("lr=log:1e-3..1e-1", "momentum=0.5..0.95", "weight-decay=log:1e-5..1e-3")
"""Options that do not change how long a trial takes."""


@dataclass(frozen=True)
class Round:
    """One study, and its trials alone.

    Attributes
    ----------
    trials
        Number of trials of each side.
    study, alone
        Seconds from the first trial to the end of the last one.
    training
        Seconds of steps and evaluations of the trials alone, of the group for which they are most.
    busy
        Fraction of the study's seconds in which groups ran trials.
    differing
        Trials whose parameters differ from those of the same run alone, in any bit.
    """

    trials: int
    study: float
    alone: float
    training: float
    busy: float
    differing: int

    @property
    def ratio(self) -> float:
        """Trials a minute of the study over those alone."""
        return self.alone / self.study

    @property
    def of_training(self) -> float:
        """Trials a minute of the study over those of groups that only take the steps."""
        return self.training / self.study


def measure(arguments: argparse.Namespace, world: MPI.Intracomm) -> tuple[float, list[Round]]:
    """Return the seconds until ranks were ready, and the rounds; collective."""
    from mpicoll import Intracomm
    from mpicoll.search.search_space import parse_space
    from mpicoll.search.trainer_objective import TrainerObjective
    from mpicoll.train.process_facts import process_age

    fixed = ["--epochs", str(arguments.epochs), "--seed", str(arguments.seed), *arguments.trainer]
    objective = TrainerObjective(fixed, parse_space(SPACE), "test_accuracy")
    world = Intracomm(world, timeout=objective.config.timeout)
    part = world.Split(world.rank // arguments.group, world.rank)
    _round(objective, _short(arguments), 0, world, part)
    ready = process_age()
    rounds: list[Round] = []
    for number in range(1, arguments.rounds + 1):
        rounds.append(_round(objective, arguments, number, world, part))
        if world.rank == 0:
            done = rounds[-1]
            text = (
                f"round {number} of {arguments.rounds}: {done.study:.1f} s, alone {done.alone:.1f} s, {done.ratio:.1%}"
            )
            print(text, file=sys.stderr, flush=True)
    return ready, rounds


def _short(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return options of a round with a trial for each group, which loads everything."""
    return argparse.Namespace(**{**vars(arguments), "trials": arguments.ranks // arguments.group})


def _round(
    objective: TrainerObjective, arguments: argparse.Namespace, number: int, world: Intracomm, part: Intracomm
) -> Round:
    """Run a study and its trials alone; collective."""
    from mpicoll.consensus import share

    with tempfile.TemporaryDirectory(prefix="mpicoll-pace-") as folder:
        study = _study(objective, arguments, number, world, Path(folder, "journal"))
        there = [] if study.study is None else study.study.get_trials(deepcopy=False)
    found = [(trial.params, trial.user_attrs["parameters_sha256"]) for trial in there]
    trials = share(world, {"trials": found} if world.rank == 0 else None)["trials"]
    seconds, training, differing = _alone(objective, trials, arguments.group, world, part)
    return Round(len(trials), study.seconds, seconds, training, study.busy, differing)


def _study(
    objective: TrainerObjective, arguments: argparse.Namespace, number: int, world: MPI.Intracomm, storage: Path
) -> StudyResult:
    from mpicoll.search.study_run import run_study
    from mpicoll.search.study_settings import StudySettings

    kept = None if arguments.no_storage else str(storage)
    settings = StudySettings(
        arguments.trials, "maximize", arguments.sampler, arguments.pruner, storage=kept, seed=arguments.seed + number,
        most_reports=objective.config.epochs,
    )  # fmt: skip
    result = run_study(objective, None, settings, world, arguments.group, objective.config.timeout)
    if result.counts["complete"] + result.counts["pruned"] != arguments.trials:
        raise RuntimeError(f"not all of {arguments.trials} trials are complete or pruned: {result.counts}")
    return result


def _alone(
    objective: TrainerObjective, trials: Sequence[tuple[dict[str, Any], str]], group: int, world: Intracomm,
    part: Intracomm,
) -> tuple[float, float, int]:  # fmt: skip
    """Train each trial without a study; return seconds, seconds of training, and the number of other results."""
    from mpi4py import MPI

    from mpicoll.train.assembly import make_communicator
    from mpicoll.train.training_run import run

    training, differing = 0.0, 0
    world.Barrier()
    began = time.perf_counter()
    for number in range(world.rank // group, len(trials), world.size // group):
        params, digest = trials[number]
        config = objective.configured(params, number)
        result = run(config, make_communicator(config, part))
        training += result["training_seconds"]
        differing += result["parameters_sha256"] != digest and part.rank == 0
    seconds = time.perf_counter() - began
    largest = np.array([seconds, training])
    world.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
    total = np.array([differing])
    world.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
    return float(largest[0]), float(largest[1]), int(total[0])


def table(rounds: Sequence[Round]) -> list[str]:
    """Return a line for each round, and the median of the ratios."""
    rows = [["round", "trials/min", "alone", "only training", "ratio", "of training", "busy", "other bits"]]
    for number, each in enumerate(rounds, 1):
        paces = [f"{60 * each.trials / seconds:.1f}" for seconds in (each.study, each.alone, each.training)]
        shares = [f"{share:.1%}" for share in (each.ratio, each.of_training, each.busy)]
        rows.append([str(number), *paces, *shares, str(each.differing)])
    lines = text_tables.markdown(rows)
    for name in ("ratio", "of_training"):
        found = intervals.of_median([getattr(each, name) for each in rounds])
        lines.append(f"{name.replace('_', ' ')}: {found:.1%}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"python -m {PROGRAM} [options] [-- trainer's options]",
    )  # fmt: skip
    add = parser.add_argument
    add("--ranks", type=int, default=8, help="when not run under mpirun (default: %(default)s)")
    add("--group", type=int, default=2, help="ranks of a trial (default: %(default)s)")
    add("--trials", type=int, default=64, help="trials of a study (default: %(default)s)")
    add("--epochs", type=int, default=24, help="epochs of a trial (default: %(default)s)")
    add("--rounds", type=int, default=5, help="studies, each beside its trials alone (default: %(default)s)")
    add("--sampler", choices=("random", "tpe", "cmaes"), default="tpe", help="default: %(default)s")
    add("--pruner", choices=("none", "asha", "median"), default="none",
        help="is asked after each epoch; what it ends is trained to the end alone (default: none)")  # fmt: skip
    add("--no-storage", action="store_true", help="keep the study in memory, without a journal")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--json", type=Path, metavar="FILE", help="write all rounds")
    return parser


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:cut])
    arguments.trainer = words[cut + 1 :]
    for name in ("ranks", "group", "trials", "epochs", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: is not at least 1")
    if not is_launcher():
        from mpi4py import MPI

        arguments.ranks = MPI.COMM_WORLD.size
    if arguments.ranks % arguments.group:
        parser.error(f"--group {arguments.group}: {arguments.ranks} ranks cannot be divided into such groups")
    return arguments


def _publish(arguments: argparse.Namespace, ready: float, rounds: Sequence[Round]) -> None:
    what = f"{arguments.trials} trials of {arguments.epochs} epochs, {arguments.ranks} ranks in groups of"
    print(f"{what} {arguments.group}; ranks were ready after {ready:.1f} s", *table(rounds), sep="\n", flush=True)
    if arguments.json is not None:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        rows = [{**asdict(each), "ratio": each.ratio, "of_training": each.of_training} for each in rounds]
        record = {"settings": settings, "ready_seconds": ready, "rounds": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the table; 1 if a trial had other bits than alone."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    arguments = _parsed(parser, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_launcher():
        command = launch.command(arguments.ranks, ["-m", PROGRAM, *argv])
        return subprocess.run(command, env=launch.clean_environment(), check=False).returncode
    from mpi4py import MPI

    ready, rounds = measure(arguments, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        _publish(arguments, ready, rounds)
    return int(arguments.pruner == "none" and any(each.differing for each in rounds))


if __name__ == "__main__":
    sys.exit(main())
