"""Memory layout of one shard: words, parameters, deltas, mailboxes.

Words, each replaced by one rank (with direct pushes: added to by workers) and read by all:

sequence          server   odd while the parameters are being replaced
version           server   pushes that are in the parameters, or soon will be
deltas            server   with compressed pulls: deltas that have been published, from the beginning
heads[worker]     worker   messages that it has put into its mailbox, from the beginning
tails[worker]     server   messages whose effect is in the parameters; their slots are free
wants[worker]     worker   `HOLD` while it wants the parameters to stay as they are, `PUBLISH` while it waits for pushes
                           that are applied and not yet published
asks[worker]      worker   how often it has asked for the whole state
pulls[worker]     worker   with compressed pulls: how often it has asked for all published parameters
left_out[worker]  server   messages that came behind their step

A mailbox is a ring of slots with one writer and one reader. A slot is a header of eight words and the payload.
With compressed pulls there is a ring of deltas with the server as its writer and all workers as readers, and the base:
version and digest of the parameters to which the first delta belongs.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np

from mpicoll.compression import Compressor
from mpicoll.errors import CorruptPayload
from mpicoll.kernels import optimizer_updates
from mpicoll.parameter_server.remote_memory import aligned, word_at

HEADER_WORDS = 8
HEADER_NBYTES = 8 * HEADER_WORDS
HOLD, PUBLISH = 1, 2
_LONGEST_REACH, _SPARE_DELTAS = 62, 2
"""Most deltas that a worker reads in place of the parameters, and slots that are filled while it reads them."""


class ShardHeader(NamedTuple):
    """Header of a payload.

    Attributes
    ----------
    number
        Number of the message in its mailbox, from 0.
    nbytes
        Bytes of the payload.
    step, version
        Number of the worker's earlier pushes, and the version that it had last pulled from this shard.
    codec
        Number of the compressor; see :func:`codec_of`.
    first
        Index in the shard of the payload's first element; 0 if it is compressed.
    rate
        The learning rate, or another number, as the bits of a float64.
    checksum
        See :meth:`sealed`.
    """

    number: int
    nbytes: int
    step: int
    version: int
    codec: int
    first: int = 0
    rate: int = 0
    checksum: int = 0

    @classmethod
    def of(cls, words: np.ndarray) -> ShardHeader:
        """Return the header in the first of some int64 words."""
        return cls(*words[: len(cls._fields)].tolist())

    @property
    def learning_rate(self) -> float:
        """Learning rate of the push, whose bits `rate` holds."""
        return float(np.int64(self.rate).view(np.float64))

    def sealed(self, payload: np.ndarray) -> ShardHeader:
        """Return the header with the checksum of itself and a payload, whose bytes are a multiple of 4."""
        text = np.array(self[:-1], np.int64).tobytes()
        seed = np.uint64(zlib.crc32(text) | self.number % (1 << 31) << 32)
        return self._replace(checksum=int(optimizer_updates.checksum(payload.view(np.uint32), seed)))

    def words(self) -> np.ndarray:
        """Return the header as it is sent, int64 of shape (8,)."""
        found = np.zeros(HEADER_WORDS, np.int64)
        found[: len(self)] = self
        return found


class Places:
    """Offsets in the memory of a shard.

    Parameters
    ----------
    count, itemsize
        Elements of the shard, and bytes of each.
    slots, payload_nbytes
        Number of slots of each worker's mailbox, 0 with direct pushes, and the largest payload of one in bytes.
    delta_payload_nbytes
        The largest payload of a delta in bytes; 0 if pulls are not compressed.

    Attributes
    ----------
    reach
        Largest number of deltas that a worker reads: more are longer than the parameters.
    deltas
        Slots of the ring of deltas, 0 if pulls are not compressed.
    """

    SEQUENCE, VERSION, DELTAS, FIRST = 0, 1, 2, 3
    BASE_WORDS = 5

    def __init__(
        self,
        workers: int,
        count: int,
        itemsize: int,
        slots: int,
        payload_nbytes: int,
        delta_payload_nbytes: int = 0,
    ) -> None:
        self.workers, self.slots, self.payload_nbytes = workers, slots, payload_nbytes
        starts = (self.FIRST + kind * workers for kind in range(6))
        self.heads, self.tails, self.wants, self.asks, self.pulls, self.left_out = starts
        self.words = self.FIRST + 6 * workers
        self.parameters = aligned(word_at(self.words))
        self.base = aligned(self.parameters + count * itemsize)
        self.delta_payload_nbytes, self.reach, self.deltas = delta_payload_nbytes, 0, 0
        if delta_payload_nbytes:
            self.reach = min(_LONGEST_REACH, max(2, count * itemsize // delta_payload_nbytes))
            self.deltas = self.reach + _SPARE_DELTAS
        self.delta_nbytes = aligned(HEADER_NBYTES + delta_payload_nbytes)
        self._first_delta = aligned(self.base + word_at(self.BASE_WORDS))
        self._mail = self._first_delta + self.deltas * self.delta_nbytes
        self._slot_nbytes = aligned(HEADER_NBYTES + payload_nbytes)
        self.nbytes = self._mail + workers * slots * self._slot_nbytes

    def delta(self, number: int) -> int:
        """Return the offset of delta `number`."""
        return self._first_delta + number % self.deltas * self.delta_nbytes

    def slot(self, worker: int, number: int) -> int:
        """Return the offset of a worker's message `number`."""
        return self._mail + (worker * self.slots + number % self.slots) * self._slot_nbytes


