"""Asynchronous stochastic gradient descent for a linear regression, on a parameter server.

The last rank serves the parameters. The others pull them, compute gradients and push them, and wait for nobody: a
gradient may thus be late by some updates, its staleness. With plain mpi4py the server answers messages. With
``mpicoll.ParameterServer`` workers add to the parameters by one-sided MPI, or leave that to it (``--push mailbox``).

    mpirun -n 4 python examples/parameter_server.py --size 1024
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks are the threads; set before NumPy is loaded

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll

STEPS, RATE, NOISE = 200, 0.01, 0.01


def gradient(step, x, y, parameters):
    """Return the gradient of half the mean squared error of a batch."""
    x, y = x[step % len(x)], y[step % len(y)]
    return x.T @ (x @ parameters - y) / np.float32(len(y))


def train_plain(comm, x, y):
    """Train with a server that receives gradients and sends parameters back."""
    parameters, server = np.zeros(x.shape[-1], np.float32), comm.size - 1
    received, status = np.empty_like(parameters), MPI.Status()
    if comm.rank == server:
        for _ in range(STEPS * (comm.size - 1)):
            comm.Recv(received, status=status)
            parameters -= RATE * received
            comm.Send(parameters, status.source)
        return
    for step in range(STEPS):
        comm.Send(gradient(step, x, y, parameters), server)
        comm.Recv(parameters, server)


def train(comm, x, y, push):
    """Return the parameters and how many pushes were 0, 1, 2, ... updates late, with `mpicoll.ParameterServer`."""
    parameters = np.zeros(x.shape[-1], np.float32)
    with mpicoll.ParameterServer(parameters, comm=comm, servers=1, lr=RATE, push=push) as ps:
        if ps.is_server:
            ps.serve()  # until all workers have finished
        else:
            for step in range(STEPS):
                ps.pull(parameters)
                ps.push(gradient(step, x, y, parameters))
            ps.result(parameters)  # after the last push of all workers
    return parameters, ps.staleness


def main():
    """Fit generated data with both servers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1024, help="number of parameters (default: %(default)s)")
    parser.add_argument("--push", choices=("direct", "mailbox"), default="direct", help="who adds the gradients")
    options = parser.parse_args()
    plain, comm, size = MPI.COMM_WORLD, mpicoll.Intracomm(MPI.COMM_WORLD), options.size
    own, truth = np.random.default_rng([1, comm.rank]), np.random.default_rng(0).normal(size=size) / np.sqrt(size)
    x = own.normal(size=(128, max(1, size // 32), size)).astype(np.float32)  # 128 batches of as many rows
    y = (x @ truth + own.normal(0, NOISE, x.shape[:2])).astype(np.float32)
    parameters, staleness = train(comm, x, y, options.push)
    if comm.rank == 0:
        first, last = (np.mean((x @ weights - y) ** 2) for weights in (0 * parameters, parameters))
        assert last < 0.1 * first, (first, last)
        print(f"mean squared error {first:.5f} at first, {last:.5f} at last (noise {NOISE**2:.5f})")
        print(f"pushes that were 0, 1, 2, ... updates late: {np.trim_zeros(staleness, 'b')[:20].tolist()}")
    compare(f"{STEPS} steps of each worker", lambda: train_plain(plain, x, y), lambda: train(comm, x, y, options.push))


if __name__ == "__main__":
    main()
