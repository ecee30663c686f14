"""DistributedDataParallel, FSDP and compression hooks, against training on one rank with all samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpicoll.compression
import mpicoll.torch
from mpicoll.errors import UnknownCompressor

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning")]
STEPS, BATCH = 5, 8


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [
        torch.nn.Linear(20, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 3),
    ]
    return torch.nn.Sequential(*layers).to(dtype)


def samples(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size * BATCH, 20, generator=generator), torch.randn(size * BATCH, 3, generator=generator)


def part(tensors: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[rank * BATCH :][:BATCH] for tensor in tensors)


def train(network: torch.nn.Module, rank: int, size: int, steps: int = STEPS, first: int = 0) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), 0.05)
    losses = []
    for step in range(first, first + steps):
        x, y = samples(step, size) if rank < 0 else part(samples(step, size), rank)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(network(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(size: int) -> torch.nn.Module:
    network = model()
    train(network, -1, size)
    return network


def assert_same(network: torch.nn.Module, other: torch.nn.Module, tolerance: float = 1e-5) -> None:
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


def assert_same_on_all_ranks(group: Any, network: torch.nn.Module) -> None:
    own = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    everyones = [torch.zeros_like(own) for _ in range(group.size())]
    dist.all_gather(everyones, own, group)
    assert all(torch.equal(each, own) for each in everyones)


@pytest.mark.parametrize("buckets", [25, 0.01])
def test_ddp_trains_as_one_rank_does(pg: Any, buckets: float) -> None:
    network = DistributedDataParallel(model(), process_group=pg, bucket_cap_mb=buckets)
    train(network, pg.rank(), pg.size())
    assert_same(network.module, alone(pg.size()))
    assert_same_on_all_ranks(pg, network)


def test_ddp_broadcasts_what_rank_0_has(pg: Any) -> None:
    network = model()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(pg.rank())
    DistributedDataParallel(network, process_group=pg)
    assert_same(network, model(), 0)


def test_ddp_without_synchronisation_and_with_unused_parameters(pg: Any) -> None:
    network = DistributedDataParallel(model(), process_group=pg, find_unused_parameters=True)
    x, y = part(samples(0, pg.size()), pg.rank())
    with network.no_sync():
        torch.nn.functional.mse_loss(network(x), y).backward()
    torch.nn.functional.mse_loss(network(x), y).backward()
    plain = model()
    x, y = samples(0, pg.size())
    (2 * torch.nn.functional.mse_loss(plain(x), y)).backward()
    for one, two in zip(network.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_ddp_of_bfloat16(pg: Any) -> None:
    network = DistributedDataParallel(model(torch.bfloat16), process_group=pg)
    x, y = part(samples(0, pg.size()), pg.rank())
    torch.nn.functional.mse_loss(network(x.bfloat16()), y.bfloat16()).backward()
    plain = model(torch.bfloat16)
    x, y = samples(0, pg.size())
    torch.nn.functional.mse_loss(plain(x.bfloat16()), y.bfloat16()).backward()
    for one, two in zip(network.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0.05, atol=0.01)


def test_ddp_with_uneven_inputs(pg: Any) -> None:
    network = DistributedDataParallel(model(), process_group=pg)
    with network.join():
        for step in range(2 + pg.rank()):
            x, y = part(samples(step, pg.size()), pg.rank())
            torch.nn.functional.mse_loss(network(x), y).backward()


def test_fsdp_trains_as_one_rank_does(world: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.size(),))
    network = model()
    for layer in (network[0], network[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    train(network, world.rank(), world.size())
    for one, two in zip(network.parameters(), alone(world.size()).parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), two, rtol=1e-5, atol=1e-5)


SPECS = [name if name != "topk" else "topk:0.2" for name in mpicoll.compression.names()]


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # on one rank
def test_fsdp_with_flat_parameters_trains_as_one_rank_does(world: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    network = FullyShardedDataParallel(
        model(), process_group=world, device_id=torch.device("cpu"), use_orig_params=True
    )  # resizes the storage of its parameters before and after each pass
    train(network, world.rank(), world.size())
    with FullyShardedDataParallel.summon_full_params(network):
        assert_same(network.module, alone(world.size()))


def test_the_hook_of_powersgd_that_pytorch_has(pg: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    network = DistributedDataParallel(model(), process_group=pg)
    state = powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=64, start_powerSGD_iter=2,
                                        min_compression_rate=0.01)  # fmt: skip
    network.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # its callbacks wait for further calls
    train(network, pg.rank(), pg.size())
    assert_same_on_all_ranks(pg, network)
    assert_same(network.module, alone(pg.size()), 1e-3)


@pytest.mark.parametrize("spec", SPECS)
def test_hooks_with_every_compressor(pg: Any, spec: str) -> None:
    network = DistributedDataParallel(model(), process_group=pg)
    network.register_comm_hook(pg, mpicoll.torch.hook(spec))
    losses = train(network, pg.rank(), pg.size(), 3)
    assert np.isfinite(losses).all()
    assert_same_on_all_ranks(pg, network)


def test_a_hook_with_a_precise_compressor_gives_nearly_the_same(pg: Any) -> None:
    network = DistributedDataParallel(model(), process_group=pg)
    network.register_comm_hook(pg, mpicoll.torch.hook("bf16"))
    train(network, pg.rank(), pg.size())
    assert_same(network.module, alone(pg.size()), 5e-3)


def test_error_feedback_makes_up_for_what_was_not_sent(pg: Any) -> None:
    """Over many steps of a constant gradient the sum of what was sent approaches the sum of the gradients."""

    class Bucket:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def buffer(self) -> torch.Tensor:
            return self._tensor

        def index(self) -> int:
            return 0

        def gradients(self) -> list[torch.Tensor]:
            return [self._tensor]

        def parameters(self) -> list[torch.Tensor]:
            return [parameter]

    gradient, parameter = torch.linspace(-1, 1, 3000), torch.zeros(3000)
    compress, total = mpicoll.torch.hook("topk:0.05"), torch.zeros(3000)
    for _ in range(200):
        total += compress(pg, Bucket(gradient.clone())).wait()
    error = (total / 200 - gradient).abs().max()
    assert error < 0.2
    plain, total = mpicoll.torch.hook("topk:0.05", error_feedback=False), torch.zeros(3000)
    for _ in range(200):
        total += plain(pg, Bucket(gradient.clone())).wait()
    assert (total / 200 - gradient).abs().max() > 0.5


def test_the_state_of_a_hook_is_restored(pg: Any) -> None:
    """Training that is interrupted goes on as it would have."""

    def begin() -> tuple[DistributedDataParallel, Any]:
        network, compress = DistributedDataParallel(model(), process_group=pg), mpicoll.torch.hook("topk:0.1")
        network.register_comm_hook(pg, compress)
        return network, compress

    network, compress = begin()
    train(network, pg.rank(), pg.size(), 4)
    kept = copy.deepcopy((network.state_dict(), compress.state_dict()))
    assert kept[1]["steps"] == 4
    assert len(kept[1]["residuals"]) == 6
    train(network, pg.rank(), pg.size(), 3, first=4)
    again, other = begin()
    again.load_state_dict(kept[0])
    other.load_state_dict(kept[1])
    train(again, pg.rank(), pg.size(), 3, first=4)
    assert_same(again, network, 1e-6)
    without, _ = begin()
    without.load_state_dict(kept[0])
    train(without, pg.rank(), pg.size(), 3, first=4)
    with pytest.raises(AssertionError):
        assert_same(without, network, 1e-6)
    with pytest.raises(ValueError, match="a step has been made"):
        other.load_state_dict(kept[1])
    with pytest.raises(ValueError, match="nonsense are not residuals and steps"):
        mpicoll.torch.hook("topk").load_state_dict({"nonsense": torch.zeros(2)})


def test_hooks_over_gloo(world: Any) -> None:
    group = dist.new_group(list(range(world.size())), backend="gloo")
    network = DistributedDataParallel(model(), process_group=group)
    network.register_comm_hook(group, mpicoll.torch.hook("bf16"))
    train(network, world.rank(), world.size())
    assert_same(network.module, alone(world.size()), 5e-3)


def test_hooks_that_are_wrong() -> None:
    with pytest.raises(UnknownCompressor, match="'nonsense' is not one of"):
        mpicoll.torch.hook("nonsense")
    with pytest.raises(ValueError, match="unbiased"):
        mpicoll.torch.hook("qsgd", error_feedback=True)
    with pytest.raises(TypeError, match="is neither a process group nor None"):
        mpicoll.torch.group_queues.queue_of("nonsense")
