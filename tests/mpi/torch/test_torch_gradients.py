"""Gradients that a distributed optimizer must average: in closures, of parameters that come and go, sparse ones."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll.torch as hvd
from tests.mpi.torch.test_torch_training import assert_same, model, part, samples

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("initialized")]
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
MEAN = (SIZE + 1) / 2  # of rank + 1


def loss_of(network: torch.nn.Module, step: int, rank: int = RANK) -> torch.Tensor:
    """Return the loss of a rank's samples, or of all samples if `rank` is negative."""
    x, y = samples(step, SIZE) if rank < 0 else part(samples(step, SIZE), rank)
    dtype = next(network.parameters()).dtype
    return torch.nn.functional.mse_loss(network(x.to(dtype)), y.to(dtype))


def closure_of(
    network: torch.nn.Module, zero_grad: Callable[[], None], step: int, rank: int
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        zero_grad()
        loss = loss_of(network, step, rank)
        loss.backward()
        return loss

    return closure


def assert_equal_on_all_ranks(network: torch.nn.Module) -> None:
    own = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    assert all(torch.equal(each, own) for each in hvd.allgather(own[None]))


def optimizers(name: str, network: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(network.parameters(), 0.05, momentum=0.5)
    return torch.optim.LBFGS(network.parameters(), 0.1, max_iter=4, line_search_fn=name.partition(" ")[2] or None)


@pytest.mark.parametrize("name", ["sgd", "lbfgs", "lbfgs strong_wolfe"])
@pytest.mark.parametrize("by_model", [False, True])
def test_closures(name: str, by_model: bool) -> None:
    """As on one rank with all samples, also where the optimizer calls the closure several times and uses the loss."""
    network, whole = model(torch.float64), model(torch.float64)  # a line search takes other ways after other rounding
    plain = optimizers(name, whole)
    optimizer = hvd.DistributedOptimizer(optimizers(name, network), network.named_parameters(), bucket_bytes=1000)
    zero_grad = network.zero_grad if by_model else optimizer.zero_grad
    for step in range(3):
        wanted = plain.step(closure_of(whole, whole.zero_grad, step, -1))
        loss = optimizer.step(closure_of(network, zero_grad, step, RANK))
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert_same(network, whole, 1e-6)
    assert_equal_on_all_ranks(network)


def test_losses_of_closures() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), op=hvd.Sum)
    assert optimizer.step(lambda: RANK + 1.0) == SIZE * MEAN
    assert optimizer.step(lambda: None) is None
    assert optimizer.step(lambda: "no number") == "no number"


def test_a_closure_that_reduces_by_itself() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))

    def closure() -> float:
        optimizer.zero_grad()
        (parameter.sum() * (RANK + 1)).backward()
        optimizer.synchronize()
        parameter.grad.clamp_(max=0.5)
        return RANK

    with optimizer.skip_synchronize():
        assert optimizer.step(closure) == RANK
    assert (parameter == -0.5).all()


def test_no_closure_inside_join() -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), 0.1))
    with optimizer.join(), pytest.raises(RuntimeError, match="a closure was given inside join"):
        optimizer.step(lambda: 0.0)


def test_named_parameters_that_lack_some() -> None:
    network = model()
    some = list(network.named_parameters())[1:-1]
    with pytest.raises(ValueError, match=r"named_parameters: 2 of the optimizer's 6 .* first of shape \(64, 20\)"):
        hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.1), some)
    head = torch.optim.SGD(network[4].parameters(), 0.1)
    hvd.DistributedOptimizer(head, network.named_parameters())  # more is allowed


def take_step(network: torch.nn.Module, optimizer: Any, step: int, rank: int = RANK) -> None:
    optimizer.zero_grad()
    loss_of(network, step, rank).backward()
    optimizer.step()


def gradual(network: torch.nn.Module, wrap: Callable[[Any], Any], rank: int) -> None:
    """Train the last layer, then that before it, too, then all but the last; one layer is added to the optimizer."""
    network[0].requires_grad_(False)
    network[2].requires_grad_(False)
    kept = [*network[4].parameters(), *network[2].parameters()]
    optimizer = wrap(torch.optim.SGD(kept, 0.05, momentum=0.9, weight_decay=0.1))
    take_step(network, optimizer, 0, rank)
    network[2].requires_grad_(True)
    take_step(network, optimizer, 1, rank)
    take_step(network, optimizer, 2, rank)
    network[0].requires_grad_(True)
    optimizer.add_param_group({"params": network[0].parameters()})
    take_step(network, optimizer, 3, rank)
    network[4].requires_grad_(False)
    take_step(network, optimizer, 4, rank)
    take_step(network, optimizer, 5, rank)


@pytest.mark.parametrize("bucket_bytes", [1000, 4 << 20])
def test_parameters_that_are_frozen_unfrozen_and_added(bucket_bytes: int) -> None:
    network, whole = model(), model()
    gradual(whole, lambda plain: plain, -1)
    gradual(network, lambda plain: hvd.DistributedOptimizer(plain, bucket_bytes=bucket_bytes), RANK)
    assert_same(network, whole)
    assert_equal_on_all_ranks(network)
    assert network[4].weight.grad is None
    assert not torch.equal(network[0].weight, model()[0].weight)


