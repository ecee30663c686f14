"""Collectives of ``torch.distributed`` and training steps on the backend mpicoll, beside gloo, in turn in the same run.

``mpirun -n 2 python -m bench.torch_backend``, or without a launcher, which starts 2 ranks. Both backends are process
groups of the same processes. Times are medians of the slowest rank's; *ratio* is gloo's time over mpicoll's. Steps are
those of DistributedDataParallel and of FSDP with the models of bench.torch_models. The *communication* of a step is
what it takes beyond the same step without synchronisation. With *bucket views* (``gradient_as_bucket_view=True``)
DistributedDataParallel does not copy gradients back from its buckets.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench import text_tables
from bench.benchmark_options import measure_on_ranks
from bench.result_table import geometric_mean
from mpicoll.quantities import format_nbytes, format_seconds, parse_nbytes, positive

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = "bench.torch_backend"
SIZES = (1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
OTHER_SIZES = (4 << 10, 1 << 20)
PARTS = ("collectives", "ddp", "fsdp")
MODELS = ("perceptron", "convolutional", "transformer")
Calls = Mapping[str, Callable[[Any], object]]


def collectives(size: int, nbytes: int) -> Calls:
    """Return calls with `nbytes` bytes, of the whole vector where ranks own parts; each takes a group."""
    import torch
    import torch.distributed as dist

    count = max(size, nbytes // 4 // size * size)
    whole, other, part = torch.zeros(count), torch.zeros(count), torch.zeros(count // size)
    parts = list(other.split(count // size))
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, group=group, group_src=0),
        "reduce": lambda group: dist.reduce(whole, group=group, group_dst=0),
        "all_gather": lambda group: dist.all_gather(parts, part, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(other, part, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(other, whole, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }


def compare(
    comm: MPI.Intracomm, groups: Mapping[str, Any], call: Callable[[Any], object], seconds: float
) -> list[float]:
    """Return the median seconds of a call on each group; collective."""
    from mpicoll import measure

    contenders: dict[str, Callable[[], Any]] = {name: partial(call, group) for name, group in groups.items()}
    found = measure.compare(comm, contenders, seconds)
    return [found[name].median for name in groups]


def _row(name: str, nbytes: int, times: Sequence[float]) -> list[str]:
    return [name, format_nbytes(nbytes), *map(format_seconds, times), f"{times[1] / times[0]:.2f}"]


def _collective_rows(
    comm: MPI.Intracomm, groups: Mapping[str, Any], sizes: Sequence[int], seconds: float
) -> list[list[str]]:
    rows, ratios = [], []
    for nbytes in sizes:
        call = collectives(comm.Get_size(), nbytes)["all_reduce"]
        times = compare(comm, groups, call, seconds)
        rows.append(_row("all_reduce", nbytes, times))
        ratios.append(times[1] / times[0])
    rows.append(["all_reduce", "geometric mean", "", "", f"{geometric_mean(ratios):.2f}"])
    for nbytes in OTHER_SIZES:
        for name, call in collectives(comm.Get_size(), nbytes).items():
            if name != "all_reduce":
                rows.append(_row(name, nbytes, compare(comm, groups, call, seconds)))
    return rows


def _training_rows(comm: MPI.Intracomm, groups: Mapping[str, Any], model: str, seconds: float) -> list[list[str]]:
    """Return the rows of a step of DistributedDataParallel, and of its communication."""
    rows = _step_rows(comm, groups, model, seconds, bucket_views=False)
    return rows + _step_rows(comm, groups, model, seconds, bucket_views=True)


def _step_rows(
    comm: MPI.Intracomm, groups: Mapping[str, Any], model: str, seconds: float, *, bucket_views: bool
) -> list[list[str]]:
    from bench import torch_models
    from mpicoll import measure

    calls: dict[str, Callable[[], None]] = {}
    for name, group in groups.items():
        calls[name], calls[f"{name} alone"] = torch_models.ddp_steps(model, group, bucket_views=bucket_views)
    found = {name: timing.median for name, timing in measure.compare(comm, calls, seconds).items()}
    steps = [found[name] for name in groups]
    alone = sum(found[f"{name} alone"] for name in groups) / len(groups)  # the same program
    rest = [step - alone for step in steps]
    nbytes = _megabytes(torch_models.made(model).nbytes)
    title = f"{model}, bucket views" if bucket_views else model
    rows = [_row(f"{title}, step", nbytes, steps)]
    if min(rest) > 0:  # else the two differ by less than they scatter
        rows.append(_row(f"{title}, communication", nbytes, rest))
    return rows


def _megabytes(nbytes: int) -> int:
    """Return a number of bytes, rounded to whole megabytes."""
    return round(nbytes / (1 << 20)) << 20


def _fsdp_rows(comm: MPI.Intracomm, groups: Mapping[str, Any], model: str, seconds: float) -> list[list[str]]:
    """Return the rows of a step of FSDP, with its own buffers and with buffers in shared memory."""
    from bench import torch_models
    from mpicoll import measure

    calls = {name: torch_models.fsdp_step(model, group) for name, group in groups.items()}
    calls["shared"] = torch_models.fsdp_step(model, groups["mpicoll"], shares_buffers=True)
    found = {name: timing.median for name, timing in measure.compare(comm, calls, seconds).items()}
    nbytes = _megabytes(torch_models.made(model).nbytes)
    return [
        _row(f"{model}, step of FSDP", nbytes, [found["mpicoll"], found["gloo"]]),
        _row(f"{model}, step of FSDP, shared buffers", nbytes, [found["shared"], found["gloo"]]),
    ]


def _measure(comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import mpicoll.torch  # noqa: F401

    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("mpicoll")
    groups = {"mpicoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = (
        _collective_rows(comm, groups, arguments.sizes, arguments.seconds) if "collectives" in arguments.parts else []
    )
    for model in arguments.models:
        if "ddp" in arguments.parts:
            rows += _training_rows(comm, groups, model, 5 * arguments.seconds)
        if "fsdp" in arguments.parts:
            rows += _fsdp_rows(comm, groups, model, 5 * arguments.seconds)
    if comm.Get_rank() == 0:
        head = ["call", "bytes", *groups, "ratio"]
        title = f"{comm.Get_size()} ranks, PyTorch {torch.__version__}, one thread a rank"
        print("\n".join(["", title, "", *text_tables.markdown([head, *rows], names=1), ""]), flush=True)
    dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2], help="when not run under mpirun (default: 2)")
    sizes = "of all_reduce, such as 64K 1MB (default: 1 KB to 64 MB)"
    parser.add_argument("--sizes", type=parse_nbytes, nargs="+", default=SIZES, metavar="BYTES", help=sizes)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS, help="of the benchmark (default: all)")
    parser.add_argument("--models", choices=MODELS, nargs="+", default=MODELS, help="of the steps (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="for each row, five times as long for steps (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return measure_on_ranks(PROGRAM, _parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
