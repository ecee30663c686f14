"""Iallreduce while computing.

The program starts the sum of one vector, computes something else, and waits for the sum when it is needed. An MPI
library moves an operation on only inside MPI calls, and so does mpicoll: the computation is therefore cut into blocks,
with ``request.Test()`` between them. Overlap needs a core for every rank; where ranks share cores, nothing is idle
that the computation could use. The arrays come from ``comm.empty``: nonblocking operations on one node copy ordinary
arrays through shared memory, which can take longer than the blocking Allreduce.

    mpirun -n 4 python examples/nonblocking_overlap.py --size 1000000
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll

BLOCKS = 16


def compute(matrix):
    """Return the trace of the matrix's square; stands for a part of the program's own work."""
    return np.trace(matrix @ matrix)


def blocking(comm, vector, total, matrix):
    """Add up `vector` and then compute."""
    comm.Allreduce(vector, total)
    return sum(compute(matrix) for _ in range(BLOCKS))


def overlapped(comm, vector, total, matrix):
    """Add up `vector` while computing."""
    request, result = comm.Iallreduce(vector, total), 0.0
    for _ in range(BLOCKS):
        result += compute(matrix)
        request.Test()
    request.Wait()
    return result


def main():
    """Check the sum and time both ways with both communicators."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1_000_000, help="elements of the vector (default: %(default)s)")
    size = parser.parse_args().size

    plain = MPI.COMM_WORLD
    comm = mpicoll.Intracomm(plain)
    vector, total = comm.empty(size), comm.empty(size)  # for plain mpi4py these are arrays like any other
    vector[:] = np.arange(size) + comm.rank
    matrix = np.random.default_rng(0).normal(size=(160, 160))
    expected = comm.size * np.arange(size) + comm.size * (comm.size - 1) / 2

    for which in (plain, comm):
        for way in (blocking, overlapped):
            total[:] = 0
            trace = way(which, vector, total, matrix)
            assert np.array_equal(total, expected)
            assert np.isclose(trace, BLOCKS * np.sum(matrix * matrix.T))
    if comm.rank == 0:
        print(f"sum of {size} elements over {comm.size} ranks: every element is right, with and without overlap")

    for way in (blocking, overlapped):
        compare(
            way.__name__,
            lambda way=way: way(plain, vector, total, matrix),
            lambda way=way: way(comm, vector, total, matrix),
        )


if __name__ == "__main__":
    main()
