"""Ways of training in which ranks need not wait for each other, beside synchronous training.

``python -m bench.async_modes`` starts itself on 8 ranks. Two parts, the same model, data, initial weights and learning
rates for all modes:

- *digits*: accuracy after as many samples as synchronous training takes, mean of some seeds with its 95 % interval, and
  its difference from synchronous training with the same seeds; samples a second; how late gradients were, in updates
  (mean and 99th percentile); bytes that a worker sends and reads for each share of a batch: medians of the seeds.
- *one slow rank*: the gradients of a share take some time, slept, as if the model were larger, and five times as long
  on rank 1. ``of ideal`` is the throughput over the sum of what all workers could do if each were alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import accuracy, launch, progress, text_tables
from bench.benchmark_options import is_launcher
from mpicoll.train.config import TrainConfig

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = "bench.async_modes"
PARTS = ("digits", "slow")
FORMATS = (".svg", ".png")
SLOWER = 5.0
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "local 16": {"mode": "local"},
    "local 16 elastic": {"mode": "local", "averaging": "elastic"},
    "ps": {"mode": "ps", "servers": 1},
    "ps int8": {"mode": "ps", "servers": 1, "compression": "int8"},
    "ps, 2 servers": {"mode": "ps", "servers": 2},
    "ps, staleness 4": {"mode": "ps", "servers": 1, "staleness": 4},
    "ps, staleness 0": {"mode": "ps", "servers": 1, "staleness": 0},
    "ps, 1 backup": {"mode": "ps", "servers": 1, "staleness": 0, "backup": 1},
    "ps direct": {"mode": "ps", "servers": 1, "push": "direct"},
    "p2p": {"mode": "p2p"},
    "p2p topk:0.01": {"mode": "p2p", "compression": "topk:0.01"},
    "gossip": {"mode": "gossip"},
}


@dataclass
class ModeOutcome:
    """One training run."""

    part: str
    mode: str
    seed: int
    accuracy: float
    samples_per_second: float
    of_ideal: float | None
    late_mean: float | None
    late_p99: float | None
    sent_nbytes: float
    read_nbytes: float
    seconds: list[float]
    accuracies: list[float]


def config_of(part: str, mode: str, seed: int, arguments: argparse.Namespace) -> TrainConfig:
    """Return the options of a run."""
    config = TrainConfig(seed=seed, epochs=arguments.epochs, progress=False, quiet=True, **MODES[mode])
    if part == "digits":
        return config
    slow, every = ((1, SLOWER),), 1 << 30
    return replace(config, steps=arguments.steps, step_seconds=arguments.step_seconds, slow=slow, evaluate_every=every)


def ideal_samples_per_second(config: TrainConfig, size: int) -> float:
    """Return what workers would do that never wait, together; their gradients take the time that was asked for."""
    workers = size - config.servers
    slow = sum(1 for rank, _ in config.slow if rank < workers)
    shares = (workers - slow + slow / SLOWER) / config.step_seconds
    return shares * config.step_batch / workers


def train(part: str, mode: str, seed: int, arguments: argparse.Namespace, comm: MPI.Intracomm) -> ModeOutcome:
    """Train once; collective."""
    from mpicoll import Intracomm
    from mpicoll.train.training_run import run

    config = config_of(part, mode, seed, arguments)
    result = run(config, Intracomm(comm))
    own: dict[str, Any] = result["mode"] or {}
    late = own.get("staleness") or {}
    ideal = ideal_samples_per_second(config, comm.Get_size()) if part == "slow" else None
    tested = [epoch for epoch in result["epochs"] if epoch["test_accuracy"] is not None]
    return ModeOutcome(
        part,
        mode,
        seed,
        result["test_accuracy"],
        result["samples_per_second"],
        None if ideal is None else result["samples_per_second"] / ideal,
        late.get("mean"),
        late.get("p99"),
        result["sent_nbytes_per_step"],
        own.get("read_nbytes_per_step", 0.0),
        [epoch["seconds"] for epoch in tested],
        [epoch["test_accuracy"] for epoch in tested],
    )


def table(outcomes: Sequence[ModeOutcome]) -> str:
    """Return the rows of both parts, one a mode."""
    head = ("mode", "accuracy", "from sync", "samples/s", "late, mean", "late, 99%", "bytes sent", "bytes read",
            "samples/s, one slow", "of ideal")  # fmt: skip
    rows: list[Sequence[str]] = [head]
    for mode in MODES:
        plain = [each for each in outcomes if (each.part, each.mode) == ("digits", mode)]
        slow = [each for each in outcomes if (each.part, each.mode) == ("slow", mode)]
        if plain or slow:
            rows.append((mode, *_plain_cells(plain, outcomes), *_slow_cells(slow)))
    return "\n".join(text_tables.markdown(rows))


def _plain_cells(found: Sequence[ModeOutcome], outcomes: Sequence[ModeOutcome]) -> tuple[str, ...]:
    if not found:
        return ("",) * 7
    own = {each.seed: each.accuracy for each in found}
    sync = {each.seed: each.accuracy for each in outcomes if (each.part, each.mode) == ("digits", "sync")}
    late = [(each.late_mean, each.late_p99) for each in found if each.late_mean is not None]
    return (
        accuracy.cell(own),
        accuracy.difference(own, sync),
        f"{median(each.samples_per_second for each in found):,.0f}",
        f"{median(mean for mean, _ in late if mean is not None):.1f}" if late else "",
        f"{median(most for _, most in late if most is not None):.0f}" if late else "",
        f"{median(each.sent_nbytes for each in found):,.0f}",
        f"{median(each.read_nbytes for each in found):,.0f}",
    )


def _slow_cells(found: Sequence[ModeOutcome]) -> tuple[str, str]:
    if not found:
        return "", ""
    share = median(each.of_ideal for each in found if each.of_ideal is not None)
    return f"{median(each.samples_per_second for each in found):,.0f}", f"{share:.0%}"


def draw(path: Path, outcomes: Sequence[ModeOutcome]) -> None:
    """Draw accuracy over time, and the throughput that one slow rank leaves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    names = [mode for mode in MODES if any(each.mode == mode for each in outcomes)]
    colors = {mode: plt.get_cmap("tab20")(number) for number, mode in enumerate(names)}
    for each in outcomes:
        if each.part == "digits" and each.seed == 0:
            errors = [100 * (1 - accuracy) for accuracy in each.accuracies]
            left.plot(each.seconds, errors, color=colors[each.mode], label=each.mode, linewidth=1.3)
    left.set(xlabel="seconds", ylabel="test samples wrong, %", yscale="log", title="digits, 8 ranks")
    left.legend(fontsize="small")
    left.grid(alpha=0.3)
    slow = [each for each in outcomes if each.part == "slow"]
    shown = [mode for mode in reversed(names) if any(each.mode == mode for each in slow)]
    shares = [100 * median(each.of_ideal or 0 for each in slow if each.mode == mode) for mode in shown]
    right.barh(shown, shares, color=[colors[mode] for mode in shown])
    right.axvline(100, color="black", linewidth=0.8)
    right.set(xlabel="throughput, % of what all workers could do alone", title=f"rank 1 is {SLOWER:g} times as slow")
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=8, help="when not run under mpirun (default: %(default)s)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help="default: all")
    add("--seeds", type=int, default=accuracy.SEEDS, help="runs of each mode on the digits (default: %(default)s)")
    add("--epochs", type=int, default=20, help="default: %(default)s")
    add("--steps", type=int, default=150, help="with a slow rank (default: %(default)s)")
    add("--step-seconds", type=float, default=0.02, help="that gradients take there (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw accuracy over time and throughput (.svg or .png)")
    add("--json", type=Path, metavar="FILE", help="write all outcomes")
    return parser


def _measure(arguments: argparse.Namespace, comm: MPI.Intracomm) -> list[ModeOutcome]:
    seeds = {"digits": range(arguments.seeds), "slow": range(1)}
    runs = [(part, mode, seed) for part in arguments.parts for seed in seeds[part] for mode in arguments.modes]
    return [train(*run, arguments, comm) for run in progress.bar(runs, "run", comm.rank)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.plot and arguments.plot.suffix not in FORMATS:
        parser.error(f"--plot: {arguments.plot} ends in none of {', '.join(FORMATS)}")
    if arguments.ranks < 4 or arguments.seeds < 1 or arguments.epochs < 1 or arguments.steps < 1:
        parser.error("--ranks is at least 4, --seeds, --epochs and --steps at least 1")
    if arguments.step_seconds <= 0:
        parser.error("--step-seconds is above 0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_launcher():
        command = launch.command(arguments.ranks, ["-m", PROGRAM, *argv])
        environment = {**launch.clean_environment(), **progress.environment()}
        return subprocess.run(command, env=environment, check=False).returncode
    from mpi4py import MPI

    outcomes = _measure(arguments, MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        print(table(outcomes), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
        if arguments.plot:
            draw(arguments.plot, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
