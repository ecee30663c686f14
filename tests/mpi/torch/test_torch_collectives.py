"""Every collective of torch.distributed, against results computed from all ranks' tensors."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import mpicoll.torch
from mpicoll.errors import RemoteError

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::FutureWarning")]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
ALL = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
SHAPES = ((), (1,), (7,), (3, 5), (40, 1000))
ASYNC = (False, True)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    """Numbers of which sums and products over four ranks are exact in every type, another on each rank."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * (rank + 3) + rank + turn) % 3
    if dtype.is_complex:
        return torch.complex(numbers.float(), (numbers + 1).float() % 2).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def everyones(group: Any, shape: tuple[int, ...], dtype: torch.dtype, turn: int = 0) -> list[torch.Tensor]:
    return [values(rank, shape, dtype, turn) for rank in range(group.size())]


def reduced(tensors: list[torch.Tensor], op: Any) -> torch.Tensor:
    if tensors[0].dtype == torch.bool:
        numbers = reduced([tensor.to(torch.int64) for tensor in tensors], op)
        return numbers % 2 == 1 if op == ReduceOp.BXOR else numbers != 0
    combine = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }[op.name]
    total = reduce(combine, tensors)
    if op != ReduceOp.AVG:
        return total
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / len(tensors))
    whole = not total.is_floating_point()
    return total.div(len(tensors), rounding_mode="trunc" if whole else None)


