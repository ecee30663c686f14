"""Compressed pulls: a server publishes compressed deltas of its parameters, and workers keep replicas by them.

The server holds its own parameters x and the published ones y. A delta is the compressed difference x - y. The server
adds the decoded delta to y, and so does every worker to its replica, with equal bits. What a delta lacks stays in the
difference, which is the residual of error feedback: there is one for all workers, and rounding in y is in it as well.
(Tang et al., "DoubleSqueeze", ICML 2019, for error feedback on both sides; Gruntkowska et al., "EF21-P and friends",
ICML 2023, for the difference to what the workers hold.)

Deltas lie in a ring of slots, each a header and a payload. A worker that is further behind than the ring reaches, or
for which the missing deltas are longer than the parameters, asks for y as a whole and gets it as a message. At the
start it does not need to if its own initial parameters are those of the server, by a digest. At the end the server
shows x itself.
"""

from __future__ import annotations

import hashlib

import numpy as np

from mpicoll.compression import Compressor, Key
from mpicoll.errors import CorruptPayload
from mpicoll.kernels import optimizer_updates
from mpicoll.parameter_server.remote_memory import Region, word_at
from mpicoll.parameter_server.shard_memory import (
    HEADER_NBYTES,
    HEADER_WORDS,
    Places,
    ShardHeader,
    codec_of,
    opened,
)

_WHOLE = 0
"""Codec of a message with all published parameters; that of a delta is never 0."""


