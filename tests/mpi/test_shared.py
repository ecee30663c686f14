"""Collectives on shared memory equal the exact result, bit for bit, for every kind of memory and around every limit."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.kernels import operation_words as words
from mpicoll.shared_memory import domain_memory, slot_lengths
from tests.mpi import exact
from tests.mpi.memory import Kinds, algorithm_for, neighbours_are_intact, place

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.parametrize("how", ["shared", None])]

PAIRS = [(op, dtype) for op in exact.OPS for dtype in exact.DTYPES if exact.applies(op, dtype)]
EXHAUSTIVE = os.environ.get("MPICOLL_TEST_EXHAUSTIVE") == "1"
"""Every pair at every limit; otherwise the pairs take turns there."""
INLINE_NBYTES = words.RECORD_NBYTES - 24
NEAR_TILE_NBYTES = 16 << 10
IN_PLACE = MPI.IN_PLACE


def limits(size: int) -> list[int]:
    """Lengths in bytes at which vectors begin to be treated in another way."""
    slot, stage = slot_lengths.largest(size), domain_memory.STAGE_NBYTES
    return [INLINE_NBYTES, NEAR_TILE_NBYTES, size * NEAR_TILE_NBYTES, words.TILE_NBYTES, slot, stage, 3 * stage]


def cases(size: int) -> Iterator[tuple[str, np.dtype, int]]:
    """All pairs with few elements, and pairs in turn just below, at and just above each limit."""
    for number, (op, dtype) in enumerate(PAIRS):
        counts = sorted({0, 1, size - 1, size, size + 1, 13, 997})
        for count in counts if EXHAUSTIVE else counts[number % 2 :: 2]:
            yield op, dtype, count
    turn = size
    for nbytes in limits(size):
        for more in (-1, 0, 1, 7):
            turn += 19
            for op, dtype in PAIRS if EXHAUSTIVE else [PAIRS[turn % len(PAIRS)]]:
                yield op, dtype, nbytes // dtype.itemsize + more


def parts_of(count: int, size: int, number: int) -> list[int]:
    """Divide elements among ranks: evenly, all to one, or in a skew way with parts of nothing."""
    if number % 3 == 0:
        return [count // size + (r < count % size) for r in range(size)]
    if number % 3 == 1:
        return [count * (r == number % size) for r in range(size)]
    cuts = sorted((number * (r + 3) * 7919) % (count + 1) for r in range(size - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]


def values_of(dtype: np.dtype, rank: int, count: int) -> np.ndarray:
    return exact.given("LXOR" if dtype == exact.BOOL else "SUM", dtype, rank, count)


def test_allreduce(subcomm: Intracomm, how: str | None) -> None:
    size, rank = subcomm.size, subcomm.rank
    kinds = Kinds(rank)
    for op, dtype, count in cases(size):
        given, wanted = exact.given(op, dtype, rank, count), exact.expected(op, dtype, size, count)
        algorithm, (one, other) = algorithm_for(subcomm, how, given.nbytes), kinds.next()
        send, recv = place(subcomm, one, given), place(subcomm, other, np.zeros_like(given))
        subcomm.Allreduce(send, recv, op=getattr(MPI, op), algorithm=algorithm)
        assert exact.same_bits(recv, wanted), (op, dtype, count, one, other)
        assert exact.same_bits(send, given), "sendbuf was changed"
        assert neighbours_are_intact(recv)
        in_place = place(subcomm, one, given)
        subcomm.Allreduce(IN_PLACE, in_place, op=getattr(MPI, op), algorithm=algorithm)
        assert exact.same_bits(in_place, wanted), (op, dtype, count, one, "in place")


def test_reduce(subcomm: Intracomm, how: str | None) -> None:
    size, rank = subcomm.size, subcomm.rank
    kinds = Kinds(rank)
    for number, (op, dtype, count) in enumerate(cases(size)):
        root, (one, other) = number % size, kinds.next()
        given, wanted = exact.given(op, dtype, rank, count), exact.expected(op, dtype, size, count)
        algorithm = algorithm_for(subcomm, how, given.nbytes)
        send = place(subcomm, one, given)
        recv = place(subcomm, other, np.zeros_like(given)) if rank == root else None
        subcomm.Reduce(send, recv, getattr(MPI, op), root, algorithm=algorithm)
        assert exact.same_bits(send, given), "sendbuf was changed"
        assert recv is None or exact.same_bits(recv, wanted), (op, dtype, count, one, other, root)
        assert recv is None or neighbours_are_intact(recv)
        source, target = (IN_PLACE, send) if rank == root else (send, None)
        subcomm.Reduce(source, target, getattr(MPI, op), root, algorithm=algorithm)
        assert exact.same_bits(send, wanted if rank == root else given), (op, dtype, count, one, "in place")


def test_bcast(subcomm: Intracomm, how: str | None) -> None:
    size, rank = subcomm.size, subcomm.rank
    kinds = Kinds(rank)
    for number, (_, dtype, count) in enumerate(cases(size)):
        root, (one, _) = number % size, kinds.next()
        wanted = values_of(dtype, root, count)
        data = place(subcomm, one, wanted if rank == root else np.zeros_like(wanted))
        subcomm.Bcast(data, root, algorithm=algorithm_for(subcomm, how, wanted.nbytes))
        assert exact.same_bits(data, wanted), (dtype, count, one, root)
        assert neighbours_are_intact(data)


def test_reduce_scatter(subcomm: Intracomm, how: str | None) -> None:
    size, rank = subcomm.size, subcomm.rank
    kinds = Kinds(rank)
    for number, (op, dtype, count) in enumerate(cases(size)):
        counts, (one, other) = parts_of(count, size, number), kinds.next()
        given, wanted = exact.given(op, dtype, rank, count), exact.expected(op, dtype, size, count)
        begin, own = sum(counts[:rank]), counts[rank]
        send, recv = place(subcomm, one, given), place(subcomm, other, np.zeros(own, dtype))
        algorithm = algorithm_for(subcomm, how, given.nbytes)
        subcomm.Reduce_scatter(send, recv, counts, getattr(MPI, op), algorithm=algorithm)
        assert exact.same_bits(recv, wanted[begin : begin + own]), (op, dtype, counts, one, other)
        assert exact.same_bits(send, given), "sendbuf was changed"
        assert neighbours_are_intact(recv)
        if number % 4 == 0:
            subcomm.Reduce_scatter(IN_PLACE, send, counts, getattr(MPI, op), algorithm=algorithm)
            assert exact.same_bits(send[:own], wanted[begin : begin + own]), (op, dtype, counts, one, "in place")


def test_reduce_scatter_block(subcomm: Intracomm, how: str | None) -> None:
    size, rank = subcomm.size, subcomm.rank
    kinds = Kinds(rank)
    for op, dtype, count in cases(size):
        part, (one, other) = -(-count // size), kinds.next()
        given, wanted = exact.given(op, dtype, rank, part * size), exact.expected(op, dtype, size, part * size)
        send, recv = place(subcomm, one, given), place(subcomm, other, np.zeros(part, dtype))
        algorithm = algorithm_for(subcomm, how, given.nbytes)
        subcomm.Reduce_scatter_block(send, recv, getattr(MPI, op), algorithm=algorithm)
        assert exact.same_bits(recv, wanted[rank * part : (rank + 1) * part]), (op, dtype, part, one, other)
        assert exact.same_bits(send, given), "sendbuf was changed"
        assert neighbours_are_intact(recv)


def test_allgather(subcomm: Intracomm, how: str | None) -> None:
    size, rank = subcomm.size, subcomm.rank
    kinds = Kinds(rank)
    for number, (_, dtype, count) in enumerate(cases(size)):
        part, (one, other) = -(-count // size), kinds.next()
        wanted = np.concatenate([values_of(dtype, r, part) for r in range(size)])
        algorithm = algorithm_for(subcomm, how, wanted.nbytes)
        recv = place(subcomm, other, np.zeros_like(wanted))
        subcomm.Allgather(place(subcomm, one, values_of(dtype, rank, part)), recv, algorithm=algorithm)
        assert exact.same_bits(recv, wanted), (dtype, part, one, other)
        assert neighbours_are_intact(recv)
        if number % 4 == 0:
            recv[: rank * part] = recv[(rank + 1) * part :] = 0
            subcomm.Allgather(IN_PLACE, recv, algorithm=algorithm)
            assert exact.same_bits(recv, wanted), (dtype, part, other, "in place")


def test_allgatherv(subcomm: Intracomm, how: str | None) -> None:
    size, rank = subcomm.size, subcomm.rank
    kinds = Kinds(rank)
    for number, (_, dtype, count) in enumerate(cases(size)):
        counts, (one, other) = parts_of(count, size, number), kinds.next()
        wanted = np.concatenate([values_of(dtype, r, counts[r]) for r in range(size)])
        send = place(subcomm, one, values_of(dtype, rank, counts[rank]))
        recv = place(subcomm, other, np.zeros_like(wanted))
        subcomm.Allgatherv(send, [recv, counts], algorithm=algorithm_for(subcomm, how, wanted.nbytes))
        assert exact.same_bits(recv, wanted), (dtype, counts, one, other)
        assert neighbours_are_intact(recv)


def test_barrier(subcomm: Intracomm, how: str | None) -> None:
    """Nobody leaves before the last has come: each rank in turn comes late, having counted up in shared memory."""
    algorithm, plain = algorithm_for(subcomm, how, 0), MPI.Intracomm(subcomm)
    window = MPI.Win.Allocate_shared(8 * (plain.rank == 0), 8, comm=plain)
    counter = np.asarray(window.Shared_query(0)[0]).view(np.int64)
    if plain.rank == 0:
        counter[0] = 0
    plain.Barrier()
    for turn in range(40):
        if turn % plain.size == plain.rank:
            counter[0] = turn + 1
        subcomm.Barrier(algorithm=algorithm)
        assert counter[0] == turn + 1
        subcomm.Barrier(algorithm=algorithm)
    window.Free()


def test_reversed_ranks_and_random_floats(comm: Intracomm, how: str | None) -> None:
    """Sums that depend on the order are made in the order of this communicator's ranks, alike everywhere."""
    plain = MPI.COMM_WORLD.Split(0, -comm.rank)
    backwards = Intracomm(plain, timeout=comm.timeout)
    assert backwards.rank == comm.size - 1 - comm.rank
    generator = np.random.default_rng(comm.rank)
    for count in (11, 5003, 70_001, 400_009):
        given = (generator.standard_normal(count) * 10.0 ** generator.integers(-20, 20, count)).astype(np.float32)
        algorithm = algorithm_for(backwards, how, given.nbytes)
        for kind in ("private", "shared"):
            result = place(backwards, kind, np.zeros_like(given))
            backwards.Allreduce(place(backwards, kind, given), result, algorithm=algorithm)
            everybodys = np.empty((comm.size, count), np.float32)
            MPI.Intracomm(backwards).Allgather(given, everybodys)
            wanted = everybodys[0].copy()
            for row in everybodys[1:]:
                wanted += row
            results = np.empty((comm.size, count), np.float32)
            MPI.Intracomm(backwards).Allgather(result.copy(), results)
            assert all(exact.same_bits(row, result) for row in results), (count, kind)
            assert algorithm != "shared" or exact.same_bits(result, wanted), (count, kind)
    plain.Free()