def ops_for(dtype: torch.dtype) -> list[Any]:
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT]
    if dtype != torch.bool:
        ops.append(ReduceOp.AVG)
    if not dtype.is_complex:
        ops += [ReduceOp.MIN, ReduceOp.MAX]
    if not (dtype.is_floating_point or dtype.is_complex):
        ops += [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    return ops


def finish(work: Any) -> None:
    if work is not None:
        work.wait()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_all_reduce_and_reduce(pg: Any, dtype: torch.dtype) -> None:
    for op in ops_for(dtype):
        if dtype.is_complex and op == ReduceOp.PRODUCT:
            continue  # torch.distributed refuses it
        for turn, shape in enumerate(SHAPES):
            wanted = reduced(everyones(pg, shape, dtype), op)
            for async_op in ASYNC:
                tensor = values(pg.rank(), shape, dtype)
                finish(dist.all_reduce(tensor, op, pg, async_op))
                assert torch.equal(tensor, wanted), (op, shape)
            tensor, root = values(pg.rank(), shape, dtype), turn % pg.size()
            finish(dist.reduce(tensor, op=op, group=pg, group_dst=root, async_op=turn % 2 == 1))
            unchanged = values(pg.rank(), shape, dtype)
            assert torch.equal(tensor, wanted if pg.rank() == root else unchanged), (op, shape)


def test_a_list_of_unequal_tensors_is_not_scattered(pg: Any) -> None:
    """Together they are as long as they have to be."""
    size, root = pg.size(), pg.size() - 1
    lengths = [1, *[2] * (size - 2), 3] if size > 1 else [1]
    tensors = [torch.ones(length) for length in lengths] if pg.rank() == root else None
    with pytest.raises(
        ValueError if pg.rank() == root else RemoteError, match=r"scatter_list: \d elements in one tensor, but 2"
    ):
        dist.scatter(torch.zeros(2), tensors, group_src=root, group=pg)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
@pytest.mark.parametrize("async_op", ASYNC)
def test_reduce_scatter(pg: Any, dtype: torch.dtype, async_op: bool) -> None:
    for op in ops_for(dtype):
        for shape in ((), (4,), (3, 700)):
            wanted = reduced(everyones(pg, shape, dtype, pg.rank()), op)
            parts = [values(pg.rank(), shape, dtype, turn) for turn in range(pg.size())]
            before = [part.clone() for part in parts]
            output = torch.zeros(shape, dtype=dtype)
            finish(dist.reduce_scatter(output, parts, op, pg, async_op))
            assert torch.equal(output, wanted), (op, shape)
            output = torch.zeros(shape, dtype=dtype)
            finish(dist.reduce_scatter_tensor(output, torch.stack(parts), op, pg, async_op))
            assert torch.equal(output, wanted), (op, shape)
            assert all(torch.equal(*pair) for pair in zip(parts, before, strict=True))


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("async_op", ASYNC)
def test_movements(pg: Any, dtype: torch.dtype, async_op: bool) -> None:
    size, rank = pg.size(), pg.rank()
    for root, shape in enumerate(SHAPES):
        root %= size
        wanted = everyones(pg, shape, dtype)
        tensor = values(rank, shape, dtype)
        finish(dist.broadcast(tensor, group=pg, group_src=root, async_op=async_op))
        assert torch.equal(tensor, wanted[root])
        outputs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        finish(dist.all_gather(outputs, values(rank, shape, dtype), pg, async_op))
        assert all(torch.equal(*pair) for pair in zip(outputs, wanted, strict=True))
        if shape:
            output = torch.zeros((size, *shape), dtype=dtype)
            finish(dist.all_gather_into_tensor(output, values(rank, shape, dtype), pg, async_op))
            assert torch.equal(output, torch.stack(wanted))
        outputs = [torch.zeros(shape, dtype=dtype) for _ in range(size)] if rank == root else None
        finish(dist.gather(values(rank, shape, dtype), outputs, group=pg, group_dst=root, async_op=async_op))
        assert outputs is None or all(torch.equal(*pair) for pair in zip(outputs, wanted, strict=True))
        output = torch.zeros(shape, dtype=dtype)
        finish(dist.scatter(output, wanted if rank == root else None, group=pg, group_src=root, async_op=async_op))
        assert torch.equal(output, wanted[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("async_op", ASYNC)
def test_all_to_all(pg: Any, dtype: torch.dtype, async_op: bool) -> None:
    size, rank = pg.size(), pg.rank()
    for shape in ((3,), (2, 500)):
        inputs = [values(rank, shape, dtype, turn) for turn in range(size)]
        wanted = [values(other, shape, dtype, rank) for other in range(size)]
        outputs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        finish(dist.all_to_all(outputs, inputs, pg, async_op))
        assert all(torch.equal(*pair) for pair in zip(outputs, wanted, strict=True))
        output = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
        finish(dist.all_to_all_single(output, torch.cat(inputs), group=pg, async_op=async_op))
        assert torch.equal(output, torch.cat(wanted))
        # Rank r sends r + s rows to rank s, none at all from rank 0 to itself.
        rows = [[torch.full((r + s, 3), 10 * r + s, dtype=dtype) for s in range(size)] for r in range(size)]
        wanted_rows = torch.cat([rows[other][rank] for other in range(size)])
        output = torch.zeros_like(wanted_rows)
        splits = [other + rank for other in range(size)]
        finish(dist.all_to_all_single(output, torch.cat(rows[rank]), splits, splits, pg, async_op))
        assert torch.equal(output, wanted_rows)


def test_parts_of_different_lengths(pg: Any) -> None:
    size, rank = pg.size(), pg.rank()
    outputs = [torch.zeros(other + 1) for other in range(size)]
    dist.all_gather(outputs, torch.full((rank + 1,), float(rank)), pg)
    assert all((output == other).all() for other, output in enumerate(outputs))
    output = torch.zeros(rank + 1)
    dist.reduce_scatter(output, [torch.full((other + 1,), float(other)) for other in range(size)], group=pg)
    assert (output == rank * size).all()


@pytest.mark.parametrize("async_op", ASYNC)
def test_coalesced(pg: Any, async_op: bool) -> None:
    size, rank = pg.size(), pg.rank()
    for count in (5, 300_000):
        with dist._coalescing_manager(group=pg, async_ops=async_op) as manager:
            tensors = [values(rank, (count + turn,), torch.float32, turn) for turn in range(3)]
            for tensor in tensors:
                dist.all_reduce(tensor, group=pg)
        finish(manager if async_op else None)
        for turn, tensor in enumerate(tensors):
            assert torch.equal(tensor, sum(everyones(pg, (count + turn,), torch.float32, turn)))
    options = dist.distributed_c10d.AllgatherOptions()
    inputs = [values(rank, (4,), torch.float32), values(rank, (2, 3), torch.float32)]
    outputs = [torch.zeros(size * 4), torch.zeros(size * 2, 3)]
    pg.all_gather_single_coalesced(outputs, inputs, options).wait()
    assert torch.equal(outputs[0], torch.cat(everyones(pg, (4,), torch.float32)))
    assert torch.equal(outputs[1], torch.cat(everyones(pg, (2, 3), torch.float32)))
    lists = [[torch.zeros(4), torch.zeros(2, 3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, inputs, pg)
    for other, (first, second) in enumerate(lists):
        assert torch.equal(first, values(other, (4,), torch.float32))
        assert torch.equal(second, values(other, (2, 3), torch.float32))
    parts = [values(rank, (size * 2,), torch.float32), values(rank, (size, 3), torch.float32)]
    outputs = [torch.zeros(2), torch.zeros(1, 3)]
    pg.reduce_scatter_single_coalesced(outputs, parts).wait()
    assert torch.equal(outputs[0], sum(everyones(pg, (size * 2,), torch.float32))[2 * rank :][:2])
    assert torch.equal(outputs[1], sum(everyones(pg, (size, 3), torch.float32))[rank:][:1])


def strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same elements in other layouts."""
    every_other = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)[:, ::2]
    every_other.copy_(tensor)
    column_major = tensor.t().contiguous().t()
    return [every_other, column_major, torch.zeros(1, dtype=tensor.dtype).expand(0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", range(2))
def test_tensors_that_are_not_contiguous(pg: Any, dtype: torch.dtype, layout: int) -> None:
    size, rank = pg.size(), pg.rank()
    shape = (4, 6)
    wanted = everyones(pg, shape, dtype)

    def own() -> torch.Tensor:
        # Ranks may lay out the same elements in different ways.
        return strided(values(rank, shape, dtype))[layout] if rank % 2 == 0 else values(rank, shape, dtype)

    tensor = own()
    dist.all_reduce(tensor, group=pg)
    assert torch.equal(tensor, sum(wanted))
    tensor = own()
    dist.broadcast(tensor, group=pg, group_src=size - 1)
    assert torch.equal(tensor, wanted[-1])
    outputs = [strided(torch.zeros(shape, dtype=dtype))[layout] for _ in range(size)]
    dist.all_gather(outputs, own(), pg)
    assert all(torch.equal(*pair) for pair in zip(outputs, wanted, strict=True))
    output = strided(torch.zeros(shape, dtype=dtype))[layout]
    dist.reduce_scatter(output, [own() for _ in range(size)], group=pg)
    assert torch.equal(output, sum(wanted))


def test_tensors_with_gradients_and_negated_ones(pg: Any) -> None:
    tensor = torch.ones(3, requires_grad=True)
    dist.all_reduce(tensor, group=pg)
    assert tensor.requires_grad
    assert tensor.detach().tolist() == [pg.size()] * 3
    negated = torch.full((2,), 1 + 2j).conj().imag
    assert negated.is_neg()
    dist.all_reduce(negated, group=pg)
    assert negated.tolist() == [-2.0 * pg.size()] * 2


def test_tensors_without_elements(pg: Any) -> None:
    size = pg.size()
    for async_op in ASYNC:
        empty = torch.empty(0, 3)
        finish(dist.all_reduce(empty, group=pg, async_op=async_op))
        finish(dist.broadcast(empty, group=pg, group_src=0, async_op=async_op))
        finish(dist.all_gather([torch.empty(0, 3) for _ in range(size)], empty, pg, async_op))
        finish(dist.reduce_scatter(torch.empty(0), [torch.empty(0)] * size, group=pg, async_op=async_op))
        finish(dist.all_to_all_single(torch.empty(0), torch.empty(0), [0] * size, [0] * size, pg, async_op))


def test_gathering_and_scattering_in_place(pg: Any) -> None:
    """As FSDP does: the input is a part of the output, or the other way round."""
    size, rank = pg.size(), pg.rank()
    whole = torch.full((size * 4,), -1.0)
    own = whole[4 * rank : 4 * rank + 4]
    own.fill_(rank)
    dist.all_gather_into_tensor(whole, own, pg)
    assert whole.tolist() == [float(place // 4) for place in range(4 * size)]
    whole = torch.arange(4.0 * size)
    output = whole[4 * rank : 4 * rank + 4]
    dist.reduce_scatter_tensor(output, whole, group=pg)
    assert output.tolist() == [size * (4.0 * rank + place) for place in range(4)]


@pytest.mark.parametrize("factor", [3.0, torch.tensor([2.0])], ids=["number", "tensor"])
def test_premultiplied_sums(pg: Any, factor: Any) -> None:
    op, size = dist._make_nccl_premul_sum(factor), pg.size()
    tensor = torch.ones(5)
    dist.all_reduce(tensor, op, pg)
    assert (tensor == size * float(factor)).all()
    given, output = torch.ones(size * 2), torch.zeros(2)
    dist.reduce_scatter_tensor(output, given, op, pg)
    assert (output == size * float(factor)).all()
    assert (given == 1).all()
    tensor = torch.ones(5)
    dist.reduce(tensor, op=op, group=pg, group_dst=0)
    assert (tensor == (size * float(factor) if pg.rank() == 0 else 1)).all()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_tensors_in_shared_memory(pg: Any, dtype: torch.dtype) -> None:
    for shape in ((0,), (7,), (300, 1000)):
        tensor = mpicoll.torch.empty(*shape, dtype=dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        tensor.copy_(values(pg.rank(), shape, dtype))
        dist.broadcast(tensor, group=pg, group_src=0)
        assert torch.equal(tensor, values(0, shape, dtype))


def test_sparse_sums(pg: Any) -> None:
    rank, size = pg.rank(), pg.size()
    tensor = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (size + 1,), check_invariants=True)
    dist.all_reduce(tensor, group=pg)
    assert tensor.to_dense().tolist() == [float(size)] + [2.0] * size


def test_objects(pg: Any) -> None:
    size, rank = pg.size(), pg.rank()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank}, pg)
    assert [each["rank"] for each in found] == list(range(size))
    told = [("root", rank)] if rank == size - 1 else [None]
    dist.broadcast_object_list(told, group=pg, group_src=size - 1)
    assert told == [("root", size - 1)]
    part: list[Any] = [None]
    dist.scatter_object_list(part, list(range(size)) if rank == 0 else None, group=pg, group_src=0)
    assert part == [rank]


def test_groups(pg: Any) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for first in range(size):
        members = list(range(first, size))
        for name_order in (members, members[::-1]):
            group = dist.new_group(name_order, sort_ranks=False)
            if rank in members:
                assert dist.get_group_rank(group, rank) == name_order.index(rank) == group.rank()
                tensor = torch.tensor([float(rank)])
                outputs = [torch.zeros(1) for _ in members]
                dist.all_gather(outputs, tensor, group)
                assert [int(output) for output in outputs] == name_order
    own, _ = dist.new_subgroups(1)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=own)
    assert tensor.item() == rank


def test_barriers(pg: Any) -> None:
    dist.barrier(pg)
    dist.barrier(pg, async_op=True).wait()
    pg.monitored_barrier()


def test_functional_collectives(pg: Any) -> None:
    import torch.distributed._functional_collectives as functional

    size, rank = pg.size(), pg.rank()
    assert functional.all_reduce(torch.ones(3), "sum", pg).tolist() == [size] * 3
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, pg)
    assert gathered.tolist() == [float(place // 2) for place in range(2 * size)]
    scattered = functional.reduce_scatter_tensor(torch.ones(size * 2), "sum", 0, pg)
    assert scattered.tolist() == [size] * 2
    moved = functional.all_to_all_single(torch.full((size,), float(rank)), None, None, pg)
    assert moved.tolist() == list(range(size))
