"""Horovod's exchanges of rows, calls for lists of tensors, and places of ranks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll
import mpicoll.torch as hvd
from mpicoll.errors import RemoteError
from mpicoll.torch import tensor_memory

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("initialized")]
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
RANKS = range(SIZE)
TOTAL = SIZE * (SIZE + 1) / 2


def both(blocking: Any, in_background: Any) -> Any:
    """The blocking call, and the other one with the wait for it."""
    return pytest.mark.parametrize(
        "call", [blocking, lambda *given, **named: hvd.synchronize(in_background(*given, **named))], ids=["", "async"]
    )


def rows(rank: int) -> torch.Tensor:
    """Rank r sends i + r rows to rank i; each has the sender, the receiver, and its number."""
    return torch.tensor([[rank, to, number] for to in RANKS for number in range(to + rank)]).reshape(-1, 3)


@both(hvd.alltoall, hvd.alltoall_async)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_alltoall_with_splits(call: Any, kind: Any) -> None:
    given = rows(RANK)
    found, received = call(given, splits=kind([to + RANK for to in RANKS]))
    wanted = torch.cat([rows(rank)[rows(rank)[:, 1] == RANK] for rank in RANKS])
    assert found.tolist() == wanted.tolist()
    assert received.tolist() == [RANK + rank for rank in RANKS]
    assert received.dtype == (torch.int32 if kind is list else torch.int64)


def test_alltoall_of_equal_parts() -> None:
    given = torch.arange(2.0 * SIZE).reshape(SIZE, 2) + 100 * RANK
    found = hvd.alltoall(given, name="rows")
    assert found.tolist() == [[100 * rank + 2 * RANK, 100 * rank + 2 * RANK + 1] for rank in RANKS]
    assert hvd.synchronize(hvd.alltoall_async(given))[0].tolist() == found.tolist()
    assert hvd.alltoall(torch.empty(0, 3)).shape == (0, 3)
    assert hvd.alltoall(given.t().contiguous().t()).tolist() == found.tolist()


def test_gradient_of_alltoall() -> None:
    """A row that has come to rank r has the factor r + 1 in its loss."""
    given = rows(RANK).double().requires_grad_()
    found, received = hvd.alltoall(given, [to + RANK for to in RANKS])
    (found * (RANK + 1)).sum().backward()
    assert not received.requires_grad
    assert given.grad.tolist() == [[to + 1.0] * 3 for to in RANKS for _ in range(to + RANK)]


def test_memory_of_alltoall_is_let_go() -> None:
    """Without the collector of cycles; and the program may write to what it got."""
    given = torch.ones(SIZE, 2, requires_grad=True)
    gc.disable()
    try:
        found, received = hvd.alltoall(given, torch.ones(SIZE, dtype=torch.uint8))
        received.zero_()
        found.sum().backward()
        known = weakref.ref(found)
        del found
        assert known() is None
    finally:
        gc.enable()
    assert received.dtype == torch.int32
    assert (given.grad == 1).all()


@pytest.mark.parametrize(
    ("splits", "error", "text"),
    [
        ([1] * (SIZE + 1), ValueError, "are not"),
        ([SIZE + 1] + [0] * (SIZE - 1), ValueError, "add up to"),
        ([-1] + [1] * (SIZE - 2) + [2] * (SIZE > 1), ValueError, "are not"),
        ([1.0] * SIZE, TypeError, "splits: .* are not integers"),
    ],
)
def test_wrong_splits(splits: list[Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hvd.alltoall(torch.ones(SIZE), splits)
    if SIZE > 1:
        with pytest.raises(ValueError, match="rows cannot be divided"):
            hvd.alltoall(torch.ones(SIZE + 1))
    assert hvd.alltoall(torch.ones(SIZE), [1] * SIZE)[0].tolist() == [1.0] * SIZE  # calls still belong together
    if SIZE > 1:
        with pytest.raises(error if RANK == 0 else RemoteError, match=text):
            hvd.alltoall(torch.ones(SIZE), splits if RANK == 0 else [1] * SIZE)


@both(hvd.reducescatter, hvd.reducescatter_async)
@pytest.mark.parametrize("count", [0, 1, SIZE, 2 * SIZE + 1])
def test_reducescatter(call: Any, count: int) -> None:
    given = torch.arange(3.0 * count).reshape(count, 3) * (RANK + 1)
    wanted = torch.tensor_split(torch.arange(3.0 * count).reshape(count, 3), SIZE)[RANK]
    torch.testing.assert_close(call(given), wanted * TOTAL / SIZE)
    torch.testing.assert_close(call(given, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), wanted * TOTAL / 2)
    torch.testing.assert_close(call(given, op=hvd.Max), wanted * SIZE)
    assert given[-1:].tolist() == [[float(3 * count - 3 + i) * (RANK + 1) for i in range(3)]][: min(count, 1)]


def test_compressed_reducescatter() -> None:
    found = hvd.reducescatter(torch.ones(SIZE + 1, 2), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert found.tolist() == [[float(SIZE)] * 2] * (1 + (RANK == 0))


@pytest.mark.parametrize(("op", "factor"), [(hvd.Average, 1), (hvd.Sum, SIZE)], ids=["average", "sum"])
def test_gradient_of_reducescatter(op: Any, factor: int) -> None:
    given = torch.ones(SIZE + 1, 2, dtype=torch.float64, requires_grad=True)
    (hvd.reducescatter(given, op=op, postscale_factor=3.0) * (RANK + 1)).sum().backward()
    owners = [0, 0, *range(1, SIZE)]
    assert given.grad.tolist() == [[3.0 * factor * (rank + 1)] * 2 for rank in owners]


def test_reducescatter_without_rows() -> None:
    with pytest.raises(ValueError, match="no dimension"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="neither Average nor Sum"):
        hvd.reducescatter(torch.ones(SIZE, requires_grad=True), op=hvd.Max).sum().backward()


GROUPED = {
    "grouped_allreduce": hvd.grouped_allreduce,
    "grouped_allreduce_": hvd.grouped_allreduce_,
    "grouped_allreduce_async": lambda *given, **named: hvd.synchronize(hvd.grouped_allreduce_async(*given, **named)),
    "grouped_allreduce_async_": lambda *given, **named: hvd.synchronize(hvd.grouped_allreduce_async_(*given, **named)),
}


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("count", [5, 200_000])
def test_grouped_allreduce(name: str, count: int) -> None:
    """Of one type and of several, together and each for itself."""
    for types in ((torch.float32,) * 3, (torch.float32, torch.float64, torch.int32)):
        given = [torch.full((count + i, 2), RANK + i + 1, dtype=dtype) for i, dtype in enumerate(types)]
        found = GROUPED[name](given, False)
        assert isinstance(found, list)
        for i, (each, before) in enumerate(zip(found, given, strict=True)):
            assert each.dtype == types[i]
            assert each.shape == (count + i, 2)
            assert (each == TOTAL + i * SIZE).all()
            assert (before is each) == name.endswith("_")
    assert GROUPED[name]([]) == []
    (scaled,) = GROUPED[name]([torch.ones(3)], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert scaled.tolist() == [SIZE] * 3


def test_gradients_of_grouped_allreduce() -> None:
    """Also where no gradient is wanted of some of the tensors."""
    given = [torch.ones(2), torch.ones(3, dtype=torch.float64, requires_grad=True), torch.ones(1, dtype=torch.int64)]
    given += [torch.ones(4, requires_grad=True)]
    found = hvd.grouped_allreduce(given, op=hvd.Sum)
    (found[1].sum() * (RANK + 1) + found[3].sum() * RANK).backward()
    assert given[1].grad.tolist() == [TOTAL] * 3
    assert given[3].grad.tolist() == [sum(RANKS)] * 4
    assert given[0].grad is None


def test_compressed_grouped_allreduce() -> None:
    found = hvd.grouped_allreduce([torch.ones(3000), torch.ones(4)], compression="fp16", op=hvd.Sum)
    assert all((each == SIZE).all() for each in found)


def sparse() -> torch.Tensor:
    return torch.ones(3).to_sparse()


WRONG = {
    "factor": lambda ok: hvd.grouped_allreduce_([ok, ok.int()], op=hvd.Sum, postscale_factor=2.0),
    "operation": lambda ok: hvd.grouped_allreduce_([ok, ok.cfloat()], op=hvd.Max),
    "layout": lambda ok: hvd.grouped_allreduce_([ok, sparse()]),
    "compressed": lambda ok: hvd.grouped_allreduce_([ok, ok.int()], compression="int8"),
    "feedback": lambda ok: hvd.grouped_allreduce_([ok, ok + 1], compression=mpicoll.ErrorFeedback("int8")),
    "gather": lambda ok: hvd.synchronize(hvd.grouped_allgather_async([ok, torch.tensor(1.0)])),
    "scatter": lambda ok: hvd.grouped_reducescatter([ok, ok.cfloat()], op=hvd.Min),
    "rows": lambda ok: hvd.alltoall(sparse(), [1] * SIZE),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused_before_the_first_message(name: str) -> None:
    """So that the other ranks hear of it, and the first tensor is as it was."""
    given = torch.ones(3)
    with pytest.raises((ValueError, TypeError)):
        WRONG[name](given)
    assert given.tolist() == [1.0] * 3
    assert hvd.allreduce(given, op=hvd.Sum).tolist() == [SIZE] * 3  # calls still belong together
    if RANK == 0:
        with pytest.raises((ValueError, TypeError)):
            WRONG[name](given)
    else:
        with pytest.raises(RemoteError):
            hvd.allreduce(given)


@pytest.mark.parametrize("call", [hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter])
def test_ranks_may_use_different_results_of_a_group(call: Any) -> None:
    """Of one backward pass; the gradient of the first tensor comes from rank 0, that of the others from the rest."""
    given = [torch.ones(SIZE, requires_grad=True), torch.ones(SIZE, 2), torch.ones(SIZE, 2, requires_grad=True)]
    found = call(each for each in given)
    assert len(found) == 3
    found[0 if RANK == 0 else 2].sum().backward()
    share = 1 / SIZE
    if call is hvd.grouped_reducescatter:
        assert given[0].grad.tolist() == [float(rank == 0) for rank in RANKS]
        assert given[2].grad.tolist() == [[float(rank > 0)] * 2 for rank in RANKS]
    else:
        torch.testing.assert_close(given[0].grad, torch.full((SIZE,), share))
        torch.testing.assert_close(given[2].grad, torch.full((SIZE, 2), 1 - share))
    assert given[1].grad is None


def test_many_tensors_of_several_types() -> None:
    """They travel in packs of one type, up to a MiB long."""
    types = [torch.float32, torch.float64, torch.int64]
    given = [torch.full((30_000 + i,), RANK + i, dtype=types[i % 3]) for i in range(40)]
    packs = tensor_memory.packs_of(given, 1 << 20)
    assert sum(map(len, packs)) == 40
    assert 3 < len(packs) < 15
    assert all(sum(each.nbytes for each in pack) <= 1 << 20 for pack in packs)
    for i, each in enumerate(hvd.grouped_allreduce(given, op=hvd.Sum)):
        assert (each == sum(rank + i for rank in RANKS)).all()
        assert each.dtype == types[i % 3]


@both(hvd.grouped_allgather, hvd.grouped_allgather_async)
def test_grouped_allgather(call: Any) -> None:
    found = call([torch.full((RANK, 2), RANK), torch.full((1,), RANK + 0.5)])
    assert found[0].tolist() == [[rank] * 2 for rank in RANKS for _ in range(rank)]
    assert found[1].tolist() == [rank + 0.5 for rank in RANKS]


@both(hvd.grouped_reducescatter, hvd.grouped_reducescatter_async)
def test_grouped_reducescatter(call: Any) -> None:
    found = call([torch.ones(SIZE), torch.ones(2 * SIZE, 3, dtype=torch.float64)], op=hvd.Sum)
    assert found[0].tolist() == [SIZE]
    assert found[1].tolist() == [[SIZE] * 3] * 2


def test_asynchronous_calls_into_new_tensors() -> None:
    given = torch.full((2,), RANK + 1.0)
    handles = [hvd.allgather_async(given[: 1 + RANK % 2]), hvd.broadcast_async(given, SIZE - 1)]
    everyone, last = map(hvd.synchronize, handles)
    assert everyone.tolist() == [rank + 1.0 for rank in RANKS for _ in range(1 + rank % 2)]
    assert last.tolist() == [SIZE] * 2
    assert given.tolist() == [RANK + 1.0] * 2
    assert all(map(hvd.poll, handles))
    with pytest.raises(ValueError, match="no dimension"):
        hvd.synchronize(hvd.allgather_async(torch.tensor(1.0)))


def test_places_of_ranks() -> None:
    places = hvd.allgather_object((hvd.cross_rank(), hvd.local_rank()))
    assert len(set(places)) == SIZE
    assert hvd.cross_size() == len({cross for cross, local in places if local == hvd.local_rank()})
    assert hvd.is_homogeneous() == (len({cross for cross, _ in places}) * hvd.local_size() == SIZE)


def test_libraries() -> None:
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert hvd.mpi_threads_supported() == (MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    assert not any((hvd.nccl_built(), hvd.gloo_built(), hvd.gloo_enabled(), hvd.cuda_built(), hvd.rocm_built()))
