"""Nonblocking and persistent collectives: many at once, in any order, mixed with everything else."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import CommunicatorBusy
from mpicoll.interface import nonblocking
from mpicoll.progress import progress_engine
from mpicoll.schedules import ALGORITHMS
from mpicoll.shared_memory.domain_memory import NONBLOCKING_LANES
from mpicoll.shared_memory.nonblocking_lanes import NonblockingLanes
from tests.mpi.conftest import WORLD, refuse

pytestmark = pytest.mark.mpi(min_size=2)


def values(rank: int, count: int, turn: int = 0) -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank) % 13 + turn).astype(np.float64)


def total(comm: Intracomm, count: int, turn: int = 0) -> np.ndarray:
    return sum((values(r, count, turn) for r in range(comm.size)), np.zeros(count))


def receive_soon(token: np.ndarray, tag: int) -> None:
    """Receive from rank 0, but do not wait for ever."""
    request, deadline = MPI.COMM_WORLD.Irecv(token, 0, tag), time.monotonic() + 10
    while not request.Test():
        if time.monotonic() > deadline:
            request.Cancel()
            request.Wait()
            pytest.fail("rank 0 did not get so far")
        time.sleep(0.0005)


class Started:
    """One operation of each kind on its way, and what it must give."""

    def __init__(self, comm: Intracomm, count: int, turn: int, algorithm: str | None = None) -> None:
        size, rank = comm.size, comm.rank
        self.sum, self.data = np.zeros(count), values(rank, count, turn)
        self.parts, self.part = np.zeros((size, count)), np.zeros(count)
        counts = [count + (r + turn) % size for r in range(size)]
        begin = sum(counts[:rank])
        self.uneven, self.share = np.zeros(sum(counts)), np.zeros(counts[rank])
        self.spread = values(rank, count, turn)
        self.wanted: list[tuple[np.ndarray, Any]] = [
            (self.sum, total(comm, count, turn)),
            (self.spread, values(turn % size, count, turn)),
            (self.parts, np.stack([values(r, count, turn) for r in range(size)])),
            (self.part, total(comm, size * count, turn)[rank * count : (rank + 1) * count]),
            (self.uneven, np.concatenate([values(r, counts[r], turn) for r in range(size)])),
            (self.share, total(comm, sum(counts), turn)[begin : begin + counts[rank]]),
        ]
        self.requests = [
            comm.Iallreduce(self.data, self.sum, algorithm=algorithm),
            comm.Ibcast(self.spread, turn % size),
            comm.Iallgather(self.data, self.parts),
            comm.Ireduce_scatter(values(rank, size * count, turn), self.part, [count] * size),
            comm.Iallgatherv(values(rank, counts[rank], turn), [self.uneven, counts, MPI.DOUBLE]),
            comm.Ireduce_scatter(values(rank, sum(counts), turn), self.share, counts),
        ]

    def check(self) -> None:
        for result, wanted in self.wanted:
            assert (result == wanted).all()


@pytest.mark.parametrize("count", [1, 300, 3000])
def test_each_kind(comm: Intracomm, count: int) -> None:
    for turn in range(3):
        started = Started(comm, count, turn)
        assert all(request.Wait() is True for request in started.requests)
        started.check()
        assert all(request.Wait() is True and request.Test() is True for request in started.requests)
        data = values(comm.rank, comm.size * count)
        comm.Ireduce_scatter_block(MPI.IN_PLACE, data).Wait()
        assert (data[:count] == total(comm, comm.size * count)[comm.rank * count :][:count]).all()
        part = np.zeros(count)
        comm.Ireduce_scatter(values(comm.rank, comm.size * count), part).wait()
        assert (part == data[:count]).all()
    assert progress_engine.pending() == 0


@pytest.mark.parametrize("algorithm", [*ALGORITHMS["allreduce"], "native", "auto"])
def test_each_algorithm(comm: Intracomm, algorithm: str) -> None:
    for count in (1, 31, 3000):
        results = [np.zeros(count) for _ in range(3)]
        requests = [
            comm.Iallreduce(values(comm.rank, count, turn), result, algorithm=algorithm)
            for turn, result in enumerate(results)
        ]
        for turn, request in reversed(list(enumerate(requests))):
            request.Wait()
            assert (results[turn] == total(comm, count, turn)).all()


@pytest.mark.parametrize("count", [1, 500, 2000])
def test_many_in_flight_completed_in_reverse_order(comm: Intracomm, count: int) -> None:
    everything = [Started(comm, count, turn) for turn in range(25)]
    for started in reversed(everything):
        for request in reversed(started.requests):
            request.Wait()
        started.check()
    assert progress_engine.pending() == 0


def test_hundreds_of_the_same_kind(comm: Intracomm) -> None:
    """Equal calls, so that only the order tells them apart; ranks start them at different times."""
    for algorithm in ("ring", "recursive_doubling"):
        results = [np.full(3, -1.0) for _ in range(600)]
        requests = []
        for turn, result in enumerate(results):
            if turn == 100 * comm.rank:
                time.sleep(0.02)
            requests.append(comm.Iallreduce(values(comm.rank, 3, turn), result, algorithm=algorithm))
        order = range(600) if comm.rank % 2 else reversed(range(600))
        for turn in order:
            requests[turn].Wait()
            assert (results[turn] == total(comm, 3, turn)).all()


def test_a_lane_whose_operation_can_end_is_used_again_by_compiled_code(
    comm: Intracomm, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    values, count = np.arange(6.0) + comm.rank, 3 * NONBLOCKING_LANES
    wanted = comm.size * np.arange(6.0) + sum(range(comm.size))
    results = np.zeros((count, 6))
    for result in results:
        comm.Iallreduce(values, result).Wait()
    results[...] = 0
    refused()
    monkeypatch.setattr(nonblocking, "start", refuse)
    requests = []
    for result in results:
        requests.append(comm.Iallreduce(values, result))
        WORLD.Barrier()  # then all ranks have started it
    MPI.Request.Waitall(requests)
    np.testing.assert_array_equal(results, np.tile(wanted, (count, 1)))


def test_waiting_in_different_order_on_different_ranks(comm: Intracomm) -> None:
    everything = [Started(comm, 40, turn) for turn in range(10)]
    order = np.random.default_rng(comm.rank).permutation(10)
    for turn in order:
        for request in everything[turn].requests:
            request.Wait()
        everything[turn].check()


def test_mixed_with_blocking_calls(comm: Intracomm) -> None:
    for count in (7, 2000):
        pending = []
        for turn in range(10):
            pending.append(Started(comm, count, turn))
            data = values(comm.rank, count, turn)
            comm.Allreduce(MPI.IN_PLACE, data)
            assert (data == total(comm, count, turn)).all()
            comm.Bcast(data, turn % comm.size)
            comm.Barrier()
            comm.Allreduce(MPI.IN_PLACE, np.ones(3), algorithm="native")
        for started in reversed(pending):
            for request in started.requests:
                request.Wait()
            started.check()


def test_mixed_with_another_communicator(comm: Intracomm) -> None:
    """Ranks wait on the two communicators in different order; each wait drives both."""
    plain = MPI.COMM_WORLD.Dup()
    other = Intracomm(plain, timeout=20)
    for turn in range(10):
        first, second = Started(comm, 50, turn), Started(other, 50, turn + 1)
        for started in (first, second) if comm.rank % 2 else (second, first):
            for request in started.requests:
                request.Wait()
            started.check()
    pending = Started(comm, 2000, 1)
    data = np.ones(2000)
    other.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size).all()
    for request in pending.requests:
        request.Wait()
    pending.check()
    plain.Free()


def test_testing_in_a_loop(comm: Intracomm) -> None:
    for count in (3, 5000):
        started = Started(comm, count, 1)
        deadline = time.monotonic() + 20
        while not all([request.Test() for request in started.requests]):  # noqa: C419  (each of them)
            assert time.monotonic() < deadline
            time.sleep(0.0001)
        started.check()


def test_all_at_once(comm: Intracomm) -> None:
    started = Started(comm, 900, 2)
    kind = type(started.requests[0])
    assert kind.Waitall(started.requests)
    started.check()
    assert kind.Testall(started.requests)
    started = Started(comm, 900, 3)
    deadline = time.monotonic() + 20
    while not kind.Testall(started.requests):
        assert time.monotonic() < deadline
    started.check()
    assert kind.Waitall([])


def test_testing_one_drives_all(comm: Intracomm) -> None:
    first, second = Started(comm, 60, 0), Started(comm, 60, 1)
    deadline = time.monotonic() + 20
    while progress_engine.pending():
        second.requests[0].Test()
        assert time.monotonic() < deadline
    first.check()
    second.check()
    for request in first.requests + second.requests:
        assert request.Test()


def test_buffers_and_requests_may_be_forgotten(comm: Intracomm) -> None:
    """The operation keeps what it needs; the other ranks get their results."""
    for count in (5, 5000):
        kept = np.zeros(count)
        requests = [comm.Iallreduce(values(comm.rank, count), kept)]
        for turn in range(4):
            comm.Iallreduce(values(comm.rank, count, turn), np.zeros(count))  # nobody keeps this
            requests.append(comm.Iallgather(values(comm.rank, count, turn), np.zeros((comm.size, count))))
            gc.collect()
            rubbish = [np.full(count, 1e300) for _ in range(5)]  # takes the place of what was freed too early
            del rubbish
        for request in requests:
            request.Wait()
        assert (kept == total(comm, count)).all()
        comm.Barrier()
        deadline = time.monotonic() + 20
        while progress_engine.pending():
            progress_engine.progress()
            assert time.monotonic() < deadline


def test_starting_does_not_wait_for_the_others(comm: Intracomm) -> None:
    """A rank may need, before it starts the same operation, something that the others do after theirs."""
    if os.environ.get("MPICOLL_CHECK") == "full":
        pytest.skip("MPICOLL_CHECK=full compares the ranks' calls before each of them")
    for count in (4, 3000):
        for start in ("Iallreduce", "Iallgather", "Ibcast", "Ireduce_scatter_block"):
            data, result = np.full(count * comm.size, 1.0), np.zeros(count)
            token = np.zeros(1)
            if comm.rank == 1:
                receive_soon(token, 77)
            if start == "Ibcast":
                request = comm.Ibcast(data, 0)
            elif start == "Iallgather":
                request = comm.Iallgather(result, data)
            elif start == "Iallreduce":
                request = comm.Iallreduce(MPI.IN_PLACE, data)
            else:
                request = comm.Ireduce_scatter_block(data, result)
            if comm.rank == 0:
                MPI.COMM_WORLD.Send(token, 1, 77)
            request.Wait()


def test_starting_many_of_a_kind_does_not_wait_for_the_others(comm: Intracomm) -> None:
    """More than have plans of their own; those that have to wait for one start later."""
    if os.environ.get("MPICOLL_CHECK") == "full":
        pytest.skip("MPICOLL_CHECK=full compares the ranks' calls before each of them")
    results, token = [np.full(40, -1.0) for _ in range(30)], np.zeros(1)
    for algorithm in ("ring", "recursive_doubling"):
        if comm.rank == 1:
            receive_soon(token, 78)
        data = [values(comm.rank, 40, turn) for turn in range(30)]
        requests = [comm.Iallreduce(x, y, algorithm=algorithm) for x, y in zip(data, results, strict=True)]
        if comm.rank == 0:
            MPI.COMM_WORLD.Send(token, 1, 78)
        for turn in reversed(range(30)):
            requests[turn].Wait()
            assert (results[turn] == total(comm, 40, turn)).all()


@pytest.mark.parametrize("algorithm", [None, "shared", "single_copy"])
def test_long_and_short_ones_have_lanes_of_their_own(comm: Intracomm, algorithm: str | None) -> None:
    """More than there are lanes for, started in turns, and waited for in another order on every rank."""
    counts = [40_000 + turn if turn % 2 else 30 for turn in range(32)]
    with contextlib.suppress(ValueError):  # where there are no copies between processes
        for _ in range(2):
            results = [np.full(count, -1.0) for count in counts]
            requests = [
                comm.Iallreduce(values(comm.rank, count, turn), results[turn], algorithm=algorithm)
                for turn, count in enumerate(counts)
            ]
            for turn in np.random.default_rng(comm.rank).permutation(len(counts)):
                requests[turn].Wait()
                assert (results[turn] == total(comm, counts[turn], int(turn))).all()


def test_more_signatures_than_are_kept(comm: Intracomm) -> None:
    counts = np.random.default_rng(5).integers(1, 120, 700)
    for first in range(0, counts.size, 7):
        group = [int(count) for count in counts[first : first + 7]]
        results = [np.zeros(count) for count in group]
        requests = [
            comm.Iallreduce(values(comm.rank, count), y, algorithm="ring")
            for count, y in zip(group, results, strict=True)
        ]
        for request, y, count in zip(requests, results, group, strict=True):
            request.Wait()
            assert (y == total(comm, count)).all()


# Persistent -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 300, 3000])
def test_persistent_operations_are_started_many_times(comm: Intracomm, count: int) -> None:
    size, rank = comm.size, comm.rank
    given, result, spread = np.zeros(count), np.zeros(count), np.zeros(count)
    reduced, parts, part, in_place = np.zeros(count), np.zeros((size, count)), np.zeros(count), np.zeros(count)
    wide = np.zeros(size * count)
    kept = [
        comm.Allreduce_init(given, result),
        comm.Allreduce_init(MPI.IN_PLACE, in_place, MPI.MAX),
        comm.Reduce_init(given, reduced, MPI.SUM, 1),
        comm.Bcast_init(spread, 1),
        comm.Allgather_init(given, parts),
        comm.Reduce_scatter_init(wide, part, [count] * size),
        comm.Reduce_scatter_block_init(wide, part),
        comm.Barrier_init(),
    ]
    for turn in range(12):
        given[:] = in_place[:] = spread[:] = values(rank, count, turn)
        wide[:] = values(rank, size * count, turn)
        for request in kept[:6] + kept[7:]:
            request.Start()
        for request in kept[:6] + kept[7:]:
            request.Wait()
        assert (result == total(comm, count, turn)).all()
        assert (in_place == np.max([values(r, count, turn) for r in range(size)], axis=0)).all()
        assert rank != 1 or (reduced == result).all()
        assert (spread == values(1, count, turn)).all()
        assert (parts == [values(r, count, turn) for r in range(size)]).all()
        wanted = total(comm, size * count, turn)[rank * count : (rank + 1) * count]
        assert (part == wanted).all()
        part[:] = -1
        kept[6].Start()
        kept[6].Wait()
        assert (part == wanted).all()
    for request in kept:
        request.Free()


@pytest.mark.parametrize("algorithm", [*ALGORITHMS["allreduce"], "native"])
def test_persistent_operations_on_each_algorithm(comm: Intracomm, algorithm: str) -> None:
    for count in (2, 2500):
        given, result = np.zeros(count), np.zeros(count)
        kept = comm.Allreduce_init(given, result, algorithm=algorithm)
        for turn in range(5):
            given[:] = values(comm.rank, count, turn)
            kept.Start()
            while not kept.Test():
                pass
            assert (result == total(comm, count, turn)).all()
        kept.Free()


def test_persistent_operations_may_start_in_any_order(comm: Intracomm) -> None:
    """Alike or not, and although some ranks are so late that the others ask what they are waiting for."""
    given, results = [np.zeros(30) for _ in range(6)], [np.zeros(30) for _ in range(6)]
    ops = [MPI.SUM, MPI.SUM, MPI.MAX, MPI.SUM, MPI.MIN, MPI.SUM]
    kept = [comm.Allreduce_init(a, b, op) for a, b, op in zip(given, results, ops, strict=True)]
    reference = {id(MPI.SUM): np.sum, id(MPI.MAX): np.max, id(MPI.MIN): np.min}
    random = np.random.default_rng(comm.rank)
    for turn in range(20):
        for number, data in enumerate(given):
            data[:] = values(comm.rank, 30, turn + number)
        if turn == 10 and comm.rank == 1:
            time.sleep(0.6)
        for number in random.permutation(6):
            kept[number].Start()
        for number in random.permutation(6):
            kept[number].Wait()
        for number, (result, op) in enumerate(zip(results, ops, strict=True)):
            everybodys = [values(r, 30, turn + number) for r in range(comm.size)]
            assert (result == reference[id(op)](everybodys, axis=0)).all()
    for request in kept:
        request.Free()


def test_persistent_operations_of_the_mpi_library_may_start_in_any_order(comm: Intracomm) -> None:
    """Of different lengths, so that no operation could take the place of another one unseen."""
    size, starts, random = comm.size, [], np.random.default_rng(comm.rank)
    for part in (3, 5):
        given = np.full(size * part, comm.rank, np.int32)
        result = np.full(size * part, -1, np.int32)
        where = [part] * size, [4 * part * rank for rank in range(size)], [MPI.INT] * size
        kept = comm.Alltoallw_init([given, where[:2], where[2]], [result, where[:2], where[2]])
        starts.append((kept, result, np.repeat(np.arange(size), part)))
    for count in (40, 7):
        given, result = np.full(count, comm.rank + 1.0), np.zeros(count)
        kept = comm.Allreduce_init(given, result, algorithm="native")
        starts.append((kept, result, np.full(count, size * (size + 1) / 2)))
    for _ in range(10):
        for number in random.permutation(len(starts)):
            starts[number][0].Start()
        for number in random.permutation(len(starts)):
            starts[number][0].Wait()
        for _, result, expected in starts:
            np.testing.assert_array_equal(result, expected)
            result[:] = -1
    for kept, _, _ in starts:
        kept.Free()


def test_an_interrupt_at_the_end_of_a_wait_loses_nothing(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the operation has ended, and before the caller of the progress engine knows."""
    advance_alone = progress_engine.advance_alone

    def interrupted(*arguments: Any) -> bool:
        if advance_alone(*arguments):
            raise KeyboardInterrupt
        return False

    result = np.zeros(100)
    request = comm.Iallreduce(np.ones(100), result)
    time.sleep(0.001)
    with monkeypatch.context() as patched:
        patched.setattr(progress_engine, "advance_alone", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            request.Wait()
    assert request.Wait()
    assert (result == comm.size).all()
    assert progress_engine.pending() == 0


def test_hundreds_of_persistent_operations(comm: Intracomm) -> None:
    many = 300
    given, results = np.zeros((many, 3)), np.zeros((many, 3))
    kept = [comm.Allreduce_init(given[i], results[i]) for i in range(many)]
    for turn in range(2):
        for i in range(many):
            given[i] = values(comm.rank, 3, turn + i)
        order = np.random.default_rng(comm.rank + turn).permutation(many)
        for i in order:
            kept[i].Start()
        for i in reversed(order):
            kept[i].Wait()
        for i in range(many):
            assert (results[i] == total(comm, 3, turn + i)).all()
    for request in kept:
        request.Free()
    for _ in range(5):  # what was freed makes room
        again = [comm.Allreduce_init(given[i], results[i]) for i in range(many)]
        for request in again:
            request.Free()


def test_persistent_operations_between_other_calls(comm: Intracomm) -> None:
    given, result = np.zeros(2000), np.zeros(2000)
    kept = comm.Allreduce_init(given, result)
    for turn in range(10):
        given[:] = values(comm.rank, 2000, turn)
        kept.Start()
        started = Started(comm, 20, turn)
        comm.Barrier()
        other = np.ones(2000)
        comm.Allreduce(MPI.IN_PLACE, other)
        assert (other == comm.size).all()
        kept.Wait()
        assert (result == total(comm, 2000, turn)).all()
        for request in started.requests:
            request.Wait()
        started.check()
    kept.Free()


def test_a_second_start_is_refused_on_all_ranks_even_if_the_operation_has_ended(comm: Intracomm) -> None:
    data = np.ones(4)
    kept = comm.Allreduce_init(MPI.IN_PLACE, data)
    for turn in range(1, 4):
        kept.Start()
        while not kept.Get_status():  # which leaves it active
            time.sleep(0.0001)
        with pytest.raises(RuntimeError, match="started again before Wait or Test"):
            kept.Start()
        kept.Wait()
        assert (data == comm.size**turn).all()
    kept.Free()


def test_misuse_of_persistent_operations(comm: Intracomm) -> None:
    data, alone = np.ones(4), Intracomm(MPI.COMM_SELF)
    kept = comm.Allreduce_init(MPI.IN_PLACE, data)
    assert kept.Wait() is True  # inactive, as in MPI
    assert kept.Test() is True
    token = np.zeros(1)
    if comm.rank == 0:
        kept.Start()  # cannot be complete before rank 1 starts
        with pytest.raises(RuntimeError, match="started again before Wait or Test"):
            kept.Start()
        with pytest.raises(RuntimeError, match="freed before it was complete"):
            kept.Free()
        MPI.COMM_WORLD.Send(token, 1, 78)
    else:
        if comm.rank == 1:
            receive_soon(token, 78)
        kept.Start()
    kept.Wait()
    assert (data == comm.size).all()
    kept.Start()
    kept.Wait()
    assert (data == comm.size**2).all()
    kept.Free()
    with pytest.raises(RuntimeError, match="it was freed"):
        kept.Start()
    kept.Free()
    single = alone.Allreduce_init(MPI.IN_PLACE, data)
    single.Start()
    single.Wait()
    single.Free()
    assert (data == comm.size**2).all()


@pytest.mark.parametrize("kind", ["persistent", "nonblocking", "by the MPI library"])
def test_free_waits_for_operations_that_have_not_ended(kind: str) -> None:
    """Their buffers and records are in memory of the communicator."""
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=20)
    count, size = 50, comm.size
    data, result = np.arange(float(count)) + comm.rank, np.zeros((size, count))
    if kind == "persistent":
        request = comm.Allgather_init(data, result)
    if comm.rank == 0:
        time.sleep(0.3)  # those of the others cannot end before
    if kind == "persistent":
        request.Start()
    elif kind == "nonblocking":
        request = comm.Iallgather(data, result)
    else:
        counts = [count] * size
        request = comm.Ialltoallv([np.tile(data, size), counts], [result, counts])
    plain.Free()
    assert request.has_ended
    request.Wait()
    assert (result == np.arange(float(count)) + np.arange(size)[:, None]).all()
    request.Free()


