"""Compression in training: accuracy at equal steps, and bytes sent.

``python -m bench.compressed_training`` starts itself on 8 ranks and trains the same model from the same seeds with each
compressor, with and without error feedback where the compressor needs it. Everything else is equal: data, order,
initial weights, learning rate, steps. Two tasks: the digits, and *clouds*, ten classes of eight Gaussian clouds each,
of which logistic regression gets half right. Accuracies are on samples that were held out: means over seeds with 95 %
intervals, and their differences from ``dense`` of the same seeds. Losses and times are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from bench import accuracy, launch, progress, text_tables
from bench.benchmark_options import is_launcher
from bench.result_files import FEEDBACK
from mpicoll.train.config import TrainConfig

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.data.datasets import Dataset

PROGRAM = "bench.compressed_training"
DENSE = "dense"
_WITHOUT = " -EF"
SPECS = (DENSE, "fp16", "bf16", "int8", "int4", "int4:rounding=stochastic", "sign", "topk:0.01", "powersgd:4")
TASKS = ("digits", "clouds")
FORMATS = (".svg", ".png")
_CLASSES, _CLOUDS, _FEATURES, _TRAIN, _TEST = 10, 8, 32, 8000, 4000
_DISTANCE = 8.0
"""Between two clouds' centres, in standard deviations of a cloud."""
_EPOCHS = {"digits": 20, "clouds": 8}
_BATCH = {"digits": 64, "clouds": 128}


class Variant(NamedTuple):
    """A compressor, and whether what it loses is fed back; None where that is no question."""

    spec: str
    feedback: bool | None

    @property
    def name(self) -> str:
        """As in the table."""
        return self.spec + {None: "", True: FEEDBACK, False: _WITHOUT}[self.feedback]


@dataclass
class CompressionOutcome:
    """One training run; `losses` are those of its epochs."""

    task: str
    variant: str
    seed: int
    steps: int
    accuracy: float
    losses: list[float]
    nbytes_per_step: float
    ratio: float
    seconds_per_step: float


def variants(specs: Sequence[str]) -> list[Variant]:
    """Return what is to be trained; compressors that there are not are left out of the default."""
    from mpicoll.compression import compressor
    from mpicoll.errors import UnknownCompressor

    found: list[Variant] = []
    for spec in specs or SPECS:
        try:
            needs = spec != DENSE and compressor(spec).needs_feedback
        except UnknownCompressor:
            if specs:
                raise
            continue
        found += [Variant(spec, True), Variant(spec, False)] if needs else [Variant(spec, None)]
    return found


def clouds(train: int = _TRAIN, test: int = _TEST) -> Dataset:
    """Return the harder task, the same for all seeds, with so many samples to train on and to test with."""
    import numpy as np

    from mpicoll.data.datasets import ArraySamples, stored

    random = np.random.default_rng(77)
    centres = random.standard_normal((_CLASSES * _CLOUDS, _FEATURES)) * _DISTANCE / np.sqrt(2 * _FEATURES)
    cloud = random.integers(0, len(centres), train + test)
    x = (centres[cloud] + random.standard_normal((len(cloud), _FEATURES))).astype(np.float32)
    y = (cloud % _CLASSES).astype(np.int64)
    parts = ArraySamples(x[:train], y[:train], 1.0), ArraySamples(x[train:], y[train:], 1.0)
    return stored(parts, _FEATURES, "float32", classes=_CLASSES)


def _config(task: str, variant: Variant, seed: int, arguments: argparse.Namespace) -> TrainConfig:
    return TrainConfig(
        dataset=task,
        epochs=_EPOCHS[task],
        batch=_BATCH[task],
        steps=arguments.steps,
        seed=seed,
        compression=None if variant.spec == DENSE else variant.spec,
        error_feedback={None: "auto", True: "on", False: "off"}[variant.feedback],
        warmup_dense=0 if variant.spec == DENSE else arguments.warmup_dense,
        quiet=True,
    )


def train(run: tuple[str, Variant, TrainConfig], comm: MPI.Intracomm) -> CompressionOutcome:
    """Train once; collective."""
    task, variant, config = run
    from mpicoll.data.datasets import load
    from mpicoll.parallel.mesh import make_mesh
    from mpicoll.train.assembly import make_loop
    from mpicoll.train.clock import Clock
    from mpicoll.train.model_choice import build_model
    from mpicoll.train.warm_kernels import compile_kernels

    dataset = clouds() if task == "clouds" else load(config, comm)
    model = build_model(config, dataset)
    compile_kernels(model, dataset, comm, config)
    mesh = make_mesh(comm, config)
    loop = make_loop(config, mesh, dataset, model, Clock())
    loop.train([])
    tested = loop.evaluate()
    loop.check_replicas()
    assert tested is not None
    assert tested[1] is not None
    facts = loop.facts()
    steps = loop.step_plan.total_steps
    seconds = loop.clock.mean(comm).stepping / steps
    losses = [record.train_loss for record in loop.epochs if record.train_loss is not None]
    sent, ratio = facts["sent_nbytes_per_step"], facts["compression_ratio"] or 1.0
    return CompressionOutcome(task, variant.name, config.seed, steps, tested[1], losses, sent, ratio, seconds)


