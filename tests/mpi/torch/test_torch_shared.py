"""Tensors in shared memory: mpicoll.torch.empty, buckets of DistributedDataParallel, buffers of FSDP."""

from __future__ import annotations

import copy
import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import mpicoll.torch
from mpicoll import Intracomm
from mpicoll.kernels import allocator
from mpicoll.shared_memory import numpy_allocator, segment
from mpicoll.torch.shared_buckets import SharedVectors
from tests.mpi.memory import SEGMENTS
from tests.mpi.torch.test_torch_collectives import ALL, everyones, reduced, values

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.skipif(not SEGMENTS, reason="no shared memory for tensors"),
]
WIDTH = 200
"""Features of the layers: their weights are longer than the vectors that stay in ordinary memory."""
TYPES_MOVED = [torch.float8_e4m3fn, torch.float8_e5m2]


def inside(address: int) -> bool:
    home = segment.own()
    return bool(home.nbytes > 0 and 0 <= address - home.address < home.nbytes)


def used() -> int:
    gc.collect()
    source = numpy_allocator.source()
    assert source is not None
    return int(source.words[allocator.USED])


def shared(tensor: torch.Tensor) -> torch.Tensor:
    made = mpicoll.torch.empty(tensor.shape, dtype=tensor.dtype)
    made.copy_(tensor)
    return made


def network(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3)
    ).to(dtype)


def train(model: torch.nn.Module, rank: int, steps: int = 4) -> list[torch.Tensor]:
    """Take some steps with other samples on each rank; return the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x.to(dtype)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class Recorder:
    """Notes where the buffers of collectives lie that are longer than `min_nbytes`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.inside: list[bool] = []
        for name in names:
            monkeypatch.setattr(Intracomm, name, self._wrapped(getattr(Intracomm, name)))

    def _wrapped(self, method: Any) -> Any:
        def call(comm: Intracomm, *arguments: Any, **options: Any) -> Any:
            for each in arguments:
                if isinstance(each, np.ndarray) and each.nbytes >= numpy_allocator.MIN_NBYTES:
                    self.inside.append(inside(each.ctypes.data))
            return method(comm, *arguments, **options)

        return call