def test_residuals_of_parameters_that_were_unfrozen() -> None:
    def made(network: torch.nn.Module) -> Any:
        network[0].requires_grad_(False)
        return hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.05), compression="topk:0.2")

    network = model()
    optimizer = made(network)
    network[0].requires_grad_(True)
    assert len(optimizer.compression_state_dict()["vectors"]) == 2
    take_step(network, optimizer, 0)
    kept = optimizer.compression_state_dict()
    assert all(vector for vector in kept["vectors"])
    again = model()
    resumed = made(again)
    again[0].requires_grad_(True)
    resumed.load_compression_state_dict(kept)


def test_an_optimizer_that_takes_the_place_of_another() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
    gone = weakref.ref(optimizer._reducer)
    parameter.sum().backward()
    optimizer.step()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
    assert gone() is None
    assert len(parameter._post_accumulate_grad_hooks) == 1
    for _ in range(2):
        optimizer.zero_grad()
        (parameter.sum() * (RANK + 1)).backward()
        optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((3,), -1 - 2 * MEAN))


def test_gradients_are_reduced_once() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), op=hvd.Sum)
    (parameter.sum() * (RANK + 1)).backward()
    optimizer.synchronize()
    optimizer.synchronize()
    parameter.grad.div_(2)
    with pytest.warns(UserWarning, match="call step inside skip_synchronize"):
        optimizer.step()
    assert (parameter == -SIZE * MEAN / 2).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for zero_grad in (optimizer.zero_grad, lambda: parameter.grad.zero_()):
            zero_grad()
            (parameter.sum() * (RANK + 1)).backward()
            optimizer.step()
    assert (parameter == -SIZE * MEAN * 5 / 2).all()


def test_a_backward_pass_of_one_rank_after_synchronisation() -> None:
    """All ranks reduce again, though only one has a new gradient."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
    (parameter.sum() * (RANK + 1)).backward()
    optimizer.synchronize()
    if RANK == 0:
        parameter.sum().backward()
    with pytest.warns(UserWarning, match="call step inside skip_synchronize"):
        optimizer.step()
    assert torch.allclose(parameter.detach(), torch.full((3,), -MEAN - 1 / SIZE))
    assert_equal_on_all_ranks(torch.nn.ParameterList([parameter]))


def test_a_step_that_is_left_out_after_synchronisation() -> None:
    """As by a gradient scaler; the next backward pass reduces as any other does."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0))
    parameter.sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    (parameter.sum() * (RANK + 1)).backward()
    optimizer.step()  # no warning
    assert torch.allclose(parameter.detach(), torch.full((3,), -MEAN))


@pytest.mark.filterwarnings("ignore:step. synchronize")
def test_a_parameter_that_is_unfrozen_after_synchronisation() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(3), requires_grad) for requires_grad in (True, False))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], 1.0))
    first.sum().backward()
    optimizer.synchronize()
    second.requires_grad_(True)
    (second.sum() * (RANK + 1)).backward()
    optimizer.step()
    assert torch.allclose(first.detach(), torch.full((3,), -1.0))
    assert torch.allclose(second.detach(), torch.full((3,), -MEAN))


@pytest.mark.filterwarnings("ignore:step. synchronize")
def test_synchronisation_before_a_step_of_ranks_that_run_out_of_samples() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), op=hvd.Sum)
    with optimizer.join():
        for step in range(1 + RANK):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.synchronize()
            if step == 1:
                parameter.sum().backward()  # of 1 + ... + 1 of the ranks with samples
            optimizer.step()
    parameters = hvd.allgather(parameter.detach()[None])
    assert all(torch.equal(each, parameters[0]) for each in parameters)
    first, rest = SIZE, [SIZE - step for step in range(1, SIZE)]
    again = rest[0] * (rest[0] + 1) if rest else 0  # each has the sum, and one
    assert parameter[0] == -(first + again + sum(rest[1:]))


@pytest.mark.parametrize("bucket_bytes", [1, 4 << 20])
def test_sparse_gradients(bucket_bytes: int) -> None:
    """Rank 0 does not use the table."""
    layers = torch.nn.ModuleList([torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1)])
    for parameter in layers.parameters():
        torch.nn.init.ones_(parameter)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), 1.0), bucket_bytes=bucket_bytes)
    rows = layers[0](torch.tensor([RANK % 5, RANK % 5])) if RANK else torch.ones(2, 3)
    layers[1](rows).sum().backward()
    optimizer.step()
    wanted = torch.ones(5, 3)
    for rank in range(1, SIZE):
        wanted[rank % 5] -= 2 / SIZE
    torch.testing.assert_close(layers[0].weight.detach(), wanted)
    assert layers[0].weight.grad.layout == torch.strided
    torch.testing.assert_close(layers[1].weight.detach(), torch.full((1, 3), -1.0))
    assert_equal_on_all_ranks(layers)


def test_sparse_gradients_over_several_passes() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 1.0), backward_passes_per_step=2)
    for _ in range(2):
        for row in range(2):
            table(torch.tensor([row])).sum().backward()
        optimizer.synchronize()
        assert table.weight.grad[:, 0].tolist() == [1, 1, 0, 0]
        optimizer.zero_grad()


def test_an_optimizer_of_sparse_gradients_only_is_refused_on_every_rank() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()))
    if RANK == 0:
        table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()
