"""Storage of parameters and gradients for sharded training: whole on every rank, or in chunks. See ``sharded``."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Piece, Whole
from mpicoll.kernels.codecs.cast_codec import WIDEN
from mpicoll.models.initial_parameters import InitialParameters
from mpicoll.models.layers import Arrays
from mpicoll.parallel.compressed_chunks import CompressedReduceScatter
from mpicoll.parallel.parameter_groups import ParameterGroups
from mpicoll.parallel.prefetch import GroupPrefetch

_MOST_UNDER_WAY = 2
"""Largest number of nonblocking Reduce_scatters in flight, each of which may need as much memory as its unit."""


class Parameters(Protocol):
    """Interface of the storage of parameters of which this rank updates its chunks.

    Attributes
    ----------
    own : list of arrays
        This rank's chunk of each unit.
    """

    own: list[np.ndarray]

    def arrays(self, layer: int) -> Arrays:
        """Return a layer's arrays; collective."""

    def before_update(self) -> None:
        """Prepare for an update of the chunks; collective."""

    def after_update(self) -> None:
        """Make updated chunks available on all ranks; collective."""

    def digest(self) -> bytes:
        """Return a digest of 32 bytes, which is equal on all ranks unless their parameters differ; collective."""

    def entry(self) -> Whole | list[Piece]:
        """Return the parameters as an entry of a checkpoint, to be saved or restored."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""


class Gradients(Protocol):
    """Interface of the storage of gradients, of which this rank gets the sums over the ranks for its chunks.

    Attributes
    ----------
    own : list of arrays
        This rank's chunk of each unit; sums over ranks after `finish`.
    """

    own: list[np.ndarray]

    def arrays(self, layer: int) -> Arrays:
        """Return arrays for a layer's gradients."""

    def complete(self, layer: int, *, last: bool) -> None:
        """Mark the layer's gradients as ready; `last` if they are complete for this step. Collective."""

    def finish(self) -> None:
        """Wait until all gradients are summed over the ranks; collective."""

    def forget(self) -> None:
        """Start a new step; collective if the gradients of this one are being reduced."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""


def pieces(division: ParameterGroups, chunks: list[np.ndarray]) -> list[Piece]:
    """Return this rank's chunk of every unit as a part of the flat vector."""
    return [Piece(chunk, own.start, division.count) for own, chunk in zip(division.own, chunks, strict=True)]


# ---- whole ----------------------------------------------------------------------------------------------------------


class WholeParameters:
    """Parameters held whole on every rank; an Allgatherv distributes updated chunks. Implements :class:`Parameters`."""

    def __init__(self, division: ParameterGroups, initial: InitialParameters) -> None:
        self._division, self._vector = division, division.zeros(division.count)
        initial.fill(0, self._vector)
        self._units = [self._vector[unit.start : unit.stop] for unit in division.units]
        self.own = [self._vector[own] for own in division.own]

    def arrays(self, layer: int) -> Arrays:
        """See :class:`Parameters`."""
        return self._division.views(layer, self._units[self._division.unit_of(layer)])

    def before_update(self) -> None:
        """See :class:`Parameters`."""

    def after_update(self) -> None:
        """See :class:`Parameters`."""
        division = self._division
        for number, (unit, data) in enumerate(zip(division.units, self._units, strict=True)):
            with division.meter.waiting(division.sent_nbytes(unit), number):
                division.comm.Allgatherv(MPI.IN_PLACE, [data, division.counts(unit)])

    def digest(self) -> bytes:
        """Return the SHA-256 of the flat vector."""
        return hashlib.sha256(self._vector.view(np.uint8).data).digest()

    def entry(self) -> Whole:
        """See :class:`Parameters`."""
        return Whole(self._vector)

    @property
    def nbytes(self) -> int:
        """See :class:`Parameters`."""
        return self._vector.nbytes


class WholeGradients:
    """Gradients held whole on every rank, reduced by Reduce_scatter in place; implements :class:`Gradients`.

    With `overlap` a unit is reduced while the gradients of lower layers are computed, otherwise at the step's end, as
    with `compressed` messages.
    """

    def __init__(
        self, division: ParameterGroups, *, overlap: bool, compressed: CompressedReduceScatter | None = None
    ) -> None:
        self._division, self._overlap, self._compressed = division, overlap and compressed is None, compressed
        self._vector = division.zeros(division.count)
        self._units = [self._vector[unit.start : unit.stop] for unit in division.units]
        # In place, the result stands where the unit begins, not where the chunk does.
        lengths = [own.stop - own.start for own in division.own]
        self.own = [data[:length] for data, length in zip(self._units, lengths, strict=True)]
        self._requests: list[MPI.Request] = []

    def arrays(self, layer: int) -> Arrays:
        """See :class:`Gradients`."""
        return self._division.views(layer, self._units[self._division.unit_of(layer)])

    def complete(self, layer: int, *, last: bool) -> None:
        """See :class:`Gradients`."""
        division = self._division
        number = division.unit_of(layer)
        if self._overlap and last and layer == division.units[number].layers[0]:
            with division.meter.waiting(division.sent_nbytes(division.units[number])):
                if len(self._requests) == _MOST_UNDER_WAY:
                    self._requests.pop(0).Wait()
                for request in self._requests:
                    request.Test()
                self._requests.append(self._start(number))

    def _start(self, number: int) -> MPI.Request:
        division, counts = self._division, self._division.counts(self._division.units[number])
        return division.comm.Ireduce_scatter(MPI.IN_PLACE, self._units[number], counts, MPI.SUM)

    def finish(self) -> None:
        """See :class:`Gradients`."""
        division = self._division
        if self._overlap:
            with division.meter.waiting():
                for request in self._requests:
                    request.Wait()
                self._requests.clear()
            return
        for number, (unit, data) in enumerate(zip(division.units, self._units, strict=True)):
            if self._compressed is not None and self._compressed.is_active:
                self._compressed.reduce(number, data, self.own[number])
                continue
            with division.meter.waiting(division.sent_nbytes(unit), number):
                division.comm.Reduce_scatter(MPI.IN_PLACE, data, division.counts(unit), MPI.SUM)

    def forget(self) -> None:
        """See :class:`Gradients`."""
        while self._requests:
            self._requests.pop(0).Wait()

    @property
    def nbytes(self) -> int:
        """See :class:`Gradients`."""
        return self._vector.nbytes


