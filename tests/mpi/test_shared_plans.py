"""Persistent operations on shared memory: every lane and more, in any order, among other calls, and misused."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import shared_requests
from mpicoll.collectives.message_requests import MessageRequest
from mpicoll.collectives.shared_requests import PersistentSharedRequest
from mpicoll.errors import CommunicatorBroken
from mpicoll.shared_memory.domain_memory import PLAN_LANES, STAGE_NBYTES
from tests.mpi.memory import HERE, KINDS, place
from tests.mpi.test_nonblocking import receive_soon

pytestmark = pytest.mark.mpi(min_size=2)
COUNTS = (1, 13, 1024, 5003, STAGE_NBYTES // 8 + 5)


def values(rank: int, count: int, turn: int) -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank) % 13 + turn).astype(np.float64)


def total(comm: Intracomm, count: int, turn: int) -> np.ndarray:
    return sum((values(r, count, turn) for r in range(comm.size)), np.zeros(count))


class Plans:
    """One persistent operation of each collective over a number of elements, and what each must give."""

    def __init__(self, comm: Intracomm, count: int, kind: str, root: int) -> None:
        self.comm, self.count, self.root, size = comm, count, root, comm.size
        zeros, wide = np.zeros(count), np.zeros(size * count)
        self.given, self.spread, self.both = (place(comm, kind, zeros) for _ in range(3))
        self.wide = place(comm, kind, wide)
        self.sum, self.reduced, self.part = (place(comm, kind, zeros) for _ in range(3))
        self.parts = place(comm, kind, wide)
        self.kept = [
            comm.Allreduce_init(self.given, self.sum),
            comm.Allreduce_init(MPI.IN_PLACE, self.both),
            comm.Reduce_init(self.given, self.reduced, MPI.SUM, root),
            comm.Bcast_init(self.spread, root),
            comm.Allgather_init(self.given, self.parts),
            comm.Reduce_scatter_block_init(self.wide, self.part),
            comm.Barrier_init(),
        ]

    def fill(self, turn: int) -> None:
        rank, size, count = self.comm.rank, self.comm.size, self.count
        self.given[:] = self.both[:] = values(rank, count, turn)
        self.spread[:] = values(rank, count, turn)
        self.wide[:] = values(rank, size * count, turn)

    def check(self, turn: int) -> None:
        comm, count, rank = self.comm, self.count, self.comm.rank
        everything = total(comm, count, turn)
        assert (self.sum == everything).all()
        assert (self.both == everything).all()
        assert rank != self.root or (self.reduced == everything).all()
        assert (self.spread == values(self.root, count, turn)).all()
        assert (self.parts == np.concatenate([values(r, count, turn) for r in range(comm.size)])).all()
        wanted = total(comm, comm.size * count, turn)
        assert (self.part == wanted[rank * count : (rank + 1) * count]).all()

    def free(self) -> None:
        for request in self.kept:
            request.Free()


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("count", COUNTS)
def test_each_collective_many_times(comm: Intracomm, count: int, kind: str) -> None:
    own = KINDS[comm.rank % 3] if kind == "mixed" else kind
    plans = Plans(comm, count, own, comm.size - 1)
    if HERE and comm._scope.channel.shared_nbytes == float("inf"):
        assert {type(request) for request in plans.kept} == {PersistentSharedRequest}
    order = np.random.default_rng(comm.rank)
    for turn in range(5):
        plans.fill(turn)
        for number in order.permutation(len(plans.kept)):
            plans.kept[number].Start()
        for number in order.permutation(len(plans.kept)):
            plans.kept[number].Wait()
        plans.check(turn)
    plans.free()


def test_every_lane_and_more(comm: Intracomm) -> None:
    """What has no lane goes by messages; lanes that are freed are used again, and are free on all ranks first."""
    many = PLAN_LANES + 5
    given, results = np.zeros((many, 40)), np.zeros((many, 40))
    kept: list[Any] = [comm.Allreduce_init(given[i], results[i]) for i in range(many)]

    def go(turn: int) -> None:
        given[:] = np.stack([values(comm.rank, 40, turn + i) for i in range(many)])
        order = np.random.default_rng(comm.rank + turn).permutation(many)
        for number in order:
            kept[number].Start()
        for number in reversed(order):
            kept[number].Wait()
        assert (results == np.stack([total(comm, 40, turn + i) for i in range(many)])).all()

    if HERE:
        assert [type(request) for request in kept] == [PersistentSharedRequest] * PLAN_LANES + [MessageRequest] * 5
    go(0)
    for turn in range(1, 4):
        freed = np.random.default_rng(turn).permutation(PLAN_LANES)[:20]
        for number in np.random.default_rng(comm.rank).permutation(freed):
            kept[number].Free()
        for number in freed:
            kept[number] = comm.Allreduce_init(given[number], results[number])
        if HERE:
            assert {type(kept[number]) for number in freed} == {PersistentSharedRequest}
        go(turn)
    for request in kept:
        request.Free()


def test_a_lane_is_taken_again_only_when_all_ranks_have_freed_it(comm: Intracomm) -> None:
    data = np.ones(5)
    first = comm.Allreduce_init(MPI.IN_PLACE, data)
    first.Start()
    first.Wait()
    if comm.rank != 0:
        first.Free()
    second = comm.Allreduce_init(MPI.IN_PLACE, other := np.ones(7))
    if HERE:
        assert isinstance(first, PersistentSharedRequest)
        assert isinstance(second, PersistentSharedRequest)
        assert second._lane.number != first._lane.number
    second.Start()
    second.Wait()
    assert (other == comm.size).all()
    first.Free()
    second.Free()


def test_progress_in_a_blocking_call(comm: Intracomm) -> None:
    """Rank 1 calls B before it waits for A, the others wait for A first: whoever waits drives both."""
    for count in (10, 200_000):
        given, result = values(comm.rank, count, 1), np.zeros(count)
        plan = comm.Allreduce_init(given, result)
        other = np.ones(count)
        for turn in range(4):
            plan.Start()
            request = comm.Iallreduce(MPI.IN_PLACE, nonblocking := np.full(count, 1.0))
            if (comm.rank + turn) % 2:
                comm.Bcast(other, turn % comm.size)
                plan.Wait()
            else:
                plan.Wait()
                comm.Bcast(other, turn % comm.size)
            request.Wait()
            assert (result == total(comm, count, 1)).all()
            assert (nonblocking == comm.size).all()
            result[:] = 0
        plan.Free()


def test_waiting_for_one_plan_drives_another(comm: Intracomm) -> None:
    """Rank 0 waits for A while the others cannot come to A before B, which rank 0 has started, is complete."""
    a, b = np.ones(70_000), np.ones(70_000)
    plans = [comm.Allreduce_init(MPI.IN_PLACE, data) for data in (a, b)]
    for turn in range(5):
        for number in (0, 1) if comm.rank == 0 else (1, 0):
            plans[number].Start()
            if comm.rank != 0 and number == 1:
                plans[1].Wait()
        plans[0].Wait()
        plans[1].Wait()
        assert (a == float(comm.size) ** (turn + 1)).all()
        assert (b == a).all()
    for plan in plans:
        plan.Free()


def test_a_result_is_in_its_buffer_before_the_operation_has_ended(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a thread that waits for it while another one drives it."""
    wide = np.ones(comm.size * COUNTS[-1])
    plan = comm.Reduce_scatter_block_init(MPI.IN_PLACE, wide)  # made aside, since others read what it overwrites
    unload, ended = shared_requests.unload, []

    def seen(task: Any, *arguments: Any) -> None:
        if task.collective == "reduce_scatter":
            ended.append(plan.Get_status())
        unload(task, *arguments)

    monkeypatch.setattr(shared_requests, "unload", seen)
    plan.Start()
    comm.Barrier()
    plan.Wait()
    assert (wide[: COUNTS[-1]] == comm.size).all()
    assert True not in ended
    assert ended or isinstance(plan, MessageRequest)