def _runs(arguments: argparse.Namespace) -> Iterator[tuple[str, Variant, TrainConfig]]:
    """Seeds come outermost, so that a run that is broken off has something of everything."""
    for seed in range(arguments.seeds):
        for task in arguments.tasks:
            for variant in variants(arguments.compression):
                yield task, variant, _config(task, variant, seed, arguments)


def _measure(arguments: argparse.Namespace, comm: MPI.Intracomm) -> list[CompressionOutcome]:
    import numpy as np

    outcomes: list[CompressionOutcome] = []
    for run in progress.bar(list(_runs(arguments)), "run", comm.Get_rank()):
        with np.errstate(all="ignore"):
            outcomes.append(train(run, comm))
        if comm.Get_rank() == 0 and arguments.json:
            _save(arguments.json, outcomes, comm.Get_size())
    return outcomes


def table(outcomes: Sequence[CompressionOutcome]) -> str:
    """Return a table for each task, in Markdown."""
    lines: list[str] = []
    for task in dict.fromkeys(each.task for each in outcomes):
        here = [each for each in outcomes if each.task == task]
        groups = {name: [o for o in here if o.variant == name] for name in dict.fromkeys(o.variant for o in here)}
        seeds = len(next(iter(groups.values())))
        lines += [f"\n{task}: {here[0].steps} steps, {seeds} seeds\n"]
        base = _accuracies(groups.get(DENSE, ()))
        lines += text_tables.markdown([_HEAD, *(_row(name, group, base) for name, group in groups.items())])
    return "\n".join(lines)


_HEAD = ("compression", "accuracy", "from dense", "final loss", "bytes a step", "ratio", "ms a step")


def _accuracies(group: Sequence[CompressionOutcome]) -> dict[int, float]:
    return {each.seed: each.accuracy for each in group}


def _row(name: str, group: Sequence[CompressionOutcome], base: Mapping[int, float]) -> tuple[str, ...]:
    found = _accuracies(group)
    loss, nbytes = median(o.losses[-1] for o in group), group[0].nbytes_per_step
    milliseconds = 1e3 * median(o.seconds_per_step for o in group)
    ratio = f"{group[0].ratio:.1f}"
    return (
        name,
        accuracy.cell(found),
        accuracy.difference(found, base),
        f"{loss:.4f}",
        f"{nbytes:,.0f}",
        ratio,
        f"{milliseconds:.1f}",
    )


def draw(path: Path, outcomes: Sequence[CompressionOutcome]) -> None:
    """Draw training loss against bytes that a rank has sent, a panel for each task, the first seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(each.task for each in outcomes))
    figure = Figure(figsize=(1 + 6 * len(tasks), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for each in outcomes:
            if each.task == task and each.seed == 0:
                epoch = each.nbytes_per_step * each.steps / len(each.losses)
                sent = [epoch * (number + 1) for number in range(len(each.losses))]
                line = "--" if each.variant.endswith(_WITHOUT) else "-"
                axis.plot(sent, each.losses, line, marker=".", label=each.variant)
        axis.set(xscale="log", yscale="log", xlabel="bytes sent by a rank", ylabel="training loss", title=task)
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="when not run under mpirun (default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all")
    usual = " ".join(SPECS)
    specs = f"compressors, or {DENSE} (default, as far as they are there: {usual})"
    parser.add_argument("--compression", nargs="+", default=[], metavar="SPEC", help=specs)
    parser.add_argument("--seeds", type=int, default=accuracy.SEEDS, help="runs of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--warmup-dense", type=int, default=0, metavar="STEPS", help="steps before compression begins")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss against bytes sent (.svg or .png)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes")
    return parser


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.plot and arguments.plot.suffix not in FORMATS:
        parser.error(f"--plot: {arguments.plot} ends in none of {', '.join(FORMATS)}")
    if arguments.ranks < 1 or arguments.seeds < 1 or (arguments.steps or 1) < 1 or arguments.warmup_dense < 0:
        parser.error("--ranks, --seeds and --steps are at least 1, --warmup-dense at least 0")
    try:
        variants(arguments.compression)
    except ValueError as error:
        parser.error(f"--{error}")


def _save(path: Path, outcomes: Sequence[CompressionOutcome], size: int) -> None:
    """Write what there is so far."""
    path.write_text(json.dumps({"ranks": size, "outcomes": [asdict(each) for each in outcomes]}, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the replicas of every run are compared."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _check(parser, arguments)
    if is_launcher():
        command = launch.command(arguments.ranks, ["-m", PROGRAM, *argv])
        environment = {**launch.clean_environment(), **progress.environment()}
        return subprocess.run(command, env=environment, check=False).returncode
    from mpi4py import MPI

    from mpicoll import Intracomm

    comm = Intracomm(MPI.COMM_WORLD)
    outcomes = _measure(arguments, comm)
    if comm.rank == 0:
        print(table(outcomes), flush=True)
        if arguments.plot:
            draw(arguments.plot, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
