"""Training by every strategy, beside PyTorch's DistributedDataParallel over gloo.

``python -m bench.training`` starts itself on 1, 2, 4 and 8 ranks. The same model, data, order, initial weights, batch
and learning rate for all, in four tasks: *digits*, to 97 % on the test samples; and a few steps on synthetic samples
of *large*, a perceptron with ten million parameters, *convolutional*, an AlexNet-like network with nine million on
images of 32 x 32 pixels, and *transformer*, with three million. One thread a rank. Everything is started several
times; columns are medians, with half the width of their 95 % interval:

- ``samples/s``: of all ranks, in training steps, and over what one rank does alone;
- ``to 97%``: seconds of training steps until an epoch ended with that; evaluation is not counted;
- ``MB held``: parameters, gradients and optimiser's state on rank 0; ``MB sent``: by a rank for a step, of gradients
  and parameters; both, and the time before, on the most ranks;
- ``from one rank``: the largest relative difference of a loss of the first 50 steps from that on one rank.

The first steps of each run, in which buffers are made and connections opened, count for nobody, nor does the time
before them; seconds are means over ranks. PyTorch is left out where it is not installed (extra ``others``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import intervals, launch, progress, text_tables
from bench.benchmark_options import is_launcher
from bench.training_outcomes import GOAL, TORCH, WARMUP_STEPS, Outcome, mean
from mpicoll.train.config import TrainConfig

if TYPE_CHECKING:
    from mpi4py import MPI


PROGRAM = "bench.training"
_EQUAL_STEPS = 50
"""Later the ways part: rounding grows as training goes on."""
_COMMON = TrainConfig(progress=False, quiet=True, evaluate_every=1 << 30)
TASKS = {
    "digits": replace(_COMMON, epochs=20),
    "large": replace(
        _COMMON, dataset="synthetic:65536x784x10", test_fraction=0.0, hidden=(2048, 2048, 2048), batch=512, epochs=1,
        lr=0.01, steps=WARMUP_STEPS + 12,
    ),
    "convolutional": replace(
        _COMMON, model="alexnet", dataset="synthetic:16384x1024x10", test_fraction=0.0, hidden=(), filters=32,
        dropout=0.0, batch=64, epochs=1, lr=1e-4, steps=WARMUP_STEPS + 12,
    ),
    "transformer": replace(
        _COMMON, model="transformer", dataset="synthetic_text:200000", task="language_modeling", test_fraction=0.0,
        hidden=(), layers=4, heads=4, width=256, context=64, dropout=0.0, batch=32, epochs=1, lr=0.01,
        steps=WARMUP_STEPS + 12,
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


def configurations(task: str, strategies: Sequence[str], size: int) -> Iterator[tuple[str, TrainConfig]]:
    """Return what can be run on so many ranks."""
    for name in strategies:
        options = STRATEGIES[name]
        shares = options.get("tensor", 1) * options.get("pipeline", 1)
        if size % shares == 0 and (size > 1 or name == "replicated"):
            yield name, replace(TASKS[task], **options)


def train_ours(task: str, strategy: str, config: TrainConfig, comm: MPI.Intracomm) -> Outcome:
    """Train once; collective."""
    from bench.training_watch import Watch
    from mpicoll import Intracomm
    from mpicoll.data.datasets import load
    from mpicoll.parallel.mesh import make_mesh
    from mpicoll.train.assembly import make_loop
    from mpicoll.train.clock import Clock
    from mpicoll.train.model_choice import build_model
    from mpicoll.train.warm_kernels import compile_kernels

    comm = Intracomm(comm, algorithm=config.algorithm)
    dataset = load(config, comm)
    model = build_model(config, dataset)
    compile_kernels(model, dataset, comm, config)
    loop = make_loop(config, make_mesh(comm, config), dataset, model, Clock())
    watch = Watch()
    loop.train([watch])
    tested = loop.evaluate()
    sent = loop.facts()["sent_nbytes_per_step"]
    return Outcome(
        task,
        strategy,
        comm.Get_size(),
        watch.samples(loop) / mean(comm, watch.seconds(loop)),
        watch.seconds_to_goal,
        None if tested is None else tested[1],
        sum(loop.strategy.nbytes().values()),
        sent,
        [record.loss for record in loop.records],
    )


def _measure(arguments: argparse.Namespace, comm: MPI.Intracomm) -> list[Outcome]:
    """Run everything on these ranks, in turn."""
    from bench import torch_training

    names = list(arguments.strategies)
    if torch_training.is_there() and not arguments.no_torch:
        names.append(TORCH)
    runs = [(task, name) for _ in range(arguments.repeats) for task in arguments.tasks for name in names]
    outcomes = []
    for task, name in progress.bar(runs, "run", comm.Get_rank()):
        if name == TORCH:
            outcomes.append(torch_training.train(task, TASKS[task], comm))
        else:
            for _, config in configurations(task, [name], comm.Get_size()):
                outcomes.append(train_ours(task, name, config, comm))
    return outcomes


Runs = Mapping[int, Sequence[Outcome]]
"""Of a strategy, by the number of ranks."""


def table(outcomes: Sequence[Outcome], task: str) -> str:
    """Return the rows of a task, one a strategy."""
    here = [each for each in outcomes if each.task == task]
    sizes = sorted({each.ranks for each in here})
    alone = [each for each in here if each.ranks == 1 and each.losses]
    pace = [f"samples/s, {size} rank{'s' * (size > 1)}" for size in sizes]
    rows = [[task, *pace, f"to {GOAL:.0%}", "MB held", "MB sent", "from one rank"]]
    there = {each.strategy for each in here}
    for name in filter(there.__contains__, (*STRATEGIES, TORCH)):
        runs = {size: [o for o in here if (o.strategy, o.ranks) == (name, size)] for size in sizes}
        rows.append([name, *(_pace(runs[size], alone) for size in sizes), *_facts(runs, sizes[-1], alone)])
    return "\n".join(text_tables.markdown(rows))


def _pace(runs: Sequence[Outcome], alone: Sequence[Outcome]) -> str:
    if not runs:
        return ""
    found, base = (
        intervals.of_median([o.samples_per_second for o in some]) if some else None for some in (runs, alone)
    )
    assert found is not None
    scaling = f" ({found.value / base.value:.2f})" if base else ""
    return f"{found.value:,.0f}{_margin(found)}{scaling}"


def _margin(found: intervals.Interval) -> str:
    """Return half the width of an interval, empty for a single value."""
    return f" ±{100 * (found.high - found.low) / 2 / found.value:.0f}%" if found.launches > 1 else ""


def _facts(runs: Runs, size: int, alone: Sequence[Outcome]) -> list[str]:
    last = runs[size]
    apart = [_difference(each, alone[0]) for some in runs.values() for each in some if alone and each.losses]
    return [
        _to_goal(last),
        _megabytes(last[0].held_nbytes if last else None),
        _megabytes(last[0].sent_nbytes if last else None),
        f"{max(apart):.0e}" if apart else "",
    ]


def _to_goal(runs: Sequence[Outcome]) -> str:
    """Return the median time in which the goal was reached, empty if some run did not reach it."""
    seconds = [each.seconds_to_goal for each in runs if each.seconds_to_goal is not None]
    if not seconds or len(seconds) < len(runs):
        return ""
    found = intervals.of_median(seconds)
    return f"{found.value:.2f} s{_margin(found)}"


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
    add(
        "--repeats", type=int, default=6, help="launches; medians have 95 %% intervals from 6 on (default: %(default)s)"
    )
    add("--no-torch", action="store_true", help="leave PyTorch out")
    add("--json", type=Path, metavar="FILE", help="write all outcomes")
    return parser


def _launch_all(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Start the ranks anew for each repeat, since launches differ more than what is run again in one of them."""
    outcomes: list[Outcome] = []
    launches = [size for _ in range(arguments.repeats) for size in arguments.ranks]
    with tempfile.TemporaryDirectory(prefix="mpicoll-bench-") as folder:
        path = Path(folder) / "outcomes.json"
        for size in progress.bar(launches, "launch"):
            command = launch.command(size, ["-m", PROGRAM, *argv, "--json", str(path), "--repeats", "1"])
            status = subprocess.run(command, env=launch.clean_environment(), check=False).returncode
            if status:
                return status
            outcomes += [Outcome(**each) for each in json.loads(path.read_text())]
    _show(arguments, outcomes)
    return 0


def _show(arguments: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    for task in arguments.tasks:
        print(table(outcomes, task), end="\n\n", flush=True)
    _save(arguments.json, outcomes)


def _save(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    if path is not None:
        path.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.repeats < 1 or min(arguments.ranks) < 1:
        parser.error("--repeats and --ranks are at least 1")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    if is_launcher():
        return _launch_all(arguments, argv)
    from mpi4py import MPI

    outcomes = _measure(arguments, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        _save(arguments.json, outcomes)
        if not arguments.json:
            _show(arguments, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