def test_sizes_and_element_types() -> None:
    for dtype in (*ALL, *TYPES_MOVED):
        made = mpicoll.torch.empty(30, 1000, dtype=dtype)
        assert (made.shape, made.dtype, made.is_contiguous()) == ((30, 1000), dtype, True)
        assert inside(made.data_ptr())
        assert inside(made[3:, 5:].data_ptr())
    assert mpicoll.torch.empty().shape == ()
    assert mpicoll.torch.empty(5, 0).shape == (5, 0)
    assert mpicoll.torch.empty([2, 3]).shape == mpicoll.torch.empty(torch.Size([2, 3])).shape == (2, 3)
    assert mpicoll.torch.empty(np.int64(4)).dtype == torch.get_default_dtype()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"size: \(3, -1\) has a negative length"):
        mpicoll.torch.empty(3, -1)
    with pytest.raises(TypeError, match=r"size: \(2.5,\) are not integers"):
        mpicoll.torch.empty(2.5)
    with pytest.raises(TypeError, match="dtype: <class 'float'> is not"):
        mpicoll.torch.empty(3, dtype=float)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="group: 'nonsense' is neither"):
        mpicoll.torch.empty(3, group="nonsense")
    with pytest.raises((MemoryError, ValueError)):
        mpicoll.torch.empty(1 << 62, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_collectives_of_shared_tensors(pg: Any, dtype: torch.dtype) -> None:
    """Every second rank has an ordinary tensor in the first turn, none in the second."""
    rank, size, shape = pg.rank(), pg.size(), (40, 1000)
    for turn in range(2):
        place = shared if turn or rank % 2 == 0 else torch.clone
        given = everyones(pg, shape, dtype, turn)
        tensor = place(given[rank])
        dist.all_reduce(tensor, group=pg)
        total = reduced(given, dist.ReduceOp.SUM)
        assert torch.equal(tensor, total.to(dtype))
        tensor = place(given[rank])
        dist.broadcast(tensor, group=pg, group_src=size - 1)
        assert torch.equal(tensor, given[-1])
        whole = place(torch.zeros(size * shape[0], shape[1]).to(dtype))
        dist.all_gather_into_tensor(whole, place(given[rank]), group=pg)
        assert torch.equal(whole, torch.cat(given))
        part = place(torch.zeros(shape).to(dtype))
        sent = [torch.cat([values(each + to, shape, dtype, turn) for to in range(size)]) for each in range(size)]
        dist.reduce_scatter_tensor(part, place(sent[rank]), group=pg)
        wanted = reduced([each[rank * shape[0] :][: shape[0]] for each in sent], dist.ReduceOp.SUM)
        assert torch.equal(part, wanted.to(dtype))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_shared_tensors_reach_the_collective_as_they_are(
    pg: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, "Allreduce", "Allgather")
    tensor = shared(values(pg.rank(), (20_000,), dtype))
    dist.all_reduce(tensor, group=pg)
    dist.all_reduce(tensor[100:], group=pg, async_op=True).wait()
    dist.all_gather_into_tensor(mpicoll.torch.empty(pg.size() * 20_000, dtype=dtype), tensor, group=pg)
    assert recorder.inside == [True] * 4


def test_memory_lives_as_long_as_a_tensor_lies_in_it(pg: Any) -> None:
    before = used()
    tensor = mpicoll.torch.empty(100_000).fill_(pg.rank())
    view = tensor.view(100, 1000)[50:].detach()
    array = tensor[:50].numpy()
    work = dist.all_reduce(tensor, group=pg, async_op=True)
    del tensor
    gc.collect()
    assert used() > before
    work.wait()
    total = sum(range(pg.size()))
    assert (view == total).all()
    assert (array == total).all()
    del view, work
    assert used() > before
    del array
    assert used() == before


def test_ranks_free_memory_by_themselves(pg: Any) -> None:
    """A rank that frees earlier, in another thread, and allocates anew does not disturb the others."""
    for turn in range(20):
        held = [mpicoll.torch.empty(50_000).fill_(1)]
        dist.all_reduce(held[0], group=pg)
        if (turn + pg.rank()) % 2:
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
            mpicoll.torch.empty(50_000).fill_(-1)
        else:
            assert (held[0] == pg.size()).all()


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("buckets", [25, 0.1])
def test_buckets_lie_in_shared_memory(pg: Any, as_view: bool, buckets: float, monkeypatch: pytest.MonkeyPatch) -> None:
    before = used()
    recorder = Recorder(monkeypatch, "Allreduce")
    model = DistributedDataParallel(network(), process_group=pg, gradient_as_bucket_view=as_view, bucket_cap_mb=buckets)
    shared_weights = train(model, pg.rank())
    if pg.size() > 1:
        assert len(recorder.inside) >= 4
    assert all(recorder.inside)
    assert used() > before
    assert inside(model.module[0].weight.grad.data_ptr()) == as_view
    monkeypatch.setattr(dist, "Reducer", dist.Reducer.__mro__[1])
    recorder.inside.clear()
    private = DistributedDataParallel(
        network(), process_group=pg, gradient_as_bucket_view=as_view, bucket_cap_mb=buckets
    )
    assert equal(train(private, pg.rank()), shared_weights)
    assert not any(recorder.inside)
    del model, private
    assert used() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_buckets_of_other_element_types(pg: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch, "Allreduce")
    train(DistributedDataParallel(network(dtype), process_group=pg), pg.rank())
    assert all(recorder.inside)
    assert pg.size() == 1 or recorder.inside


def test_buckets_of_copies_of_a_model(pg: Any) -> None:
    model = DistributedDataParallel(network(), process_group=pg)
    train(model, pg.rank(), 2)
    again = network()
    again.load_state_dict(copy.deepcopy(model.module.state_dict()))
    again = DistributedDataParallel(again, process_group=pg)
    assert equal(train(model, pg.rank()), train(again, pg.rank()))


def test_other_groups_have_buckets_of_their_own(world: Any) -> None:
    before = used()
    group = dist.new_group(list(range(world.size())), backend="gloo")
    model = DistributedDataParallel(network(), process_group=group)
    train(model, world.rank(), 2)
    assert used() == before


def test_modes_of_the_program_are_left_alone(pg: Any) -> None:
    """A mode that is active when a model is wrapped sees the tensors that it would see otherwise."""

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += func is torch.ops.aten.empty.memory_format
            return func(*args, **(kwargs or {}))

    before, mode = used(), Counting()
    with mode:
        model = DistributedDataParallel(network(), process_group=pg)
    assert mode.seen
    assert used() == before
    train(model, pg.rank(), 2)


def test_only_long_vectors_of_the_cpu_are_shared() -> None:
    with SharedVectors():
        made = {
            "vector": torch.empty(10_000),
            "short": torch.empty(10),
            "matrix": torch.empty(100, 100),
            "zeros": torch.zeros(10_000),
            "meta": torch.empty(10_000, device="meta"),
        }
    assert [name for name, tensor in made.items() if tensor.device.type == "cpu" and inside(tensor.data_ptr())] == [
        "vector"
    ]
    assert made["meta"].device.type == "meta"


def test_buffers_of_fsdp(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.size(),))

    def sharded(allocates: bool) -> torch.nn.Module:
        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if hasattr(module, "set_allocate_memory_from_process_group_for_comm"):
                module.set_allocate_memory_from_process_group_for_comm(allocates)
        return model

    def full(model: torch.nn.Module) -> list[torch.Tensor]:
        return [parameter.full_tensor() for parameter in train(model, world.rank())]

    if not hasattr(fully_shard(network(), mesh=mesh), "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("this PyTorch has FSDP allocate its buffers itself")
    private = full(sharded(False))
    recorder = Recorder(monkeypatch, "Allgather", "Reduce_scatter_block")
    assert equal(full(sharded(True)), private)
    assert world.size() == 1 or sum(recorder.inside) >= 8


def test_what_a_group_says_of_its_backend(pg: Any) -> None:
    backend = pg._get_backend(torch.device("cpu"))
    assert (backend.name(), backend.rank(), backend.size()) == ("mpicoll", pg.rank(), pg.size())
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_coalescing
    made = backend.allocate_tensor(5000, dtype=torch.float64, device=torch.device("cpu"))
    assert (made.shape, made.dtype, inside(made.data_ptr())) == ((5000,), torch.float64, True)
    assert not backend.supports_tensor_alloc(torch.device("meta"))
    with pytest.raises(ValueError, match="device: meta has no memory"):
        backend.allocate_tensor(5, dtype=torch.float32, device=torch.device("meta"))
    with pytest.raises(RuntimeError, match="of the CPU only, not of meta"):
        pg._get_backend(torch.device("meta"))
