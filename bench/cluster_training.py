"""Training over slow links: seconds until a target accuracy, with every way to send less.

``python -m bench.cluster_training`` trains the digits with a perceptron of 1.1 million parameters on 4 emulated hosts
with one rank each, whose links carry 0.1 and 1 Gbit/s (:mod:`bench.cluster`: Linux, root). Data, order, initial
weights, batch and learning rate are the same for all; options of the trainer are all that differs. With ``--delay 5ms``
every frame takes so long from one host to another. Columns are medians over seeds:

- ``to 97%``: seconds of training, evaluations included, until an epoch ended with that accuracy on the test samples;
- ``dense over it``: how many times sooner than with all gradients as they are;
- ``epochs``: epochs until then; ``samples/s``: of all ranks; ``MB a step``: what a rank sends in a step.

The ranks share this machine's cores, so that computation takes longer than on four machines: the factors are lower
than there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench import progress, text_tables
from bench.cluster import EmulatedCluster, add_delay_options, unavailable
from bench.namespaces import NamespaceError
from mpicoll.quantities import format_seconds, parse_rate

PROGRAM = "bench.cluster_training"
DENSE = "dense"
TASK = ("--hidden", "1024,1024", "--batch", "64")
SERVED = ("--strategy", "parameter_server", "--compression", "topk:0.01")
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    DENSE: (),
    "bf16": ("--compression", "bf16"),
    "int8": ("--compression", "int8"),
    "sign": ("--compression", "sign"),
    "topk:0.01": ("--compression", "topk:0.01"),
    "powersgd:4": ("--compression", "powersgd:4"),
    "local 16": ("--strategy", "local", "--sync-every", "16"),
    "local 16 int8": ("--strategy", "local", "--sync-every", "16", "--compression", "int8"),
    "parameter server": ("--strategy", "parameter_server"),
    "parameter server topk:0.01": SERVED,
    "parameter server topk:0.01, pulls int4": (*SERVED, "--pull-compression", "int4"),
    "parameter server topk:0.01, pulls topk:0.03": (*SERVED, "--pull-compression", "topk:0.03"),
    "parameter server topk:0.01, pulls int4, staleness 0": (*SERVED, "--pull-compression", "int4", "--staleness", "0"),
    "gossip": ("--strategy", "gossip"),
}
FORMATS = (".svg", ".png")
_RUN_SECONDS = 900.0


@dataclass
class ClusterOutcome:
    """One training run over links of `gbit`, with `delay` and `jitter` in seconds.

    `curve` holds seconds and test accuracy after each epoch.
    """

    gbit: float
    name: str
    seed: int
    samples_per_second: float
    nbytes_per_step: float
    curve: list[tuple[float, float]]
    delay: float = 0.0
    jitter: float = 0.0

    @property
    def links(self) -> str:
        """Rate and delay as a heading."""
        delay = f", {format_seconds(self.delay)} delay" if self.delay else ""
        jitter = f" ± {format_seconds(self.jitter)}" if self.jitter else ""
        return f"{self.gbit:g} Gbit/s{delay}{jitter}"

    def to_goal(self, goal: float) -> tuple[float, int] | None:
        """Return seconds and epochs until an accuracy; None if it was not reached."""
        reached = (i for i, (_, accuracy) in enumerate(self.curve) if accuracy >= goal)
        first = next(reached, None)
        return None if first is None else (self.curve[first][0], first + 1)


def train(cluster: EmulatedCluster, name: str, seed: int, epochs: int) -> ClusterOutcome:
    """Train once on a cluster.

    Raises
    ------
    RuntimeError
        If the run failed; the message has its output.
    """
    with tempfile.TemporaryDirectory(prefix="mpicoll-cluster-") as folder:
        file = Path(folder, "result.json")
        options = [*TASK, *CONFIGURATIONS[name], "--epochs", str(epochs), "--seed", str(seed), "--quiet"]
        done = cluster.run(["-m", "mpicoll.train", *options, "--json", str(file)], timeout=_RUN_SECONDS)
        if done.returncode or not file.exists():
            raise RuntimeError(f"{name}: status {done.returncode}\n{done.stdout}{done.stderr}")
        found = json.loads(file.read_text())
    curve = [(each["seconds"], each["test_accuracy"]) for each in found["epochs"] if each["test_accuracy"] is not None]
    pace, nbytes = found["samples_per_second"], found["sent_nbytes_per_step"]
    if cluster.relayed.too_slow:
        print(f"{name}: {cluster.relayed.describe()}", file=sys.stderr)
    delay = cluster.delay
    return ClusterOutcome(cluster.gbit, name, seed, pace, nbytes, curve, delay.seconds, delay.jitter)


def measure(arguments: argparse.Namespace) -> list[ClusterOutcome]:
    """Run all configurations at all rates; what there is so far is written to ``--json`` after each run."""
    outcomes: list[ClusterOutcome] = []
    runs = [(seed, name) for seed in range(arguments.seeds) for name in arguments.configurations]
    for gbit in arguments.rates:
        where = (arguments.hosts, arguments.ranks, gbit, arguments.delay, arguments.jitter)
        with EmulatedCluster(*where) as cluster:
            for seed, name in progress.bar(runs, f"run at {gbit:g} Gbit/s"):
                outcomes.append(train(cluster, name, seed, arguments.epochs))
                if arguments.json:
                    arguments.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=2) + "\n")
    return outcomes


def read(files: Iterable[Path]) -> list[ClusterOutcome]:
    """Return the outcomes that earlier runs have written.

    Raises
    ------
    ValueError
        If a file holds something else.
    """
    outcomes = []
    for file in files:
        try:
            outcomes += [ClusterOutcome(**each) for each in json.loads(file.read_text())]
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"--read: {file} holds no outcomes: {error}") from None
    return outcomes


def _groups(outcomes: Iterable[ClusterOutcome]) -> Iterator[tuple[str, dict[str, list[ClusterOutcome]]]]:
    outcomes = list(outcomes)
    for links in dict.fromkeys(each.links for each in outcomes):
        here = [each for each in outcomes if each.links == links]
        yield links, {name: [o for o in here if o.name == name] for name in dict.fromkeys(o.name for o in here)}


def table(outcomes: Sequence[ClusterOutcome], goal: float) -> str:
    """Return a table for each rate, in Markdown."""
    lines: list[str] = []
    for links, groups in _groups(outcomes):
        seeds = len(next(iter(groups.values())))
        lines.append(f"\n{links}, {seeds} {'seed' if seeds == 1 else 'seeds'}\n")
        base = _median_to_goal(groups.get(DENSE, ()), goal)
        head = (
            "configuration",
            f"to {goal:.0%}",
            "dense over it",
            "epochs",
            "samples/s",
            "MB a step",
            "final accuracy",
        )
        lines += text_tables.markdown([head, *(_row(name, group, base, goal) for name, group in groups.items())])
    return "\n".join(lines)


def _median_to_goal(group: Sequence[ClusterOutcome], goal: float) -> tuple[float, float] | None:
    """Return medians of seconds and epochs; None if a run has not reached the goal."""
    found = [each.to_goal(goal) for each in group]
    reached = [each for each in found if each is not None]
    if not found or len(reached) < len(found):
        return None
    return median(seconds for seconds, _ in reached), median(epochs for _, epochs in reached)


def _row(name: str, group: Sequence[ClusterOutcome], base: tuple[float, float] | None, goal: float) -> tuple[str, ...]:
    found = _median_to_goal(group, goal)
    pace, nbytes = median(o.samples_per_second for o in group), median(o.nbytes_per_step for o in group)
    return (
        name,
        "not reached" if found is None else f"{found[0]:.1f} s",
        "" if found is None or base is None else f"{base[0] / found[0]:.1f}",
        "" if found is None else f"{found[1]:g}",
        f"{pace:,.0f}",
        f"{nbytes / 1e6:.2f}",
        f"{median(each.curve[-1][1] for each in group):.1%}",
    )


def draw(path: Path, outcomes: Sequence[ClusterOutcome], goal: float) -> None:
    """Draw test accuracy against seconds, a panel for each rate, the first seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(_groups(outcomes))
    figure = Figure(figsize=(1 + 6 * len(groups), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (links, names) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        for name, group in names.items():
            seconds, accuracies = zip(*group[0].curve, strict=True)
            axis.plot(seconds, accuracies, "-", color="black" if name == DENSE else None, marker=".", label=name)
        axis.axhline(goal, color="grey", linewidth=1)
        axis.set(xscale="log", xlabel="seconds", ylabel="test accuracy", title=links, ylim=(0.85, 1.0))
        axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=int, default=4, help="number of hosts (default: %(default)s)")
    add("--ranks", type=int, default=1, help="ranks on each host (default: %(default)s)")
    add("--rates", type=parse_rate, nargs="+", default=[0.1, 1.0], metavar="RATE", help="default: 100mbit 1gbit")
    add_delay_options(parser)
    names = ", ".join(f'"{name}"' for name in CONFIGURATIONS)
    add("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), metavar="NAME",
        help=f"default: all of {names}")  # fmt: skip
    add("--seeds", type=int, default=3, help="runs of each (default: %(default)s)")
    add("--epochs", type=int, default=12, help="epochs of each run (default: %(default)s)")
    add("--goal", type=float, default=0.97, help="target accuracy (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw accuracy against seconds (.svg or .png)")
    add("--json", type=Path, metavar="FILE", help="write all outcomes")
    add("--read", type=Path, nargs="+", metavar="FILE", help="train nothing; show outcomes that --json has written")
    return parser


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.plot and arguments.plot.suffix not in FORMATS:
        parser.error(f"--plot: {arguments.plot} ends in none of {', '.join(FORMATS)}")
    if min(arguments.hosts, arguments.ranks, arguments.seeds, arguments.epochs) < 1:
        parser.error("--hosts, --ranks, --seeds and --epochs are at least 1")
    if not 0 < arguments.goal <= 1:
        parser.error(f"--goal: {arguments.goal} is not an accuracy above 0 and of at most 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 where there can be no cluster, 1 if a run has failed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    reason = None if arguments.read else unavailable()
    if reason is not None:
        parser.exit(2, f"{parser.prog}: {reason}\n")
    try:
        outcomes = read(arguments.read) if arguments.read else measure(arguments)
    except (ValueError, NamespaceError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except RuntimeError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(table(outcomes, arguments.goal), flush=True)
    if arguments.plot:
        draw(arguments.plot, outcomes, arguments.goal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
