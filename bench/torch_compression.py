"""Training of a transformer in PyTorch with compressed gradients, beside gradients as they are over gloo.

``python -m bench.torch_compression`` starts 2 ranks; ``python -m bench.cluster --hosts 4 --ranks 1 --rate 1gbit -- -m
bench.torch_compression`` measures on slow links. The transformer of bench.torch_models learns to predict the bytes of a
text, with DistributedDataParallel. Each row is another process group or communication hook; steps are timed in turn in
the same run, and are medians of the slowest rank's. The *communication* of a step is what it takes beyond the same step
without synchronisation. The loss is the mean of the last tenth of the steps of a run of its own, over all ranks.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench import text_tables
from bench.benchmark_options import measure_on_ranks
from mpicoll.quantities import format_seconds, positive, positive_number

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = "bench.torch_compression"
GLOO, DENSE = "gloo", "mpicoll"
_SPECS = ("int8", "powersgd:4", "topk:0.01")


def _runs(groups: dict[str, Any], specs: Sequence[str], batch: int) -> dict[str, Any]:
    """Return fresh runs by name: without compression on each group, and with each compressor on mpicoll's."""
    import mpicoll.torch
    from bench.torch_models import LanguageRun

    found = {name: LanguageRun(group, batch=batch) for name, group in groups.items()}
    return found | {spec: LanguageRun(groups[DENSE], mpicoll.torch.hook(spec), batch) for spec in specs}


def _losses(comm: MPI.Intracomm, runs: dict[str, Any], steps: int) -> dict[str, float]:
    """Return the mean loss of the last tenth of so many steps, for each run; collective."""
    import numpy as np
    from mpi4py import MPI

    found = np.zeros(len(runs))
    for place, run in enumerate(runs.values()):
        losses = [run.step() for _ in range(steps)]
        found[place] = np.mean(losses[-max(1, steps // 10) :])
    comm.Allreduce(MPI.IN_PLACE, found, MPI.SUM)
    return dict(zip(runs, (found / comm.Get_size()).tolist(), strict=True))


def _seconds(comm: MPI.Intracomm, runs: dict[str, Any], seconds: float) -> tuple[dict[str, float], float]:
    """Return the seconds of a step of each run, and of a step without synchronisation; collective."""
    from mpicoll import measure

    calls = {name: run.step for name, run in runs.items()} | {"alone": runs[GLOO].step_alone}
    found = {name: timing.median for name, timing in measure.compare(comm, calls, seconds).items()}
    return found, found.pop("alone")


def table(seconds: dict[str, float], alone: float, losses: dict[str, float]) -> list[str]:
    """Return the lines of the table."""
    rows = [["gradients", "step", "gloo / it", "communication", "gloo / it", "loss"]]
    for name, step in seconds.items():
        rest, of_gloo = step - alone, seconds[GLOO] - alone
        is_told = rest > 0 and of_gloo > 0
        rows.append(
            [
                name,
                format_seconds(step),
                f"{seconds[GLOO] / step:.2f}",
                format_seconds(rest) if rest > 0 else "-",
                f"{of_gloo / rest:.2f}" if is_told else "-",
                f"{losses[name]:.3f}",
            ]
        )
    return text_tables.markdown(rows, names=1)


def _measure(comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import mpicoll.torch  # noqa: F401

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("mpicoll")
    groups = {GLOO: dist.new_group(backend="gloo"), DENSE: dist.group.WORLD}
    losses = _losses(comm, _runs(groups, arguments.compression, arguments.batch), arguments.steps)
    runs = _runs(groups, arguments.compression, arguments.batch)
    seconds, alone = _seconds(comm, runs, arguments.seconds)
    if comm.Get_rank() == 0:
        title = f"{comm.Get_size()} ranks, PyTorch {torch.__version__}, {arguments.batch} texts a rank"
        title += f"; without synchronisation a step takes {format_seconds(alone)}"
        print("\n".join(["", title, "", *table(seconds, alone, losses), ""]), flush=True)
    dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=positive, nargs="+", default=[2], help="when not run under mpirun (default: 2)")
    add("--compression", nargs="+", default=list(_SPECS), metavar="SPEC",
        help=f"compressors (default: {' '.join(_SPECS)})")  # fmt: skip
    add("--batch", type=positive, default=4, help="texts of a rank in a step (default: %(default)s)")
    add("--steps", type=positive, default=100, help="steps until the loss is told (default: %(default)s)")
    add("--seconds", type=positive_number, default=20.0, help="for all timed steps (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return measure_on_ranks(PROGRAM, _parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
