"""Nonblocking collectives go on while a rank is in calls of the MPI library, or in none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import MismatchError
from mpicoll.progress import progress_engine, progress_thread, watchdog

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not progress_thread.is_wanted(), reason="the MPI library serves one thread"),
]
COUNTS = (5, 3_000, 1_000_000)


@pytest.fixture(autouse=True)
def _two_ranks(comm: Intracomm) -> None:
    if comm.size < 2:
        pytest.skip("nobody waits for anybody")


def begin(comm: Intracomm, count: int) -> tuple[MPI.Request, np.ndarray]:
    result = np.zeros(count)
    return comm.Iallreduce(np.full(count, comm.rank + 1.0), result), result


def check(comm: Intracomm, result: np.ndarray) -> None:
    assert (result == comm.size * (comm.size + 1) // 2).all()


def waits_for_others(comm: Intracomm, between: Callable[[], None], count: int) -> None:
    """Rank 0 makes a call of the MPI library before it waits, all others after it has ended there."""
    for _ in range(3):
        request, result = begin(comm, count)
        if comm.rank == 0:
            between()
            request.Wait()
        else:
            request.Wait()
            between()
        check(comm, result)


def test_a_thread_that_cannot_be_started(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(progress_engine, "_thread", None)
    if comm.rank == 0:
        monkeypatch.setattr(progress_thread.threading.Thread, "start", refuse)
        thread = progress_thread.ProgressThread(lambda: None, lambda: 0, lambda: 0)
        thread.notice()
        assert thread.awake
        monkeypatch.setattr(progress_engine, "_thread", thread)
        thread.awake = False  # so that each call tries to start it
    for count in COUNTS:
        request, result = begin(comm, count)
        request.Wait()
        check(comm, result)


@pytest.mark.parametrize("count", COUNTS)
def test_a_message_is_received_first(comm: Intracomm, count: int) -> None:
    def between() -> None:
        if comm.rank == 0:
            comm.Recv(np.empty(1), source=1)
        elif comm.rank == 1:
            comm.Send(np.empty(1), dest=0)

    waits_for_others(comm, between, count)


@pytest.mark.parametrize("count", COUNTS)
def test_a_communicator_is_made_first(comm: Intracomm, count: int) -> None:
    waits_for_others(comm, lambda: comm.Split(0, comm.rank).Free(), count)


def test_a_channel_is_freed_first(comm: Intracomm) -> None:
    """The library's own collectives on the private communicators too."""
    made = [comm.Split(comm.rank % 2, comm.rank) for _ in range(3)]
    for one in made:
        one.Barrier()
    waits_for_others(comm, lambda: made.pop().Free(), 3_000)


@pytest.mark.parametrize("refused", [False, True])
def test_a_communicator_is_freed_first_without_the_thread(
    comm: Intracomm, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free itself advances operations of other communicators while it waits for others, longest for refusals."""
    made = Intracomm(MPI.COMM_WORLD.Dup())
    made.Barrier()
    monkeypatch.setattr(progress_thread.ProgressThread, "_take_over", lambda thread: None)
    request, result = begin(comm, 1_000_000)
    if comm.rank != 0:
        request.Wait()
    if refused:
        with pytest.raises(ValueError, match="recvbuf: the blocks end at element"):
            made.Igatherv(np.ones(4), [np.zeros(3), [4] * comm.size], comm.rank)
    started = time.monotonic()
    made.Free()
    assert time.monotonic() - started < watchdog.REFUSAL_SECONDS / 2, "nobody advanced the operation"
    request.Wait()
    check(comm, result)


@pytest.mark.parametrize("count", COUNTS)
def test_no_call_at_all(comm: Intracomm, count: int) -> None:
    """Rank 0 looks at its memory only."""
    request, result = begin(comm, count)
    if comm.rank == 0:
        until = time.monotonic() + 15
        while not result.all() and time.monotonic() < until:
            time.sleep(0.001)
        check(comm, result)
    request.Wait()
    check(comm, result)


def test_persistent_operations(comm: Intracomm) -> None:
    result = np.zeros(3_000)
    request = comm.Allreduce_init(np.full(3_000, comm.rank + 1.0), result)
    for _ in range(3):
        request.Start()
        if comm.rank == 0:
            comm.Recv(np.empty(1), source=comm.size - 1)
        request.Wait()
        if comm.rank == comm.size - 1:
            comm.Send(np.empty(1), dest=0)
        check(comm, result)
    request.Free()


def test_an_error_is_raised_where_the_program_waits(comm: Intracomm) -> None:
    """The thread meets it; the program hears of it in its own call."""
    count = 3_000 + comm.rank
    request = comm.Iallreduce(np.ones(count), np.zeros(count))
    time.sleep(0.5)
    with pytest.raises(MismatchError):
        request.Wait()


def test_the_thread_sleeps_when_nothing_is_in_flight(comm: Intracomm) -> None:
    request, _ = begin(comm, 1_000_000)
    request.Wait()
    thread = progress_engine._thread
    if thread is None:
        pytest.skip("no operation had to wait")
    until = time.monotonic() + 10
    while thread.awake and time.monotonic() < until:
        time.sleep(0.05)
    assert not thread.awake
    waits_for_others(comm, lambda: comm.Split(0, comm.rank).Free(), 1_000_000)


@pytest.mark.parametrize("nodes", [False, True], ids=["shared", "messages"])
def test_one_sided_operations_end_while_their_target_waits(comm: Intracomm, nodes: bool) -> None:
    """They need calls of the MPI library on the target, which is in a collective on shared memory."""
    plain, memory = MPI.COMM_WORLD.Dup(), np.zeros(1000)
    made = Intracomm(plain, timeout=8.0, algorithm="dissemination" if nodes else "auto")
    window = MPI.Win.Create(memory, 8, comm=plain)
    made.Barrier()
    if comm.rank:
        for _ in range(100):
            window.Lock(0)
            window.Accumulate(np.ones(1000), 0)
            window.Unlock(0)
    made.Barrier()
    window.Free()
    assert comm.rank or (memory == 100 * (comm.size - 1)).all()
    plain.Free()
