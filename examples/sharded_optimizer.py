"""A perceptron whose parameters, gradients and velocity are divided among the ranks (ZeRO stage 3).

Each rank computes the gradients of its part of every batch. Plain mpi4py keeps everything on every rank, and makes an
Allreduce for each layer. ``mpicoll.ShardedOptimizer`` keeps a part of each layer, and gathers it when it is used.

    mpirun -n 4 python examples/sharded_optimizer.py --size 256
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll

FEATURES, CLASSES, ROWS, BATCH, STEPS, RATE = 64, 10, 1024, 32, 40, 0.05


class Plain:
    """Momentum with all parameters on every rank."""

    def __init__(self, layers):
        self.layers = [array.copy() for array in layers]
        self.velocities, self.gradients = ([np.zeros_like(array) for array in layers] for _ in range(2))
        self.gather, self.release = lambda number: [self.layers[number]], lambda number: None
        self.complete = lambda number, given: MPI.COMM_WORLD.Allreduce(given[0], self.gradients[number])

    def step(self, samples):
        """Update the layers by the mean gradient of all ranks' samples."""
        for layer, velocity, gradient in zip(self.layers, self.velocities, self.gradients, strict=True):
            velocity *= 0.9
            velocity += gradient / (samples * MPI.COMM_WORLD.size)
            layer -= RATE * velocity


def train(optimizer, x, labels):
    """Train three layers and return the mean loss of the last step on this rank."""
    for start in np.arange(STEPS) * BATCH % ROWS:
        inputs = [x[start : start + BATCH]]
        for number in range(3):
            inputs.append(np.maximum(inputs[-1] @ optimizer.gather(number)[0], 0 if number < 2 else -np.inf))
            optimizer.release(number)
        delta = np.exp(inputs[-1] - inputs[-1].max(axis=1, keepdims=True))
        delta /= delta.sum(axis=1, keepdims=True)
        right = np.arange(BATCH), labels[start : start + BATCH]
        loss, delta[right] = -np.log(delta[right]).mean(), delta[right] - 1
        for number in reversed(range(3)):
            gradient, (weights,) = inputs[number].T @ delta, optimizer.gather(number)
            delta = (delta @ weights.T) * (inputs[number] > 0)
            optimizer.complete(number, [gradient])
        optimizer.step(samples=BATCH)
    return loss


def main():
    """Train on generated data with both, and compare parameters, bytes and times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="width of the hidden layers (default: %(default)s)")
    width, comm = parser.parse_args().size, mpicoll.Intracomm(MPI.COMM_WORLD)
    common, own = np.random.default_rng(0), np.random.default_rng([1, comm.rank])
    centres, labels = common.normal(size=(CLASSES, FEATURES)), own.integers(CLASSES, size=ROWS)
    x = (centres[labels] + own.normal(size=(ROWS, FEATURES))).astype("f")
    layers = [common.normal(0, 0.1, s).astype("f") for s in ((FEATURES, width), (width, width), (width, CLASSES))]
    sharded = mpicoll.ShardedOptimizer([[layer] for layer in layers], comm=comm, optimizer="momentum", lr=RATE)
    plain, loss = Plain(layers), train(sharded, x, labels)
    assert abs(loss - train(plain, x, labels)) < 1e-3 < 1 - loss, loss
    state = sharded.state_dict()
    assert all(np.allclose(state[f"parameters.{n}.0"], plain.layers[n], atol=1e-4) for n in range(3) if state)
    if comm.rank == 0:
        print(f"loss {loss:.3f}; rank 0 holds {sharded.nbytes()} of 3 times {sum(a.nbytes for a in layers)} bytes")
    compare(f"{STEPS} steps", lambda: train(plain, x, labels), lambda: train(sharded, x, labels))


if __name__ == "__main__":
    main()
