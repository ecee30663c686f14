"""Training by every strategy, beside PyTorch's DistributedDataParallel over gloo.

``python -m bench.training`` starts itself on 1, 2, 4 and 8 ranks. Two tasks, the same model, data, order, initial
weights, batch and learning rate for all: *digits*, to 97 % on the test samples; and *large*, a perceptron with ten
million parameters on synthetic samples, a few steps. One thread a rank. Columns:

- ``samples/s``: of all ranks, in training steps, and over what one rank does alone;
- ``to 97%``: seconds of training steps until an epoch ended with that; evaluation is not counted;
- ``MB held``: parameters, gradients and optimiser's state on rank 0; ``MB sent``: by a rank for a step, of gradients
  and parameters; both, and the time before, on the most ranks;
- ``from one rank``: the largest relative difference of a loss of the first 50 steps from that on one rank.

PyTorch is left out where it is not installed (extra ``others``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import launch, layout
from bench.options import is_launcher
from mpicoll.train.config import TrainConfig

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.train.loop import Trainer

PROGRAM = "bench.training"
TORCH = "PyTorch DDP"
GOAL = 0.97
_EQUAL_STEPS = 50
"""Later the ways part: rounding grows as training goes on."""
_COMMON = TrainConfig(progress=False, quiet=True, evaluate_every=1 << 30)
TASKS = {
    "digits": replace(_COMMON, epochs=20),
    "large": replace(
        _COMMON, dataset="synthetic:65536x784x10", test_fraction=0.0, hidden=(2048, 2048, 2048), batch=512, epochs=1,
        lr=0.01, steps=12,
    ),
}  # fmt: skip
STRATEGIES: dict[str, dict[str, Any]] = {
    "replicated": {"overlap": "off"},
    "MPI_Allreduce": {"overlap": "off", "algorithm": "native"},
    "overlap": {"overlap": "on"},
    "int8": {"compression": "int8"},
    "shard optimizer": {"shard": "optimizer"},
    "shard gradients": {"shard": "gradients"},
    "shard parameters": {"shard": "parameters"},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2, "microbatches": 4},
    "tensor 2 pipeline 2": {"tensor": 2, "pipeline": 2, "microbatches": 4},
}


@dataclass
class Outcome:
    """One training run; `losses` are those of its steps."""

    task: str
    strategy: str
    ranks: int
    samples_per_second: float
    seconds_to_goal: float | None = None
    accuracy: float | None = None
    held_nbytes: int | None = None
    sent_nbytes: float | None = None
    losses: list[float] = field(default_factory=list)


class Watch:
    """In place of what saves checkpoints: looks at the accuracy after each epoch."""

    def __init__(self) -> None:
        self.seconds_to_goal: float | None = None

    def after_step(self, trainer: Trainer, steps: int) -> None:
        """Let it go on."""

    def after_epoch(self, trainer: Trainer, steps: int) -> None:
        """Note when the goal is reached."""
        tested = trainer.evaluate()
        if tested is not None and tested[1] >= GOAL and self.seconds_to_goal is None:
            self.seconds_to_goal = trainer.clock.stepping

    def save(self, trainer: Trainer, steps: int) -> None:
        """Nothing is saved."""


def configurations(task: str, strategies: Sequence[str], size: int) -> Iterator[tuple[str, TrainConfig]]:
    """Return what can be run on so many ranks."""
    for name in strategies:
        options = STRATEGIES[name]
        shares = options.get("tensor", 1) * options.get("pipeline", 1)
        if size % shares == 0 and (size > 1 or name == "replicated"):
            yield name, replace(TASKS[task], **options)


def train_ours(task: str, strategy: str, config: TrainConfig, comm: MPI.Intracomm) -> Outcome:
    """Train once; collective."""
    from mpicoll import Intracomm
    from mpicoll.train.assemble import build_model, compile_kernels, make_trainer
    from mpicoll.train.clock import Clock
    from mpicoll.train.data import load
    from mpicoll.train.mesh import make_mesh
    from mpicoll.train.monitor import Monitor

    comm = Intracomm(comm, algorithm=config.algorithm)
    dataset = load(config, comm)
    model = build_model(config, dataset)
    compile_kernels(model, dataset, comm, config.compression)
    trainer = make_trainer(config, make_mesh(comm, config), dataset, model, Clock())
    watch = Watch()
    trainer.train(Monitor(config, 0, 1), watch)
    tested = trainer.evaluate()
    sent = trainer.facts()["sent_nbytes_per_step"]
    return Outcome(
        task,
        strategy,
        comm.Get_size(),
        trainer.samples_seen / trainer.clock.mean(comm).stepping,
        watch.seconds_to_goal,
        None if tested is None else tested[1],
        sum(trainer.strategy.nbytes().values()),
        sent,
        [record.loss for record in trainer.records],
    )


def _measure(arguments: argparse.Namespace, comm: MPI.Intracomm) -> list[Outcome]:
    """Run everything on these ranks, interleaved, and keep the fastest of each."""
    from bench import torch_training

    found: dict[tuple[str, str], Outcome] = {}
    for _ in range(arguments.repeats):
        for task in arguments.tasks:
            runs = list(configurations(task, arguments.strategies, comm.Get_size()))
            outcomes = [train_ours(task, name, config, comm) for name, config in runs]
            if torch_training.is_there() and not arguments.no_torch:
                outcomes.append(torch_training.train(task, TASKS[task], comm))
            for each in outcomes:
                before = found.get((task, each.strategy))
                if before is None or before.samples_per_second < each.samples_per_second:
                    found[task, each.strategy] = each
    return list(found.values())


def table(outcomes: Sequence[Outcome], task: str) -> str:
    """Return the rows of a task, one a strategy."""
    here = [each for each in outcomes if each.task == task]
    sizes = sorted({each.ranks for each in here})
    alone = next((each for each in here if each.ranks == 1 and each.losses), None)
    pace = [f"samples/s, {size} rank{'s' * (size > 1)}" for size in sizes]
    rows = [[task, *pace, f"to {GOAL:.0%}", "MB held", "MB sent", "from one rank"]]
    there = {each.strategy for each in here}
    for name in filter(there.__contains__, (*STRATEGIES, TORCH)):
        runs = {each.ranks: each for each in here if each.strategy == name}
        rows.append([name, *(_pace(runs.get(size), alone) for size in sizes), *_facts(runs, sizes[-1], alone)])
    return "\n".join(layout.markdown(rows))


def _pace(run: Outcome | None, alone: Outcome | None) -> str:
    if run is None:
        return ""
    scaling = f" ({run.samples_per_second / alone.samples_per_second:.2f})" if alone else ""
    return f"{run.samples_per_second:,.0f}{scaling}"


def _facts(runs: Mapping[int, Outcome], size: int, alone: Outcome | None) -> list[str]:
    run = runs.get(size)
    apart = [_difference(each, alone) for each in runs.values() if alone and each.losses]
    return [
        f"{run.seconds_to_goal:.2f} s" if run and run.seconds_to_goal is not None else "",
        _megabytes(run.held_nbytes if run else None),
        _megabytes(run.sent_nbytes if run else None),
        f"{max(apart):.0e}" if apart else "",
    ]


def _difference(each: Outcome, alone: Outcome) -> float:
    pairs = list(zip(each.losses, alone.losses, strict=True))[:_EQUAL_STEPS]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def _megabytes(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="when not run under mpirun (default: 1 2 4 8)")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="NAME", help="default: all")
    add("--repeats", type=int, default=2, help="runs of each, of which the fastest counts (default: %(default)s)")
    add("--no-torch", action="store_true", help="leave PyTorch out")
    add("--json", type=Path, metavar="FILE", help="write all outcomes")
    return parser


def _launch_all(arguments: argparse.Namespace, argv: list[str]) -> int:
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mpicoll-bench-") as folder:
        for size in arguments.ranks:
            path = Path(folder) / f"{size}.json"
            command = launch.command(size, ["-m", PROGRAM, *argv, "--json", str(path)])
            status = subprocess.run(command, env=launch.clean_environment(), check=False).returncode
            if status:
                return status
            outcomes += [Outcome(**each) for each in json.loads(path.read_text())]
    for task in arguments.tasks:
        print(table(outcomes, task), end="\n\n", flush=True)
    _save(arguments.json, outcomes)
    return 0


def _save(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    if path is not None:
        path.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    if is_launcher():
        return _launch_all(arguments, argv)
    from mpi4py import MPI

    outcomes = _measure(arguments, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        _save(arguments.json, outcomes)
        print(f"done on {MPI.COMM_WORLD.size} ranks", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
