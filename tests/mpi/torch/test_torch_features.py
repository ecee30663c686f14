"""Features of PyTorch that call ``torch.distributed``, on the backend mpicoll, compared with what one rank gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def mesh(world: Any) -> Any:
    """All ranks, in one dimension."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (world.size(),))


@pytest.fixture
def folder(world: Any, tmp_path: Path) -> str:
    """A folder, the same on all ranks."""
    box = [str(tmp_path)]
    dist.broadcast_object_list(box)
    return str(box[0])


@pytest.fixture
def restored_autograd(world: Any) -> Iterator[None]:
    """Compiled code of a test is forgotten after it."""
    yield
    torch.compiler.reset()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))


def assert_equal_on_all_ranks(tensors: Any) -> None:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    found = [torch.zeros_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    assert all(torch.equal(flat, each) for each in found)


def test_distributed_tensors(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rows = 6 * mesh.size()
    a, b = torch.arange(rows * 12.0).reshape(rows, 12), torch.arange(96.0).reshape(12, 8)
    of_rows, whole = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    assert torch.equal((of_rows @ whole).full_tensor(), a @ b)
    for placement in (Shard(1), Replicate()):
        assert torch.equal(of_rows.redistribute(mesh, [placement]).full_tensor(), a)
    assert torch.equal(of_rows.sum(0).full_tensor(), a.sum(0))


def test_tensor_parallelism(mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = layers(), torch.ones(5, 10)
    wanted = model(x)
    divided = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    got = divided(x)
    torch.testing.assert_close(got, wanted)
    got.sum().backward()


def test_sharded_optimizer_and_uneven_inputs(world: Any) -> None:
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    with Join([model]):
        for _ in range(2 + world.rank()):
            optimizer.zero_grad()
            model(torch.ones(4, 10) * (world.rank() + 1)).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(0)
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fully_sharded_data_parallel(world: Any, strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    reference, x = layers(), torch.ones(4, 10)
    model = FullyShardedDataParallel(
        layers(), sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu")
    )
    for each in (reference, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).sum().backward()
            optimizer.step()
    torch.testing.assert_close(model(x), reference(x))


def test_checkpoints_of_shards(world: Any, folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    saved = get_model_state_dict(fully_shard(layers()))
    checkpoint.save(saved, checkpoint_id=f"{folder}/model")
    model = fully_shard(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3)))
    state = get_model_state_dict(model)
    checkpoint.load(state, checkpoint_id=f"{folder}/model")
    set_model_state_dict(model, state)
    for name, value in get_model_state_dict(model).items():
        assert torch.equal(value.full_tensor(), saved[name].full_tensor())


def test_shards_in_groups(world: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if world.size() % 2:
        pytest.skip("needs an even number of ranks")
    mesh = init_device_mesh("cpu", (2, world.size() // 2), mesh_dim_names=("copies", "shards"))
    model = fully_shard(layers(), mesh=mesh)
    model(torch.ones(4, 10)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    reference = layers()
    reference(torch.ones(4, 10)).sum().backward()
    torch.testing.assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(reference.parameters(), 1.0))


def _hooks() -> dict[str, Callable[[DistributedDataParallel], None]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    return {
        "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "bf16": lambda model: model.register_comm_hook(None, default_hooks.bf16_compress_hook),
        "powersgd": lambda model: model.register_comm_hook(state, powerSGD_hook.powerSGD_hook),
    }


@pytest.mark.parametrize("name", ["fp16", "bf16", "powersgd"])
def test_hooks_of_pytorch(world: Any, name: str) -> None:
    if name == "bf16" and torch.version.cuda is None:
        pytest.skip("PyTorch allows it only where it was built with CUDA")
    model = DistributedDataParallel(layers())
    _hooks()[name](model)
    for _ in range(4):
        model.zero_grad()
        model(torch.ones(3, 10) * (world.rank() + 1)).sum().backward()
    assert_equal_on_all_ranks([parameter.grad for parameter in model.parameters()])


def test_local_sgd_of_pytorch(world: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model, (alone, _) = DistributedDataParallel(layers()), dist.new_subgroups(1)
    model.register_comm_hook(PostLocalSGDState(None, alone, 1), post_localSGD_hook)
    averager = PeriodicModelAverager(2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(3, 10) * (world.rank() + 1)).sum().backward()
        optimizer.step()
    averager.step = 1  # the next call averages
    averager.average_parameters(model.parameters())
    assert_equal_on_all_ranks(model.parameters())


def test_pipelines(world: Any) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    size, rank, losses = world.size(), world.rank(), {}
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(rank)
        stage = PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
        collected: list[torch.Tensor] = []
        inputs = (torch.ones(8, 8),) if rank == 0 else ()
        last = {"target": torch.zeros(8, 8), "losses": collected} if rank == size - 1 else {}
        kind(stage, 4, loss_fn=nn.MSELoss()).step(*inputs, **last)
        losses[kind] = [loss.item() for loss in collected]
    assert losses[ScheduleGPipe] == losses[Schedule1F1B]
    assert len(losses[ScheduleGPipe]) == (4 if rank == size - 1 else 0)


def test_compiled_code(world: Any, restored_autograd: None) -> None:
    import torch.distributed._functional_collectives as functional

    double = torch.compile(
        lambda x: functional.all_reduce(x * 2, "sum", world) + 1, backend="aot_eager", fullgraph=True
    )
    assert (double(torch.ones(5)) == 2 * world.size() + 1).all()
    model = torch.compile(DistributedDataParallel(layers()), backend="aot_eager")
    model(torch.ones(3, 10) * (world.rank() + 1)).sum().backward()
    assert_equal_on_all_ranks([parameter.grad for parameter in model.parameters()])


def test_gradients_of_collectives(world: Any) -> None:
    from torch.distributed.nn import functional

    size, x = world.size(), torch.ones(3, requires_grad=True)
    functional.all_reduce(x * 2).sum().backward()
    assert (x.grad == 2 * size).all()
    y = torch.ones(2, requires_grad=True)
    torch.cat(functional.all_gather(y)).sum().backward()
    assert (y.grad == size).all()
