"""Data-parallel training of a model of one's own: a perceptron with one hidden layer, in NumPy.

Each rank computes the gradients of its part of every batch, and the gradients are averaged over the ranks. Plain
mpi4py makes an Allreduce for each parameter. ``mpicoll.GradientSynchronizer`` keeps all gradients in one buffer and
averages them by one Allreduce in place.

    mpirun -n 4 python examples/own_model.py --size 128
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll

FEATURES, CLASSES, ROWS, BATCH, STEPS, RATE = 64, 10, 1024, 32, 60, 0.1


def backward(parameters, x, labels, gradients):
    """Write the gradients of the cross entropy to `gradients` and return the loss."""
    weights1, bias1, weights2, bias2 = parameters
    hidden = np.maximum(x @ weights1 + bias1, 0)
    odds = np.exp(hidden @ weights2 + bias2)
    delta = odds / odds.sum(axis=1, keepdims=True)  # probabilities; less 1 where right, the gradient
    right = np.arange(BATCH), labels
    loss = -np.log(delta[right]).sum()
    delta[right] -= 1
    gradients[2][:], gradients[3][:] = hidden.T @ delta, delta.sum(axis=0)
    delta = (delta @ weights2.T) * (hidden > 0)
    gradients[0][:], gradients[1][:] = x.T @ delta, delta.sum(axis=0)
    return loss


def train(comm, initial, x, labels, sync=None):
    """Return the trained parameters and the last mean loss; `sync` averages gradients, else Allreduce."""
    parameters = [array.copy() for array in initial]
    gradients = [np.empty_like(array) for array in initial] if sync is None else sync.gradients
    for start in np.arange(STEPS) * BATCH % ROWS:
        batch = slice(start, start + BATCH)
        loss = backward(parameters, x[batch], labels[batch], gradients)
        if sync is not None:
            sync.synchronize()
        else:
            for gradient in gradients:
                comm.Allreduce(MPI.IN_PLACE, gradient)
                gradient /= comm.size
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= RATE / BATCH * gradient
    return parameters, loss / BATCH


def main():
    """Train on generated data with both ways of averaging."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128, help="width of the hidden layer (default: %(default)s)")
    width = parser.parse_args().size
    plain, comm = MPI.COMM_WORLD, mpicoll.Intracomm(MPI.COMM_WORLD)
    common, own = np.random.default_rng(0), np.random.default_rng([1, comm.rank])
    centres, labels = common.normal(size=(CLASSES, FEATURES)), own.integers(CLASSES, size=ROWS)
    x = (centres[labels] + own.normal(size=(ROWS, FEATURES))).astype(np.float32)
    shapes = (FEATURES, width), (width,), (width, CLASSES), (CLASSES,)
    initial = [common.normal(0, 0.1, shape).astype(np.float32) for shape in shapes]
    sync = mpicoll.GradientSynchronizer(initial, comm=comm)
    parameters, loss = train(comm, initial, x, labels, sync)
    expected, _ = train(plain, initial, x, labels)
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(parameters, expected, strict=True))
    assert loss < 0.5, loss
    if comm.rank == 0:
        print(f"loss {loss:.3f} after {STEPS} steps; the parameters are those of plain Allreduce up to rounding")
    compare(f"{STEPS} steps", lambda: train(plain, initial, x, labels), lambda: train(comm, initial, x, labels, sync))


if __name__ == "__main__":
    main()
