"""Gradients of Horovod's functions on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll.torch as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("initialized")]
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)


def own(*shape: int) -> torch.Tensor:
    return torch.full(shape, RANK + 1.0, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_allreduce(op: Any) -> None:
    """Rank r's loss is (r + 1) times the elements: the gradient is the reduction of the factors."""
    tensor = own(2, 3)
    result = hvd.allreduce(tensor, op=op, prescale_factor=2.0, postscale_factor=3.0)
    (result * (RANK + 1)).t().sum().backward()
    wanted = 6.0 * sum(rank + 1 for rank in RANKS) / (SIZE if op == hvd.Average else 1)
    torch.testing.assert_close(tensor.grad, torch.full_like(tensor, wanted))
    torch.testing.assert_close(result.detach(), torch.full_like(tensor, wanted))


def test_allreduce_by_the_older_argument() -> None:
    tensor = own(3)
    (hvd.allreduce(tensor, False) * RANK).sum().backward()
    assert tensor.grad.tolist() == [sum(RANKS)] * 3


def test_second_derivatives() -> None:
    """Of ``total ** 3 / 6``: ``total ** 2 / 2`` reduced over the ranks, then ``total`` reduced twice."""
    of_others = 0.0 if RANK else 1 / SIZE  # the average over the ranks, to which the root alone contributes
    for call, factor in ((lambda x: hvd.allreduce(x, op=hvd.Sum), SIZE**2), (lambda x: hvd.broadcast(x, 0), of_others)):
        tensor = own(1)
        total = call(tensor)
        (first,) = torch.autograd.grad((total**3 / 6).sum(), tensor, create_graph=True)
        first.sum().backward()
        assert tensor.grad.item() == pytest.approx(factor * total.item())


def test_a_compressed_allreduce() -> None:
    tensor = torch.ones(3000, requires_grad=True)
    hvd.allreduce(tensor, op=hvd.Sum, compression="fp16").sum().backward()
    assert (tensor.grad == SIZE).all()


def test_allgather() -> None:
    """The rows of rank r have the factor s + 1 + r in the loss of rank s."""
    tensor = own(RANK, 2)
    everyone = hvd.allgather(tensor)
    rows = torch.cat([torch.full((rank, 2), RANK + 1.0 + rank) for rank in RANKS])
    (everyone * rows).sum().backward()
    wanted = sum(rank + 1.0 + RANK for rank in RANKS) / SIZE
    torch.testing.assert_close(tensor.grad, torch.full_like(tensor, wanted))
    with pytest.raises(ValueError, match="no dimension"):
        hvd.allgather(torch.tensor(1.0, requires_grad=True))


def test_broadcast() -> None:
    tensor = own(3)
    result = hvd.broadcast(tensor, SIZE - 1)
    assert (result == SIZE).all()
    (result * (RANK + 1)).sum().backward()
    wanted = (SIZE + 1) / 2 if RANK == SIZE - 1 else 0.0
    assert tensor.grad.tolist() == [wanted] * 3
    infinite = own(3)
    (hvd.broadcast(infinite, 0) * float("inf")).sum().backward()
    assert infinite.grad.tolist() == [float("inf") if RANK == 0 else 0.0] * 3


def test_operations_without_a_gradient() -> None:
    tensor = own(2)
    largest = hvd.allreduce(tensor, op=hvd.Max)
    assert largest.tolist() == [SIZE] * 2
    with pytest.raises(ValueError, match="neither Average nor Sum, which alone have a gradient"):
        largest.sum().backward()


def test_nothing_is_recorded_where_no_gradient_is_needed() -> None:
    plain, tensor = torch.ones(2, 2), own(2, 2)
    calls = (hvd.allreduce, hvd.allgather, lambda each: hvd.broadcast(each, 0))
    for call in calls:
        assert not call(plain).requires_grad
        with torch.no_grad():
            assert not call(tensor).requires_grad
    assert tensor.grad is None
