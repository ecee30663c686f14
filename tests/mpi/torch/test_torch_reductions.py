"""Reductions of element types for which the plain sum, or the product with a factor, would be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.mpi.torch.test_torch_collectives import ASYNC, finish

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning")]

NARROW = {
    torch.float16: 40000, torch.int8: 100, torch.uint8: 200, torch.int16: 30000, torch.uint16: 60000,
    torch.int32: 2_000_000_000, torch.uint32: 4_000_000_000,
}  # fmt: skip
"""For each type a number of which the sum over several ranks is out of its range, but the mean is not."""


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("async_op", ASYNC)
def test_means_of_numbers_whose_sum_is_out_of_range(pg: Any, dtype: torch.dtype, async_op: bool) -> None:
    size, root = pg.size(), pg.size() - 1
    given = torch.tensor([NARROW[dtype], 4, 0], dtype=dtype)
    tensor = given.clone()
    finish(dist.all_reduce(tensor, ReduceOp.AVG, pg, async_op))
    assert torch.equal(tensor, given)
    tensor = torch.stack([given, given]).t()  # not contiguous
    finish(dist.all_reduce(tensor, ReduceOp.AVG, pg, async_op))
    assert torch.equal(tensor[:, 1], given)
    tensor = given.clone() if pg.rank() == root else given
    finish(dist.reduce(tensor, op=ReduceOp.AVG, group=pg, group_dst=root, async_op=async_op))
    assert torch.equal(tensor, given)
    output = torch.zeros(3, dtype=dtype)
    finish(dist.reduce_scatter(output, [given] * size, ReduceOp.AVG, pg, async_op))
    assert torch.equal(output, given)
    with dist._coalescing_manager(group=pg, async_ops=async_op) as manager:
        tensors = [given.clone(), given.clone()]
        for tensor in tensors:
            dist.all_reduce(tensor, ReduceOp.AVG, pg)
    finish(manager if async_op else None)
    assert all(torch.equal(tensor, given) for tensor in tensors)


def test_means_of_the_longest_integers(pg: Any) -> None:
    for dtype, number in ((torch.int64, -(2**60) - 1), (torch.uint64, 2**60 + 1)):
        tensor = torch.tensor([number, 2 * pg.rank()], dtype=dtype)
        dist.all_reduce(tensor, ReduceOp.AVG, pg)
        assert tensor.tolist() == [number, pg.size() - 1]


def test_means_of_the_smallest_float16(pg: Any) -> None:
    """They vanish if they are divided before they are added."""
    tensor = torch.tensor([2.0**-24, 3 * 2.0**-24], dtype=torch.float16)
    wanted = tensor.clone()
    dist.all_reduce(tensor, ReduceOp.AVG, pg)
    assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.int64, torch.float32], ids=str)
def test_means_of_sparse_tensors(pg: Any, dtype: torch.dtype) -> None:
    values = torch.tensor([100, 30 * pg.rank()], dtype=dtype) * (400 if dtype == torch.float16 else 1)
    tensor = torch.sparse_coo_tensor([[0, 2]], values, (3,), check_invariants=True)
    dense = tensor.to_dense()
    dist.all_reduce(tensor, ReduceOp.AVG, pg)
    dist.all_reduce(dense, ReduceOp.AVG, pg)
    assert tensor.dtype == dtype
    assert torch.equal(tensor.to_dense(), dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("factor", [0.5, torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.float64)], ids=str)
def test_premultiplied_sums_of_other_types(pg: Any, dtype: torch.dtype, factor: Any) -> None:
    op, size, root = dist._make_nccl_premul_sum(factor), pg.size(), 0
    tensor = torch.full((4,), 2.0, dtype=dtype)
    dist.all_reduce(tensor, op, pg)
    assert (tensor == size).all()
    tensor = torch.full((4,), 2.0, dtype=dtype)
    dist.reduce(tensor, op=op, group=pg, group_dst=root)
    assert (tensor == (size if pg.rank() == root else 2)).all()
    output = torch.zeros(2, dtype=dtype)
    dist.reduce_scatter_tensor(output, torch.full((2 * size,), 2.0, dtype=dtype), op, pg)
    assert (output == size).all()


def test_premultiplied_sums_of_integers_are_refused(pg: Any) -> None:
    op = dist._make_nccl_premul_sum(0.5)
    for dtype in (torch.int32, torch.bool):
        with pytest.raises(ValueError, match=r"op: PREMUL_SUM .*is not defined on tensors of"):
            dist.all_reduce(torch.ones(3, dtype=dtype), op, pg)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_moved_and_not_reduced(pg: Any, dtype: torch.dtype) -> None:
    tensor = torch.full((4,), pg.rank() + 1.0).to(dtype)
    for call in (
        lambda: dist.all_reduce(tensor, group=pg),
        lambda: dist.all_reduce(tensor, ReduceOp.AVG, pg),
        lambda: dist.reduce(tensor, op=ReduceOp.MAX, group=pg, group_dst=0),
        lambda: dist.reduce_scatter(torch.zeros(4, dtype=dtype), [tensor] * pg.size(), group=pg),
        lambda: pg.allreduce_coalesced([tensor, tensor.clone()]).wait(),
    ):
        with pytest.raises(ValueError, match=r"op: \w+ is not defined on tensors of torch.float8"):
            call()
    outputs = [torch.zeros(4, dtype=dtype) for _ in range(pg.size())]
    dist.all_gather(outputs, tensor, pg)
    assert [output.float().tolist() for output in outputs] == [[rank + 1.0] * 4 for rank in range(pg.size())]
    dist.broadcast(tensor, group=pg, group_src=0)
    assert tensor.float().tolist() == [1.0] * 4
