"""Collectives inside functions that JAX compiles, with derivatives; needs JAX.

>>> import mpicoll.jax
>>> @jax.jit
... def step(parameters, batch):
...     gradients = jax.grad(loss)(parameters, batch)
...     return update(parameters, mpicoll.jax.average_gradients(gradients))

Raises
------
ImportError
    If JAX is not installed; the message says how to install it.
"""

from __future__ import annotations

try:
    import jax as _jax
except ImportError as error:
    raise ImportError('mpicoll.jax: JAX is missing; pip install "mpicoll[jax]"', name="jax") from error
if _jax.__version_info__ < (0, 8):
    raise ImportError(f"mpicoll.jax: it needs JAX 0.8 or newer, not {_jax.__version__}", name="jax")

from mpicoll.jax.collective_handler import last_error
from mpicoll.jax.jax_collectives import (
    allgather,
    allreduce,
    alltoall,
    average_gradients,
    barrier,
    bcast,
    reduce_scatter,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "average_gradients",
    "barrier",
    "bcast",
    "last_error",
    "reduce_scatter",
]
