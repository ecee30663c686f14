"""Every collective of torch.distributed on mpicoll and on gloo, with the same tensors: the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning")]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
COUNTS = (1, 6, 1000)
OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@pytest.fixture(scope="module")
def groups(world: Any) -> Any:
    """A group of gloo and one of mpicoll."""
    pair = [dist.new_group(list(range(world.size())), backend=name) for name in ("gloo", "mpicoll")]
    yield pair
    for each in pair:
        dist.destroy_process_group(each)


def given(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, of which every order of adding and multiplying gives the same, another on each rank."""
    numbers = (torch.arange(count) * (group.rank() + 3) + group.rank()) % 3
    return (
        torch.complex(numbers.float(), (numbers + 1).float() % 2).to(dtype) if dtype.is_complex else numbers.to(dtype)
    )


def all_reduce(group: Any, count: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    tensor = given(group, count, dtype)
    dist.all_reduce(tensor, op, group)
    return tensor


def reduce(group: Any, count: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    tensor, root = given(group, count, dtype), count % group.size()
    dist.reduce(tensor, op=op, group=group, group_dst=root)
    return tensor if group.rank() == root else torch.zeros(0)  # gloo leaves partial results on the others


def reduce_scatter(group: Any, count: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    output = torch.zeros(count).to(dtype)
    dist.reduce_scatter_tensor(output, given(group, count * group.size(), dtype), op, group)
    return output


def broadcast(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = given(group, count, dtype)
    dist.broadcast(tensor, group=group, group_src=count % group.size())
    return tensor


def all_gather(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    outputs = [torch.zeros(count).to(dtype) for _ in range(group.size())]
    dist.all_gather(outputs, given(group, count, dtype), group)
    return torch.cat(outputs)


def all_gather_into(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    output = torch.zeros(count * group.size()).to(dtype)
    dist.all_gather_into_tensor(output, given(group, count, dtype), group)
    return output


def gather(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    root = count % group.size()
    outputs = [torch.zeros(count).to(dtype) for _ in range(group.size())] if group.rank() == root else None
    dist.gather(given(group, count, dtype), outputs, group=group, group_dst=root)
    return torch.cat(outputs) if outputs else torch.zeros(0)


def scatter(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    output, root = torch.zeros(count).to(dtype), count % group.size()
    whole = list(given(group, count * group.size(), dtype).split(count)) if group.rank() == root else None
    dist.scatter(output, whole, group=group, group_src=root)
    return output


def all_to_all(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    output = torch.zeros(count * group.size()).to(dtype)
    dist.all_to_all_single(output, given(group, count * group.size(), dtype), group=group)
    return output


def all_to_all_of_parts(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    size, rank = group.size(), group.rank()
    sent, received = [count + rank + to for to in range(size)], [count + rank + source for source in range(size)]
    output = torch.zeros(sum(received)).to(dtype)
    dist.all_to_all_single(output, given(group, sum(sent), dtype), received, sent, group=group)
    return output


def ring(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    size, rank, tensor = group.size(), group.rank(), torch.zeros(count).to(dtype)
    if size == 1:
        return tensor
    right, left = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    operations = [dist.P2POp(dist.isend, given(group, count, dtype), right, group)]
    operations += [dist.P2POp(dist.irecv, tensor, left, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return tensor


def results(groups: Any, call: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what gloo and mpicoll give; skips the test if gloo refuses the call."""
    gloo, mpicoll = groups
    try:
        wanted = call(gloo)
    except (RuntimeError, ValueError, TypeError) as error:
        pytest.skip(f"gloo: {error}")
    return wanted, call(mpicoll)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
@pytest.mark.parametrize("call", [all_reduce, reduce, reduce_scatter], ids=lambda call: call.__name__)
def test_reductions(groups: Any, call: Any, dtype: torch.dtype, op: Any) -> None:
    for count in COUNTS:
        wanted, got = results(groups, lambda group, count=count: call(group, count, dtype, op))
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool, *COMPLEX], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        broadcast,
        all_gather,
        all_gather_into,
        gather,
        scatter,
        all_to_all,
        all_to_all_of_parts,
        ring,
    ],
    ids=lambda call: call.__name__,
)
def test_movements(groups: Any, call: Any, dtype: torch.dtype) -> None:
    for count in COUNTS:
        wanted, got = results(groups, lambda group, count=count: call(group, count, dtype))
        assert torch.equal(got, wanted)
