"""Histogram of values that are distributed over the ranks.

The range is found by Allreduce with MIN and MAX. Each rank then counts its own values in the same bins, and Reduce
adds the counts up at rank 0.

    mpirun -n 4 python examples/histogram.py --size 10000 --bins 4096
"""

import argparse

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll


def histogram(comm, values, bins):
    """Return the counts of all ranks' values, which are zeros except on rank 0, and the range of the bins."""
    low, high = np.array([values.min()]), np.array([values.max()])
    comm.Allreduce(MPI.IN_PLACE, low, op=MPI.MIN)
    comm.Allreduce(MPI.IN_PLACE, high, op=MPI.MAX)
    counts, _ = np.histogram(values, bins, range=(low[0], high[0]))
    total = np.zeros_like(counts)
    comm.Reduce(counts, total, root=0)
    return total, (low[0], high[0])


def main():
    """Count values of a normal distribution and compare the counts with NumPy's on the gathered values."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=10_000, help="values of each rank (default: %(default)s)")
    parser.add_argument("--bins", type=int, default=4096, help="number of bins (default: %(default)s)")
    options = parser.parse_args()

    plain = MPI.COMM_WORLD
    comm = mpicoll.Intracomm(plain)  # the only line that changes
    values = np.random.default_rng([0, comm.rank]).normal(size=options.size)

    counts, limits = histogram(comm, values, options.bins)
    everything = np.empty((comm.size, options.size))
    comm.Gather(values, everything, root=0)
    if comm.rank == 0:
        expected, edges = np.histogram(everything, options.bins)
        assert np.array_equal(counts, expected)
        assert limits == (edges[0], edges[-1])
        print(f"{counts.sum()} values from {limits[0]:.3f} to {limits[1]:.3f}; every count is NumPy's")

    def repeated(which):
        for _ in range(10):
            histogram(which, values, options.bins)

    compare("10 histograms", lambda: repeated(plain), lambda: repeated(comm))


if __name__ == "__main__":
    main()
