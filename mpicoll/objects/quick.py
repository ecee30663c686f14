"""The quickest way for common short objects: from the object to a record and back, with one look-up each.

Objects that it does not know, or that do not fit into a record, take the way of :mod:`mpicoll.objects.encoding`. Both
write the same records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any

from mpicoll.objects import pickling
from mpicoll.objects.encoding import (
    BYTES,
    COMPLEX,
    FALSE,
    FEW,
    FLOAT,
    INT,
    NONE,
    PICKLE,
    PLAIN,
    STR,
    TRUE,
    TRUSTED,
)
from mpicoll.objects.records import HEADER, NBYTES, ROOM

_pack_int, _pack_float = struct.Struct("<QQq").pack_into, struct.Struct("<QQd").pack_into
_pack_complex = struct.Struct("<QQdd").pack_into
_unpack_int, _unpack_float = struct.Struct("<q").unpack_from, struct.Struct("<d").unpack_from
_unpack_complex = struct.Struct("<dd").unpack_from
_NONE, _FALSE, _TRUE, _INT, _FLOAT, _COMPLEX, _BYTES, _STR, _PICKLE = (
    kind << 32 for kind in (NONE, FALSE, TRUE, INT, FLOAT, COMPLEX, BYTES, STR, PICKLE)
)
_TRUSTED = _PICKLE | TRUSTED << 50

_CONTAINERS = frozenset((list, tuple, dict))
_DEPTH = 1
"""Levels of containers in a container that are looked through."""
OTHER_WAY = -1
"""In place of a number of bytes, for an object that does not fit here."""

Put = Callable[[memoryview, int, int, Any], int]
Reader = Callable[[memoryview, int, int], Any]


def _put_header(memory: memoryview, begin: int, word: int) -> int:
    HEADER.pack_into(memory, begin, word, 0)
    return 0


def _put_int(memory: memoryview, begin: int, call: int, obj: int) -> int:
    if not -(2**63) <= obj < 2**63:
        return OTHER_WAY
    _pack_int(memory, begin, call | _INT, 8, obj)
    return 8


def _put_float(memory: memoryview, begin: int, call: int, obj: float) -> int:
    _pack_float(memory, begin, call | _FLOAT, 8, obj)
    return 8


def _put_complex(memory: memoryview, begin: int, call: int, obj: complex) -> int:
    _pack_complex(memory, begin, call | _COMPLEX, 16, obj.real, obj.imag)
    return 16


def _put_bytes(memory: memoryview, begin: int, word: int, data: bytes) -> int:
    nbytes = len(data)
    if nbytes > ROOM:
        return OTHER_WAY
    HEADER.pack_into(memory, begin, word, nbytes)
    begin += 16
    memory[begin : begin + nbytes] = data
    return nbytes


def _put_str(memory: memoryview, begin: int, call: int, obj: str) -> int:
    if len(obj) > ROOM:
        return OTHER_WAY
    return _put_bytes(memory, begin, call | _STR, obj.encode("utf-8", "surrogatepass"))


def _put_sequence(memory: memoryview, begin: int, call: int, obj: Any) -> int:
    if len(obj) <= FEW and PLAIN.issuperset(map(type, obj)):
        return _put_bytes(memory, begin, call | _TRUSTED, pickling.dumps(obj))
    return _put_bytes(memory, begin, call | _PICKLE, pickling.dumps(obj)) if _is_simple(obj, obj, _DEPTH) else OTHER_WAY


def _put_dict(memory: memoryview, begin: int, call: int, obj: dict[Any, Any]) -> int:
    # Keys may be of any type, but none that is worth to be sent apart.
    values = obj.values()
    if (len(obj) > FEW or not PLAIN.issuperset(map(type, values))) and not _is_simple(obj, values, _DEPTH):
        return OTHER_WAY
    return _put_bytes(memory, begin, call | _PICKLE, pickling.dumps(obj))


def _is_simple(obj: Any, values: Collection[Any], depth: int) -> bool:
    """Return whether a container has few values, of exact built-in types, in containers that are simple, too."""
    if len(obj) > FEW:
        return False
    for each in values:
        kind = type(each)
        if kind in PLAIN:
            continue
        if depth == 0 or kind not in _CONTAINERS:
            return False
        if not _is_simple(each, each.values() if kind is dict else each, depth - 1):
            return False
    return True


_WRITERS: dict[type, Put] = {
    type(None): lambda memory, begin, call, obj: _put_header(memory, begin, call | _NONE),
    bool: lambda memory, begin, call, obj: _put_header(memory, begin, call | (_TRUE if obj else _FALSE)),
    int: _put_int,
    float: _put_float,
    complex: _put_complex,
    bytes: lambda memory, begin, call, obj: _put_bytes(memory, begin, call | _BYTES, obj),
    str: _put_str,
    list: _put_sequence,
    tuple: _put_sequence,
    dict: _put_dict,
}
READERS: dict[int, Reader] = {
    _NONE: lambda memory, begin, nbytes: None,
    _FALSE: lambda memory, begin, nbytes: False,
    _TRUE: lambda memory, begin, nbytes: True,
    _INT: lambda memory, begin, nbytes: _unpack_int(memory, begin)[0],
    _FLOAT: lambda memory, begin, nbytes: _unpack_float(memory, begin)[0],
    _COMPLEX: lambda memory, begin, nbytes: complex(*_unpack_complex(memory, begin)),
    _BYTES: lambda memory, begin, nbytes: bytes(memory[begin : begin + nbytes]),
    _STR: lambda memory, begin, nbytes: str(memory[begin : begin + nbytes], "utf-8", "surrogatepass"),
    _PICKLE: lambda memory, begin, nbytes: pickling.loads(memory[begin : begin + nbytes]),
    _TRUSTED: lambda memory, begin, nbytes: pickling.loads(memory[begin : begin + nbytes]),
}
"""By the bits that describe the object."""
PREDICTABLE = frozenset(READERS) - {_PICKLE}
"""Those of objects with which operations run no code of the program."""


def put(memory: memoryview, begin: int, call: int, obj: Any) -> int:
    """Write a short object of a common type into a record.

    Parameters
    ----------
    call
        The bits of the record's first word that say which call is made.

    Returns
    -------
    int
        Number of bytes of the object; OTHER_WAY if it has to take the other way, where it also fails again if pickling
        fails, so that the others hear of it.
    """
    writer = _WRITERS.get(type(obj))
    if writer is None:
        return OTHER_WAY
    try:
        return writer(memory, begin, call, obj)
    except Exception:
        return OTHER_WAY


def read(call: int, heads: tuple[int, ...], memory: memoryview) -> list[Any] | None:
    """Return the objects of records, None if any of them takes the other way, or makes another call.

    Parameters
    ----------
    heads
        The first two words of each record.
    """
    objects, begin = [], 16
    for place in range(0, len(heads), 2):
        reader, nbytes = READERS.get(heads[place] ^ call), heads[place + 1]
        if reader is None or nbytes > ROOM:
            return None
        objects.append(reader(memory, begin, nbytes))
        begin += NBYTES
    return objects


def are_all(call: int, heads: tuple[int, ...]) -> bool:
    """Return whether `read` knows all records."""
    for place in range(0, len(heads), 2):  # noqa: SIM110, a generator takes several times as long
        if heads[place] ^ call not in READERS or heads[place + 1] > ROOM:
            return False
    return True
