"""Tensor parallelism: dense layers of which each rank has some columns or rows of the weights, and attention heads.

Dense layers form pairs. Of the first layer every rank has some columns, which give some complete outputs, so that ReLU
needs no communication. Of the second layer it has the rows for these outputs, which give a partial sum of every output.
One Allreduce sums them in the forward pass, and one in the backward pass sums the gradient of the pair's input::

    forward   x -> x @ W1[:, mine] + b1[mine] -> ReLU -> h @ W2[mine] -> ALLREDUCE -> + b2 -> ReLU
    backward  ALLREDUCE <- (.) @ W1[:, mine].T <- ReLU' <- (.) @ W2[mine].T <- ReLU' <- delta

A pair may have an activation or a dropout in between. Of an attention a rank has some of the heads: their queries, keys
and values are columns, their part of the output weights are rows.

A layer without a partner is replicated on every rank, and so are the second layer's bias and layers of other kinds,
such as convolutions, which have few parameters. All ranks apply the same operations to the same numbers, so that their
gradients are equal bit for bit, provided that the ranks' matrix products are (processors of one kind, one library).
Sums of gradients over replicas need not be: :mod:`mpicoll.parallel.common_arrays` makes them so, and with them the
parameters after any number of steps.

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
from mpicoll.models.layers import (
    Arrays,
    CausalSelfAttention,
    Dense,
    Dropout,
    Gelu,
    Layer,
    Relu,
    Residual,
    Shape,
    Workspace,
)
from mpicoll.schedules import chunk_bounds

Index = tuple[slice, ...]
_ALL: Index = (slice(None),)


class Divided(NamedTuple):
    """One rank's part of a layer.

    Attributes
    ----------
    layer
        The layer that the rank computes.
    cuts
        For each parameter array of the whole layer, the index of this rank's part.
    common
        For each parameter array, True if all ranks that share the layer have the same part.
    """

    layer: Layer
    cuts: tuple[Index, ...]
    common: tuple[bool, ...]


class _Sum:
    """Sum over the ranks that share a layer, and the time that it took."""

    _comm: MPI.Intracomm
    waited: float

    def _add_up(self, x: np.ndarray) -> None:
        began = time.perf_counter()
        self._comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
        self.waited += time.perf_counter() - began


class _Shared(_Sum):
    """Base of both kinds of divided layer: a smaller dense layer, and the communicator of the ranks with the rest."""

    def __init__(self, dense: Dense, comm: MPI.Intracomm) -> None:
        self._dense, self._comm, self.waited = dense, comm, 0.0
        self.shapes: tuple[Shape, ...] = dense.shapes
        self.decays: tuple[bool, ...] = dense.decays
        self.initials = dense.initials
        self.output: Shape = dense.output

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`~mpicoll.models.layers.Layer`."""
        return self._dense.forward(arrays, x, room)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`~mpicoll.models.layers.Layer`."""
        return self._dense.backward(arrays, delta, room, gradients, below=below, add=add)


class ColumnDense(_Shared):
    """Some of the columns of a dense layer: some outputs of all inputs; a :class:`~mpicoll.models.layers.Layer`.

    :meth:`backward` is collective over `comm` if the derivative with respect to `x` is wanted.
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
    """Some of the rows of a dense layer, and its bias: all outputs, from some inputs; a `Layer`.

    :meth:`forward` is collective over `comm`.
    """

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`~mpicoll.models.layers.Layer`."""
        out = self._dense.multiply(arrays, x, room)
        self._add_up(out)
        return self._dense.finish(arrays, out)


class HeadsOfAttention(_Sum, CausalSelfAttention):
    """Some of the heads of an attention, and its bias; a :class:`~mpicoll.models.layers.Layer`.

    Both passes are collective over `comm`, :meth:`backward` if the derivative with respect to `x` is wanted.
    """

    waited = 0.0

    def __init__(self, whole: CausalSelfAttention, own_heads: int, comm: MPI.Intracomm) -> None:
        context, width = whole.output
        super().__init__(context, width, whole.heads, own_heads=own_heads)
        self._comm = comm

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`~mpicoll.models.layers.Layer`."""
        out = self.mix(arrays, x, room)
        self._add_up(out)
        return np.add(out, arrays[3], out=out)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`~mpicoll.models.layers.Layer`."""
        into = super().backward(arrays, delta, room, gradients, below=below, add=add)
        if into is not None:
            self._add_up(into)
        return into


def divide(layers: Sequence[Layer], comm: MPI.Intracomm | None) -> list[Divided]:
    """Return this rank's part of each layer, which are divided in pairs.

    Parameters
    ----------
    layers
        The layers of the whole model.
    comm
        The ranks that share them; None does not divide them.

    Raises
    ------
    UsageError
        If a layer has fewer columns or heads than there are ranks, or there is nothing to divide.
    """
    if comm is None:
        return [_undivided(layer, common=False) for layer in layers]
    parts = _parts(layers, comm)
    if all(same for part in parts for same in part.common):
        raise UsageError(f"--tensor {comm.Get_size()} divides pairs of dense layers, and attention; the model has none")
    return parts


def _parts(layers: Sequence[Layer], comm: MPI.Intracomm) -> list[Divided]:
    """Return this rank's part of each layer: of blocks, attentions, and pairs with or without a layer in between."""
    found: list[Divided] = []
    while len(found) < len(layers):
        layer, rest = layers[len(found)], layers[len(found) + 1 :]
        between = rest[:1] if rest and _goes_between(rest[0]) else rest[:0]
        second = rest[len(between)] if len(rest) > len(between) else None
        if isinstance(layer, Residual):
            found.append(_block(layer, comm))
        elif isinstance(layer, CausalSelfAttention):
            found.append(_heads(layer, comm))
        elif isinstance(layer, Dense) and isinstance(second, Dense):
            found += _pair(layer, between, second, comm)
        else:
            found.append(_undivided(layer, common=True))
    return found


