"""Allreduce of gradient-like vectors, compressed with int8 and with top-k and error feedback.

Compression pays between hosts that a slow network joins. On one node it rarely does, since ranks share memory there.
Linux can emulate such a network from a checkout of mpicoll, as root with ``ip`` and ``tc`` (package iproute2)::

    python -m bench.cluster --hosts 4 --ranks 1 --rate 1gbit -- examples/compressed_allreduce.py
    mpirun -n 4 python examples/compressed_allreduce.py --size 250000
"""

import argparse

import numpy as np
from mpi4py import MPI
from timing import compare

import mpicoll

STEPS = 10


def relative(difference, vector):
    """Return the norm of a difference over that of a vector."""
    return np.linalg.norm(difference) / np.linalg.norm(vector)


def owed(comm, feedback):
    """Return what all ranks together still owe: residuals of their own vectors and of the sum."""
    total = np.zeros_like(feedback.residual)
    for residual in (feedback.residual, feedback.result_residual):
        if comm.allreduce(residual is not None, MPI.LOR):
            total += comm.allreduce(np.zeros_like(total) if residual is None else residual)
    return total


def main():
    """Sum vectors of some steps with each compressor; print bytes, errors and times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=250_000, help="elements of the vector (default: %(default)s)")
    size = parser.parse_args().size

    plain = MPI.COMM_WORLD
    comm = mpicoll.Intracomm(plain)
    feedback = mpicoll.ErrorFeedback("topk:0.01")  # one object for each vector that is summed again and again

    # Every rank has the same mean gradient with noise of its own.
    mean = np.random.default_rng(0).normal(size=size) ** 3
    own = np.random.default_rng([1, comm.rank])
    vectors = [(mean + own.normal(size=size)).astype(np.float32) for _ in range(STEPS)]
    exact, total = np.empty(size, np.float32), np.empty(size, np.float32)

    for name, compression in (("topk:0.01", "topk:0.01"), ("topk:0.01", feedback), ("int8", "int8")):
        given, arrived, errors = np.zeros(size), np.zeros(size), []
        for vector in vectors:
            plain.Allreduce(vector, exact)
            comm.Allreduce(vector, total, compression=compression)
            given += exact
            arrived += total
            errors.append(relative(total - exact, exact))
        if compression is feedback:  # what has arrived and what is still owed make up what was given
            assert relative(arrived + owed(comm, feedback) - given, given) < 1e-5
        assert name != "int8" or max(errors) < 0.1, errors

        title = name + (" with error feedback" if compression is feedback else "")
        if comm.rank == 0:
            nbytes = mpicoll.compressor(name).wire_nbytes(size)
            print(f"{title}: a vector of {exact.nbytes} bytes is encoded as {nbytes}; ", end="")
            print(f"error of a sum {np.mean(errors):.3f}, of {STEPS} sums {relative(arrived - given, given):.3f}")
        compare(
            f"{STEPS} sums, {title}",
            lambda: [plain.Allreduce(vector, total) for vector in vectors],
            lambda how=compression: [comm.Allreduce(vector, total, compression=how) for vector in vectors],
            seconds=1.0,
        )


if __name__ == "__main__":
    main()
