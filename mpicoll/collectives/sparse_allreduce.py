"""Sparse allreduce: the sum of the entries that a sparsifier selects on each rank.

The sparse vectors are added in rank order, exactly but for rounding, and the sum is equal on all ranks. If all ranks
together have few entries, each rank sends all of its entries to all others::

    gathered   each rank sends its entries to all others, and adds up all of them

Otherwise each rank adds up one region of the vector and sends the sum to all, as entries or, if that is shorter, as a
dense vector::

    split      shot 1   rank 0 sends its entries in region B to 1, in C to 2     ...     owner of A adds up A
               shot 2   the owners send their sums to all

With k entries a rank and P ranks the first moves (P-1) k entries a rank; the second (P-1)/P (k + union), at most
(P-1)/P (k + n). (Renggli et al., "SparCML", SC19, section 5.3: split allgather.) With
:class:`~mpicoll.compression.ErrorFeedback` what was not sent stays in the residual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.collectives.composite import CompositePlan
from mpicoll.compression import ErrorFeedback, Key, Sparsifier
from mpicoll.errors import CorruptPayload
from mpicoll.kernels.codecs import sparse_encoding, sparse_vectors
from mpicoll.messages.lowering import Message, Phase
from mpicoll.schedules import chunk_bounds

if TYPE_CHECKING:
    from mpicoll.collectives.composite import Allocate
    from mpicoll.communicator.channel import Channel

_BYTES = np.dtype(np.uint8)
_MANY = 8
"""Entries are gathered by all ranks if all of them together have at most 1 / _MANY as many as there are elements."""


class Selection:
    """One rank's entries, `capacity` at most, selected from `x`, or from `x` plus the residual.

    Attributes
    ----------
    indices, values
        The entries, in increasing order of indices.
    """

    def __init__(
        self, channel: Channel, feedback: ErrorFeedback | None, x: np.ndarray, capacity: int, allocate: Allocate
    ) -> None:
        self.channel, self.feedback, self._x, self.capacity = channel, feedback, x, capacity
        self._indices = allocate(self.capacity, np.dtype(np.uint32))
        self._values = allocate(self.capacity, np.dtype(np.float32))
        self._found = 0

    @property
    def indices(self) -> np.ndarray:
        """See the class."""
        return self._indices[: self._found]

    @property
    def values(self) -> np.ndarray:
        """See the class."""
        return self._values[: self._found]

    def compensated(self) -> np.ndarray:
        """Number the operation and return the vector to select from; to be called once in each operation."""
        self.channel.compressed += 1
        return self._x if self.feedback is None else self.feedback.begin(self._x)

    def take(self, x: np.ndarray, select: Callable[..., int]) -> None:
        """Fill `indices` and `values` by ``select(x, key, indices, values)``, which returns the number of entries."""
        key = Key(0, self.channel.identity, self.channel.compressed, 0)
        self._found = select(x, key, self._indices, self._values)

    def run(self, select: Callable[..., int]) -> None:
        """Select the entries; all other elements remain in the residual."""
        x = self.compensated()
        self.take(x, select)
        if self.feedback is not None:
            sparse_vectors.take_out(x, self.indices)

    def end(self) -> None:
        """Release the error feedback, since the operation is complete."""
        if self.feedback is not None:
            self.feedback.end()


class SparsePayload:
    """Memory for one payload of sparse entries, to be sent or received."""

    def __init__(self, most: int, length: int, allocate: Allocate) -> None:
        self._memory = allocate(sparse_encoding.wire_nbytes(min(most, length), length), _BYTES)
        self._nbytes = 0

    def encode(self, indices: np.ndarray, values: np.ndarray, first: int, length: int) -> None:
        """Write the entries of elements ``first`` to ``first + length - 1``."""
        self._nbytes = sparse_encoding.encode(indices, values, first, length, self._memory)

    def outgoing(self) -> np.ndarray:
        """Return the payload that was written."""
        return self._memory[: self._nbytes]

    def incoming(self) -> np.ndarray:
        """Return the memory to receive into."""
        return self._memory

    def decode(self, out: np.ndarray, *, add: bool) -> int:
        """Write the received entries to `out`, or add them; return the number of entries.

        Raises
        ------
        CorruptPayload
            If the payload cannot be one for ``out.size`` elements; `out` is then unchanged.
        """
        if sparse_encoding.length_of(self._memory, out.size) < 0:
            raise CorruptPayload(f"sparse payload for {out.size} elements: its counts or indices are invalid")
        return int(sparse_encoding.decode(self._memory, out, add))


def stages(
    channel: Channel,
    sparsifier: Sparsifier,
    feedback: ErrorFeedback | None,
    x: np.ndarray,
    y: np.ndarray,
    allocate: Allocate,
) -> tuple[Phase, ...]:
    """Return the phases of a plan that writes the sum of the selected entries of float32 `x` to `y`, maybe `x`."""
    selection = Selection(channel, feedback, x, sparsifier.capacity(x.size), allocate)
    select = partial(selection.run, sparsifier.select)
    few = channel.size * selection.capacity * _MANY <= x.size or channel.size <= 2
    return (_gathered if few else _split)(selection, select, y, allocate)


def others_of(channel: Channel) -> list[int]:
    """Return the other ranks, starting with the next one, so that not all ranks send to the same one first."""
    return [(channel.rank + distance) % channel.size for distance in range(1, channel.size)]


def _gathered(selection: Selection, select: Callable[[], None], y: np.ndarray, allocate: Allocate) -> tuple[Phase, ...]:
    channel, count = selection.channel, y.size
    payloads = [SparsePayload(selection.capacity, count, allocate) for _ in range(channel.size)]
    own = payloads[channel.rank]

    def begin() -> None:
        select()
        own.encode(selection.indices, selection.values, 0, count)

    def end() -> None:
        for rank, payload in enumerate(payloads):
            payload.decode(y, add=rank > 0)
        selection.end()

    program = CompositePlan()
    program.exchange(to_all(channel, own, payloads), begin)
    program.call(end)
    return program.stages()


def to_all(channel: Channel, own: SparsePayload, payloads: list[SparsePayload]) -> list[Message]:
    """Return the messages that exchange each rank's payload with all others."""
    receives = [Message(False, peer, payloads[peer].incoming()) for peer in others_of(channel)]
    return receives + [Message(True, peer, own.outgoing) for peer in others_of(channel)]