def bits_of(rate: float) -> int:
    """Return the bits of a float64 as an int."""
    return int(np.float64(rate).view(np.int64))


def payload_nbytes(compressor: Compressor | None, count: int, itemsize: int) -> int:
    """Return the largest payload of a gradient of `count` elements, in bytes."""
    return count * itemsize if compressor is None else compressor.wire_nbytes(count)


def codec_of(compressor: Compressor | None, start: int, stop: int) -> int:
    """Return the number of the encoding of elements ``start`` to ``stop - 1``; 0 for none."""
    return 0 if compressor is None else 1 + zlib.crc32(repr((compressor, start, stop)).encode())


def opened(
    slot: np.ndarray, source: str, number: int, codec: int, most: int, itemsize: int
) -> tuple[ShardHeader, np.ndarray]:
    """Return header and payload of message `number`, which has to be in a slot.

    Parameters
    ----------
    slot : (nbytes,) uint8
        Memory from the slot's beginning on.
    source
        Writer of the message, for the exception.
    most
        The largest payload in bytes.
    itemsize
        Bytes of an element, if the message may be for a part of the shard; 0 if it is always for all of it.

    Raises
    ------
    CorruptPayload
        If the slot does not contain that message, undamaged and in that encoding.
    """
    header = ShardHeader.of(slot[:HEADER_NBYTES].view(np.int64))
    wrong = _problem(header, number, codec, most, itemsize)
    payload = slot[HEADER_NBYTES : HEADER_NBYTES + (0 if wrong else header.nbytes)]
    if not wrong and header._replace(checksum=0).sealed(payload) != header:
        wrong = "its checksum is wrong"
    if wrong:
        raise CorruptPayload(f"parameter server: message {number} of {source}: {wrong}")
    return header, payload


def _problem(header: ShardHeader, number: int, codec: int, most: int, itemsize: int) -> str:
    if header.number != number:
        return f"its number is {header.number}"
    if not 0 <= header.nbytes <= most or header.nbytes % 4:
        return f"{header.nbytes} bytes are not up to {most}"
    if header.codec != codec:
        return "it was written by another compressor"
    if header.first and not itemsize:
        return f"it begins at element {header.first}"
    if itemsize and (header.nbytes % itemsize or not 0 <= header.first * itemsize <= most - header.nbytes):
        return f"{header.nbytes} bytes from element {header.first} on are not in the shard"
    return "" if header.step == number and header.version >= 0 else "it has an impossible step or version"
