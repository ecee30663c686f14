"""Several nodes, pretended on one: every collective equals the exact result whatever the nodes look like."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.collectives import execute, select
from mpicoll.collectives.composed_plan import ComposedPlan
from mpicoll.errors import MismatchError, MpicollError, RemoteError
from mpicoll.shared_memory.domain_memory import NONBLOCKING_LANES, PLAN_LANES
from tests.mpi import call_forms, exact
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


def test_networks_have_rules_of_their_own() -> None:
    apart = select.Capabilities(4, apart=True)
    assert select.choose("bcast", 64 << 10, apart) == "double_tree"
    assert select.choose("bcast", 64 << 10, apart._replace(size=2)) == "tree"
    assert select.choose("allreduce", 1 << 20, apart._replace(size=3)) == "ring"
    assert select.choose("allreduce", 1 << 20, apart._replace(size=3), commutative=False) == "halving_doubling"


def _nonblocking(comm: Intracomm, turn: int, count: int) -> tuple[MPI.Request, np.ndarray, np.ndarray | float]:
    """Start one of several collectives; return its request, its result, and what that must be."""
    size, rank, root = comm.size, comm.rank, turn % comm.size
    x, y = np.full(count, rank + turn, np.float64), np.zeros(count)
    total = size * (size - 1) / 2 + size * turn
    if turn % 5 == 0:
        return comm.Iallreduce(x, y), y, total
    if turn % 5 == 1:
        return comm.Ireduce(x, y, root=root), y, total if rank == root else 0.0
    if turn % 5 == 2:
        y[:] = turn if rank == root else -1
        return comm.Ibcast(y, root), y, turn
    if turn % 5 == 3:
        y = np.zeros(size * count)
        return comm.Iallgather(x, y), y, np.repeat(np.arange(size) + turn, count)
    return comm.Ireduce_scatter_block(np.full(size * count, rank + turn, np.float64), y), y, total


@pytest.mark.parametrize("count", [3, 5000, 300_007])
def test_many_nonblocking_operations_at_once(clustered: Intracomm, count: int) -> None:
    """More than there are lanes for them on a node, completed in the order in which each rank likes to."""
    turns = 2 * NONBLOCKING_LANES + 1 if count < 10_000 else 5
    started = [_nonblocking(clustered, turn, count) for turn in range(turns)]
    blocking = np.full(count, 1.0)
    clustered.Allreduce(MPI.IN_PLACE, blocking)
    assert (blocking == clustered.size).all()
    barrier = clustered.Ibarrier()
    for request, result, wanted in started if clustered.rank % 2 else reversed(started):
        request.Wait()
        assert (result == wanted).all()
    barrier.Wait()


@pytest.mark.parametrize("count", [3, 5000, 300_007])
def test_persistent_operations_in_any_order(clustered: Intracomm, count: int) -> None:
    size, rank = clustered.size, clustered.rank
    inputs = [np.zeros(count) for _ in range(3)]
    results = [clustered.empty(count), np.zeros(2 * count)[::2], np.zeros(count)]
    requests = [clustered.Allreduce_init(x, y) for x, y in zip(inputs, results, strict=True)]
    requests.append(clustered.Bcast_init(inputs[0], root=size - 1))
    for turn in range(4):
        for number, x in enumerate(inputs):
            x[:] = rank + number + turn
        order = requests[:3] if rank % 2 else requests[2::-1]
        for request in order:
            request.Start()
        for request in reversed(order):
            request.Wait()
        for number, y in enumerate(results):
            assert (y == size * (size - 1) / 2 + size * (number + turn)).all()
        requests[3].Start()
        requests[3].Wait()
        assert (inputs[0] == size - 1 + turn).all()
    for request in requests:
        request.Free()


def test_persistent_operations_take_messages_where_memory_has_run_out(clustered: Intracomm) -> None:
    """On the nodes where it has; all others need not know."""
    x, y = np.ones(100), np.zeros(100)
    cluster = clustered.channel.cluster
    if cluster is not None and cluster.node.node is not None and cluster.my_node == 0:
        cluster.node.node._busy = set(range(PLAN_LANES))
    request = clustered.Allreduce_init(x, y)
    for _ in range(3):
        y[:] = 0
        request.Start()
        request.Wait()
        assert (y == clustered.size).all()
    request.Free()


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_a_communicator_may_be_freed_before_its_operations(verdicts: MPI.Intracomm, algorithm: str) -> None:
    for variables in ({}, {"MPICOLL_SEGMENTS": "off"}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MPICOLL_NODES", "2")
            for name, value in variables.items():
                patch.setenv(name, value)
            plain = WORLD.Dup()
            comm = Intracomm(plain, timeout=TIMEOUT, algorithm=algorithm)
            results = [np.zeros(300) for _ in range(2 * NONBLOCKING_LANES + 4)]
            size, rank = comm.size, float(comm.rank)
            requests = [comm.Iallreduce(np.full(300, turn + rank), y) for turn, y in enumerate(results)]
            plain.Free()
        for turn, (request, y) in enumerate(zip(requests, results, strict=True)):
            request.Wait()
            assert (y == size * turn + size * (size - 1) / 2).all()


def test_plans_that_are_not_kept_leave_no_memory(clustered: Intracomm) -> None:
    """Also where Python's garbage collector is off."""
    kept: list[weakref.ref[ComposedPlan]] = []
    with pytest.MonkeyPatch.context() as patch:
        made = ComposedPlan.close
        patch.setattr(ComposedPlan, "close", lambda plan, *ends: (kept.append(weakref.ref(plan)), made(plan, *ends)))
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                x, y = np.ones(200_000), np.zeros(200_000 * clustered.size)
                clustered.Iallgather(x, y).Wait()
                clustered.Iallreduce(x, y[: x.size]).Wait()
            assert not any(plan() for plan in kept)
        finally:
            gc.enable()