class Regions:
    """The first exchange: each rank's entries are sent to the owners of their regions, which add them up.

    `bounds` has the first element of each region, and the number of elements; it may change between operations.
    """

    def __init__(self, selection: Selection, bounds: np.ndarray, allocate: Allocate, longest: int) -> None:
        channel = selection.channel
        self.selection, self.bounds, self._rank = selection, bounds, channel.rank
        self._outgoing = [SparsePayload(selection.capacity, longest, allocate) for _ in range(channel.size)]
        self._incoming = [SparsePayload(selection.capacity, longest, allocate) for _ in range(channel.size)]
        self._incoming[channel.rank] = self._outgoing[channel.rank]

    def own(self) -> slice:
        """Return this rank's region."""
        return self.of(self._rank)

    def of(self, rank: int) -> slice:
        """Return the region of a rank."""
        return slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))

    def messages(self) -> list[Message]:
        """Return the messages to be exchanged after :meth:`encode`."""
        others = others_of(self.selection.channel)
        receives = [Message(False, peer, self._incoming[peer].incoming()) for peer in others]
        return receives + [Message(True, peer, self._outgoing[peer].outgoing) for peer in others]

    def encode(self) -> None:
        """Encode the entries of each region."""
        indices, values = self.selection.indices, self.selection.values
        cuts = np.searchsorted(indices, self.bounds.astype(np.uint32))
        for rank, payload in enumerate(self._outgoing):
            part, region = slice(cuts[rank], cuts[rank + 1]), self.of(rank)
            payload.encode(indices[part], values[part], region.start, region.stop - region.start)

    def add_up(self, out: np.ndarray) -> None:
        """Add up this rank's region, in rank order, in `out`."""
        for rank, payload in enumerate(self._incoming):
            payload.decode(out, add=rank > 0)


def _split(selection: Selection, select: Callable[[], None], y: np.ndarray, allocate: Allocate) -> tuple[Phase, ...]:
    channel = selection.channel
    bounds = np.array(chunk_bounds(y.size, channel.size), np.int64)
    lengths = [int(length) for length in np.diff(bounds)]
    regions = Regions(selection, bounds, allocate, max(lengths))
    most = selection.capacity * channel.size
    results = [SparsePayload(most, length, allocate) for length in lengths]
    own, region, room = results[channel.rank], regions.own(), max(lengths)
    indices, values = allocate(room, np.dtype(np.uint32)), allocate(room, np.dtype(np.float32))
    sparse_vectors.compact(y[:0], indices, values)  # compiles it if that is needed, while no rank waits for another

    def middle() -> None:
        regions.add_up(y[region])
        found = sparse_vectors.compact(y[region], indices, values)
        own.encode(indices[:found], values[:found], 0, region.stop - region.start)

    program = CompositePlan()
    program.exchange(regions.messages(), select, regions.encode)
    program.exchange(to_all(channel, own, results), middle)
    program.call(*(partial(result.decode, y[regions.of(rank)], add=False) for rank, result in enumerate(results)))
    program.call(selection.end)
    return program.stages()
