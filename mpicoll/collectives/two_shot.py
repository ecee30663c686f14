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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.compression import Compressor, ErrorFeedback, Key
from mpicoll.errors import CorruptPayload
from mpicoll.messages.lowering import KernelCall, Message, Phase

if TYPE_CHECKING:
    from mpicoll.collectives.composite import Allocate
    from mpicoll.communicator.channel import Channel

_ALIGNMENT = 64
_HEAD_NBYTES = 8
_CODES = np.dtype(np.uint8)
_VALUES = np.dtype(np.float32)


def shard_bounds(count: int, size: int, granularity: int) -> list[int]:
    """Return ``size + 1`` offsets of shards of `count` elements: multiples of `granularity`, as even as possible."""
    blocks = -(-count // granularity)
    return [min(count, blocks * rank // size * granularity) for rank in range(size + 1)]


class CompressedChunk:
    """Memory for the payload of `count` elements, to be sent or received.

    If the length of the payload depends on the elements, 8 bytes with the length precede it.
    """

    def __init__(self, compressor: Compressor, count: int, allocate: Allocate) -> None:
        self._compressor, self._head = compressor, 0 if compressor.fixed else _HEAD_NBYTES
        nbytes = (self._head + compressor.wire_nbytes(count)) if count else 0
        # Each on cache lines of its own.
        self.memory = allocate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, _CODES)[:nbytes]

    def compress(self, x: np.ndarray, key: Key) -> None:
        """Write the payload of `x`."""
        nbytes = self._compressor.compress(x, self.memory[self._head :], key)
        if self._head:
            self.memory[: self._head].view(np.int64)[0] = nbytes

    def decompress(self, out: np.ndarray, *, add: bool = False) -> None:
        """Decode the payload to `out`, or add it to `out`.

        Raises
        ------
        CorruptPayload
            If the payload cannot be one of ``out.size`` elements.
        """
        body = self._written()[self._head :]
        (self._compressor.decompress_add if add else self._compressor.decompress)(body, out)

    def outgoing(self) -> np.ndarray | Callable[[], np.ndarray]:
        """Return the bytes to send or, if the length varies, a function that returns them once it is known."""
        return self._written if self._head and self.memory.size else self.memory

    def _written(self) -> np.ndarray:
        if self._head == 0:
            return self.memory
        nbytes = int(self.memory[: self._head].view(np.int64)[0])
        if not 0 <= nbytes <= self.memory.size - self._head:
            raise CorruptPayload(f"payload of at most {self.memory.size - self._head} bytes: its head says {nbytes}")
        return self.memory[: self._head + nbytes]


class TwoShot:
    """One rank's memory for the operation, and its phases.

    Parameters
    ----------
    x, y : (count,) float32
        The input and the memory for the sum; may be the same.
    allocate
        ``allocate(count, dtype)`` returns working memory.
    """

    def __init__(
        self,
        channel: Channel,
        compression: Compressor | ErrorFeedback,
        x: np.ndarray,
        y: np.ndarray,
        allocate: Allocate,
    ) -> None:
        self._channel, self._x, self._y = channel, x, y
        self._feedback = compression if isinstance(compression, ErrorFeedback) else None
        compressor = compression.compressor if isinstance(compression, ErrorFeedback) else compression
        self._size, self._rank = channel.size, channel.rank
        self._bounds = shard_bounds(x.size, self._size, compressor.granularity)
        counts = [stop - start for start, stop in self._shards()]
        self._outgoing = [CompressedChunk(compressor, count, allocate) for count in counts]
        self._incoming = [CompressedChunk(compressor, counts[self._rank], allocate) for _ in counts]
        self._results = [CompressedChunk(compressor, count, allocate) for count in counts]
        self._decoded = allocate(max(counts) if self._feedback else 0, _VALUES)
        self._step = 0

    def _shards(self) -> list[tuple[int, int]]:
        return list(zip(self._bounds, self._bounds[1:], strict=False))

    def stages(self) -> tuple[Phase, ...]:
        """Return the phases of a plan: compress and exchange, reduce and send to all, decode."""
        others = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        first = [Message(False, peer, self._incoming[peer].memory) for peer in others]
        first += [Message(True, peer, self._outgoing[peer].outgoing()) for peer in others]
        second = [Message(False, peer, self._results[peer].memory) for peer in others]
        second += [Message(True, peer, self._results[self._rank].outgoing()) for peer in others]
        return (
            Phase(None, (KernelCall(self._compress, ()),), _without_empty(first)),
            Phase(0, (KernelCall(self._reduce, ()),), _without_empty(second)),
            Phase(1, (KernelCall(self._decode, ()),), None),
        )

    def _key(self, shot: int, start: int) -> Key:
        return Key(0, self._channel.identity, 2 * self._step + shot, start)

    def _compress(self) -> None:
        self._channel.compressed += 1
        self._step = self._channel.compressed
        feedback = self._feedback
        given = self._x if feedback is None else feedback.begin(self._x)
        for owner, (start, stop) in enumerate(self._shards()):
            target = (self._incoming if owner == self._rank else self._outgoing)[owner]
            if stop == start:
                continue
            target.compress(given[start:stop], self._key(0, start))
            if feedback is not None:
                feedback.update(self._decode_own(target, stop - start), start)

    def _decode_own(self, payload: CompressedChunk, count: int) -> np.ndarray:
        """Return a payload of this rank as the other ranks decode it."""
        decoded = self._decoded[:count]
        payload.decompress(decoded)
        return decoded

    def _reduce(self) -> None:
        start, stop = self._shards()[self._rank]
        if stop == start:
            return
        own = self._y[start:stop]
        for rank, payload in enumerate(self._incoming):
            payload.decompress(own, add=rank > 0)
        feedback, result = self._feedback, self._results[self._rank]
        compensated = own if feedback is None else feedback.compensate_result(own, start)
        result.compress(compensated, self._key(1, start))
        if feedback is not None:
            feedback.update_result(self._decode_own(result, own.size), start)

    def _decode(self) -> None:
        for payload, (start, stop) in zip(self._results, self._shards(), strict=True):
            if stop > start:
                payload.decompress(self._y[start:stop])
        if self._feedback is not None:
            self._feedback.end()


def _without_empty(messages: list[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if callable(message.data) or message.data.size)
