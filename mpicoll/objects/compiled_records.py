"""Memory of the compiled collectives of short objects, and what they leave to Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mpicoll.kernels import object_records as layout
from mpicoll.kernels.object_records import NBYTES
from mpicoll.objects import folding, pickling


class Left:
    """Object that a compiled collective returns where something is left to Python."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


ASIDE, PENDING, UNREAD = Left("ASIDE"), Left("PENDING"), Left("UNREAD")
"""Nothing has happened; the exchange has begun and goes on; the records have come, and are to be read.

See :mod:`mpicoll.kernels.object_calls`.
"""
_ERRORS = ctypes.create_string_buffer(b"surrogatepass")
_OBJECTS: dict[int, Any] = {
    layout.ASIDE: ASIDE,
    layout.PENDING: PENDING,
    layout.UNREAD: UNREAD,
    layout.DUMPS: pickling.dumps,
    layout.LOADS: pickling.loads,
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
_OPS = [folding.predefined(number) for number in range(1, layout.OP_COUNT + 1)]


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
    long, longs
        Bytes of an object that follow its record, and of those of all ranks; compiled code sets the lengths.
    """

    def __init__(self, rank: int, size: int, table: int) -> None:
        self.own = np.zeros(NBYTES, np.uint8)
        self.all, self.sent = np.zeros(size * NBYTES, np.uint8), np.zeros(size * NBYTES, np.uint8)
        # Views, since NumPy frees by an array's length.
        self.long, self.longs = (np.empty(n, np.uint8)[:] for n in (layout.LONG_ROOM, layout.GATHERED_ROOM))
        self._scratch, self._values = np.zeros(layout.SCRATCH_WORDS, np.int64), np.zeros(size, np.int64)
        self._ops = np.array([id(op) for op in _OPS], np.int64)
        self._words = np.zeros(layout.WORDS, np.int64)
        self.address = self._words.ctypes.data
        for place, thing in _OBJECTS.items():
            self._words[place] = id(thing)
        arrays = {layout.OWN: self.own, layout.ALL: self.all, layout.SENT: self.sent}
        arrays |= {layout.LONG: self.long, layout.LONGS: self.longs}
        for place, array in arrays.items():
            self._words[[place, place + 1]] = id(array), array.ctypes.data
        self._words[[layout.TABLE, layout.RANK, layout.RANKS]] = table, rank, size
        self._words[[layout.SCRATCH, layout.ERRORS]] = self._scratch.ctypes.data, ctypes.addressof(_ERRORS)
        self._words[[layout.VALUES, layout.OPS]] = self._values.ctypes.data, self._ops.ctypes.data

    @property
    def status(self) -> int:
        """The status of the exchange that is left to Python."""
        return int(self._words[layout.STATUS])

    @property
    def stage(self) -> int:
        """1 if the exchange is that of bytes that follow records, else 0."""
        return int(self._words[layout.STAGE])

    def taken_pickle(self) -> bytes | None:
        """Return this rank's pickle, which has no room in its record; None if there is none."""
        address = int(self._words[layout.PICKLED])
        if not address:
            return None
        self._words[layout.PICKLED] = 0
        data: bytes = ctypes.cast(address, ctypes.py_object).value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(data))
        return data

    def taken(self, memory: np.ndarray) -> bytes:
        """Return records that have come, and leave the memory to the next call."""
        data = memory.tobytes()
        self.release()
        return data

    def release(self) -> None:
        """Leave words and records to the next call."""
        self.taken_pickle()
        self._words[layout.IN_USE] = 0


def known_layout() -> bool:
    """Return whether this interpreter's floats and complex numbers are laid out as expected."""
    behind = object.__basicsize__
    found = [ctypes.c_double.from_address(id(number) + behind) for number in (1.5, 2.5 + 0j)]
    return [each.value for each in found] == [1.5, 2.5]
