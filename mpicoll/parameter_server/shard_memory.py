"""Memory layout of one shard: words, parameters, mailboxes.

Words, each replaced by one rank (with direct pushes: added to by workers) and read by all:

sequence          server   odd while the parameters are being replaced
version           server   pushes that are in the parameters, or soon will be
heads[worker]     worker   messages that it has put into its mailbox, from the beginning
tails[worker]     server   messages whose effect is in the parameters; their slots are free
holds[worker]     worker   1 while it wants the parameters to stay as they are
asks[worker]      worker   how often it has asked for the whole state
left_out[worker]  server   messages that came behind their step

A mailbox is a ring of slots with one writer and one reader. A slot is a header of eight words and the payload.
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


class ShardHeader(NamedTuple):
    """Header of a payload.

    Attributes
    ----------
    number
        Of the message in its mailbox, from 0.
    nbytes
        Of the payload.
    step, version
        Of the worker when it wrote this: pushes before this one, and the version that it had pulled from this shard.
    codec
        Which compressor; see :func:`codec_of`.
    first
        The payload's first element in the shard; 0 where it is compressed.
    rate
        The learning rate, or what else a number is needed for: the bits of a float64.
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

    @property
    def learning_rate(self) -> float:
        """Learning rate of the push, whose bits `rate` holds."""
        return float(np.int64(self.rate).view(np.float64))

    def sealed(self, payload: np.ndarray) -> ShardHeader:
        """Return it with the checksum of itself and a payload, whose bytes are a multiple of 4."""
        text = np.array(self[:-1], np.int64).tobytes()
        seed = np.uint64(zlib.crc32(text) | self.number % (1 << 31) << 32)
        return self._replace(checksum=int(optimizer_updates.checksum(payload.view(np.uint32), seed)))

    def words(self) -> np.ndarray:
        """Return it as it is sent."""
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
        Slots of each worker's mailbox, and the most bytes in one; 0 slots where nothing is sent.
    """

    SEQUENCE, VERSION, FIRST = 0, 1, 2

    def __init__(self, workers: int, count: int, itemsize: int, slots: int, payload_nbytes: int) -> None:
        self.workers, self.slots, self.payload_nbytes = workers, slots, payload_nbytes
        starts = (self.FIRST + kind * workers for kind in range(5))
        self.heads, self.tails, self.holds, self.asks, self.left_out = starts
        self.words = self.FIRST + 5 * workers
        self.parameters = aligned(word_at(self.words))
        self._mail = aligned(self.parameters + count * itemsize)
        self._slot_nbytes = aligned(HEADER_NBYTES + payload_nbytes)
        self.nbytes = self._mail + workers * slots * self._slot_nbytes

    def slot(self, worker: int, number: int) -> int:
        """Return where a message of a worker lies."""
        return self._mail + (worker * self.slots + number % self.slots) * self._slot_nbytes


def bits_of(rate: float) -> int:
    """Return a number as a header has it."""
    return int(np.float64(rate).view(np.int64))


def payload_nbytes(compressor: Compressor | None, count: int, itemsize: int) -> int:
    """Return the most bytes that a gradient becomes."""
    return count * itemsize if compressor is None else compressor.wire_nbytes(count)


def codec_of(compressor: Compressor | None, start: int, stop: int) -> int:
    """Return a number for how elements ``start`` to ``stop - 1`` are written; 0 is as they are."""
    return 0 if compressor is None else 1 + zlib.crc32(repr((compressor, start, stop)).encode())


def opened(
    slot: np.ndarray, worker: int, number: int, codec: int, most: int, itemsize: int
) -> tuple[ShardHeader, np.ndarray]:
    """Return header and payload of the message that has to be in a slot.

    Parameters
    ----------
    slot : (nbytes,) uint8
        Memory from the slot's beginning on, for at least the longest payload.
    most
        The bytes of that.
    itemsize
        Bytes of an element, of which a message may have some only; 0 where it always has all of them.

    Raises
    ------
    CorruptPayload
        If it is not that message, whole and by that codec.
    """
    header = ShardHeader(*slot[:HEADER_NBYTES].view(np.int64)[: len(ShardHeader._fields)].tolist())
    wrong = _problem(header, number, codec, most, itemsize)
    payload = slot[HEADER_NBYTES : HEADER_NBYTES + (0 if wrong else header.nbytes)]
    if not wrong and header._replace(checksum=0).sealed(payload) != header:
        wrong = "its checksum is wrong"
    if wrong:
        raise CorruptPayload(f"parameter server: message {number} of worker {worker}: {wrong}")
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
