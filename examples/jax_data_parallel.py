"""Data-parallel training in JAX: a perceptron learns which of two rings a point lies on.

Each rank has its own points. All steps are one compiled function, in which the ranks average their gradients. At the
end every rank trains alone on the points of all ranks; the losses must agree. Needs JAX: pip install "mpicoll[jax]".

    mpirun -n 4 python examples/jax_data_parallel.py
    mpirun -n 4 python examples/jax_data_parallel.py --compression int8
"""

import argparse
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax
from mpi4py import MPI

import mpicoll.jax


def points(count, seed):
    """Return points near two rings, of shape (count, 2), and the number of the ring of each, of shape (count,)."""
    keys = jax.random.split(jax.random.key(seed), 3)
    ring = jax.random.bernoulli(keys[0], shape=(count,)).astype(jnp.int32)
    angle = 2 * jnp.pi * jax.random.uniform(keys[1], (count,))
    radius = 1.0 + ring + 0.2 * jax.random.normal(keys[2], (count,))
    return jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], 1), ring


def perceptron(*widths):
    """Return random weights of a perceptron, equal on all ranks."""
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    layers = [jax.random.normal(key, pair) / pair[0] ** 0.5 for key, pair in zip(keys, pairwise(widths), strict=True)]
    return [{"weights": weights, "bias": jnp.zeros(weights.shape[1])} for weights in layers]


def loss(model, x, ring):
    """Return the mean cross-entropy of the model's guesses."""
    for layer in model[:-1]:
        x = jnp.tanh(x @ layer["weights"] + layer["bias"])
    guesses = jax.nn.log_softmax(x @ model[-1]["weights"] + model[-1]["bias"])
    return -jnp.mean(jnp.take_along_axis(guesses, ring[:, None], 1))


def train(model, x, ring, steps, comm, compression=None):
    """Return the model after some steps of gradient descent on the points of all ranks, and its loss on them."""

    def step(model, _):
        gradients = mpicoll.jax.average_gradients(jax.grad(loss)(model, x, ring), comm=comm, compression=compression)
        return jax.tree.map(lambda weight, gradient: weight - 0.5 * gradient, model, gradients), None

    @jax.jit
    def run(model):
        model, _ = lax.scan(step, model, length=steps)
        return model, mpicoll.jax.allreduce(loss(model, x, ring), comm=comm) / comm.size

    return run(model)


def main():
    """Train with all ranks and alone, and compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compression", help="such as int8")
    options = parser.parse_args()
    world, model = MPI.COMM_WORLD, perceptron(2, 64, 64, 2)
    own = points(500, seed=world.rank + 1)
    trained, together = train(model, *own, options.steps, world, options.compression)
    everything = [gathered.reshape(-1, *gathered.shape[2:]) for gathered in mpicoll.jax.allgather(own)]
    _, alone = train(model, *everything, options.steps, MPI.COMM_SELF)
    first = mpicoll.jax.bcast(trained)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, trained, first)), "the models of the ranks differ"
    assert jnp.allclose(together, alone, rtol=0.05 if options.compression else 1e-3), f"loss: {together}, not {alone}"
    if world.rank == 0:
        print(f"{world.size} ranks, loss {together:.4f}; one rank with all points, loss {alone:.4f}")


if __name__ == "__main__":
    main()
