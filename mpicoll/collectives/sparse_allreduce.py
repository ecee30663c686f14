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

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.collectives.plan_feedback import PlanFeedback
from mpicoll.compression import Sparsifier
from mpicoll.kernels.codecs import residuals, sparse_codec
from mpicoll.kernels.codecs.codec_kernels import settings_of
from mpicoll.kernels.codecs.sparse_codec import Selector
from mpicoll.messages.calls import Allocate, Call, KernelCall, Memory, MovableVector
from mpicoll.messages.codec_calls import Decode, Encode, NextKeys
from mpicoll.messages.lowering import Message, Phase
from mpicoll.messages.sparse_memory import SelectedEntries, SparseEntries, SparsePayload
from mpicoll.schedules import chunk_bounds

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel

_MANY = 8
"""Entries are gathered by all ranks if all of them together have at most 1 / _MANY as many as there are elements."""


class SparseAllreduce:
    """One rank's memory for the operation, and its phases.

    Parameters
    ----------
    x, y : (count,) float32
        The input and the memory for the sum; may be the same.
    allocate
        ``allocate(count, dtype)`` returns working memory.
    counter
        See :class:`~mpicoll.messages.codec_calls.NextKeys`.
    """

    def __init__(
        self,
        channel: Channel,
        sparsifier: Sparsifier,
        feedback: PlanFeedback | None,
        x: np.ndarray,
        y: np.ndarray,
        allocate: Allocate,
        counter: np.ndarray | None = None,
    ) -> None:
        self._channel, self._feedback, self._allocate = channel, feedback, allocate
        self._x, self._y = x, y
        self._keys = NextKeys(channel, counter)
        self._residual = MovableVector()
        self._capacity = sparsifier.capacity(x.size)
        self._entries = SelectedEntries(sparsifier, x.size, allocate)

    def stages(self) -> tuple[Phase, ...]:
        """Return the phases of a plan."""
        size = self._channel.size
        few = size * self._capacity * _MANY <= self._x.size or size <= 2
        return self._gathered() if few else self._split()

    def _select(self) -> Iterator[Call]:
        """Number the operation and select the entries; with error feedback all other elements stay in the residual."""
        yield self._keys
        if self._feedback is None:
            yield self._encode(self._x, self._entries)
            return
        residual = self._residual.part(0, self._x.size)
        yield KernelCall(self._begin, ())
        yield KernelCall(residuals.add(), (residual, residual, self._x), True)
        yield self._encode(residual, self._entries)
        yield Decode(self._entries, residual, add=True)

    def _begin(self) -> None:
        """Open the error feedback, whose residual may be elsewhere than in the run before."""
        assert self._feedback is not None
        self._residual.move(self._feedback.open(self._x.size))

    def _end(self) -> Iterator[Call]:
        if self._feedback is not None:
            yield KernelCall(self._feedback.end, ())

    def _encode(self, x: Memory, target: SparseEntries | SparsePayload, first: int = 0) -> Encode:
        return Encode(x, target, self._keys, 0, first)

    def _gathered(self) -> tuple[Phase, ...]:
        channel, count = self._channel, self._x.size
        payloads = [self._payload(self._capacity, count) for _ in range(channel.size)]
        own = self._encode(self._entries.words, payloads[channel.rank])
        added = [Decode(payload, self._y, add=rank > 0) for rank, payload in enumerate(payloads)]
        return (
            Phase(None, (*self._select(), own), to_all(channel, payloads)),
            Phase(0, (*added, *self._end()), None),
        )

    def _split(self) -> tuple[Phase, ...]:
        channel, bounds = self._channel, chunk_bounds(self._y.size, self._channel.size)
        regions = list(pairwise(bounds))
        start, stop = regions[channel.rank]
        outgoing = [self._payload(self._capacity, end - begin) for begin, end in regions]
        incoming = [self._payload(self._capacity, stop - start) for _ in regions]
        incoming[channel.rank] = outgoing[channel.rank]
        results = [self._payload(channel.size * self._capacity, end - begin) for begin, end in regions]
        words = self._entries.words
        cut = [self._encode(words, each, begin) for each, (begin, _) in zip(outgoing, regions, strict=True)]
        result = [Decode(each, self._y[begin:end]) for each, (begin, end) in zip(results, regions, strict=True)]
        return (
            Phase(None, (*self._select(), *cut), exchanged(channel, outgoing, incoming)),
            Phase(0, self._add_up(incoming, results[channel.rank], self._y[start:stop]), to_all(channel, results)),
            Phase(1, (*result, *self._end()), None),
        )

    def _payload(self, most: int, length: int) -> SparsePayload:
        return SparsePayload(most, length, self._allocate)

    def _add_up(self, incoming: Sequence[SparsePayload], result: SparsePayload, region: np.ndarray) -> tuple[Call, ...]:
        """Add up this rank's region, in rank order, and encode what is not zero."""
        entries = SparseEntries(Selector(sparse_codec.not_zero, settings_of()), region.size, self._allocate)
        added = [Decode(payload, region, add=rank > 0) for rank, payload in enumerate(incoming)]
        return (*added, self._encode(region, entries), self._encode(entries.words, result))


def others_of(channel: Channel) -> list[int]:
    """Return the other ranks, starting with the next one, so that not all ranks send to the same one first."""
    return [(channel.rank + distance) % channel.size for distance in range(1, channel.size)]


def exchanged(
    channel: Channel, outgoing: Sequence[SparsePayload], incoming: Sequence[SparsePayload]
) -> tuple[Message, ...]:
    """Return the messages that send a payload to each other rank, and receive one from each."""
    receives = [Message(False, peer, incoming[peer].memory) for peer in others_of(channel)]
    return (*receives, *(Message(True, peer, outgoing[peer].outgoing()) for peer in others_of(channel)))


def to_all(channel: Channel, payloads: Sequence[SparsePayload]) -> tuple[Message, ...]:
    """Return the messages that exchange each rank's payload with all others."""
    return exchanged(channel, [payloads[channel.rank]] * channel.size, payloads)
