"""Layers that several ranks share, each with some of the columns or rows of the weights.

Dense layers go in pairs: of the first every rank has some columns, which give it some of the outputs, whole, so that
ReLU needs nobody else; of the second it has the rows that take these, which give it a part of every output's sum. One
Allreduce adds them up on the way forward, and one on the way back, of the derivative that leaves the pair below::

    forward   x -> x @ W1[:, mine] + b1[mine] -> ReLU -> h @ W2[mine] -> ALLREDUCE -> + b2 -> ReLU
    backward  ALLREDUCE <- (.) @ W1[:, mine].T <- ReLU' <- (.) @ W2[mine].T <- ReLU' <- delta

A last layer that finds no partner is held whole by every rank, and so is the second layer's bias: the same numbers go
through the same operations everywhere, so that gradients, and after any number of steps parameters, are equal bit for
bit, provided that the ranks' matrix products are (processors of one kind, one library).

(Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism", 2019,
section 3.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.errors import UsageError
from mpicoll.models.layers import Arrays, Dense, Layer, Shape, Workspace
from mpicoll.schedules import chunk_bounds

Index = tuple[slice, ...]
_ALL: Index = (slice(None),)


class Divided(NamedTuple):
    """One rank's share of a layer.

    Attributes
    ----------
    layer
        What the rank computes.
    cuts
        For each parameter array of the whole layer, what this rank holds of it.
    common
        For each, whether all ranks that share the layer hold the same of it.
    """

    layer: Layer
    cuts: tuple[Index, ...]
    common: tuple[bool, ...]


class _Shared:
    """Base of both kinds of sharded layer: a smaller dense layer, and the others that have the rest."""

    def __init__(self, dense: Dense, comm: MPI.Intracomm) -> None:
        self._dense, self._comm, self.waited = dense, comm, 0.0
        self.shapes: tuple[Shape, ...] = dense.shapes
        self.decays: tuple[bool, ...] = dense.decays
        self.output: Shape = dense.output

    def initial(self, random: np.random.Generator, arrays: Arrays) -> None:
        """Refuse: a share's parameters are cut out of those of the whole layer."""
        raise NotImplementedError("the parameters of a shared layer are cut out of those of the whole layer")

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`~mpicoll.models.layers.Layer`."""
        return self._dense.forward(arrays, x, room)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`~mpicoll.models.layers.Layer`."""
        return self._dense.backward(arrays, delta, room, gradients, below=below, add=add)

    def _add_up(self, x: np.ndarray) -> None:
        began = time.perf_counter()
        self._comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
        self.waited += time.perf_counter() - began


class ColumnDense(_Shared):
    """Some of the columns of a dense layer: some outputs of all inputs; a :class:`~mpicoll.models.layers.Layer`.

    Collective over `comm`: `backward`, where the derivative with respect to `x` is wanted.
    """

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`~mpicoll.models.layers.Layer`."""
        into = super().backward(arrays, delta, room, gradients, below=below, add=add)
        if into is not None:
            self._add_up(into)
        return into


class RowDense(_Shared):
    """Some of the rows of a dense layer, and its bias: all outputs, of some inputs each; a `Layer`.

    Collective over `comm`: `forward`.
    """

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`~mpicoll.models.layers.Layer`."""
        out = self._dense.multiply(arrays, x, room)
        self._add_up(out)
        return self._dense.finish(arrays, out)


def divide(layers: Sequence[Layer], comm: MPI.Intracomm | None) -> list[Divided]:
    """Return this rank's share of each layer, a pair after the other.

    Parameters
    ----------
    layers
        Of the whole model; all dense, unless `comm` is None.
    comm
        The ranks that share them; None leaves them as they are.

    Raises
    ------
    UsageError
        If a width is too small to give each rank some of it, or a layer is of another kind.
    """
    if comm is None:
        return [_undivided(layer, common=False) for layer in layers]
    found: list[Divided] = []
    for first, second in zip(layers[::2], layers[1::2], strict=False):
        found += _pair(first, second, comm)
    return found + [_undivided(layer, common=True) for layer in layers[len(found) :]]


def _undivided(layer: Layer, *, common: bool) -> Divided:
    return Divided(layer, (_ALL,) * len(layer.shapes), (common,) * len(layer.shapes))


def _pair(first: Layer, second: Layer, comm: MPI.Intracomm) -> list[Divided]:
    size, rank = comm.Get_size(), comm.Get_rank()
    if not isinstance(first, Dense) or not isinstance(second, Dense):
        raise UsageError(f"--tensor {size} can share dense layers only")
    (inputs, width), (_, outputs) = first.shapes[0], second.shapes[0]
    if width < size:
        raise UsageError(f"--tensor {size}: a layer of width {width} cannot be shared by {size} ranks")
    mine = slice(*chunk_bounds(width, size)[rank : rank + 2])
    count = mine.stop - mine.start
    columns = ColumnDense(Dense(inputs, count, relu=first.relu), comm)
    rows = RowDense(Dense(count, outputs, relu=second.relu), comm)
    return [
        Divided(columns, ((slice(None), mine), (mine,)), (False, False)),
        Divided(rows, ((mine,), _ALL), (False, True)),
    ]
