"""Records: what every rank says of its object in a collective, and the object itself if it is short.

A record has a fixed number of bytes, so that one exchange of records is a plain collective. Its first word says which
call the rank makes and of what kind its object is, the second how many bytes the object has; the shape of an array
and the bytes of a short object follow.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpicoll.errors import CorruptPayload
from mpicoll.kernels.object_words import (
    APART,
    COLLECTIVES,
    DTYPE_BIT,
    ERROR,
    FLAGS_BIT,
    KIND_BIT,
    MAX_NDIM,
    MAX_ROOT,
    NBYTES,
    NDIM_BIT,
    ROOM,
    ROOM_BIT,
    pack_word,
)
from mpicoll.objects.encoding import Payload, in_place_nbytes

HEADER = struct.Struct("<QQ")
_MAGIC = 0x6F
_CALL_MASK = (1 << 32) - 1 | 0xFF << 56
_SHAPES = [struct.Struct(f"<{ndim}Q") for ndim in range(MAX_NDIM + 1)]


class Description(NamedTuple):
    """A record as it was read.

    Attributes
    ----------
    data
        The bytes of the object; None if it is too long for a record.
    room
        Bytes for each long object of this rank, where it has one for each rank; 0 if that is too much for equal parts.
    """

    call: int
    kind: int
    dtype: int
    flags: int
    shape: tuple[int, ...]
    nbytes: int
    data: bytes | None
    room: int

    @property
    def in_place_nbytes(self) -> int:
        """Bytes at the end of the object that a broadcast sends from where they lie on the root."""
        return in_place_nbytes(self.kind, self.flags, self.shape, self.nbytes)


@lru_cache(maxsize=4096)
def call_word(collective: str, op: int = 0, root: int = 0) -> int:
    """Return the bits of the first word that are the same on all ranks in a correct program."""
    return int(pack_word(COLLECTIVES.index(collective), op, root))


def is_long(payload: Payload) -> bool:
    """Say whether an object has to travel apart from its record."""
    return payload.nbytes + 8 * len(payload.shape) > ROOM


def write(memory: memoryview, begin: int, call: int, payload: Payload, flags: int = 0, room: int = 0) -> None:
    """Write a record, with the object if it is short; `room` is the exponent of the bytes for each long object.

    `flags` are added to those of the object.
    """
    ndim, nbytes = len(payload.shape), payload.nbytes
    of_object = payload.kind << KIND_BIT | payload.dtype << DTYPE_BIT | (payload.flags | flags) << FLAGS_BIT
    HEADER.pack_into(memory, begin, call | of_object | ndim << NDIM_BIT, nbytes | room << ROOM_BIT)
    begin += 16
    if ndim:
        _SHAPES[ndim].pack_into(memory, begin, *payload.shape)
        begin += 8 * ndim
    if nbytes + 8 * ndim <= ROOM and nbytes:
        if len(payload.parts) == 1:
            memory[begin : begin + nbytes] = payload.parts[0]
        else:
            payload.write(memory[begin : begin + nbytes])


def read(data: bytes, begin: int) -> Description:
    """Read the record that begins there.

    Raises
    ------
    CorruptPayload
        If it is no record.
    """
    word, nbytes = HEADER.unpack_from(data, begin)
    room, nbytes = nbytes >> ROOM_BIT, nbytes & (1 << ROOM_BIT) - 1
    ndim = word >> NDIM_BIT & 0x3F
    if word >> 56 != _MAGIC or ndim > MAX_NDIM or (word >> KIND_BIT & 0xF) > ERROR or room > 16:
        raise CorruptPayload(f"object: a record begins with {word:#018x}")
    begin += 16
    shape = _SHAPES[ndim].unpack_from(data, begin) if ndim else ()
    if word >> KIND_BIT & 0xF == APART and (ndim > 1 or sum(shape) > nbytes):
        raise CorruptPayload(f"object: a record of {nbytes} bytes says {shape} of its last buffer")
    begin += 8 * ndim
    short = nbytes + 8 * ndim <= ROOM
    return Description(
        word & _CALL_MASK,
        word >> KIND_BIT & 0xF,
        word >> DTYPE_BIT & 0xFF,
        word >> FLAGS_BIT & 0x3F,
        shape,
        nbytes,
        data[begin : begin + nbytes] if short else None,
        1 << room if room else 0,
    )


def describe(call: int, op_names: tuple[str, ...]) -> str:
    """Return the call of a record as error messages have it."""
    name = COLLECTIVES[call & 0xF] if (call & 0xF) < len(COLLECTIVES) else "?"
    if name == "outcome":
        return "end of a reduction of objects"
    op = call >> 4 & 0xFF
    parts = [op_names[op]] if name in ("reduce", "allreduce", "scan", "exscan") and op < len(op_names) else []
    parts += [f"root={call >> 12 & MAX_ROOT - 1}"] if name in ("bcast", "reduce", "gather", "scatter") else []
    return f"{name}({', '.join(parts)})"


class Workspace:
    """Memory for the records of one call on `size` ranks.

    Attributes
    ----------
    own, all
        One record, and one of each rank.
    """

    def __init__(self, size: int) -> None:
        self.own, self.all = np.zeros(NBYTES, np.uint8), np.zeros(size * NBYTES, np.uint8)
        self.memory = self.own.data
        self._sent: np.ndarray | None = None

    def to_all(self) -> np.ndarray:
        """Return memory for a record to each rank."""
        if self._sent is None:
            self._sent = np.zeros(self.all.size, np.uint8)
        return self._sent
