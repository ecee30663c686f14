"""Memory of the compiled collectives of short objects, and what they leave to Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.errors import CorruptPayload
from mpicoll.kernels import object_words as layout
from mpicoll.kernels.object_words import NBYTES
from mpicoll.objects import folding, numpy_functions, pickling, records
from mpicoll.objects.encoding import DTYPES, Payload, pickled


class Left:
    """Object that a compiled collective returns where something is left to Python."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ASIDE, PENDING, UNREAD, PICKLED = Left("ASIDE"), Left("PENDING"), Left("UNREAD"), Left("PICKLED")
"""Nothing has happened; the exchange has begun and goes on; the records have come, and are to be read; nothing but that
an object has been pickled.

See :mod:`mpicoll.kernels.object_calls`.
"""


def corrupt(_: None) -> None:
    """Refuse a container that cannot be read."""
    raise CorruptPayload("object: a list, tuple or dictionary of scalars cannot be read")


def dumps(obj: Any) -> tuple[Any, Sequence[Any]]:
    """Return a pickle and its buffers, or in place of the pickle why there is none: pickling again may do otherwise."""
    try:
        return pickling.dumps_apart(obj)
    except Exception as error:
        return error, ()


_ERRORS = ctypes.create_string_buffer(b"surrogatepass")
_OBJECTS: dict[int, Any] = {
    layout.ASIDE: ASIDE,
    layout.PENDING: PENDING,
    layout.UNREAD: UNREAD,
    layout.PICKLED: PICKLED,
    layout.DUMPS: dumps,
    layout.LOADS: pickling.loads,
    layout.CORRUPT: corrupt,
    layout.ORDINARY: Exception,
    layout.NOTHING: None,
    layout.NO: False,
    layout.YES: True,
    layout.INT_TYPE: int,
    layout.FLOAT_TYPE: float,
    layout.COMPLEX_TYPE: complex,
    layout.BYTES_TYPE: bytes,
    layout.STR_TYPE: str,
    layout.LIST_TYPE: list,
    layout.TUPLE_TYPE: tuple,
    layout.DICT_TYPE: dict,
    layout.BOOL_TYPE: bool,
    layout.NONE_TYPE: type(None),
}
"""Kept alive, since their addresses stand in the words."""
_OPS = folding.PREDEFINED[: layout.OP_COUNT]


