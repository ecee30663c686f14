"""Every algorithm, op, element type, count and size equals the exact result, bit for bit, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.schedules import ALGORITHMS
from tests import extent
from tests.mpi import exact

LONG = 1_000_003
PAIRS = [(op, dtype) for op in exact.OPS for dtype in exact.DTYPES if exact.applies(op, dtype)]
SHARE = 1 if extent.EXHAUSTIVE or extent.ALL else 3

pytestmark = pytest.mark.mpi(min_size=2)


def counts(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 13, 4099})


def in_turn(algorithm: str, size: int, every: int) -> list[tuple[str, np.dtype]]:
    """Return each `every`-th pair, beginning with another one for each algorithm and size."""
    return PAIRS if extent.EXHAUSTIVE else PAIRS[(size + len(algorithm)) % every :: every]


def cases(algorithm: str, size: int) -> Iterator[tuple[str, np.dtype, int]]:
    turn, step = in_turn(algorithm, size, 4), 1 if extent.EXHAUSTIVE else 2 * SHARE
    for number, (op, dtype) in enumerate(PAIRS):
        if dtype not in exact.INTEGERS or (op, dtype) in turn:
            for count in counts(size)[(number + size) % step :: step]:
                yield op, dtype, count
    for op, dtype in in_turn(algorithm, size, 19):
        yield op, dtype, LONG


@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
def test_allreduce(subcomm: Intracomm, algorithm: str) -> None:
    size = subcomm.size
    for op, dtype, count in cases(algorithm, size):
        given, wanted = exact.given(op, dtype, subcomm.rank, count), exact.expected(op, dtype, size, count)
        result = np.zeros_like(given)
        subcomm.Allreduce(given, result, op=getattr(MPI, op), algorithm=algorithm)
        assert exact.same_bits(result, wanted), (op, dtype, count)
        if count < size or count == 4099:
            subcomm.Allreduce(MPI.IN_PLACE, given, op=getattr(MPI, op), algorithm=algorithm)
            assert exact.same_bits(given, wanted), (op, dtype, count, "in place")


@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce"])
def test_reduce(subcomm: Intracomm, algorithm: str) -> None:
    size, rank = subcomm.size, subcomm.rank
    for number, (op, dtype, count) in enumerate(cases(algorithm, size)):
        root = number % size
        given, wanted = exact.given(op, dtype, rank, count), exact.expected(op, dtype, size, count)
        result = np.zeros_like(given) if rank == root else None
        subcomm.Reduce(given, result, op=getattr(MPI, op), root=root, algorithm=algorithm)
        assert result is None or exact.same_bits(result, wanted), (op, dtype, count)
        assert exact.same_bits(given, exact.given(op, dtype, rank, count)), "sendbuf was changed"


@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce_scatter"])
def test_reduce_scatter(subcomm: Intracomm, algorithm: str) -> None:
    size, rank = subcomm.size, subcomm.rank
    for op, dtype, count in cases(algorithm, size):
        recvcounts = [count // size + (r < count % size) for r in range(size)]
        begin = sum(recvcounts[:rank])
        given, wanted = exact.given(op, dtype, rank, count), exact.expected(op, dtype, size, count)
        result = np.zeros(recvcounts[rank], dtype)
        subcomm.Reduce_scatter(given, result, recvcounts, op=getattr(MPI, op), algorithm=algorithm)
        assert exact.same_bits(result, wanted[begin : begin + result.size]), (op, dtype, count)


@pytest.mark.parametrize("algorithm", ALGORITHMS["bcast"])
def test_bcast(subcomm: Intracomm, algorithm: str) -> None:
    size = subcomm.size
    for number, dtype in enumerate(exact.DTYPES):
        for count in [*counts(size)[(number + size) % SHARE :: SHARE], LONG]:
            root = (number + count) % size
            wanted = exact.given("LXOR" if dtype == exact.BOOL else "SUM", dtype, root, count)
            data = wanted.copy() if subcomm.rank == root else np.zeros_like(wanted)
            subcomm.Bcast(data, root=root, algorithm=algorithm)
            assert exact.same_bits(data, wanted), (dtype, count, root)


@pytest.mark.parametrize("algorithm", ALGORITHMS["allgather"])
def test_allgather(subcomm: Intracomm, algorithm: str) -> None:
    size, rank = subcomm.size, subcomm.rank
    for number, dtype in enumerate(exact.DTYPES):
        for count in [*counts(size)[(number + size) % SHARE :: SHARE], LONG // size]:
            op = "LXOR" if dtype == exact.BOOL else "SUM"
            wanted = np.stack([exact.given(op, dtype, r, count) for r in range(size)])
            result = np.zeros_like(wanted)
            subcomm.Allgather(wanted[rank].copy(), result, algorithm=algorithm)
            assert exact.same_bits(result, wanted), (dtype, count)


@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
def test_random_floats_have_equal_bits_on_all_ranks_and_in_every_run(comm: Intracomm, algorithm: str) -> None:
    generator = np.random.default_rng(comm.rank)
    given = (generator.standard_normal(5003) * 10.0 ** generator.integers(-20, 20, 5003)).astype(np.float32)
    first, second = np.empty_like(given), np.empty_like(given)
    comm.Allreduce(given, first, algorithm=algorithm)
    comm.Allreduce(given, second, algorithm=algorithm)
    everybodys = np.empty((comm.size, first.size), np.float32)
    MPI.COMM_WORLD.Allgather(first, everybodys)
    assert all(exact.same_bits(row, first) for row in everybodys)
    assert exact.same_bits(first, second)
    in_double = np.empty((comm.size, given.size), np.float64)
    MPI.COMM_WORLD.Allgather(given.astype(np.float64), in_double)
    bound = comm.size * np.finfo(np.float32).eps * np.abs(in_double).sum(axis=0)
    assert np.all(np.abs(first - in_double.sum(axis=0)) <= bound)


@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
@pytest.mark.parametrize("op", ["SUM", "MAX", "MIN"])
def test_nan_and_infinity_arrive_everywhere_with_equal_bits(comm: Intracomm, algorithm: str, op: str) -> None:
    given = np.zeros(64, np.float64)
    given[comm.rank % 8] = np.nan
    given[10 + comm.rank % 8] = np.inf if comm.rank % 2 else -np.inf
    given[30] = -0.0 if comm.rank % 2 else 0.0
    result = np.empty_like(given)
    comm.Allreduce(given, result, op=getattr(MPI, op), algorithm=algorithm)
    assert np.isnan(result[: min(8, comm.size)]).all()
    everybodys = np.empty((comm.size, 64))
    MPI.COMM_WORLD.Allgather(result, everybodys)
    assert all(exact.same_bits(row, result) for row in everybodys)
