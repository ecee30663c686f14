"""Compression of models for deployment: accuracy, bytes and throughput after each method, beside the original.

``python -m bench.deployment`` runs the commands of ``python -m mpicoll.deploy`` on models that it trains first; under
``mpirun`` all ranks train and count. Two tasks, each with several seeds of split, initial weights and order: *digits*,
and *synthetic*, 20,000 samples in 50 overlapping classes, of which half are for testing, so that a sample is 0.01
points. Columns are medians over the seeds, differences from the original with the smallest and the largest one. Times
are taken on one rank, in turns with the original.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench import text_tables

if TYPE_CHECKING:
    from mpi4py import MPI

TASKS = {
    "digits": ["--epochs", "40"],
    "synthetic": ["--dataset", "synthetic:20000x64x50", "--test-fraction", "0.5", "--epochs", "20"],
}
"""Options of the original's training; its hidden layers are 256 and 128."""
STUDENT = {"digits": "72,48", "synthetic": "72,48"}
"""Widths of a model of a fifth of the original's bytes."""
METHODS = {
    "8 bits": ["quantize", "MODEL"],
    "4 bits": ["quantize", "MODEL", "--weights", "int4"],
    "4 bits, trained": ["quantize", "MODEL", "--weights", "int4", "--qat", "5"],
    "90 % sparse": ["prune", "MODEL", "--sparsity", "0.9"],
    "half of the channels": ["prune", "MODEL", "--sparsity", "0.5", "--structured", "channels"],
    "rank 24": ["lowrank", "MODEL", "--rank", "24", "--epochs", "5"],
    "a fifth, alone": ["distill", "--teacher", "MODEL", "--alpha", "0"],
    "a fifth, distilled": ["distill", "--teacher", "MODEL", "--alpha", "0.9"],
    "half, then 8 bits": ["quantize", "half of the channels"],
    "sparse, then 8 bits": ["quantize", "90 % sparse"],
}
"""Commands by name; MODEL is the original, and other names are files of earlier methods."""
_QUIET = ("--quiet", "--no-progress")


@dataclass
class MethodOutcome:
    """One method on one task with one seed.

    Attributes
    ----------
    original
        Accuracy of the original.
    share, latency, speed
        Bytes, time of one sample, and throughput, as shares of the original's.
    """

    task: str
    method: str
    seed: int
    accuracy: float
    original: float
    share: float
    latency: float
    speed: float


def measure(task: str, seed: int, folder: Path, epochs: int | None, world: MPI.Intracomm) -> Iterator[MethodOutcome]:
    """Yield the outcome of each method; collective over `world`.

    Parameters
    ----------
    folder
        Empty folder for files, the same on all ranks.
    epochs
        Epochs of the original's training and of those of methods; None for the task's.
    """
    from mpicoll import Intracomm
    from mpicoll.deploy.deploy_options import parse_deploy
    from mpicoll.deploy.deploy_run import run
    from mpicoll.train.options import parse
    from mpicoll.train.training_run import run as train

    shorter = [] if epochs is None else ["--epochs", str(epochs)]
    words = [*TASKS[task], *shorter, "--seed", str(seed), "--quiet", "--checkpoint", str(folder / "MODEL")]
    train(parse(words), Intracomm(world))
    for method, command in METHODS.items():
        given = [str(_file(folder, word)) if word in (*METHODS, "MODEL") else word for word in command]
        if command[0] == "distill":
            given += ["--hidden", STUDENT[task], *(shorter or TASKS[task][-2:])]
        elif command[0] == "prune":
            given += shorter
        path = str(_file(folder, method))
        run(parse_deploy([*given, "-o", path, *_QUIET]), world)
        original, made = run(parse_deploy(["evaluate", path, "--original", str(folder / "MODEL"), *_QUIET]), world)
        assert original.accuracy is not None
        assert made.accuracy is not None
        share = made.nbytes / original.nbytes
        latency, speed = (one / other for one, other in zip(made.times, original.times, strict=True))
        yield MethodOutcome(task, method, seed, made.accuracy, original.accuracy, share, latency, speed)


def _file(folder: Path, name: str) -> Path:
    """Return the path of the original, or of the file of a method."""
    return folder / (name if name == "MODEL" else f"{list(METHODS).index(name)}.safetensors")


def table(outcomes: Sequence[MethodOutcome], task: str) -> list[str]:
    """Return the lines of a table of a task."""
    original = [each.original for each in outcomes if each.task == task]
    rows = [["method", "accuracy", "points lost", "bytes", "latency", "throughput"]]
    rows.append(["original", f"{median(original):.2%}", "", "100.0%", "1.00", "1.00x"])
    for method in METHODS:
        found = [each for each in outcomes if (each.task, each.method) == (task, method)]
        if not found:
            continue
        lost = sorted(100 * (each.original - each.accuracy) for each in found)
        rows.append(
            [
                method,
                f"{median(each.accuracy for each in found):.2%}",
                f"{median(lost):+.2f} ({lost[0]:+.2f} to {lost[-1]:+.2f})",
                f"{median(each.share for each in found):.1%}",
                f"{median(each.latency for each in found):.2f}",
                f"{median(each.speed for each in found):.2f}x",
            ]
        )
    return text_tables.markdown(rows)


def _tell(outcome: MethodOutcome, arguments: argparse.Namespace, rank: int) -> None:
    """Print a line on standard error, which is how far the benchmark has come."""
    if rank == 0:
        seeds, lost = arguments.seeds, 100 * (outcome.original - outcome.accuracy)
        line = f"{outcome.task}, seed {outcome.seed + 1} of {seeds}: {outcome.method}, {lost:+.2f} points lost"
        print(line, file=sys.stderr, flush=True)


def _write(outcomes: Sequence[MethodOutcome], arguments: argparse.Namespace) -> None:
    """Write all outcomes so far."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table for each task."""
    from mpi4py import MPI

    from mpicoll import Intracomm
    from mpicoll.consensus import share

    parser = argparse.ArgumentParser(
        prog="python -m bench.deployment", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=tuple(TASKS), help="tasks (default: both)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds of each task (default: %(default)s)")
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs in place of the task's, for a quick look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome")
    arguments = parser.parse_args(argv)
    world = MPI.COMM_WORLD
    outcomes: list[MethodOutcome] = []
    for task in arguments.tasks:
        for seed in range(arguments.seeds):
            made = {"path": tempfile.mkdtemp()} if world.rank == 0 else None
            folder = Path(share(Intracomm(world), made)["path"])
            for outcome in measure(task, seed, folder, arguments.epochs, world):
                outcomes.append(outcome)
                _tell(outcome, arguments, world.rank)
            world.Barrier()
            if world.rank == 0:
                shutil.rmtree(folder)
                _write(outcomes, arguments)
        if world.rank == 0:
            print(f"\n{task}:", *table(outcomes, task), sep="\n", flush=True)


if __name__ == "__main__":
    main()
