"""Persistent collectives inside functions that Numba compiles."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI
from numba import njit, types

import mpicoll.jit
from mpicoll import Intracomm
from mpicoll.consensus import wait_politely
from mpicoll.errors import CollectiveTimeout, MpicollError
from mpicoll.jit import plan_type

pytestmark = pytest.mark.mpi(min_size=2)


@njit
def iterate(plan, x, y, steps):
    """Add to each element, in each step, the mean over the ranks."""
    for _ in range(steps):
        mpicoll.jit.run(plan)
        x += y
    return x.sum()


@njit(nogil=True)
def two(first, second, times):
    for _ in range(times):
        mpicoll.jit.run(first)
        mpicoll.jit.run(second)


@njit
def once(plan):
    mpicoll.jit.run(plan)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile before any rank waits for others."""
    kind, vector = plan_type.plan, types.int64[::1]
    iterate.compile((kind, vector, vector, types.int64))
    two.compile((kind, kind, types.int64))
    once.compile((kind,))


@pytest.mark.parametrize("count", [1, 1000, 300_000])
def test_many_steps_give_what_python_gives(comm: Intracomm, count: int) -> None:
    steps = 50 if count < 1000 else 5
    results = []
    for compiled in (True, False):
        x, y = np.arange(count, dtype=np.int64) % 5 + comm.rank, np.zeros(count, np.int64)
        plan = comm.Allreduce_init(x, y, MPI.MAX)
        (iterate if compiled else iterate.py_func)(plan, x, y, steps)
        results.append(x)
        plan.Free()
    np.testing.assert_array_equal(*results)
    assert results[0][0] == comm.rank + (comm.size - 1) * (2**steps - 1) or count != 1 or comm.rank != comm.size - 1


def test_a_rank_that_is_late_is_waited_for(comm: Intracomm) -> None:
    x, y = np.full(10, comm.rank + 1.0), np.zeros(10)
    plan = comm.Allreduce_init(x, y)
    for late in range(comm.size):
        y[:] = 0
        if comm.rank == late:
            time.sleep(0.3)
        once(plan)
        assert (y == comm.size * (comm.size + 1) / 2).all()
    plan.Start()  # as any other, afterwards
    plan.Wait()
    plan.Free()


def test_plans_of_parts_of_the_ranks_and_of_other_collectives(comm: Intracomm) -> None:
    part = comm.Split(comm.rank % 2, comm.rank)
    x, total, word = np.full(3, comm.rank + 1.0), np.zeros(3), np.full(2, float(comm.rank))
    first, second = part.Allreduce_init(x, total), comm.Bcast_init(word, 1)
    two(first, second, 20)
    assert (total == sum(rank + 1.0 for rank in range(comm.size) if rank % 2 == comm.rank % 2)).all()
    assert (word == 1).all()
    strided = np.zeros(20)[::2]  # this one has to be unpacked in Python
    third = comm.Allgather_init(np.array([comm.rank + 0.5]), strided[: comm.size])
    two(first, third, 3)
    assert (strided[: comm.size] == np.arange(comm.size) + 0.5).all()
    for plan in (first, second, third):
        plan.Free()
    part.Free()


def test_plans_by_messages(comm: Intracomm) -> None:
    x, y = np.full(7, comm.rank + 1.0), np.zeros(7)
    plan = comm.Allreduce_init(x, y, algorithm="ring")
    for _ in range(3):
        y[:] = 0
        once(plan)
        assert (y == comm.size * (comm.size + 1) / 2).all()
    plan.Free()
    with pytest.raises(RuntimeError, match="last_error"):
        once(plan)
    assert "freed" in str(mpicoll.jit.last_error())


def test_a_freed_plan_is_not_started(comm: Intracomm) -> None:
    x, y = np.ones(3), np.zeros(3)
    plan = comm.Allreduce_init(x, y)
    once(plan)
    plan.Free()
    other = comm.Allreduce_init(x, y)  # in the same lane
    with pytest.raises(RuntimeError, match="last_error"):
        once(plan)
    assert "freed" in str(mpicoll.jit.last_error())
    other.Free()


def test_an_error_is_raised_on_every_rank(comm: Intracomm) -> None:
    short = Intracomm(MPI.Intracomm(comm), timeout=0.7)
    x, y = np.ones(3), np.zeros(3)
    plan = short.Allreduce_init(x, y)
    once(plan)
    try:
        if comm.rank != 0:
            with pytest.raises(RuntimeError, match="last_error"):
                once(plan)
            assert isinstance(mpicoll.jit.last_error(), CollectiveTimeout)
    finally:
        wait_politely(MPI.COMM_WORLD)  # rank 0 comes neither before the others give up nor after that


def test_a_plan_that_was_started_is_not_started_again(comm: Intracomm) -> None:
    x, y = np.ones(3), np.zeros(3)
    plan = comm.Allreduce_init(x, y)
    if comm.rank == 0:
        plan.Start()
        with pytest.raises(RuntimeError, match="last_error"):
            once(plan)
        assert "started again" in str(mpicoll.jit.last_error())
        plan.Wait()
    else:
        time.sleep(0.2)
        once(plan)
    assert (y == comm.size).all()
    plan.Free()


def test_a_signal_ends_a_wait(comm: Intracomm) -> None:
    """As Ctrl-C does, on the ranks that wait; the others learn that the collective has failed."""
    plain = MPI.COMM_WORLD.Dup()
    plan = Intracomm(plain, timeout=3).Allreduce_init(np.ones(3), np.zeros(3))
    once(plan)
    if comm.rank == 0:
        time.sleep(1.5)
    else:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RuntimeError, match="last_error"):
        once(plan)
    assert isinstance(mpicoll.jit.last_error(), MpicollError if comm.rank == 0 else KeyboardInterrupt)
    plain.Free()


def test_a_freed_plan_does_not_stay_in_memory(comm: Intracomm) -> None:
    x, y = np.ones(3), np.zeros(3)
    plan = comm.Allreduce_init(x, y)
    once(plan)
    plan.Free()
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None
