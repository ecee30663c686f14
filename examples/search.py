"""Search for the width and the penalty of a kernel ridge regression with ``mpicoll.search``.

Each group of ranks runs one trial at a time: its ranks compute parts of the kernel matrix, and an Allreduce adds up
what they find. Rank 0 asks Optuna (``pip install "mpicoll[search]"``) for all groups, and works as the others do.

    mpirun -n 4 python examples/search.py --group 2
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll
from mpicoll.search import run

NOISE = 0.1


def samples(count, seed):
    """Return points in a square, and a function of them with noise."""
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (count, 2))
    return x, np.sin(3 * x[:, 0]) * np.cos(2 * x[:, 1]) + NOISE * random.standard_normal(count)


def kernel(a, b, width):
    """Return the Gaussian kernel between two sets of points."""
    return np.exp(-((a[:, None] - b[None]) ** 2).sum(axis=2) / (2 * width**2))


def validation_error(comm, data, held_out, centres, width, penalty):
    """Fit weights of the centres, each rank with its rows, and return the mean squared error on samples held out."""
    sums = np.zeros((len(centres), len(centres) + 1))
    features = kernel(data[0][comm.rank :: comm.size], centres, width)
    sums[:, :-1], sums[:, -1] = features.T @ features, features.T @ data[1][comm.rank :: comm.size]
    comm.Allreduce(MPI.IN_PLACE, sums)
    weights = np.linalg.solve(sums[:, :-1] + penalty * np.eye(len(centres)), sums[:, -1])
    return float(((kernel(held_out[0], centres, width) @ weights - held_out[1]) ** 2).mean())


def main():
    """Run the study, and time one fit on all ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4000, help="number of samples (default: %(default)s)")
    parser.add_argument("--group", type=int, default=1, help="ranks of a trial (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=24, help="number of trials (default: %(default)s)")
    options = parser.parse_args()
    data, held_out = samples(options.size, 0), samples(500, 1)  # the same on all ranks
    centres = samples(64, 2)[0]

    def objective(trial, comm):
        width = trial.suggest_float("width", 0.01, 10, log=True)
        penalty = trial.suggest_float("penalty", 1e-6, 1e3, log=True)
        return validation_error(comm, data, held_out, centres, width, penalty)

    result = run(objective, trials=options.trials, group=options.group)
    assert result.counts["complete"] == options.trials
    assert NOISE**2 / 2 < result.best_value < 0.1, result.best_value
    plain, ours = MPI.COMM_WORLD, mpicoll.Intracomm(MPI.COMM_WORLD)
    if plain.rank == 0:
        print(f"best of {options.trials} trials: error {result.best_value:.4f} with {result.best_params}")
    best = result.best_params["width"], result.best_params["penalty"]
    fits = [lambda comm=comm: validation_error(comm, data, held_out, centres, *best) for comm in (plain, ours)]
    compare("1 fit on all ranks", *fits)


if __name__ == "__main__":
    main()
