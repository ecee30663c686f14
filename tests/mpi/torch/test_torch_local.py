"""Local SGD, and a parameter server, for modules of PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpicoll.torch as hvd
from tests.mpi.torch.test_torch_training import assert_same, model, part, samples

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("initialized")]
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size


def flat(network: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in network.parameters()])


def everybody(vector: torch.Tensor) -> list[torch.Tensor]:
    return [torch.from_numpy(each) for each in COMM.allgather(vector.numpy().copy())]


def are_equal(network: torch.nn.Module) -> bool:
    found = everybody(flat(network))
    return all(bool((each == found[0]).all()) for each in found)


def step(network: torch.nn.Module, optimizer: Any, number: int) -> None:
    x, y = part(samples(number, SIZE), RANK)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(network(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_parameters_are_averaged_every_few_steps(kind: Any) -> None:
    network = model()
    with torch.no_grad():
        for each in network.parameters():
            each.add_(0.1 * RANK)  # rank 0's are broadcast
    optimizer = hvd.LocalSGD(kind(network.parameters(), lr=0.05), every=3)
    assert isinstance(optimizer, kind)
    assert are_equal(network)
    own = model()
    own.load_state_dict(network.state_dict())
    plain = kind(own.parameters(), lr=0.05)
    for number in range(3):
        step(network, optimizer, number)
        step(own, plain, number)
        assert are_equal(network) == (SIZE == 1 or number == 2)
    mean = torch.stack(everybody(flat(own))).mean(0)
    assert torch.allclose(flat(network), mean, atol=1e-6)
    step(network, optimizer, 3)
    optimizer.average()
    assert are_equal(network)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_step_has_momentum(nesterov: bool) -> None:
    network = model()
    optimizer = hvd.LocalSGD(
        torch.optim.SGD(network.parameters(), lr=0.1), every=2, outer_lr=0.7, outer_momentum=0.5, nesterov=nesterov
    )
    anchor, velocity = flat(network), torch.zeros_like(flat(network))
    own = model()
    plain = torch.optim.SGD(own.parameters(), lr=0.1)
    for turn in range(3):
        torch.nn.utils.vector_to_parameters(anchor.clone(), own.parameters())
        for number in (2 * turn, 2 * turn + 1):
            step(network, optimizer, number)
            step(own, plain, number)
        way = anchor - torch.stack(everybody(flat(own))).mean(0)
        velocity = 0.5 * velocity + way
        anchor = anchor - 0.7 * (way + 0.5 * velocity if nesterov else velocity)
        assert torch.allclose(flat(network), anchor, atol=1e-5)
        assert are_equal(network)


def test_a_model_loaded_after_construction_is_the_start() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.LocalSGD(torch.optim.SGD([weight], lr=0.0), every=1, outer_momentum=0.9)
    with torch.no_grad():
        weight.fill_(10.0)
    for _ in range(5):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert weight.item() == 10.0


@pytest.mark.parametrize("compression", [None, "topk:0.3"])
def test_a_checkpoint_of_each_rank_continues_bit_for_bit(compression: str | None) -> None:
    def made(network: torch.nn.Module) -> Any:
        plain = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.5)
        return hvd.LocalSGD(plain, every=3, outer_momentum=0.5, compression=compression)

    network = model()
    optimizer = made(network)
    for number in range(5):
        step(network, optimizer, number)
    kept = copy.deepcopy((network.state_dict(), optimizer.state_dict(), optimizer.compression_state_dict()))
    for number in range(5, 9):
        step(network, optimizer, number)
    again = model()
    resumed = made(again)
    again.load_state_dict(kept[0])
    resumed.load_state_dict(kept[1])
    resumed.load_compression_state_dict(kept[2])
    for number in range(5, 9):
        step(again, resumed, number)
    assert torch.equal(flat(again), flat(network))
    with pytest.raises(ValueError, match="state: anchor has 3 elements"):
        resumed.load_state_dict({**kept[1], "local": {"anchor": torch.zeros(3)}})
    torch.optim.SGD(model().parameters(), lr=0.05, momentum=0.5).load_state_dict(kept[1])


def test_averages_may_be_compressed_and_a_schedule_applies() -> None:
    network = model()
    optimizer = hvd.LocalSGD(torch.optim.SGD(network.parameters(), lr=0.1), every=2, compression="int8")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for number in range(4):
        step(network, optimizer, number)
        schedule.step()
    assert are_equal(network)
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"every": 0}, "every: 0"),
        ({"outer_lr": 0.0}, "outer_lr: 0.0"),
        ({"outer_momentum": 1.0}, "outer_momentum: 1.0"),
        ({"nesterov": True}, "nesterov: it needs"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hvd.LocalSGD(torch.optim.SGD(model().parameters(), lr=0.1), **settings)


def test_parameters_of_several_types_are_refused() -> None:
    mixed = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    for parameters in (mixed, [torch.nn.Parameter(torch.zeros(2), requires_grad=False)]):
        with pytest.raises(ValueError, match="they must all be float32 or all float64"):
            hvd.LocalSGD(torch.optim.SGD(parameters, lr=0.1))


def regression(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = np.random.default_rng(rank)
    x = numbers.standard_normal((40, 5)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(x @ np.arange(5, dtype=np.float32)[:, None])


def check_workers(network: torch.nn.Module) -> None:
    first, *others = everybody(flat(network))[: SIZE - 1]
    assert all(bool((each == first).all()) for each in others)


@pytest.mark.mpi(min_size=2)
def test_a_synchronous_server_takes_the_sum_of_all_gradients() -> None:
    network = torch.nn.Linear(5, 1)
    optimizer = hvd.AsyncOptimizer(network.parameters(), lr=0.02, staleness=0)
    own = torch.nn.Linear(5, 1)
    own.load_state_dict(network.state_dict())
    with optimizer:
        if optimizer.is_server:
            optimizer.serve()
        else:
            x, y = regression(RANK)
            for _ in range(10):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(network(x), y).backward()
                optimizer.step()
            optimizer.finish()
    for _ in range(10):
        own.zero_grad()
        for rank in range(SIZE - 1):
            x, y = regression(rank)
            torch.nn.functional.mse_loss(own(x), y).backward()
        with torch.no_grad():
            for each in own.parameters():
                assert each.grad is not None
                each.sub_(0.02 * each.grad)
    if RANK < SIZE - 1:
        assert_same(network, own)
    check_workers(network)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "settings", [{"optimizer": "momentum", "staleness": 2}, {"compression": "int8"}, {"push": "direct"}]
)
def test_workers_that_wait_for_nobody_learn(settings: dict[str, Any]) -> None:
    network = torch.nn.Linear(5, 1)
    optimizer = hvd.AsyncOptimizer(network.parameters(), lr=0.02 / SIZE, **settings)
    with optimizer:
        if optimizer.is_server:
            optimizer.serve()
        else:
            x, y = regression(RANK)
            for _ in range(300):
                optimizer.zero_grad(set_to_none=False)
                torch.nn.functional.mse_loss(network(x), y).backward()
                assert optimizer.step() >= 0
            optimizer.finish()
    x, y = regression(99)
    assert RANK == SIZE - 1 or torch.nn.functional.mse_loss(network(x), y) < 0.5
    check_workers(network)
