"""Division of a flat parameter vector among ranks: groups (*units*) of whole layers, a chunk for each rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm, tracing
from mpicoll.models.sequential import ParameterLayout
from mpicoll.parallel.strategy import CommunicationStatistics


class ParameterGroup(NamedTuple):
    """A parameter group: layers whose parameters are communicated together, elements ``start`` to ``stop - 1``.

    Each rank owns a chunk of `block` elements, the last ranks perhaps fewer. Blocks of equal length allow Allgather and
    Reduce_scatter_block in place of calls with counts, at the cost of at most ``size - 1`` more elements in a buffer.
    """

    layers: range
    start: int
    stop: int
    block: int

    @property
    def length(self) -> int:
        """Elements of the unit."""
        return self.stop - self.start

    def chunk(self, rank: int) -> slice:
        """Return the elements of the flat vector that belong to `rank`; the last ranks may have none."""
        return slice(*(min(self.start + number * self.block, self.stop) for number in (rank, rank + 1)))


def cut(bounds: Sequence[int], least: int, size: int) -> list[ParameterGroup]:
    """Return units of consecutive layers; all but the last have at least `least` elements.

    Parameters
    ----------
    bounds
        The first element of each layer, and the length of the vector.
    size
        Number of ranks that share each unit.
    """
    units, first = [], 0
    for after in range(1, len(bounds)):
        count = bounds[after] - bounds[first]
        # Layers without parameters at the end belong to the unit before them.
        if (count >= least and bounds[after] < bounds[-1]) or after == len(bounds) - 1:
            units.append(ParameterGroup(range(first, after), bounds[first], bounds[after], -(-count // size)))
            first = after
    return units


class Meter:
    """Counter of bytes sent and of communication time."""

    def __init__(self) -> None:
        self._sent, self._under_way, self._waited = 0.0, 0.0, 0.0

    @contextmanager
    def waiting(self, sent: float = 0.0, unit: int = -1) -> Iterator[None]:
        """Count the time of the ``with`` body as waiting, and `sent` bytes; with `unit`, record a span in the trace."""
        began = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            passed = end - began
            if unit >= 0:
                tracing.note("bucket", began, end, unit)
            self._waited += passed
            self._under_way += passed
            self._sent += sent

    def beside(self, since: float, unit: int) -> None:
        """Count the time from `since` to now, in which a unit was communicated during computation."""
        now = time.perf_counter()
        self._under_way += now - since
        tracing.note("bucket", since, now, unit)

    def traffic(self, dense: float) -> CommunicationStatistics:
        """Return the statistics; `dense` are the bytes of plain allreduces."""
        return CommunicationStatistics(self._sent, dense, self._under_way, self._waited)


class FlatVector(Protocol):
    """Description of a flat vector of parameters; a :class:`~mpicoll.models.sequential.Model` is one."""

    @property
    def layout(self) -> ParameterLayout:
        """Offsets of each layer's arrays."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""

    @property
    def parameter_count(self) -> int:
        """Number of elements."""


class ParameterGroups:
    """Ownership of a model's flat vector by ranks.

    Attributes
    ----------
    units : list of ParameterGroup
    own : list of slice
        This rank's chunk of each unit, in the flat vector.
    dtype : np.dtype
        Type of the elements that travel; the model's unless another one is given.
    """

    def __init__(
        self, model: FlatVector, comm: MPI.Intracomm, bucket_bytes: int, dtype: np.dtype | None = None
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        self.layout, self.dtype, self.count = model.layout, dtype or model.dtype, model.parameter_count
        self.units = cut(model.layout.bounds, max(1, bucket_bytes // self.dtype.itemsize), self.size)
        self.own = [unit.chunk(self.rank) for unit in self.units]
        self._unit_of = [number for number, unit in enumerate(self.units) for _ in unit.layers]
        self.meter = Meter()

    def unit_of(self, layer: int) -> int:
        """Return the number of a layer's unit."""
        return self._unit_of[layer]

    def counts(self, unit: ParameterGroup) -> list[int]:
        """Return the number of elements of a unit that each rank owns."""
        chunks = [unit.chunk(rank) for rank in range(self.size)]
        return [chunk.stop - chunk.start for chunk in chunks]

    def padded(self, unit: ParameterGroup) -> int:
        """Return the length of a unit padded to whole blocks."""
        return unit.block * self.size

    def views(self, layer: int, data: np.ndarray) -> list[np.ndarray]:
        """Return a layer's arrays as views of `data`, which has its unit's elements."""
        bounds, start = self.layout.bounds, self.units[self._unit_of[layer]].start
        return self.layout.views(layer, data[bounds[layer] - start : bounds[layer + 1] - start])

    @property
    def is_short(self) -> bool:
        """True if elements have 16 bits; sums of several reductions are then kept in float32."""
        return self.dtype.itemsize == 2

    def zeros(self, count: int) -> np.ndarray:
        """Return a new vector of zeros, in shared memory if possible."""
        return self.comm.zeros(count, self.dtype) if isinstance(self.comm, Intracomm) else np.zeros(count, self.dtype)

    def sent_nbytes(self, unit: ParameterGroup) -> int:
        """Return the bytes that a rank sends in an allgather or reduce_scatter of a unit."""
        return (self.size - 1) * unit.block * self.dtype.itemsize
