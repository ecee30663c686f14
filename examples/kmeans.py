"""K-means clustering by Lloyd's algorithm, with the points distributed over the ranks.

Each rank assigns its own points to the nearest centres. The sums and the numbers of the points of each cluster are
then added up by one Allreduce of a few kilobytes, after which every rank computes the same new centres.

    mpirun -n 4 python examples/kmeans.py --size 2000
"""

import argparse
import os
from itertools import pairwise

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll

CLUSTERS, FEATURES = 32, 16


def step(comm, points, centres):
    """Return the next centres and the mean squared distance to the present ones."""
    # |p - c|^2 without |p|^2, which is the same for all centres.
    distances = np.sum(centres**2, axis=1) - 2 * points @ centres.T
    nearest = np.argmin(distances, axis=1)
    members = (nearest == np.arange(CLUSTERS)[:, None]).astype(points.dtype)

    # Sums, counts and the total distance share one buffer, and thus one Allreduce.
    totals = np.zeros((CLUSTERS + 1, FEATURES + 1))
    totals[:-1, :-1] = members @ points
    totals[:-1, -1] = members.sum(axis=1)
    totals[-1, 0] = np.sum(points**2) + distances[np.arange(len(points)), nearest].sum()
    comm.Allreduce(MPI.IN_PLACE, totals)

    counts = totals[:-1, -1:]
    centres = np.where(counts > 0, totals[:-1, :-1] / np.maximum(counts, 1), centres)
    return centres, totals[-1, 0] / counts.sum()


def cluster(comm, points, centres, steps=20):
    """Return the centres after `steps` steps and the mean squared distance before each."""
    history = []
    for _ in range(steps):
        centres, distance = step(comm, points, centres)
        history.append(distance)
    return centres, history


def main():
    """Cluster points that are drawn around known centres, with both communicators."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2000, help="points of each rank (default: %(default)s)")
    size = parser.parse_args().size

    plain = MPI.COMM_WORLD
    comm = mpicoll.Intracomm(plain)  # the only line that changes

    truth = np.random.default_rng(0).uniform(-10, 10, (CLUSTERS, FEATURES))  # the same on all ranks
    own = np.random.default_rng([1, comm.rank])
    points = truth[np.arange(size) % CLUSTERS] + own.normal(size=(size, FEATURES))
    start = truth + np.random.default_rng(2).normal(size=truth.shape)
    comm.Bcast(start)

    centres, history = cluster(comm, points, start)
    assert all(after <= before + 1e-9 for before, after in pairwise(history)), history
    error = np.abs(centres - truth).max()
    bound = 6 / np.sqrt(comm.size * (size // CLUSTERS))  # six standard deviations of a mean
    assert error < bound, (error, bound)
    if comm.rank == 0:
        print(f"mean squared distance {history[0]:.2f} at first, {history[-1]:.2f} at last (expected {FEATURES})")
        print(f"largest error of a centre {error:.3f} (expected less than {bound:.3f})")
    compare("20 steps", lambda: cluster(plain, points, start), lambda: cluster(comm, points, start))


if __name__ == "__main__":
    main()