def test_persistent_operations_give_their_requests_back_after_the_communicator() -> None:
    """Else each keeps a communicator of the MPI library, of which there are some thousand."""
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=20)
    request = comm.Allreduce_init(MPI.IN_PLACE, np.ones(3), algorithm="ring")
    request.Start()
    request.Wait()
    plan = request._plan
    assert any(plan.requests)
    plain.Free()
    request.Free()
    assert not any(plan.requests)


def test_a_communicator_may_be_freed_before_its_persistent_operations() -> None:
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=20)
    data = np.ones(3)
    kept = [comm.Allreduce_init(MPI.IN_PLACE, data) for _ in range(3)]
    for request in kept:
        request.Start()
        request.Wait()
    plain.Free()
    for request in kept:
        request.Free()
    del kept, comm
    gc.collect()


def test_handles_that_nobody_frees(comm: Intracomm) -> None:
    kinds = set()
    for _ in range(100):  # more than there are operation lanes in shared memory
        data = np.ones(3)
        kept = comm.Allreduce_init(MPI.IN_PLACE, data)
        kinds.add(type(kept))
        kept.Start()
        kept.Wait()
        del kept
        comm.Barrier()
    assert len(kinds) == 1


@pytest.mark.parametrize("name", ["Ibcast", "Ireduce", "Igather", "Iscatter", "Igatherv", "Iscatterv"])
def test_a_root_that_no_rank_can_have_is_refused(comm: Intracomm, name: str) -> None:
    ends = (np.zeros(comm.size),) if name == "Ibcast" else (np.zeros(comm.size), np.zeros(comm.size))
    for root in (2**64, -1, comm.size):
        for call in (getattr(comm, name), getattr(comm, name[1:].capitalize())):
            with pytest.raises(MPI.Exception, match=f"root: {root} is not in") as caught:
                call(*ends, root=root)
            assert isinstance(caught.value, ValueError)
            assert caught.value.Get_error_class() == MPI.ERR_ROOT
    comm.Barrier()