class DeltaPublisher:
    """Published parameters of a server's shard, and the deltas that lead to them.

    Parameters
    ----------
    compressor
        Compressor of the shard's deltas.
    bounds
        Index of the shard's first element and of the one after its last.
    published : (count,) float32
        The published parameters at the start; updated in place.
    version
        Their version.

    Attributes
    ----------
    published : (count,) float32
        The parameters that workers hold after all deltas so far.
    """

    def __init__(
        self,
        region: Region,
        places: Places,
        compressor: Compressor,
        bounds: tuple[int, int],
        published: np.ndarray,
        version: int,
    ) -> None:
        self._region, self._places, self._compressor, self._start = region, places, compressor, bounds[0]
        self._codec = codec_of(compressor, *bounds)
        self.published, self._version, self._number = published, version, 0
        self._scratch = np.zeros_like(published)
        self._message = np.zeros(places.delta_nbytes // 8, np.int64)
        base = region.local[places.base :][: 8 * Places.BASE_WORDS].view(np.int64)
        base[:] = _base(published, version)
        self._encode(self._scratch)  # compiles the kernels before other ranks wait for this one

    @property
    def nbytes(self) -> int:
        """Bytes of the published parameters and of memory for a delta."""
        return self.published.nbytes + self._scratch.nbytes + self._message.nbytes

    def _encode(self, difference: np.ndarray) -> np.ndarray:
        """Compress a difference into the message, and return the payload."""
        room = self._message[HEADER_WORDS:].view(np.uint8)
        key = Key(step=self._number, first=self._start)
        payload = room[: self._compressor.compress(difference, room, key)]
        self._compressor.decompress(payload, self._scratch)
        return payload

    def publish(self, parameters: np.ndarray, version: int) -> None:
        """Publish a delta towards the server's parameters, which are of that version."""
        with np.errstate(invalid="ignore", over="ignore"):  # parameters that diverge are published as they are
            payload = self._encode(np.subtract(parameters, self.published, out=self._scratch))
            self.published += self._scratch
        header = ShardHeader(self._number, payload.size, self._number, version, self._codec).sealed(payload)
        self._message[:HEADER_WORDS] = header.words()
        used = HEADER_WORDS + -(-payload.size // 8)
        self._region.replace(self._places.delta(self._number), self._message[:used])
        self._number, self._version = self._number + 1, version
        self._region.replace(word_at(Places.DELTAS), np.array([self._number], np.int64))

    def whole(self) -> np.ndarray:
        """Return a message with a copy of all published parameters, uint8."""
        payload = self.published.view(np.uint8)
        header = ShardHeader(self._number, payload.size, self._number, self._version, _WHOLE).sealed(payload)
        return np.concatenate([header.words().view(np.uint8), payload])

    def end(self, parameters: np.ndarray) -> None:
        """Write the server's own parameters, the last ones, to where pulls without compression read."""
        self._region.replace(self._places.parameters, parameters)


class DeltaFollower:
    """A worker's replica of the published parameters of a shard.

    Parameters
    ----------
    compressor, bounds
        As for :class:`DeltaPublisher`.
    start : (count,) float32
        Parameters that may be those of the server at the start; copied.

    Attributes
    ----------
    parameters : (count,) float32
        The replica; of no meaning as long as `version` is negative.
    version
        Number of pushes that the published parameters include; -1 before the first pull.
    read_nbytes
        Bytes of deltas and whole parameters that were read.
    """

    def __init__(
        self, region: Region, places: Places, compressor: Compressor, bounds: tuple[int, int], start: np.ndarray
    ) -> None:
        self._region, self._places, self._compressor = region, places, compressor
        self._codec = codec_of(compressor, *bounds)
        self.parameters, self.version, self.read_nbytes = start.copy(), -1, 0
        self._number, self._begun = 0, False
        self._scratch = np.zeros_like(start)
        self._slot = np.zeros(places.delta_nbytes // 8, np.int64)
        payload = self._slot[HEADER_WORDS:].view(np.uint8)
        compressor.decompress(payload[: compressor.compress(self._scratch, payload, Key())], self._scratch)
        optimizer_updates.checksum(np.empty(0, np.uint32), np.uint64(0))

    @property
    def whole_nbytes(self) -> int:
        """Bytes of a message of :meth:`DeltaPublisher.whole`."""
        return HEADER_NBYTES + self.parameters.nbytes

    def catch_up(self, published: int) -> bool:
        """Apply the deltas up to number `published`; return False if all parameters have to be read instead.

        Raises
        ------
        CorruptPayload
            If a delta is damaged, or its number is not the one that follows.
        """
        if not self._begun:
            self._begin()
        behind = published - self._number
        if behind < 0:
            raise CorruptPayload(f"parameter server: {published} deltas are published, {self._number} were read")
        if self.version < 0 or behind > self._places.reach:
            return False
        return all(self._apply(number) for number in range(self._number, published))

    def _begin(self) -> None:
        """Take the start for the server's if their digests are equal."""
        self._begun, found = True, np.zeros(Places.BASE_WORDS, np.int64)
        self._region.read(self._places.base, found)
        if found[0] >= 0 and np.array_equal(found, _base(self.parameters, int(found[0]))):
            self.version = int(found[0])

    def _apply(self, number: int) -> bool:
        """Read and apply a delta; return False if the server may have overwritten it meanwhile."""
        at, room = self._places.delta(number), self._slot.size - HEADER_WORDS
        self._region.read(at, self._slot[:HEADER_WORDS])
        words = -(-ShardHeader.of(self._slot).nbytes // 8)
        if 0 < words <= room:
            self._region.read(at + HEADER_NBYTES, self._slot[HEADER_WORDS : HEADER_WORDS + words])
        self.read_nbytes += HEADER_NBYTES + 8 * max(0, min(words, room))
        newest = np.zeros(1, np.int64)
        self._region.read(word_at(Places.DELTAS), newest)
        if newest[0] >= number + self._places.deltas:
            return False
        slot, most = self._slot.view(np.uint8), self._places.delta_payload_nbytes
        header, payload = opened(slot, "the server's deltas", number, self._codec, most, 0)
        self._compressor.decompress(payload, self._scratch)
        with np.errstate(invalid="ignore", over="ignore"):
            self.parameters += self._scratch
        self._number, self.version = number + 1, header.version
        return True

    def restore(self, message: np.ndarray) -> None:
        """Take over all published parameters from a message of :meth:`DeltaPublisher.whole`.

        Raises
        ------
        CorruptPayload
            If it is damaged, or older than the replica.
        """
        number, nbytes = ShardHeader.of(message[:HEADER_NBYTES].view(np.int64)).number, self.parameters.nbytes
        header, payload = opened(message, "the server, all published parameters", max(number, 0), _WHOLE, nbytes, 0)
        if header.nbytes != nbytes or (self.version >= 0 and number < self._number):
            raise CorruptPayload(f"parameter server: all published parameters: {header} does not follow {self._number}")
        self.parameters.view(np.uint8)[:] = payload
        self._number, self.version = number, header.version
        self.read_nbytes += message.size


def _base(parameters: np.ndarray, version: int) -> np.ndarray:
    """Return the words that tell published parameters of a version from others."""
    return np.append(np.int64(version), np.frombuffer(hashlib.sha256(parameters.data).digest(), np.int64))
