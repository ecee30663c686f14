"""Horovod's interface: functions on tensors, and an optimizer that averages gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll.torch as hvd
from mpicoll.errors import MismatchError, RemoteError
from tests.mpi.torch.test_torch_training import alone, assert_same, model, part, samples

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("initialized")]
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def test_places() -> None:
    hvd.init()  # nothing happens
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    assert (hvd.local_rank(), hvd.local_size()) == (RANK, SIZE)
    hvd.barrier()


def test_functions_on_tensors() -> None:
    tensor = torch.full((2, 3), float(RANK))
    total = sum(range(SIZE))
    assert (hvd.allreduce(tensor) == total / SIZE).all()
    assert (hvd.allreduce(tensor, op=hvd.Sum) == total).all()
    assert (hvd.allreduce(tensor, op=hvd.Max) == SIZE - 1).all()
    assert (tensor == RANK).all()
    handle = hvd.allreduce_async(tensor, op=hvd.Sum)
    assert (hvd.synchronize(handle) == total).all()
    assert hvd.poll(handle)
    compressed = hvd.allreduce(torch.ones(3000) * RANK, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert torch.allclose(compressed, torch.full((3000,), float(total)), atol=0.01)
    assert (hvd.broadcast(tensor, SIZE - 1) == SIZE - 1).all()
    hvd.broadcast_(tensor, 0)
    assert (tensor == 0).all()
    rows = torch.full((RANK, 2), RANK, dtype=torch.int32)
    assert torch.equal(hvd.allgather(rows), torch.cat([torch.full((r, 2), r, dtype=torch.int32) for r in range(SIZE)]))
    assert hvd.allgather(torch.tensor([RANK])).tolist() == list(range(SIZE))
    assert hvd.broadcast_object({"rank": RANK}, SIZE - 1) == {"rank": SIZE - 1}
    assert hvd.allgather_object(("rank", RANK)) == [("rank", rank) for rank in range(SIZE)]
    with pytest.raises(ValueError, match="no dimension"):
        hvd.allgather(torch.tensor(1.0))


def test_without_init() -> None:
    hvd.shutdown()
    with pytest.raises(RuntimeError, match=r"call init\(\) first"):
        hvd.rank()
    with pytest.raises(RuntimeError, match=r"call init\(\) first"):
        hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), 0.1))


def test_a_parameter_without_elements() -> None:
    last = torch.nn.Parameter(torch.empty(0))
    first = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, last], 1.0))
    (first.sum() * (RANK + 1) + last.sum()).backward()
    optimizer.step()
    assert torch.allclose(first.detach(), torch.full((2,), 1 - (SIZE + 1) / 2))


def train(network: torch.nn.Module, optimizer: Any, steps: int = 5) -> None:
    for step in range(steps):
        x, y = part(samples(step, SIZE), RANK)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(network(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 4 << 20])
def test_it_trains_as_one_rank_does(bucket_bytes: int) -> None:
    network = model()
    plain = torch.optim.SGD(network.parameters(), 0.05)
    optimizer = hvd.DistributedOptimizer(plain, network.named_parameters(), bucket_bytes=bucket_bytes)
    assert isinstance(optimizer, torch.optim.SGD)
    train(network, optimizer)
    assert_same(network, alone(SIZE))


def test_schedules_of_the_learning_rate() -> None:
    network = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.05))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(network, optimizer, 1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.025


@pytest.mark.parametrize("compression", ["bf16", "topk:0.5", "int8"])
def test_compression(compression: str) -> None:
    network = model()
    plain = torch.optim.SGD(network.parameters(), 0.05)
    train(network, hvd.DistributedOptimizer(plain, network.named_parameters(), compression))
    assert_same(network, alone(SIZE), {"bf16": 5e-3}.get(compression, 0.1))


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product])
def test_only_sums_are_compressed(op: Any) -> None:
    tensor = torch.full((4096,), RANK + 1.0)
    for call in (hvd.allreduce, hvd.allreduce_, lambda *a, **k: hvd.synchronize(hvd.allreduce_async_(*a, **k))):
        with pytest.raises(ValueError, match="is neither Average nor Sum, with compression"):
            call(tensor, op=op, compression="fp16")
    with pytest.raises(ValueError, match="is neither Average nor Sum, which gradients need"):
        hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), 0.1), op=op)
    assert (hvd.allreduce(tensor, op=hvd.Sum, compression="fp16") == SIZE * (SIZE + 1) / 2).all()


def test_a_checkpoint_with_residuals_continues_bit_for_bit() -> None:
    def made(network: torch.nn.Module) -> Any:
        plain = torch.optim.SGD(network.parameters(), 0.05, momentum=0.5)
        return hvd.DistributedOptimizer(plain, network.named_parameters(), "topk:0.2", bucket_bytes=8000)

    network = model()
    optimizer = made(network)
    train(network, optimizer, 3)
    kept = copy.deepcopy((network.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()))
    assert any(kept[2]["vectors"])
    train(network, optimizer, 3)
    again = model()
    resumed = made(again)
    again.load_state_dict(kept[0])
    resumed.load_state_dict(kept[1])
    resumed.load_compression_state_dict(kept[2])
    train(again, resumed, 3)
    for one, other in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="state: it is not the state of"):
        resumed.load_compression_state_dict({"vectors": []})


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_several_backward_passes_for_a_step(op: Any) -> None:
    """As in Horovod: the sum over the passes, with both operations."""
    network, plain = model(), model()
    plain_optimizer = torch.optim.SGD(network.parameters(), 0.05)
    optimizer = hvd.DistributedOptimizer(plain_optimizer, backward_passes_per_step=2, op=op)
    for step in range(2):
        x, y = part(samples(step, SIZE), RANK)
        torch.nn.functional.mse_loss(network(x), y).backward()
        x, y = samples(step, SIZE)
        loss = torch.nn.functional.mse_loss(plain(x), y)
        (loss if op == hvd.Average else SIZE * loss).backward()
    optimizer.synchronize()
    for one, two in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_one_backward_pass_too_many() -> None:
    network = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.05))
    network(torch.ones(20)).sum().backward()
    with pytest.raises(RuntimeError, match="more than 1 backward pass since the last step"):
        network(torch.ones(20)).sum().backward()
    optimizer.step()


def test_the_last_optimizer_of_a_parameter_reduces_its_gradients() -> None:
    """One that was made before may live on, where nothing has collected it yet."""
    network, plain = model(), model()
    first = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.05))
    train(network, first, 2)
    second = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.05))
    train(network, second, 2)
    train(plain, hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), 0.05)), 2)
    train(plain, hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), 0.05)), 2)
    for one, two in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(RuntimeError, match="another DistributedOptimizer was made"):
        first.step()


def test_passes_that_only_accumulate() -> None:
    network, plain = model(), model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(network.parameters(), 0.05))
    x, y = part(samples(0, SIZE), RANK)
    with optimizer.no_sync():
        torch.nn.functional.mse_loss(network(x), y).backward()
    torch.nn.functional.mse_loss(network(x), y).backward()
    optimizer.synchronize()
    x, y = samples(0, SIZE)
    (2 * torch.nn.functional.mse_loss(plain(x), y)).backward()
    for one, two in zip(network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)
    with optimizer.skip_synchronize():
        optimizer.step()


def test_parameters_that_only_some_ranks_use() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(3)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), 0.1), bucket_bytes=1)
    used = layers[0](torch.ones(4)) if RANK == 0 else layers[1](torch.ones(4))
    used.sum().backward()
    optimizer.synchronize()
    assert torch.allclose(layers[0].weight.grad, torch.full((4, 4), 1 / SIZE))
    assert torch.allclose(layers[1].weight.grad, torch.full((4, 4), (SIZE - 1) / SIZE))
    assert (layers[2].weight.grad == 0).all()


def test_parameters_and_optimizer_state_come_from_the_root() -> None:
    network = model()
    optimizer = torch.optim.Adam(network.parameters(), 0.1 * (RANK + 1))
    if RANK == 0:
        network(torch.ones(20)).sum().backward()
        optimizer.step()
    else:
        for parameter in network.parameters():
            parameter.data.fill_(7)
    hvd.broadcast_parameters(network.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    first = next(network.parameters())
    everyones = hvd.allgather(torch.stack([first.detach(), optimizer.state[first]["exp_avg"]])[None])
    assert all(torch.equal(each, everyones[0]) for each in everyones)
    assert everyones[0, 1].abs().max() > 0


@pytest.mark.mpi(min_size=2)
def test_models_that_differ() -> None:
    layer = torch.nn.Linear(3 + (RANK == 1), 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1))
    layer(torch.ones(layer.in_features)).sum().backward()
    with pytest.raises((MismatchError, RemoteError)):
        optimizer.step()


@pytest.mark.mpi(min_size=2)
def test_an_argument_that_is_wrong_on_one_rank() -> None:
    tensor = torch.ones(3, dtype=torch.bool if RANK == 1 else torch.float32)
    with pytest.raises(ValueError if RANK == 1 else RemoteError, match=r"op: AVG is not defined on tensors of torch"):
        hvd.allreduce(tensor)


def test_wrong_arguments() -> None:
    optimizer = torch.optim.SGD(model().parameters(), 0.1)
    with pytest.raises(ValueError, match="backward_passes_per_step: 0"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="bucket_bytes: 0"):
        hvd.DistributedOptimizer(optimizer, bucket_bytes=0)


def uneven(steps: int, rank: int) -> int:
    """Return how many of `steps` a rank takes: rank 1 half of them, rank 2 none."""
    return {1: steps // 2, 2: 0}.get(rank, steps)


def reference(steps: int, by_initial_size: bool) -> torch.nn.Module:
    """Train on one rank as ranks with different numbers of batches do."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.5)
    for step in range(steps):
        present = [rank for rank in range(SIZE) if step < uneven(steps, rank)]
        optimizer.zero_grad()
        for rank in present:
            x, y = part(samples(step, SIZE), rank)
            divisor = SIZE if by_initial_size else len(present)
            (torch.nn.functional.mse_loss(network(x), y) / divisor).backward()
        optimizer.step()
    return network


@pytest.mark.parametrize("by_initial_size", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1000, 4 << 20])
def test_ranks_that_run_out_of_samples(by_initial_size: bool, bucket_bytes: int) -> None:
    network = model()
    plain = torch.optim.SGD(network.parameters(), 0.05, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, network.named_parameters(), bucket_bytes=bucket_bytes)
    with optimizer.join(by_initial_size):
        train(network, optimizer, uneven(6, RANK))
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + RANK)
    assert_same(network, reference(6, by_initial_size))
    last = max(rank for rank in range(SIZE) if uneven(6, rank) == 6)
    assert optimizer.param_groups[0]["lr"] == 0.01 * (1 + last)
    assert (
        len({tuple(each) for each in hvd.allgather_object([p.detach().sum().item() for p in network.parameters()])})
        == 1
    )
    train(network, optimizer, 1)  # all ranks have samples again


def test_no_join_inside_another() -> None:
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model().parameters(), 0.05))
    with optimizer.join(), pytest.raises(RuntimeError, match="inside another join"), optimizer.join():
        pass
