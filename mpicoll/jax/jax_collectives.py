"""Collectives on arrays of JAX and pytrees of them, for functions that JAX compiles and differentiates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

from mpicoll.buffers.reduction_ops import name_of, reducer_for
from mpicoll.collectives.call_context import AnyOp, check_root
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.jax.array_trees import Leaf, leaves_of, run
from mpicoll.jax.jax_communicators import Group, group_of
from mpicoll.jax.ordered_primitive import bind

_Compression = str | Compressor | ErrorFeedback | None


def allreduce(
    x: Any, op: AnyOp = MPI.SUM, *, comm: MPI.Intracomm | None = None, compression: _Compression = None
) -> Any:
    """Reduce arrays over all ranks; every rank gets the result, with equal bits.

    Parameters
    ----------
    x
        An array, a number, or a pytree of them; of the same shapes and dtypes on all ranks. Leaves of one dtype travel
        as one vector.
    op
        An operation of MPI, or of :func:`mpicoll.op`.
    comm
        An intracommunicator of mpi4py or mpicoll; by default ``MPI.COMM_WORLD``. The first call with a communicator
        duplicates it, which is collective.
    compression
        Compressor of the messages, as for :meth:`mpicoll.Intracomm.Allreduce`, for SUM of float32.

    Returns
    -------
    array or pytree
        Of the shapes and dtypes of `x`.

    Raises
    ------
    TypeError, ValueError, UnknownCompressor
        If an argument is wrong; the message names it. Raised while the function is traced.
    NotImplementedError
        If another operation than SUM is differentiated.
    jax.errors.JaxRuntimeError
        When a compiled function runs: with the text of the error of the collective, such as CollectiveTimeout. The
        exception itself is what :func:`last_error` returns.

    Notes
    -----
    The derivative of a SUM is that of the sum of all ranks' objectives: the gradients that the ranks get of its result
    are summed over the ranks, without compression.
    """
    leaves, structure = leaves_of(x)
    for leaf in leaves:
        _check_op(op, leaf)
    group = group_of(comm)
    if compression is not None:
        for leaf in leaves:
            _check_compression(compression, op, leaf, group)
    return run(group.collective("allreduce", op, 0, compression), leaves, structure)


def average_gradients(tree: Any, *, comm: MPI.Intracomm | None = None, compression: _Compression = None) -> Any:
    """Average gradients over all ranks; every rank gets the mean, with equal bits.

    Parameters
    ----------
    tree
        An array of real or complex numbers, or a pytree of them, such as the result of ``jax.grad``.
    comm, compression
        As in :func:`allreduce`.

    Returns
    -------
    array or pytree
        The sum over the ranks, divided by their number, of the shapes and dtypes of `tree`. Those of float16 are summed
        in float32, as their sum may be out of range.

    Raises
    ------
    TypeError
        If the elements of a leaf are integers or bools.
    TypeError, ValueError, UnknownCompressor, jax.errors.JaxRuntimeError
        As in :func:`allreduce`.
    """
    leaves, structure = leaves_of(tree)
    for name, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(f"tree{name[1:]}: elements of {leaf.dtype} have no mean of their own dtype")
    given = jax.tree.unflatten(structure, [leaf for _, leaf in leaves])
    total = allreduce(given if compression is not None else _widened(given), comm=comm, compression=compression)
    size = group_of(comm).size
    return jax.tree.map(lambda each, leaf: (each / size).astype(leaf.dtype), total, given)


def _widened(tree: Any) -> Any:
    """Return a pytree with its float16 arrays as float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float16 else leaf, tree)


def bcast(x: Any, root: int = 0, *, comm: MPI.Intracomm | None = None) -> Any:
    """Broadcast arrays: every rank gets those of `root`.

    Parameters
    ----------
    x
        An array, a number, or a pytree of them; of the same shapes and dtypes on all ranks.
    root
        The rank whose values are taken.
    comm
        As in :func:`allreduce`.

    Returns
    -------
    array or pytree
        Of the shapes and dtypes of `x`.

    Raises
    ------
    TypeError, ValueError, jax.errors.JaxRuntimeError
        As in :func:`allreduce`.

    Notes
    -----
    The gradients of the result are summed to the root; those of the other ranks' `x` are zero.
    """
    leaves, structure = leaves_of(x)
    group = group_of(comm)
    return run(group.collective("bcast", root=check_root(root, group.size)), leaves, structure)


