"""Principal component analysis of rows that are distributed over the ranks.

The mean and the covariance matrix are added up by Allreduce. Every rank then computes the eigenvectors itself: all
ranks have the same bits of the matrix, so all get the same eigenvectors. With mpicoll the matrix lies in memory from
``comm.empty``, which the ranks of a node share, so the Allreduce copies nothing.

    mpirun -n 4 python examples/pca.py --size 512
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll

ROWS, COMPONENTS = 200, 5
"""Rows of each rank, and the number of components that are checked."""


def covariance(comm, rows, out):
    """Write the covariance matrix of all ranks' rows to `out`."""
    total = np.append(rows.sum(axis=0), len(rows))
    comm.Allreduce(MPI.IN_PLACE, total)
    centred = rows - total[:-1] / total[-1]
    np.matmul(centred.T, centred, out=out)
    comm.Allreduce(MPI.IN_PLACE, out)
    out /= total[-1] - 1
    return out


def components(matrix):
    """Return the eigenvectors of the largest eigenvalues, one in each row."""
    return np.linalg.eigh(matrix)[1][:, : -COMPONENTS - 1 : -1].T


def main():
    """Find components of generated data and compare them with NumPy's on the gathered rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="number of features (default: %(default)s)")
    features = parser.parse_args().size

    plain = MPI.COMM_WORLD
    comm = mpicoll.Intracomm(plain)

    deviations = 2.0 ** -np.arange(features).clip(max=10)  # well separated where the components are checked
    mixing = np.linalg.qr(np.random.default_rng(0).normal(size=(features, features)))[0]
    own = np.random.default_rng([1, comm.rank])
    rows = own.normal(size=(ROWS, features)) * deviations @ mixing + 3.0

    shared = comm.empty((features, features))  # an array of this rank that the node's other ranks can reach
    found = components(covariance(comm, rows, shared))

    everything = np.empty((comm.size * ROWS, features))
    comm.Allgather(rows, everything)
    expected = components(np.cov(everything, rowvar=False))
    difference = np.abs(np.abs(np.sum(found * expected, axis=1)) - 1).max()  # a component has no sign
    assert difference < 1e-8, difference
    same = comm.allgather(found.tobytes())
    assert same.count(same[0]) == comm.size
    if comm.rank == 0:
        print(f"{COMPONENTS} components: equal bits on {comm.size} ranks, equal to NumPy's to eight digits")

    ordinary = np.empty((features, features))
    compare(
        f"covariance of {features} features",
        lambda: covariance(plain, rows, ordinary),
        lambda: covariance(comm, rows, shared),
    )


if __name__ == "__main__":
    main()
