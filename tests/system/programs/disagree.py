"""Ranks that call different things: each case on a communicator of its own; prints what every rank got."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

import mpicoll
from tests.system.programs.cases import ODD, Case, communicator, outcome, run_cases, vector


def case_count(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(11 if ODD else 10))


def case_count_zero(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(0 if ODD else 10))


def case_count_large(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(2_000_000 if ODD else 1_000_000))


def case_dtype(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(dtype="i4" if ODD else "f4"))


def case_dtype_width(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(dtype="f8" if ODD else "f4"))


def case_op(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(), op=MPI.MAX if ODD else MPI.SUM)


def case_algorithm(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector(), algorithm="ring" if ODD else "tree")


def case_bcast_root(comm: mpicoll.Intracomm) -> None:
    comm.Bcast(vector(), root=1 if ODD else 0)


def case_reduce_root(comm: mpicoll.Intracomm) -> None:
    comm.Reduce(vector(), vector(), root=1 if ODD else 0)


def case_bcast_count(comm: mpicoll.Intracomm) -> None:
    comm.Bcast(vector(3 if ODD else 10))


def case_collective(comm: mpicoll.Intracomm) -> None:
    if ODD:
        comm.Bcast(vector())
    else:
        comm.Allreduce(MPI.IN_PLACE, vector())


def case_order(comm: mpicoll.Intracomm) -> None:
    calls = [lambda: comm.Allreduce(MPI.IN_PLACE, vector()), lambda: comm.Allgather(vector(1), vector(comm.size))]
    for call in calls[::-1] if ODD else calls:
        call()


def case_barrier(comm: mpicoll.Intracomm) -> None:
    if ODD:
        comm.Barrier()
    else:
        comm.Reduce_scatter_block(vector(comm.size), vector(1))


def case_recvcounts(comm: mpicoll.Intracomm) -> None:
    counts = [2] * comm.size
    if ODD:
        counts[0], counts[2] = 1, 3
    comm.Reduce_scatter(vector(2 * comm.size), vector(counts[comm.rank]), counts)


def case_nonblocking(comm: mpicoll.Intracomm) -> None:
    comm.Iallreduce(MPI.IN_PLACE, vector(11 if ODD else 10)).Wait()


def case_refused_by_all(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(np.zeros(3), np.zeros(4))


def case_left_early(comm: mpicoll.Intracomm) -> None:
    comm.Allreduce(MPI.IN_PLACE, vector())
    if not ODD:
        comm.Allgather(vector(1), vector(comm.size))


def case_slow_is_fine(comm: mpicoll.Intracomm) -> None:
    for _ in range(3):
        time.sleep(0.6 if ODD else 0)
        comm.Allreduce(MPI.IN_PLACE, vector())
    for root in range(comm.size):
        comm.Bcast(vector(), root=root)


def usable(comm: mpicoll.Intracomm) -> bool:
    """Try a right call."""
    data = np.ones(5)
    try:
        comm.Allreduce(MPI.IN_PLACE, data)
    except mpicoll.errors.MpicollError:
        return False
    return bool((data == comm.size).all())


def attempt(case: Case) -> dict[str, object]:
    comm = communicator(case)
    return outcome(case, comm, usable)


run_cases(globals(), attempt)