@pytest.mark.parametrize("count", [10, 200_000])
def test_misuse(comm: Intracomm, count: int) -> None:
    data = np.ones(count)[::-1]  # stood in for by a copy, which a wrong Start must not refresh
    plan = comm.Allreduce_init(MPI.IN_PLACE, data)
    token = np.zeros(1)
    if comm.rank == 0:
        plan.Start()
        data[:] = 100
        for _ in range(2):
            with pytest.raises(RuntimeError, match="started again before Wait or Test"):
                plan.Start()
            with pytest.raises(RuntimeError, match="freed before it was complete"):
                plan.Free()
        for peer in range(1, comm.size):
            MPI.COMM_WORLD.Send(token, peer, 77)
    else:
        receive_soon(token, 77)
        plan.Start()
    plan.Wait()
    assert (data == comm.size).all()
    plan.Free()
    with pytest.raises(RuntimeError, match="it was freed"):
        plan.Start()


def test_plans_of_a_freed_communicator_are_refused() -> None:
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=20)
    plan = comm.Allreduce_init(MPI.IN_PLACE, comm.zeros(9000))
    plan.Start()
    plan.Wait()
    plain.Free()
    with pytest.raises(CommunicatorBroken, match="it was freed"):
        plan.Start()
    plan.Free()


def test_threads_that_wait_at_the_same_time() -> None:
    """Whoever waits drives all operations of the process, but an operation only in one thread at a time."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI_THREAD_MULTIPLE")
    plain = [MPI.COMM_WORLD.Dup() for _ in range(3)]
    several = [Intracomm(each, timeout=20) for each in plain]
    outcomes: list[Any] = []

    def work(comm: Intracomm) -> None:
        try:
            data = comm.zeros(60_000)
            plan = comm.Allreduce_init(MPI.IN_PLACE, data)
            for turn in range(60):
                data[:] = values(comm.rank, data.size, turn)
                plan.Start()
                plan.Wait()
                assert (data == total(comm, data.size, turn)).all(), turn
            plan.Free()
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(comm,)) for comm in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == [None] * 3
    for each in plain:
        each.Free()


def test_a_plan_and_blocking_calls_in_two_threads(comm: Intracomm) -> None:
    """They are at work at the same time, so nothing that one of them keeps may be the other's."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI_THREAD_MULTIPLE")
    count, turns, wrong = 400_000, 40, []
    given, result = np.zeros(count), np.zeros(count)
    kept = comm.Allreduce_init(given, result)

    def work() -> None:
        for turn in range(turns):
            given[:] = comm.rank + turn
            kept.Start()
            kept.Wait()
            if (result != sum(range(turn, turn + comm.size))).any():
                wrong.append(f"plan {turn}")

    thread = threading.Thread(target=work)
    thread.start()
    data, total = np.zeros(count), np.zeros(count)
    for turn in range(turns):
        data[:] = 1000 * comm.rank + turn
        comm.Allreduce(data, total)
        if (total != 1000 * sum(range(comm.size)) + comm.size * turn).any():
            wrong.append(f"call {turn}")
    thread.join(60)
    assert not wrong
    kept.Free()