def allgather(x: Any, *, comm: MPI.Intracomm | None = None) -> Any:
    """Gather arrays of all ranks on every rank.

    Parameters
    ----------
    x
        An array of shape (...), a number, or a pytree of them; of the same shapes and dtypes on all ranks.
    comm
        As in :func:`allreduce`.

    Returns
    -------
    array or pytree
        Arrays of shape (size, ...), in rank order.

    Raises
    ------
    TypeError, ValueError, jax.errors.JaxRuntimeError
        As in :func:`allreduce`.

    Notes
    -----
    The gradients of the result are summed over the ranks; each rank gets those of its own block.
    """
    leaves, structure = leaves_of(x)
    return run(group_of(comm).collective("allgather"), leaves, structure)


def reduce_scatter(x: Any, op: AnyOp = MPI.SUM, *, comm: MPI.Intracomm | None = None) -> Any:
    """Reduce arrays over all ranks and scatter the result: rank r gets its r-th block.

    Parameters
    ----------
    x
        An array of shape (size, ...), or a pytree of them; of the same shapes and dtypes on all ranks.
    op, comm
        As in :func:`allreduce`.

    Returns
    -------
    array or pytree
        Arrays of shape (...).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError
        As in :func:`allreduce`; ValueError also if the first dimension is not the number of ranks.

    Notes
    -----
    The gradients of a SUM's result are gathered from all ranks.
    """
    leaves, structure = leaves_of(x)
    group = group_of(comm)
    for leaf in leaves:
        _check_op(op, leaf)
        _check_blocks(leaf, group)
    return run(group.collective("reduce_scatter", op), leaves, structure)


def alltoall(x: Any, *, comm: MPI.Intracomm | None = None) -> Any:
    """Exchange blocks: rank r gets the r-th block of every rank.

    Parameters
    ----------
    x
        An array of shape (size, ...), or a pytree of them; of the same shapes and dtypes on all ranks.
    comm
        As in :func:`allreduce`.

    Returns
    -------
    array or pytree
        Arrays of shape (size, ...): the blocks in the order of the ranks that they come from.

    Raises
    ------
    TypeError, ValueError, jax.errors.JaxRuntimeError
        As in :func:`reduce_scatter`.

    Notes
    -----
    The gradients of the result are exchanged in the same way.
    """
    leaves, structure = leaves_of(x)
    group = group_of(comm)
    for leaf in leaves:
        _check_blocks(leaf, group)
    return run(group.collective("alltoall"), leaves, structure)


def barrier(*, comm: MPI.Intracomm | None = None) -> None:
    """Let no rank run the collectives that follow before every rank has come here.

    In a compiled function other work than collectives is not ordered by it.

    Parameters
    ----------
    comm
        As in :func:`allreduce`.
    """
    bind(group_of(comm).collective("barrier"))


def _check_op(op: AnyOp, leaf: Leaf) -> None:
    """Raise TypeError if `op` is no operation, or not defined on the elements of a leaf."""
    name, array = leaf
    dtype = np.dtype(array.dtype)
    if reducer_for(op, dtype) is not None:
        return
    if name_of(op) is not None or (isinstance(op, MPI.Op) and op.is_predefined):
        raise TypeError(f"{name}: op {name_of(op) or repr(op)} is not defined on elements of {dtype}")
    if dtype.kind == "V" or dtype == np.float16:
        raise TypeError(f"{name}: MPI has no elements of {dtype}, which operations of MPI.Op.Create need")


def _check_compression(compression: _Compression, op: AnyOp, leaf: Leaf, group: Group) -> None:
    name, array = leaf
    if array.dtype != np.float32:
        raise TypeError(f"compression: {compression!r} is for float32, but {name} is {array.dtype}")
    assert group.comm is not None
    if name_of(op) != "SUM":
        raise ValueError(f"compression: {compression!r} is for SUM, not {name_of(op) or repr(op)}")
    if not isinstance(compression, ErrorFeedback):
        group.comm.choice("allreduce", array.size * 4, compression=compression)


def _check_blocks(leaf: Leaf, group: Group) -> None:
    name, array = leaf
    if array.ndim == 0 or array.shape[0] != group.size:
        raise ValueError(f"{name}: of shape {array.shape}, but the first dimension must be the {group.size} ranks")
