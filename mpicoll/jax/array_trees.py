"""Pytrees of arrays as few vectors: all leaves of one element type travel in one collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpicoll.jax.jax_communicators import Collective
from mpicoll.jax.ordered_primitive import bind
from mpicoll.kernels.reduce import DTYPES

Leaf = tuple[str, Any]
"""A leaf of a pytree and its name in error messages, such as ``x['weight']``."""


def leaves_of(tree: Any) -> tuple[list[Leaf], Any]:
    """Return the leaves of the argument `x` of a collective as arrays, with their names, and the tree's structure.

    Raises
    ------
    TypeError
        If a leaf is no array or number, or its elements cannot be communicated; the message names leaf and dtype.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [(f"x{jax.tree_util.keystr(path)}", leaf) for path, leaf in found]
    return [(name, _array(name, leaf)) for name, leaf in leaves], structure


def _array(name: str, leaf: Any) -> Any:
    try:
        made = jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(f"{name}: {leaf!r} is neither an array nor a number") from error
    if not isinstance(made.dtype, np.dtype) or made.dtype not in DTYPES:
        raise TypeError(f"{name}: elements of {made.dtype} cannot be communicated")
    return made


def run(collective: Collective, leaves: Sequence[Leaf], structure: Any) -> Any:
    """Run a collective on all leaves, one on each element type in the order of its first leaf; return the pytree."""
    arrays = [leaf for _, leaf in leaves]
    results: dict[int, Any] = {}
    for dtype in dict.fromkeys(each.dtype for each in arrays):
        places = [place for place, each in enumerate(arrays) if each.dtype == dtype]
        results |= zip(places, _joined(collective)([arrays[place] for place in places]), strict=True)
    return jax.tree_util.tree_unflatten(structure, [results[place] for place in range(len(arrays))])


def _joined(collective: Collective) -> Callable[[list[Any]], list[Any]]:
    return partial(_run_joined, collective=collective)


@partial(jax.jit, static_argnames="collective")
def _run_joined(arrays: list[Any], *, collective: Collective) -> list[Any]:
    """Run a collective on arrays of one element type, joined along the dimensions that belong to no rank."""
    if len(arrays) == 1:
        return [bind(collective, arrays[0])]
    lead = 1 if collective.kind in ("reduce_scatter", "alltoall") else 0
    shapes = [each.shape[lead:] for each in arrays]
    flat = [each.reshape(*each.shape[:lead], math.prod(shape)) for each, shape in zip(arrays, shapes, strict=True)]
    joined = bind(collective, jnp.concatenate(flat, axis=-1))
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1].tolist()
    parts = jnp.split(joined, ends, axis=-1)
    return [part.reshape(*joined.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