def _goes_between(layer: Layer) -> bool:
    """Return True for a layer that treats each element by itself, and may stand between the two layers of a pair."""
    return isinstance(layer, (Gelu, Relu)) or (isinstance(layer, Dropout) and len(layer.output) == 1)


def _part_of(layer: Layer, shape: Shape, first: int) -> Layer:
    """Return the part of a layer that :func:`_goes_between`, of `shape`, from the element `first` on."""
    if isinstance(layer, Dropout):
        return Dropout(shape, layer.rate, layer.stream, first)
    return Gelu(shape) if isinstance(layer, Gelu) else Relu(shape)


def _undivided(layer: Layer, *, common: bool) -> Divided:
    return Divided(layer, (_ALL,) * len(layer.shapes), (common,) * len(layer.shapes))


def _pair(first: Dense, between: Sequence[Layer], second: Dense, comm: MPI.Intracomm) -> list[Divided]:
    size, rank = comm.Get_size(), comm.Get_rank()
    (inputs, width), (_, outputs) = first.shapes[0], second.shapes[0]
    if width < size:
        raise UsageError(f"--tensor {size}: a layer of width {width} cannot be shared by {size} ranks")
    mine = slice(*chunk_bounds(width, size)[rank : rank + 2])
    count = mine.stop - mine.start
    positions, biases = first.output[:-1], (len(first.shapes) - 1, len(second.shapes) - 1)
    columns = Dense(inputs, count, relu=first.relu, bias=bool(biases[0]), positions=positions)
    rows = Dense(count, outputs, relu=second.relu, bias=bool(biases[1]), positions=positions)
    return [
        Divided(
            ColumnDense(columns, comm), ((slice(None), mine), (mine,))[: 1 + biases[0]], (False,) * (1 + biases[0])
        ),
        *(_undivided(_part_of(layer, columns.output, mine.start), common=True) for layer in between),
        Divided(RowDense(rows, comm), ((mine,), _ALL)[: 1 + biases[1]], (False, True)[: 1 + biases[1]]),
    ]


def _block(block: Residual, comm: MPI.Intracomm) -> Divided:
    """Return this rank's part of a residual block."""
    parts = _parts(block.layers, comm)
    cuts = tuple(cut for part in parts for cut in part.cuts)
    common = tuple(same for part in parts for same in part.common)
    return Divided(Residual([part.layer for part in parts]), cuts, common)


def _heads(attention: CausalSelfAttention, comm: MPI.Intracomm) -> Divided:
    size, rank = comm.Get_size(), comm.Get_rank()
    if attention.heads < size:
        raise UsageError(f"--tensor {size}: an attention with {attention.heads} heads cannot be shared by {size} ranks")
    mine = slice(*chunk_bounds(attention.heads, size)[rank : rank + 2])
    every = slice(None)
    cuts: tuple[Index, ...] = ((every, every, mine), (every, mine), (mine,), _ALL)
    return Divided(HeadsOfAttention(attention, mine.stop - mine.start, comm), cuts, (False, False, False, True))
