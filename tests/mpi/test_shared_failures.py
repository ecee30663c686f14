"""What happens on shared memory when something fails, and what threads must not share."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.errors import MismatchError, OperationError, RemoteError
from mpicoll.kernels import operation_words as words
from tests.mpi.memory import HERE, SEGMENTS

pytestmark = pytest.mark.mpi(min_size=2)


def picky(a: float, b: float) -> float:
    if a == 13.0 or b == 13.0:
        raise ValueError("thirteen")
    return a + b


PICKY = mpicoll.op(picky)


@pytest.mark.parametrize("count", [5, 3000, 300_000], ids=["record", "slot", "long"])
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter_block"])
def test_an_operation_that_raises_is_an_error_on_every_rank(comm: Intracomm, collective: str, count: int) -> None:
    """At the latest in the next call; nobody waits for the timeout, and nobody gets a wrong result."""
    given, result = np.ones(comm.size * count), np.full(comm.size * count, -1.0)
    if comm.rank == comm.size - 1:
        given[0] = 13.0  # in the part of rank 0, the root

    def call() -> None:
        if collective == "reduce":
            comm.Reduce(given, result, PICKY)
        elif collective == "allreduce":
            comm.Allreduce(given, result, PICKY)
        else:
            comm.Reduce_scatter_block(given, result[:count], PICKY)
        comm.Allreduce(MPI.IN_PLACE, np.ones(300_000))

    begin = time.monotonic()
    with pytest.raises((OperationError, RemoteError, ValueError)) as caught:
        call()
    if comm.channel.node is not None:  # by messages it is the function's own exception
        assert not isinstance(caught.value, ValueError)
        assert "picky raised an exception" in str(caught.value)
    assert re.search("picky raised an exception|thirteen", str(caught.value)), caught.value
    assert time.monotonic() - begin < comm.timeout / 2


def test_memory_of_a_broken_communicator_is_not_used_again() -> None:
    """A rank that was late could still read records there, and write to them."""
    comm = Intracomm(MPI.COMM_WORLD.Dup(), timeout=20)
    node = comm.channel.node
    assert (node is not None) == HERE
    if node is None:
        pytest.skip("no shared memory")
    with pytest.raises(MismatchError):
        comm.Allreduce(MPI.IN_PLACE, np.ones(3 if comm.rank == 0 else 4))
    alive = weakref.ref(node)
    comm.Free()
    del comm, node
    gc.collect()
    assert alive() is not None


def test_plans_in_two_threads_reduce_each_in_memory_of_its_own(comm: Intracomm) -> None:
    """Partial sums of three vectors and more pass through memory that was one for all plans of a communicator."""
    if comm.channel.node is None or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("no shared memory, or no threads")
    plans = []
    for factor in (1.0, 100.0):
        given, result = comm.zeros(60_000), comm.zeros(60_000)
        plans.append((factor, given, result, comm.Allreduce_init(given, result)))
    wrong: list[float] = []

    def work(factor: float, given: np.ndarray, result: np.ndarray, plan: MPI.Prequest) -> None:
        for turn in range(150):
            given[:] = factor * (comm.rank + turn)
            plan.Start()
            plan.Wait()
            total = factor * (comm.size * turn + comm.size * (comm.size - 1) // 2)
            wrong.extend(result[result != total][:1])

    threads = [threading.Thread(target=work, args=plan) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    if SEGMENTS:
        scratch = {int(plan._job[words.SCRATCH]) for *_, plan in plans}
        assert len(scratch) == 2
    for *_, plan in plans:
        plan.Free()
