"""Two-shot allreduce: a reduce_scatter followed by an allgather, each with compressed messages.

Three ranks, vector in shards A B C, ``c(x)`` a payload::

    shot 1   rank 0 sends c(B0) to 1, c(C0) to 2    ...    owner of A: A = c(A0) + c(A1) + c(A2), in rank order
    shot 2   the owners send c(A), c(B), c(C) to all; all ranks decode all three, the owner its own too

Each rank sends 2 (P-1)/P of the compressed vector; every element is compressed twice, whatever P. All ranks decode the
same bytes, so that all hold the same bits: an owner that kept its exact sum would drift away from the others. With an
unbiased compressor of relative variance w the variance of the sum is at most ``w (sum of |x_i|^2 + |sum|^2)``.

With error feedback, the error of either shot is kept in a residual and added to the next vector: that of x on every
rank, that of the sum on the owner of the shard. (Tang et al., "1-bit Adam", ICML 2021, section 5; Alistarh et al.,
"QSGD", NIPS 2017.)

The calls between the messages are instructions of the plan if the compressor has a codec; other compressors are called
from Python. The residuals of an :class:`~mpicoll.compression.ErrorFeedback` may be replaced between two operations, so
that each operation begins and ends in Python there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.collectives.compressed import Compression, plain
from mpicoll.collectives.plan_feedback import feedback_of
from mpicoll.kernels.codecs import residuals
from mpicoll.messages.calls import Allocate, Call, CallSequence, KernelCall, Memory, MovableVector
from mpicoll.messages.codec_calls import CompressedChunk, Decode, Encode, NextKeys
from mpicoll.messages.lowering import Message, Phase

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel

_VALUES = np.dtype(np.float32)


def shard_bounds(count: int, size: int, granularity: int) -> list[int]:
    """Return ``size + 1`` offsets of shards of `count` elements: multiples of `granularity`, as even as possible."""
    blocks = -(-count // granularity)
    return [min(count, blocks * rank // size * granularity) for rank in range(size + 1)]


class TwoShot:
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
        compression: Compression,
        x: np.ndarray,
        y: np.ndarray,
        allocate: Allocate,
        counter: np.ndarray | None = None,
    ) -> None:
        self._x, self._y = x, y
        self._feedback, self._compressor = feedback_of(compression), plain(compression)
        self._size, self._rank = channel.size, channel.rank
        bounds = shard_bounds(x.size, self._size, self._compressor.granularity)
        self._shards = list(pairwise(bounds))
        counts = [stop - start for start, stop in self._shards]
        self._outgoing = [CompressedChunk(self._compressor, count, allocate) for count in counts]
        self._incoming = [CompressedChunk(self._compressor, counts[self._rank], allocate) for _ in counts]
        self._results = [CompressedChunk(self._compressor, count, allocate) for count in counts]
        self._decoded = allocate(max(counts) if self._feedback else 0, _VALUES)
        self._keys = NextKeys(channel, counter)
        self._residual, self._result_residual = MovableVector(), MovableVector()

    def stages(self) -> tuple[Phase, ...]:
        """Return the phases of a plan: compress and exchange, reduce and send to all, decode."""
        others = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        first = [Message(False, peer, self._incoming[peer].memory) for peer in others]
        first += [Message(True, peer, self._outgoing[peer].outgoing()) for peer in others]
        second = [Message(False, peer, self._results[peer].memory) for peer in others]
        second += [Message(True, peer, self._results[self._rank].outgoing()) for peer in others]
        return (
            Phase(None, self._together(self._compress()), _without_empty(first)),
            Phase(0, self._together(self._reduce()), _without_empty(second)),
            Phase(1, self._together(self._decode()), None),
        )

    def _together(self, calls: Iterator[Call]) -> tuple[Call, ...]:
        """Return the calls, as one if the interpreter has to make them."""
        return tuple(calls) if self._compressor.codec is not None else (CallSequence(tuple(calls)),)

    def _compress(self) -> Iterator[Call]:
        yield self._keys
        if self._feedback is not None:
            yield KernelCall(self._begin, ())
            residual = self._residual.part(0, self._x.size)
            yield KernelCall(residuals.add(), (residual, residual, self._x), True)
        for owner, (start, stop) in enumerate(self._shards):
            target = (self._incoming if owner == self._rank else self._outgoing)[owner]
            if stop > start:
                given = self._x[start:stop] if self._feedback is None else self._residual.part(start, stop)
                yield from self._write(given, target, 0, start)

    def _begin(self) -> None:
        """Open the error feedback, whose residuals may be elsewhere than in the run before."""
        assert self._feedback is not None
        self._residual.move(self._feedback.open(self._x.size))
        start, stop = self._shards[self._rank]
        if stop > start:
            self._result_residual.move(self._feedback.open_result())

    def _write(self, given: Memory, target: CompressedChunk, shot: int, start: int) -> Iterator[Call]:
        """Write a payload; with error feedback, subtract what the other ranks decode from the residual `given`."""
        yield Encode(given, target, self._keys, shot, start)
        if self._feedback is not None:
            sent = self._decoded[: given.size]
            yield Decode(target, sent)
            yield KernelCall(residuals.subtract(), (given, given, sent), True)

    def _reduce(self) -> Iterator[Call]:
        start, stop = self._shards[self._rank]
        if stop == start:
            return
        own: Memory = self._y[start:stop]
        for rank, payload in enumerate(self._incoming):
            yield Decode(payload, self._y[start:stop], add=rank > 0)
        if self._feedback is not None:
            residual = self._result_residual.part(start, stop)
            yield KernelCall(residuals.add(), (residual, residual, own), True)
            own = residual
        yield from self._write(own, self._results[self._rank], 1, start)

    def _decode(self) -> Iterator[Call]:
        for payload, (start, stop) in zip(self._results, self._shards, strict=True):
            if stop > start:
                yield Decode(payload, self._y[start:stop])
        if self._feedback is not None:
            yield KernelCall(self._feedback.end, ())


def _without_empty(messages: list[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if callable(message.data) or message.data.size)
