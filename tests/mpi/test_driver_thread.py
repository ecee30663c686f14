"""Long nonblocking collectives that a thread drives beside the program, where it has a core."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import CollectiveTimeout, MismatchError
from mpicoll.kernels.decorators import DISABLED
from mpicoll.kernels.driven_jobs import ENTRIES
from mpicoll.progress import driver_thread, progress_engine

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(DISABLED, reason="compiled code drives")]
COUNT = 200_000


@pytest.fixture(autouse=True)
def thread(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[driver_thread.DriverThread]:
    """Have the thread, although the tests leave it no core."""
    if comm.size < 2 or comm.channel.node is None:
        pytest.skip("nothing is in flight on shared memory")
    made = driver_thread.DriverThread()
    monkeypatch.setattr(driver_thread, "_driver", made)
    monkeypatch.setattr(driver_thread, "_is_wanted", True)
    yield made
    made.end()


def begin(comm: Intracomm, count: int = COUNT) -> tuple[MPI.Request, np.ndarray]:
    """Start a known Allreduce, which compiled code starts."""
    given, result = np.full(count, comm.rank + 1.0), np.zeros(count)
    comm.Iallreduce(given, result).Wait()
    result[:] = 0
    return comm.Iallreduce(given, result), result


def check(comm: Intracomm, result: np.ndarray) -> None:
    assert (result == comm.size * (comm.size + 1) // 2).all()


def until_it_ends(thread: driver_thread.DriverThread, request: MPI.Request) -> None:
    """Wait until the thread has driven an operation to its end, and make no call of mpicoll meanwhile."""
    until = time.monotonic() + 20
    while thread.is_at(request._address):
        assert time.monotonic() < until, "nobody drives it"
        time.sleep(1e-3)


def test_an_operation_ends_without_a_call(comm: Intracomm, thread: driver_thread.DriverThread) -> None:
    request, result = begin(comm)
    until_it_ends(thread, request)
    check(comm, result)
    assert request.Test()


def test_wait_takes_an_operation_back(comm: Intracomm) -> None:
    for late in range(comm.size):
        request, result = begin(comm)
        if comm.rank == late:
            time.sleep(0.02)
        request.Wait()
        check(comm, result)


def test_a_persistent_operation(comm: Intracomm, thread: driver_thread.DriverThread) -> None:
    given, result = comm.empty(COUNT, np.float64), comm.empty(COUNT, np.float64)
    plan = comm.Allreduce_init(given, result)
    for turn in range(6):
        given[:], result[:] = comm.rank + 1, 0
        plan.Start()
        if turn % 2:
            with progress_engine._lock:  # so that nobody else notes the end
                until_it_ends(thread, plan)
                with pytest.raises(RuntimeError, match="started again"):
                    plan.Start()
        plan.Wait()
        check(comm, result)
    plan.Free()


def test_more_operations_than_it_drives(comm: Intracomm) -> None:
    begun = [begin(comm) for _ in range(2 * ENTRIES)]
    MPI.Request.Waitall([request for request, _ in begun])
    for _, result in begun:
        check(comm, result)


def test_short_operations_are_left_to_the_program(comm: Intracomm, thread: driver_thread.DriverThread) -> None:
    request, result = begin(comm, 10)
    assert not thread.is_at(request._address)
    request.Wait()
    check(comm, result)


def test_another_call_of_some_rank(comm: Intracomm) -> None:
    mine = Intracomm(comm.Dup(), timeout=10)
    begin(mine)[0].Wait()
    request, _ = begin(mine), None
    request[0].Wait()
    count = COUNT + (mine.rank == 1)
    wrong = mine.Iallreduce(np.ones(count), np.zeros(count))
    with pytest.raises(MismatchError):
        wrong.Wait()
    mine.Free()


def test_a_rank_that_does_not_come(comm: Intracomm) -> None:
    mine = Intracomm(comm.Dup(), timeout=0.5)
    begin(mine)[0].Wait()
    comm.Barrier()
    if mine.rank:
        request = mine.Iallreduce(np.ones(COUNT), np.zeros(COUNT))
        with pytest.raises(CollectiveTimeout):
            request.Wait()
    comm.Barrier()
    mine.Free()


def test_operations_of_two_threads(comm: Intracomm) -> None:
    comms = [comm, Intracomm(comm.Dup())]
    wrong: list[int] = []

    def work(mine: Intracomm) -> None:
        for _ in range(10):
            request, result = begin(mine)
            request.Wait()
            wrong.append(int((result != mine.size * (mine.size + 1) // 2).sum()))

    workers = [threading.Thread(target=work, args=(each,)) for each in comms]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == [0] * 20
    comms[1].Free()


def test_its_end_leaves_operations_to_the_program(comm: Intracomm, thread: driver_thread.DriverThread) -> None:
    begun = [begin(comm) for _ in range(2)]
    thread.end()
    for request, result in [*begun, begin(comm)]:
        while not request.Test():
            pass
        check(comm, result)
