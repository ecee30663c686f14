"""Training of a model of one's own with ``mpicoll.train.Trainer``: softmax regression, in NumPy.

The model is three methods on arrays. The trainer cuts batches, synchronises gradients and updates the parameters by any
strategy, such as replicated, sharded, local or parameter_server. Plain mpi4py needs a loop of its own, with an
Allreduce for each parameter.

    mpirun -n 4 python examples/trainer.py --strategy sharded
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

from mpicoll.train import ArrayDataset, Trainer

FEATURES, CLASSES, BATCH, EPOCHS, RATE = 64, 10, 64, 5, 0.05


class Softmax:
    """Linear layer with softmax and cross entropy."""

    def initial(self, seed):
        """Return the first parameters."""
        return [np.zeros((FEATURES, CLASSES), np.float32), np.zeros(CLASSES, np.float32)]

    def forward(self, parameters, x, y):
        """Return the summed loss, the number of hits, and what backward needs."""
        odds = np.exp(x @ parameters[0] + parameters[1])
        odds /= odds.sum(axis=1, keepdims=True)
        return -np.log(odds[np.arange(len(y)), y]).sum(), (odds.argmax(axis=1) == y).sum(), (x, y, odds)

    def backward(self, parameters, saved):
        """Return the gradients of the summed loss."""
        x, y, odds = saved
        delta = odds.copy()
        delta[np.arange(len(y)), y] -= 1
        return x.T @ delta, delta.sum(axis=0)


def train_plainly(comm, model, x, y):
    """Return the parameters that plain mpi4py trains."""
    parameters, random = model.initial(0), np.random.default_rng(0)
    for _ in range(EPOCHS):
        order = random.permutation(len(y))
        for start in range(0, len(y) - BATCH + 1, BATCH):
            own = order[start + comm.rank : start + BATCH : comm.size]
            *_, saved = model.forward(parameters, x[own], y[own])
            for parameter, gradient in zip(parameters, model.backward(parameters, saved), strict=True):
                comm.Allreduce(MPI.IN_PLACE, gradient)
                parameter -= RATE / BATCH * gradient
    return parameters


def main():
    """Train on generated data with a trainer and with a plain loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="number of samples (default: %(default)s)")
    parser.add_argument("--strategy", default="replicated", help="default: %(default)s")
    options = parser.parse_args()
    comm, model, random = MPI.COMM_WORLD, Softmax(), np.random.default_rng(0)  # the same samples on all ranks
    centres, y = random.normal(size=(CLASSES, FEATURES)), random.integers(CLASSES, size=options.size)
    x = (centres[y] + random.normal(size=(options.size, FEATURES))).astype(np.float32)
    trainer = Trainer(model, ArrayDataset(x, y), strategy=options.strategy, epochs=EPOCHS, batch=BATCH, lr=RATE)
    result = trainer.fit()
    hits = [model.forward(parameters, x, y)[1] for parameters in (trainer.parameters, train_plainly(comm, model, x, y))]
    assert min(hits) > 0.97 * options.size, hits
    if comm.rank == 0:
        print(f"{options.strategy}: loss {result['train_loss']:.3f} in the last epoch, {hits[0]} of {len(y)} right")
    compare(f"{EPOCHS} epochs", lambda: train_plainly(comm, model, x, y), trainer.fit)


if __name__ == "__main__":
    main()
