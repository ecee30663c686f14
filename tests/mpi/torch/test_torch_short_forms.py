"""Calls of a process group's methods with a tensor, a root, an operation and a timeout in place of options."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

pytestmark = pytest.mark.mpi

LONG = timedelta(seconds=20)


def own(pg: Any, count: int = 3) -> torch.Tensor:
    return torch.full((count,), pg.rank() + 1.0)


def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6) * (rank + 1) % 4).to(dtype).reshape(2, 3)


def total(pg: Any) -> float:
    return sum(range(1, pg.size() + 1))


def test_reductions(pg: Any) -> None:
    for arguments, named in (
        ((), {}),
        ((ReduceOp.SUM,), {}),
        ((ReduceOp(ReduceOp.SUM),), {}),
        ((ReduceOp.SUM, LONG), {}),
        ((), {"op": ReduceOp.SUM, "timeout": LONG}),
        ((), {"opts": dist.AllreduceOptions()}),
        ((dist.AllreduceOptions(),), {}),
    ):
        tensor = own(pg)
        pg.allreduce([tensor], *arguments, **named).wait()
        assert tensor.tolist() == [total(pg)] * 3
    tensor = own(pg)
    pg.allreduce(tensor, ReduceOp.MAX).wait()
    assert tensor.tolist() == [pg.size()] * 3
    pg.allreduce_coalesced([tensor, tensor.clone()], ReduceOp.MIN).wait()
    tensor = own(pg)
    pg.reduce(tensor, pg.size() - 1, ReduceOp.SUM).wait()
    assert pg.rank() < pg.size() - 1 or tensor.tolist() == [total(pg)] * 3
    output = torch.zeros(3)
    pg.reduce_scatter(output, [own(pg)] * pg.size(), ReduceOp.SUM, LONG).wait()
    assert output.tolist() == [total(pg)] * 3


def test_movements(pg: Any) -> None:
    last = pg.size() - 1
    tensor = own(pg)
    pg.broadcast(tensor, last, timeout=LONG).wait()
    assert tensor.tolist() == [pg.size()] * 3
    outputs = [torch.zeros(3) for _ in range(pg.size())]
    pg.allgather(outputs, own(pg)).wait()
    assert [each.tolist() for each in outputs] == [[rank + 1.0] * 3 for rank in range(pg.size())]
    outputs = [torch.zeros(3) for _ in range(pg.size())] if pg.rank() == last else []
    pg.gather(outputs, own(pg), last).wait()
    assert [each.tolist() for each in outputs] == [[rank + 1.0] * 3 for rank in range(pg.size())][: len(outputs)]
    given = [torch.full((3,), float(rank)) for rank in range(pg.size())] if pg.rank() == last else []
    output = torch.zeros(3)
    pg.scatter(output, given, root=last).wait()
    assert output.tolist() == [pg.rank()] * 3
    moved = torch.zeros(pg.size())
    pg.alltoall_base(moved, own(pg, pg.size()), [], [], LONG).wait()
    assert moved.tolist() == [rank + 1 for rank in range(pg.size())]
    pieces = [torch.zeros(1) for _ in range(pg.size())]
    pg.alltoall(pieces, list(own(pg, pg.size()).split(1)), timeout=LONG).wait()
    assert torch.cat(pieces).tolist() == moved.tolist()
    pg.barrier(timeout=LONG).wait()
    pg.barrier(LONG).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_gather_to_one_tensor(pg: Any, dtype: torch.dtype) -> None:
    for root in range(pg.size()):
        tensor = numbers(pg.rank(), dtype)
        output = torch.zeros((3, 2 * pg.size())).to(dtype).t() if pg.rank() == root else torch.empty(0, dtype=dtype)
        options = dist.GatherOptions()
        options.rootRank = root
        pg.gather_single(output, tensor, options).wait()
        wanted = torch.cat([numbers(rank, dtype) for rank in range(pg.size())])
        assert pg.rank() != root or torch.equal(output, wanted)


def test_a_short_call_has_its_own_time(pg: Any) -> None:
    if pg.size() == 1:
        pytest.skip("needs a rank that does not come")
    dist.barrier()
    if pg.rank():
        with pytest.raises(Exception, match=r"ranks? 0\b.* did not arrive within 0\.5 s"):
            pg.allreduce(own(pg), ReduceOp.SUM, timedelta(seconds=0.5)).wait()
    dist.barrier()


def test_too_many_arguments(pg: Any) -> None:
    with pytest.raises(TypeError, match="reduce: 5 arguments; 4 at most"):
        pg.reduce(own(pg), 0, ReduceOp.SUM, LONG, 1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'root'"):
        pg.barrier(root=1)
