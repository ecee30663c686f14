"""Tensors that have no memory of their own: they are unwrapped, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from mpicoll.errors import RemoteError
from mpicoll.torch import tensor_collectives

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning")]
COUNT = 100_000


def pending(pg: Any, count: int = COUNT) -> torch.Tensor:
    """The size of the group as the elements, in a tensor that nobody has waited for."""
    made = functional.all_reduce(torch.ones(count), "sum", pg)
    assert isinstance(made, functional.AsyncCollectiveTensor)
    return made


def test_results_of_functional_collectives(pg: Any) -> None:
    size, rank = pg.size(), pg.rank()
    for async_op in (False, True):
        tensor = pending(pg)
        finish(dist.all_reduce(tensor, group=pg, async_op=async_op))
        assert (tensor == size**2).all()
        finish(dist.broadcast(pending(pg), group=pg, group_src=0, async_op=async_op))
        output = torch.zeros(size * COUNT)
        finish(dist.all_gather_into_tensor(output, pending(pg), pg, async_op))
        assert (output == size).all()
        outputs = [torch.zeros(COUNT) for _ in range(size)]
        finish(dist.all_gather(outputs, pending(pg), pg, async_op))
        assert all((each == size).all() for each in outputs)
        output = torch.zeros(COUNT)
        finish(dist.reduce_scatter_tensor(output, pending(pg, size * COUNT), group=pg, async_op=async_op))
        assert (output == size**2).all()
    if size > 1:
        received = torch.zeros(COUNT)
        sending = dist.isend(pending(pg), group=pg, group_dst=(rank + 1) % size)
        dist.recv(received, group=pg, group_src=(rank - 1) % size)
        sending.wait()
        assert (received == size).all()


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


def calls(pg: Any) -> list[Callable[[torch.Tensor], Any]]:
    """Calls of which one argument is a tensor of three elements."""
    size = pg.size()
    plain = torch.ones(3)
    return [
        lambda each: dist.all_reduce(each, group=pg),
        lambda each: dist.all_reduce(each, dist.ReduceOp.AVG, pg),
        lambda each: dist.reduce(each, group=pg, group_dst=0),
        lambda each: dist.broadcast(each, group=pg, group_src=0),
        lambda each: dist.all_gather_into_tensor(torch.zeros(3 * size), each, pg),
        lambda each: dist.all_gather([torch.zeros(3) for _ in range(size)], each, pg),
        lambda each: dist.all_gather([each] * size, plain, pg),
        lambda each: dist.reduce_scatter(plain.clone(), [each] * size, group=pg),
        lambda each: dist.reduce_scatter(each, [plain] * size, group=pg),
        lambda each: dist.all_to_all([torch.zeros(3) for _ in range(size)], [each] * size, pg),
        lambda each: dist.all_to_all_single(torch.zeros(3), each, [3] + [0] * (size - 1), [3] + [0] * (size - 1), pg),
        lambda each: pg.allreduce_coalesced([each, plain.clone()]).wait(),
    ]


@pytest.fixture(scope="module")
def distributed(world: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (world.size(),))
    return DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize("call", range(12))
def test_other_tensors_without_memory(pg: Any, distributed: DTensor, call: int) -> None:
    with pytest.raises(TypeError, match=r"tensor: DTensor of shape \(3,\) has no memory of its own"):
        calls(pg)[call](distributed)


@pytest.mark.mpi(min_size=2)
def test_one_on_one_rank(pg: Any, distributed: DTensor) -> None:
    kind = TypeError if pg.rank() == 1 else RemoteError
    with pytest.raises(kind, match=r"tensor: DTensor of shape \(3,\) has no memory of its own"):
        dist.all_reduce(distributed if pg.rank() == 1 else torch.ones(3), group=pg)


def test_a_message_of_one(pg: Any, distributed: DTensor) -> None:
    for call in (dist.isend, dist.irecv):
        with pytest.raises(TypeError, match="has no memory of its own"):
            call(distributed, 0, pg)


def test_tensors_without_elements_have_no_memory_either(pg: Any) -> None:
    tensor_collectives.allreduce(pg.comm, torch.empty(0), dist.ReduceOp.SUM)
