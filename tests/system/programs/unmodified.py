"""An mpi4py program that knows nothing of mpicoll; prints a line a rank, for test_run_program.py."""

import sys

import numpy as np
from mpi4py import MPI
from mpi4py.futures import MPICommExecutor
from mpi4py.MPI import COMM_WORLD
from mpi4py.util import pkl5


class Thing:
    def __init__(self, number):
        self.number = number

    def __add__(self, other):
        return Thing(self.number + other.number)


def double(thing):
    return Thing(2 * thing.number)


def reduce_often(comm, data, result):
    for _ in range(20):
        comm.Allreduce(data, result)


def unusual_forms(comm):
    pairs = np.array([comm.rank, comm.rank], "i")
    best = np.empty_like(pairs)
    comm.Allreduce([pairs, 1, MPI.TWOINT], [best, 1, MPI.TWOINT], op=MPI.MAXLOC)
    assert best.tolist() == [comm.size - 1] * 2
    assert comm.alltoall(iter([comm.rank] * comm.size)) == list(range(comm.size))
    grid = comm.Create_cart([comm.size], [True])
    grid.Neighbor_allgather(np.array([grid.rank]), np.empty((2, 1), int))
    grid.Free()


def main():
    comm = MPI.COMM_WORLD
    assert comm is COMM_WORLD
    data, result = np.full(1000, comm.rank + 1.0), np.empty(1000)
    reduce_often(comm, data, result)
    reduce_often(comm, data[:10], result[:10])
    total = comm.allreduce(Thing(comm.rank)).number
    root = comm.size - 1
    array = np.arange(5) if comm.rank == root else np.empty(5, int)
    comm.Bcast([array, 5, MPI.INT64_T], root=root)
    part = comm.Split(comm.rank % 2, comm.rank)
    for _ in range(20):
        part.Allreduce(MPI.IN_PLACE, np.ones(3), op=MPI.MAX)
    request = comm.Iallgather(np.array([comm.rank]), np.empty(comm.size, int))
    request.Wait()
    plan = comm.Allreduce_init(data, result)
    for _ in range(3):
        plan.Start()
        plan.Wait()
    plan.Free()
    unusual_forms(comm)
    wrapped = pkl5.Intracomm(MPI.COMM_WORLD).bcast({"a": array} if comm.rank == 0 else None)
    with MPICommExecutor() as executor:
        doubled = [each.number for each in executor.map(double, [Thing(4)])] if executor is not None else [8]
    assert MPI.COMM_SELF.allreduce(5) == 5
    kinds = [type(each).__module__.split(".")[0] for each in (comm, part, MPI.COMM_SELF)]
    lines = comm.gather([total, wrapped["a"].tolist(), doubled, float(result[0]), *kinds])
    if comm.rank == 0:
        print(sys.argv[1:], lines)
    comm.Barrier()
    if "raise" in sys.argv:
        if comm.rank == 1:
            raise KeyError("the culprit")
        comm.Barrier()
    sys.exit(7 if "exit" in sys.argv else None)


main()
