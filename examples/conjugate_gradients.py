"""Conjugate gradients for the Poisson equation on a square grid.

The grid's rows are divided among the ranks. Each iteration exchanges one row with either neighbour (Sendrecv) and
adds up two dot products over all ranks (Allreduce of 8 bytes). Sendrecv is mpi4py's own in both runs: an
``mpicoll.Intracomm`` inherits all that is not a collective.

    mpirun -n 4 python examples/conjugate_gradients.py --size 64
"""

import argparse

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll


def laplacian(comm, p):
    """Return A p for this rank's rows, after filling the outer rows of `p` with those of the neighbours."""
    above = comm.rank - 1 if comm.rank > 0 else MPI.PROC_NULL
    below = comm.rank + 1 if comm.rank < comm.size - 1 else MPI.PROC_NULL
    comm.Sendrecv(p[1], above, recvbuf=p[-1], source=below)
    comm.Sendrecv(p[-2], below, recvbuf=p[0], source=above)
    return 4 * p[1:-1, 1:-1] - p[:-2, 1:-1] - p[2:, 1:-1] - p[1:-1, :-2] - p[1:-1, 2:]


def dot(comm, a, b):
    """Return the dot product of two distributed vectors."""
    total = np.array([np.sum(a * b)])
    comm.Allreduce(MPI.IN_PLACE, total)
    return total[0]


def solve(comm, b, tolerance=1e-10):
    """Return x with A x = b and the number of iterations."""
    x, residual = np.zeros_like(b), b.copy()
    p = np.zeros((b.shape[0] + 2, b.shape[1] + 2))  # with a border: zeros, or rows of the neighbours
    p[1:-1, 1:-1] = residual
    square = first = dot(comm, residual, residual)
    iterations = 0
    while square > tolerance**2 * first:
        q = laplacian(comm, p)
        step = square / dot(comm, p[1:-1, 1:-1], q)
        x += step * p[1:-1, 1:-1]
        residual -= step * q
        previous, square = square, dot(comm, residual, residual)
        p[1:-1, 1:-1] = residual + square / previous * p[1:-1, 1:-1]
        iterations += 1
    return x, iterations


def main():
    """Solve a problem whose solution is known, with both communicators."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="rows and columns of the grid (default: %(default)s)")
    n = parser.parse_args().size

    plain = MPI.COMM_WORLD
    comm = mpicoll.Intracomm(plain)  # the only line that changes
    if n < comm.size:
        raise SystemExit(f"--size {n}: the grid needs a row for each of the {comm.size} ranks")

    points = np.arange(n + 2) / (n + 1)
    first, last = n * comm.rank // comm.size, n * (comm.rank + 1) // comm.size
    y, x = points[first : last + 2, None], points[None, :]
    solution = x * (1 - x) * y * (1 - y) * np.exp(2 * x + y)  # zero on the boundary
    b = laplacian(comm, solution)

    found, iterations = solve(comm, b)
    error = comm.allreduce(np.abs(found - solution[1:-1, 1:-1]).max(), MPI.MAX)
    assert error < 1e-6, error
    if comm.rank == 0:
        print(f"{n} x {n} unknowns, {iterations} iterations, largest error {error:.1e}")
    compare("solve", lambda: solve(plain, b), lambda: solve(comm, b))


if __name__ == "__main__":
    main()