def test_persistent_operations_that_not_all_set_up_are_an_error(
    verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPICOLL_NODES", "2")
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=0.5)
    call = comm.Allreduce_init if comm.rank == 0 else comm.Allreduce
    with pytest.raises(MpicollError, match=r"Allreduce\(count=4000, dtype=float64, op=SUM, algorithm=hierarchy\)"):
        call(np.ones(4000), np.zeros(4000))
    with pytest.raises(MpicollError):
        comm.Barrier()
    plain.Free()


def test_known_calls_are_one_compiled_call(clustered: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if clustered.channel.cluster is None:
        pytest.skip("one rank a node, or one node")
    vectors = [(np.full(count, 1.0), np.zeros(count)) for count in (3, 300_007)]
    for x, y in vectors:
        clustered.Allreduce(x, y)
        clustered.Bcast(x, root=1)
        clustered.Barrier()
    with monkeypatch.context() as patch:
        patch.setattr(execute, "run", None)  # the general path
        for x, y in vectors:
            y[:] = 0
            clustered.Allreduce(x, y)
            clustered.Bcast(x, root=1)
            clustered.Barrier()
            assert (y == clustered.size).all()


def test_compressed_forms_have_equal_bits(clustered: Intracomm) -> None:
    """All ranks choose the same elements, also where parts of operations start in different orders."""
    count, comm = 300_007, clustered
    x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
    results = [np.zeros(count, np.float32) for _ in range(3)]
    plans = [comm.Allreduce_init(x, y, compression="randomk:0.1") for y in results[:2]]
    request = comm.Iallreduce(x, results[2], compression="randomk:0.1")
    for plan in plans if comm.rank % 2 else reversed(plans):
        plan.Start()
    for waiting in (request, *plans):
        waiting.Wait()
    whole = sum(np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(comm.size))
    for y in results:
        chosen = y != 0
        assert 0.05 < chosen.mean() < 0.2
        np.testing.assert_allclose(y[chosen], 10 * whole[chosen], rtol=0.2, atol=0.01)  # parts are not of equal length
        assert len({bytes(each) for each in comm.allgather(y.tobytes())}) == 1
    assert (results[0] != results[1]).any()
    for plan in plans:
        plan.Free()


def _picky(a: float, b: float) -> float:
    if a == 13.0 or b == 13.0:
        raise ArithmeticError("thirteen")
    return a + b


PICKY = mpicoll.op(_picky)


@pytest.mark.parametrize("form", call_forms.FORMS)
def test_all_ranks_hear_of_a_failed_operation(clustered: Intracomm, form: str) -> None:
    """A function that raises in the part on shared memory, or in that by messages, on some ranks."""
    x, y = np.zeros(5000), np.zeros(5000)
    x[-1] = 13.0 if clustered.rank == clustered.size - 1 else 0.0

    with pytest.raises((MpicollError, ArithmeticError)):
        call_forms.make(clustered, form, "allreduce", x, y, op=PICKY)
    with pytest.raises(MpicollError):
        clustered.Barrier()


@pytest.mark.parametrize("count", [5000, 300_007])
def test_all_ranks_hear_of_a_mismatch(clustered: Intracomm, count: int) -> None:
    wrong = clustered.rank == clustered.size - 1
    with pytest.raises((MismatchError, RemoteError)):
        clustered.Allreduce(MPI.IN_PLACE, np.ones(count + wrong))
    with pytest.raises(MpicollError):
        clustered.Allreduce(MPI.IN_PLACE, np.ones(5000))


@pytest.mark.parametrize("form", call_forms.FORMS)
@pytest.mark.parametrize("count", [1, 5000])
def test_all_ranks_hear_of_another_compressor(clustered: Intracomm, form: str, count: int) -> None:
    """A rank of a node has no share of one element, and so no part that tells of the compressor."""
    spec = "int4" if clustered.rank == clustered.size - 1 else "int8"
    x, y = np.ones(count, np.float32), np.zeros(count, np.float32)
    with pytest.raises(MismatchError, match="compression="):
        call_forms.make(clustered, form, "allreduce", x, y, compression=spec)
    with pytest.raises(MpicollError):
        clustered.Barrier()


@pytest.mark.parametrize("spec", ["powersgd:2", "oktopk:0.05", "sign"])
def test_error_feedback_goes_on_from_its_state(clustered: Intracomm, spec: str) -> None:
    """Compressors keep something for each lane's part of the vector, too."""
    feedback, shape = mpicoll.ErrorFeedback(spec), (100, 200)

    def steps(used: mpicoll.ErrorFeedback, first: int) -> list[np.ndarray]:
        results = []
        for step in range(first, first + 3):
            given = np.random.default_rng([clustered.rank, step]).standard_normal(shape).astype(np.float32)
            result = np.empty_like(given)
            clustered.Allreduce(given, result, compression=used)
            results.append(result)
        return results

    steps(feedback, 0)
    state = feedback.state()
    other = mpicoll.ErrorFeedback(spec)
    other.load(state)
    assert sorted(other.state()) == sorted(state)
    wanted = steps(feedback, 3)
    feedback.load(state)
    for used in (other, feedback):
        for got, right in zip(steps(used, 3), wanted, strict=True):
            np.testing.assert_array_equal(got, right)
    if state:  # not on a rank without a lane
        with pytest.raises(ValueError, match="is not of a part of 20000"):
            other.load({**state, "memory.part.0.10.11.steps": np.array(1)})
