"""Ranks that call different things on shared memory, in the middle of a program that was right until then."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

import mpicoll
from tests.system.programs.cases import (
    ODD,
    RANK,
    Case,
    Comm,
    communicator,
    outcome,
    read_only_on_one,
    run_cases,
    vector,
)

LONG = 300_000


def case_short_count(comm: Comm) -> None:
    comm.Allreduce(vector(11 if ODD else 10), vector(11 if ODD else 10))


def case_dtype(comm: Comm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(dtype="i8" if ODD else "f8"))


def case_op(comm: Comm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(), MPI.MIN if ODD else MPI.SUM)


def case_long_count(comm: Comm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(LONG + ODD))


def case_short_and_long(comm: Comm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(LONG if ODD else 10))


def case_shared_and_private(comm: Comm) -> None:
    """Where the memory lies is no difference, the count is."""
    data = comm.zeros(LONG + ODD) if RANK % 2 else vector(LONG)
    comm.Allreduce(MPI.IN_PLACE, data)


def case_collective(comm: Comm) -> None:
    if ODD:
        comm.Allgather(vector(2), vector(2 * comm.size))
    else:
        comm.Allreduce(MPI.IN_PLACE, vector(2 * comm.size))


def case_barrier(comm: Comm) -> None:
    if ODD:
        comm.Barrier()
    else:
        comm.Allreduce(MPI.IN_PLACE, vector())


def case_new_bcast_root(comm: Comm) -> None:
    comm.Bcast(vector(21), 1 if ODD else 0)


def case_new_reduce_root(comm: Comm) -> None:
    comm.Reduce(vector(22), vector(22), root=1 if ODD else 0)


def case_long_bcast_root(comm: Comm) -> None:
    comm.Bcast(vector(LONG), 1 if ODD else 0)


def case_known_bcast_root(comm: Comm) -> None:
    """Every rank has made these calls before; that they differ is found at the next call at the latest."""
    comm.Bcast(vector(), 1 if ODD else 0)
    comm.Allreduce(MPI.IN_PLACE, vector())


def case_known_reduce_root(comm: Comm) -> None:
    comm.Reduce(vector(), vector(), root=1 if ODD else 0)
    comm.Barrier()


def scatterv(comm: Comm, root: int = 0, dtype: str = "f8", count: int = 3) -> None:
    whole = [vector(3 * comm.size + 1), [3] * (comm.size - 1) + [4]] if comm.rank == root else None
    comm.Scatterv(whole, vector(count + (comm.rank + 1 == comm.size), dtype), root)


def case_scatterv_dtype(comm: Comm) -> None:
    """The rank sees in the root's record that elements are others; the root may have left, and is told."""
    scatterv(comm, dtype="f4" if ODD else "f8")
    comm.Barrier()


def case_scatterv_root(comm: Comm) -> None:
    scatterv(comm, 1 if ODD else 0)
    comm.Barrier()


def case_scatterv_and_bcast(comm: Comm) -> None:
    """Records of two kinds of calls, of which none has a count."""
    if ODD:
        comm.Bcast(vector(comm.size, "i8"))
    else:
        scatterv(comm)
    comm.Barrier()


def case_scatterv_and_gatherv(comm: Comm) -> None:
    if ODD:
        comm.Gatherv(vector(3), None)
    else:
        scatterv(comm)
    comm.Barrier()


def gatherv(comm: Comm, root: int = 0, dtype: str = "f8", count: int = 3, odd_count: int = 3) -> None:
    counts = [3, odd_count, *[3] * (comm.size - 2)]
    whole = [vector(sum(counts)), counts] if comm.rank == root else None
    comm.Gatherv(vector(count, dtype), whole, root)
    comm.Barrier()


def case_gatherv_dtype(comm: Comm) -> None:
    gatherv(comm, dtype="f4" if ODD else "f8")


def case_gatherv_root(comm: Comm) -> None:
    gatherv(comm, 1 if ODD else 0)


def case_gathered_counts(comm: Comm) -> None:
    """A length that the rank has not had before: it waits for the root."""
    gatherv(comm, count=2 if ODD else 3)


def case_known_gathered_counts(comm: Comm) -> None:
    """A length that every rank has had before: the ranks have left when the root sees that it expects another one."""
    gatherv(comm, odd_count=4)


def case_refused_counts(comm: Comm) -> None:
    """The root may have left before another rank sees that its part is of another length."""
    scatterv(comm, count=2 if ODD else 3)
    comm.Barrier()


def case_plan_count(comm: Comm) -> None:
    """Plans are numbered alike; the first start compares them."""
    plan = comm.Allreduce_init(MPI.IN_PLACE, vector(12 if ODD else 13))
    plan.Start()
    plan.Wait()


def case_plan_root(comm: Comm) -> None:
    plan = comm.Bcast_init(vector(14), 1 if ODD else 0)
    plan.Start()
    plan.Wait()


def case_shared_and_messages(comm: Comm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(), algorithm="ring" if ODD else "shared")


def case_refused_long(comm: Comm) -> None:
    comm.Allreduce(MPI.IN_PLACE, read_only_on_one(LONG))


def case_refused_by_all(comm: Comm) -> None:
    for _ in range(2):
        try:
            comm.Allreduce(vector(3), vector(4))
        except ValueError:
            comm.Allreduce(MPI.IN_PLACE, vector())
    comm.Allreduce(vector(3), vector(4))


def case_never_came_long(comm: Comm) -> None:
    if not ODD:
        comm.Allreduce(MPI.IN_PLACE, vector(LONG))


def case_never_started(comm: Comm) -> None:
    plan = comm.Allreduce_init(MPI.IN_PLACE, vector())
    if not ODD:
        plan.Start()
        plan.Wait()


def case_slow_is_fine(comm: Comm) -> None:
    for count in (10, LONG):
        time.sleep(0.6 if ODD else 0)
        comm.Allreduce(MPI.IN_PLACE, vector(count))


def warm(comm: Comm) -> None:
    """Make calls of each kind, so that the compiled path is taken from then on."""
    for _ in range(3):
        comm.Allreduce(MPI.IN_PLACE, vector())
        comm.Bcast(vector(comm.size, "i8"))
        for root in range(2):
            scatterv(comm, root)
            comm.Gatherv(vector(3), [vector(3 * comm.size), [3] * comm.size], root)
            comm.Bcast(vector(), root)
            comm.Reduce(vector(), vector(), root=root)
        comm.Allreduce(MPI.IN_PLACE, vector(), MPI.MIN)
        comm.Allreduce(MPI.IN_PLACE, vector(LONG))
        comm.Allgather(vector(2), vector(2 * comm.size))
        comm.Allreduce(MPI.IN_PLACE, vector(dtype="i8"))
        comm.Barrier()


def usable(comm: Comm) -> bool:
    """Try right calls, short and long."""
    try:
        for count in (5, LONG):
            data = np.ones(count)
            comm.Allreduce(MPI.IN_PLACE, data)
            if not (data == comm.size).all():
                return False
    except mpicoll.errors.MpicollError:
        return False
    return True


def attempt(case: Case) -> dict[str, object]:
    comm = communicator(case)
    assert comm._scope.channel.node is not None
    warm(comm)
    return outcome(case, comm, usable)


run_cases(globals(), attempt)