def test_a_count_of_a_reduce_scatter_is_that_of_one_block(comm: Intracomm) -> None:
    count = 50
    given, result = np.repeat(np.arange(comm.size) + comm.rank, count).astype(float), np.zeros(count)
    comm.Ireduce_scatter_block([given, count], result).Wait()
    assert (result == comm.size * comm.rank + comm.size * (comm.size - 1) // 2).all()
    if comm.size > 1:
        with pytest.raises(ValueError, match="sendbuf"):
            comm.Ireduce_scatter_block([given, given.size], result)


@pytest.mark.parametrize("count", [5, 200_000])
def test_a_call_that_begins_while_another_takes_its_lane_is_refused(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """From a signal handler, for instance; the first one goes on, and so do later ones."""
    take, refused = NonblockingLanes.take_turn, []

    def nested(lanes: NonblockingLanes, *arguments: Any) -> Any:
        monkeypatch.undo()
        for makes in (comm.Iallreduce, comm.Ibcast):
            try:
                makes(*[np.ones(count) for _ in range(1 + (makes == comm.Iallreduce))])
            except CommunicatorBusy:
                refused.append(makes)
        return take(lanes, *arguments)

    comm.Iallreduce(MPI.IN_PLACE, np.ones(count)).Wait()
    monkeypatch.setattr(NonblockingLanes, "take_turn", nested)
    requests, got = [], np.zeros((20, count))
    for row in got:
        requests.append(comm.Iallreduce(np.ones(count), row))
    MPI.Request.Waitall(requests)
    assert len(refused) == 2
    assert (got == comm.size).all()
    comm.Allreduce(MPI.IN_PLACE, row := np.ones(count))
    assert (row == comm.size).all()