# ---- in chunks ------------------------------------------------------------------------------------------------------


class ChunkedParameters:
    """Parameters held in chunks, gathered unit by unit when they are used; implements :class:`Parameters`.

    With `ahead` the next unit is gathered into a second buffer while one is used.
    """

    def __init__(self, division: ParameterGroups, initial: InitialParameters, *, ahead: bool) -> None:
        self._division = division
        self._blocks = [division.zeros(unit.block) for unit in division.units]
        self.own = [block[: own.stop - own.start] for own, block in zip(division.own, self._blocks, strict=True)]
        for own, chunk in zip(division.own, self.own, strict=True):
            initial.fill(own.start, chunk)
        self._gathering = GroupPrefetch(division, self._blocks, min(2 if ahead else 1, len(self._blocks)))
        self._ahead, self._last_layer, self._previous = ahead, len(division.layout.bounds) - 2, 0
        self._completed = len(self._blocks)  # the backward pass has been through this unit and those above

    def arrays(self, layer: int) -> Arrays:
        """See :class:`Parameters`."""
        number = self._division.unit_of(layer)
        data = self._gathering.use(number)
        if self._ahead:
            self._prepare_after(layer, number)
        self._previous = layer
        return self._division.views(layer, data)

    def _prepare_after(self, layer: int, number: int) -> None:
        """Start to gather the unit that is used next.

        Layers fall one by one in a backward pass, which layer 0 ends. Where activations are computed again, passes
        forward through a few layers interrupt it, from a lower layer up to those that the backward pass has completed.
        """
        if layer > 0 and layer in (self._previous, self._previous - 1):
            self._completed = number
            self._gathering.prepare(number - 1)
            return
        if layer == self._previous == 0:  # the backward pass is over
            self._completed = len(self._blocks)
        if number + 1 < self._completed:
            self._gathering.prepare(number + 1)

    def before_update(self) -> None:
        """See :class:`Parameters`."""
        self._gathering.forget()

    def after_update(self) -> None:
        """See :class:`Parameters`."""

    def digest(self) -> bytes:
        """Return the SHA-256 of the flat vector, unit by unit."""
        whole = hashlib.sha256()
        for layer in range(self._last_layer + 1):
            for array in self.arrays(layer):
                whole.update(array.reshape(-1).view(np.uint8).data)
        return whole.digest()

    def entry(self) -> list[Piece]:
        """See :class:`Parameters`; invalidates gathered units, since a restore overwrites the chunks."""
        self._gathering.forget()
        return pieces(self._division, self.own)

    @property
    def nbytes(self) -> int:
        """See :class:`Parameters`."""
        return sum(block.nbytes for block in self._blocks) + self._gathering.nbytes


class ChunkedGradients:
    """Gradients in a buffer for one unit, reduced into this rank's chunks; implements :class:`Gradients`.

    A unit is reduced as soon as it is complete, for every part of the batch. This sends more than one reduction a step,
    but the sums over the parts need memory for the chunks only. Those of 16-bit gradients are kept in float32.
    """

    def __init__(self, division: ParameterGroups, compressed: CompressedReduceScatter | None = None) -> None:
        self._division, self._compressed = division, compressed
        self._buffer = division.zeros(max(map(division.padded, division.units)))
        make = partial(np.zeros, dtype=np.float32) if division.is_short else division.zeros
        self._blocks = [make(unit.block) for unit in division.units]
        self.own = [block[: own.stop - own.start] for own, block in zip(division.own, self._blocks, strict=True)]
        self._filled = [False] * len(self.own)

    def arrays(self, layer: int) -> Arrays:
        """See :class:`Gradients`; zeros after the first part of a batch, since the model adds to the arrays."""
        arrays = self._division.views(layer, self._buffer)
        if self._filled[self._division.unit_of(layer)]:
            for array in arrays:
                array[...] = 0
        return arrays

    def complete(self, layer: int, *, last: bool) -> None:
        """See :class:`Gradients`."""
        division, number = self._division, self._division.unit_of(layer)
        unit = division.units[number]
        if layer != unit.layers[0]:
            return
        buffer, sums = self._buffer[: division.padded(unit)], self._blocks[number]
        buffer[unit.length :] = 0
        into = np.empty(sums.size, division.dtype) if self._filled[number] or division.is_short else sums
        if self._compressed is not None and self._compressed.is_active:
            self._compressed.reduce(number, buffer, into)
        else:
            with division.meter.waiting(division.sent_nbytes(unit), number):
                division.comm.Reduce_scatter_block(buffer, into, MPI.SUM)
        if division.is_short:
            WIDEN[into.dtype.name](into.view(np.uint16), sums, self._filled[number])
        elif self._filled[number]:
            sums += into
        self._filled[number] = True

    def finish(self) -> None:
        """See :class:`Gradients`; nothing is left to do."""

    def forget(self) -> None:
        """See :class:`Gradients`."""
        self._filled = [False] * len(self.own)

    @property
    def nbytes(self) -> int:
        """See :class:`Gradients`."""
        return self._buffer.nbytes + sum(block.nbytes for block in self._blocks)
