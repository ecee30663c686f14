"""Several nodes, pretended on one: every collective equals the exact result whatever the nodes look like."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.collectives import select
from mpicoll.errors import MismatchError, MpicollError, RemoteError
from tests.mpi import exact
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = pytest.mark.mpi(min_size=3)
LAST = mpicoll.op(lambda a, b: b, commutative=False)
DIGITS = mpicoll.op(lambda a, b: a * 10 ** (1 + (b > 9) * 1 + (b > 99) * 1 + (b > 999) * 1) + b, commutative=False)
COUNTS = (0, 1, 7, 1500, 70_001)
CASES = (("SUM", np.float32), ("MAX", np.int16), ("PROD", np.float64), ("SUM", np.complex64))


@pytest.fixture(params=["2", "4", "3,5", "1,7", "1,2,5"])
def clustered(request: pytest.FixtureRequest, verdicts: MPI.Intracomm) -> Iterator[Intracomm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOLL_NODES", request.param)
        patch.setattr(select, "OVERSUBSCRIBED", {})  # the hierarchy is what is tested, whatever this machine is
        plain = WORLD.Dup()
        yield Intracomm(plain, timeout=TIMEOUT)
        plain.Free()


def test_reductions(clustered: Intracomm) -> None:
    size, rank = clustered.size, clustered.rank
    for op, kind in CASES:
        dtype = np.dtype(kind)
        for number, count in enumerate(COUNTS):
            given, wanted = exact.given(op, dtype, rank, count), exact.expected(op, dtype, size, count)
            result, root = np.zeros_like(given), number % size
            clustered.Allreduce(given, result, op=getattr(MPI, op))
            assert exact.same_bits(result, wanted), (op, dtype, count)
            clustered.Reduce(given, result if rank == root else None, op=getattr(MPI, op), root=root)
            assert rank != root or exact.same_bits(result, wanted), (op, dtype, count)
            clustered.Allreduce(MPI.IN_PLACE, given, op=getattr(MPI, op))
            assert exact.same_bits(given, wanted), (op, dtype, count, "in place")


def test_memory_of_every_kind(clustered: Intracomm) -> None:
    for count in (5, 70_001):
        wanted = exact.expected("SUM", np.dtype(np.float64), clustered.size, count)
        data = exact.given("SUM", np.dtype(np.float64), clustered.rank, count)
        for given in (clustered.empty(count), np.empty(2 * count)[::2], np.empty(count, ">f8")):
            given[:] = data
            clustered.Allreduce(MPI.IN_PLACE, given)
            assert (given == wanted).all()


def test_long_vectors_in_segments(clustered: Intracomm) -> None:
    dtype, count = np.dtype(np.float64), 300_007  # two segments of unequal length
    data = exact.given("SUM", dtype, clustered.rank, count)
    wanted = exact.expected("SUM", dtype, clustered.size, count)
    result = np.zeros(2 * count)[::2]
    clustered.Allreduce(data, result)
    assert (result == wanted).all()
    clustered.Allreduce(MPI.IN_PLACE, data)
    assert exact.same_bits(data, wanted)
    data[:] = clustered.rank
    clustered.Allreduce(MPI.IN_PLACE, data, op=LAST)
    assert (data == clustered.size - 1).all()


def test_data_that_moves(clustered: Intracomm) -> None:
    size, rank = clustered.size, clustered.rank
    for count in COUNTS:
        for root in range(size):
            data = np.full(count, root if rank == root else -1, np.int32)
            clustered.Bcast(data, root)
            assert (data == root).all()
        everything = np.zeros(count * size, np.int32)
        clustered.Allgather(np.full(count, rank, np.int32), everything)
        assert (everything == np.repeat(np.arange(size), count)).all()
        part = np.zeros(count, np.int32)
        clustered.Reduce_scatter_block(everything, part)
        assert (part == size * rank).all()
        own = slice(count * rank, count * (rank + 1))
        everything[:] = -1
        everything[own] = rank
        clustered.Allgather(MPI.IN_PLACE, everything)
        assert (everything == np.repeat(np.arange(size), count)).all()
        clustered.Reduce_scatter_block(MPI.IN_PLACE, everything)
        assert (everything[:count] == size * rank).all()
        clustered.Barrier()


def test_parts_of_different_lengths(clustered: Intracomm) -> None:
    size, rank = clustered.size, clustered.rank
    for counts in ([(7 * r) % 5 for r in range(size)], [20_000 * (r % 3) + r for r in range(size)]):
        whole = np.repeat(np.arange(size), counts).astype(np.float64)
        gathered = np.zeros(sum(counts))
        clustered.Allgatherv(np.full(counts[rank], float(rank)), [gathered, counts])
        assert (gathered == whole).all()
        part = np.zeros(counts[rank])
        clustered.Reduce_scatter(whole + rank, part, counts)
        assert (part == size * rank + size * (size - 1) // 2).all()
        clustered.Reduce_scatter(np.full(sum(counts), float(rank)), part, counts, op=LAST)
        assert (part == size - 1).all()


def test_order_is_kept_for_operations_that_do_not_commute(clustered: Intracomm) -> None:
    small = np.full(3, clustered.rank + 1.0)
    clustered.Allreduce(MPI.IN_PLACE, small, op=LAST)
    assert (small == clustered.size).all()
    if clustered.size == 3:
        clustered.Allreduce(MPI.IN_PLACE, number := np.array([clustered.rank + 1.0]), op=DIGITS)
        assert number[0] == 123


def test_ranks_in_another_order(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_NODES", "2")
    key = WORLD.rank % 2 * WORLD.size + WORLD.rank  # neighbours on a node are far apart
    plain = WORLD.Split(0, key)
    comm = Intracomm(plain, timeout=TIMEOUT)
    data = np.full(5000, comm.rank + 1.0)
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size * (comm.size + 1) / 2).all()
    data[:] = comm.rank
    comm.Allreduce(MPI.IN_PLACE, data, op=LAST)
    assert (data == comm.size - 1).all()
    plain.Free()


def test_messages_name_ranks_as_the_user_does(clustered: Intracomm) -> None:
    """Not by their numbers on a node or a lane."""
    cluster = clustered.channel.cluster
    if cluster is None:
        pytest.skip("one rank a node, or one node")
    whole = clustered.channel.comm.Get_group()
    for channel in cluster.channels():
        watchdog, group = channel.watchdog, channel.comm.Get_group()
        ranks = range(channel.size)
        assert list(watchdog.numbers) == list(MPI.Group.Translate_ranks(group, list(ranks), whole))
        last = watchdog.numbers[channel.size - 1]
        assert watchdog._named([channel.size - 1]) == f"rank {last}"
        group.Free()
    whole.Free()


def test_what_is_chosen(clustered: Intracomm) -> None:
    cluster = clustered.channel.cluster
    if cluster is None:  # one rank a node, or one node
        assert "hierarchy" not in clustered.algorithms("allreduce")
        return
    assert clustered.choice("allreduce", 1 << 20) == "hierarchy"
    for collective in ("reduce_scatter", "allgather"):
        assert (clustered.choice(collective, 1 << 20) == "hierarchy") == cluster.even
    assert cluster.lanes == min(cluster.node_of.count(node) for node in cluster.node_of)


def test_in_a_crowd_short_vectors_go_by_messages() -> None:
    means = select.Capabilities(8, hierarchy=True, blocked=True, even=True, oversubscribed=True)
    assert select.choose("allreduce", 64 << 10, means) == "halving_doubling"
    assert select.choose("allreduce", 16 << 20, means) == "hierarchy"
    assert select.choose("allreduce", 64 << 10, means._replace(blocked=False)) == "hierarchy"
    assert select.choose("allreduce", 4 << 20, means._replace(size=6)) == "hierarchy"
    assert select.choose("bcast", 64 << 10, means) == "hierarchy"


def test_networks_have_rules_of_their_own() -> None:
    apart = select.Capabilities(4, apart=True)
    assert select.choose("bcast", 64 << 10, apart) == "double_tree"
    assert select.choose("bcast", 64 << 10, apart._replace(size=2)) == "tree"
    assert select.choose("allreduce", 1 << 20, apart._replace(size=3)) == "ring"
    assert select.choose("allreduce", 1 << 20, apart._replace(size=3), commutative=False) == "halving_doubling"


def test_other_forms_go_by_messages(clustered: Intracomm) -> None:
    x, y = np.full(1000, clustered.rank + 1.0), np.zeros(1000)
    request = clustered.Allreduce_init(x, y)
    request.Start()
    request.Wait()
    request.Free()
    assert (y == clustered.size * (clustered.size + 1) / 2).all()
    y[:] = 0
    clustered.Iallreduce(x, y).Wait()
    assert (y == clustered.size * (clustered.size + 1) / 2).all()


@pytest.mark.parametrize("count", [5000, 300_007])
def test_all_ranks_hear_of_a_mismatch(clustered: Intracomm, count: int) -> None:
    wrong = clustered.rank == clustered.size - 1
    with pytest.raises((MismatchError, RemoteError)):
        clustered.Allreduce(MPI.IN_PLACE, np.ones(count + wrong))
    with pytest.raises(MpicollError):
        clustered.Allreduce(MPI.IN_PLACE, np.ones(5000))