class CompiledRecords:
    """Words and records of one communicator; see :mod:`mpicoll.kernels.object_records`.

    Parameters
    ----------
    table
        Address of the dispatch table.

    Attributes
    ----------
    address
        Of the words.
    own, all, sent
        A record, and one from and to each rank.
    long, longs, sent_longs
        Bytes of an object that follow its record, and of those of and to all ranks; compiled code sets the lengths.
    """

    def __init__(self, rank: int, size: int, table: int) -> None:
        self.own = np.zeros(NBYTES, np.uint8)
        self.all, self.sent = np.zeros(size * NBYTES, np.uint8), np.zeros(size * NBYTES, np.uint8)
        # Views, since NumPy frees by an array's length.
        lengths = layout.LONG_ROOM, layout.GATHERED_ROOM, layout.GATHERED_ROOM
        self.long, self.longs, self.sent_longs = (np.empty(length, np.uint8)[:] for length in lengths)
        self._words = np.zeros(layout.WORDS, np.int64)
        self._long_data, self._held = np.zeros(size, np.int64), np.zeros(2 * size, np.int64)
        self._scratch, self._values = np.zeros(1, np.int64), np.zeros(2 * size, np.int64)
        self._stack = np.zeros(layout.MAX_DEPTH * layout.FRAME_WORDS, np.int64)
        self._seen = np.zeros(layout.MAX_SEEN, np.int64)
        self._space = np.empty(layout.GATHERED_ROOM, np.uint8)
        self._ops = np.array([id(op) for op in _OPS], np.int64)
        self._dtypes = np.array([*map(id, DTYPES), *(dtype.itemsize for dtype in DTYPES)], np.int64)
        self._scalar_types = np.array([id(dtype.type) for dtype in DTYPES], np.int64)
        self.address = self._words.ctypes.data
        self._enter(rank, size, table)

    def _enter(self, rank: int, size: int, table: int) -> None:
        """Write the words."""
        words = self._words
        for place, thing in _OBJECTS.items():
            words[place] = id(thing)
        exchanged = {layout.OWN: self.own, layout.ALL: self.all, layout.SENT: self.sent}
        exchanged |= {layout.LONG: self.long, layout.LONGS: self.longs, layout.SENT_LONGS: self.sent_longs}
        for place, array in exchanged.items():
            words[[place, place + 1]] = id(array), array.ctypes.data
        own = {layout.SCRATCH: self._scratch, layout.VALUES: self._values, layout.SPACE: self._space}
        own |= {layout.STACK: self._stack, layout.SEEN: self._seen}
        own |= {layout.LONG_DATA: self._long_data, layout.HELD: self._held, layout.OPS: self._ops}
        own |= {layout.DTYPES: self._dtypes, layout.SCALAR_TYPES: self._scalar_types}
        for place, array in own.items():
            words[place] = array.ctypes.data
        words[[layout.TABLE, layout.RANK, layout.RANKS]] = table, rank, size
        words[layout.ERRORS] = ctypes.addressof(_ERRORS)
        words[[layout.NEW_ARRAY, layout.NEW_SCALAR]] = numpy_functions.addresses()

    @property
    def status(self) -> int:
        """The status of the exchange that is left to Python."""
        return int(self._words[layout.STATUS])

    @property
    def stage(self) -> int:
        """1 if the exchange is that of bytes that follow records, 2 if it is a reduction of arrays, else 0."""
        return int(self._words[layout.STAGE])

    @property
    def result(self) -> np.ndarray | None:
        """The array that a reduction of arrays writes to; None on ranks that get none."""
        address = int(self._words[layout.RESULT])
        return ctypes.cast(address, ctypes.py_object).value if address else None

    def payload(self) -> Payload:
        """Return this rank's object of a collective of one object a rank, as it stands in its record."""
        return self._payload(self.own, 0)

    def payloads(self) -> list[Payload]:
        """Return this rank's objects of a collective of one object for each rank."""
        return [self._payload(self.sent[slot * NBYTES :], slot) for slot in range(len(self._long_data))]

    def taken_pickle(self) -> Payload:
        """Return the object that has been pickled, and leave the memory to the next call."""
        try:
            (found,) = self._pickles()
        finally:
            self.release()
        return found

    def taken_pickles(self) -> list[Payload]:
        """Return this rank's first objects, which are written or pickled, and leave the memory to the next call."""
        written = range(self._words[layout.RECORD_COUNT])
        try:
            return [*(self._payload(self.sent[slot * NBYTES :], slot) for slot in written), *self._pickles()]
        finally:
            self.release()

    def _pickles(self) -> list[Payload]:
        address = int(self._words[layout.PICKLE_APART])
        if not address:
            return []
        data, buffers = ctypes.cast(address, ctypes.py_object).value
        if isinstance(data, Exception):
            raise data
        return [pickled(data, buffers)]

    def _payload(self, memory: np.ndarray, slot: int) -> Payload:
        found = records.read(memory[:NBYTES].tobytes(), 0)
        data = found.data
        if data is None:
            data = ctypes.string_at(int(self._long_data[slot]), found.nbytes)
        return Payload(found.kind, found.nbytes, (data,), found.dtype, found.flags, found.shape)

    def taken(self, memory: np.ndarray) -> bytes:
        """Return records that have come, and leave the memory to the next call."""
        data = memory.tobytes()
        self.release()
        return data

    def release(self) -> None:
        """Leave words and records to the next call."""
        held = self._held[: self._words[layout.HELD_COUNT]].tolist()
        held += self._words[[layout.RESULT, layout.PICKLE_APART]].tolist()
        self._words[[layout.HELD_COUNT, layout.RESULT, layout.PICKLE_APART]] = 0
        for address in filter(None, held):
            ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))
        self._words[layout.IN_USE] = 0


def known_layout() -> bool:
    """Return whether this interpreter's floats and complex numbers are laid out as expected."""
    behind = object.__basicsize__
    found = [ctypes.c_double.from_address(id(number) + behind) for number in (1.5, 2.5 + 0j)]
    return [each.value for each in found] == [1.5, 2.5]
