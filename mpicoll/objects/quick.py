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

_pack_int, _pack_float = struct.Struct("<q").pack, struct.Struct("<d").pack
_unpack_int, _unpack_float = struct.Struct("<q").unpack, struct.Struct("<d").unpack
_pack_complex, _unpack_complex = struct.Struct("<dd").pack, struct.Struct("<dd").unpack
_NONE, _FALSE, _TRUE, _INT, _FLOAT, _COMPLEX, _BYTES, _STR, _PICKLE = (
    kind << 32 for kind in (NONE, FALSE, TRUE, INT, FLOAT, COMPLEX, BYTES, STR, PICKLE)
)
_TRUSTED = _PICKLE | TRUSTED << 50

_CONTAINERS = frozenset((list, tuple, dict))
_DEPTH = 1
"""Levels of containers in a container that are looked through."""

Found = tuple[int, bytes]
"""The bits of a record's first word that describe the object, and its bytes."""


def _from_int(obj: int) -> Found | None:
    return (_INT, _pack_int(obj)) if -(2**63) <= obj < 2**63 else None


def _from_str(obj: str) -> Found | None:
    return (_STR, obj.encode("utf-8", "surrogatepass")) if len(obj) <= ROOM else None


def _from_sequence(obj: Any) -> Found | None:
    if len(obj) <= FEW and PLAIN.issuperset(map(type, obj)):
        return _TRUSTED, pickling.dumps(obj)
    return (_PICKLE, pickling.dumps(obj)) if _is_simple(obj, obj, _DEPTH) else None


def _from_dict(obj: dict[Any, Any]) -> Found | None:
    # Keys may be of any type, but none that is worth to be sent apart.
    return (_PICKLE, pickling.dumps(obj)) if _is_simple(obj, obj.values(), _DEPTH) else None


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


_WRITERS: dict[type, Callable[[Any], Found | None]] = {
    type(None): lambda obj: (_NONE, b""),
    bool: lambda obj: (_TRUE if obj else _FALSE, b""),
    int: _from_int,
    float: lambda obj: (_FLOAT, _pack_float(obj)),
    complex: lambda obj: (_COMPLEX, _pack_complex(obj.real, obj.imag)),
    bytes: lambda obj: (_BYTES, obj),
    str: _from_str,
    list: _from_sequence,
    tuple: _from_sequence,
    dict: _from_dict,
}
READERS: dict[int, Callable[[bytes], Any]] = {
    _NONE: lambda data: None,
    _FALSE: lambda data: False,
    _TRUE: lambda data: True,
    _INT: lambda data: _unpack_int(data)[0],
    _FLOAT: lambda data: _unpack_float(data)[0],
    _COMPLEX: lambda data: complex(*_unpack_complex(data)),
    _BYTES: lambda data: data,
    _STR: lambda data: str(data, "utf-8", "surrogatepass"),
    _PICKLE: pickling.loads,
    _TRUSTED: pickling.loads,
}
"""By the bits that describe the object."""
PREDICTABLE = frozenset(READERS) - {_PICKLE}
"""Those of objects with which operations run no code of the program."""


def found_in(obj: Any) -> Found | None:
    """Return a short object as bits and bytes, None if it takes the other way.

    Raises
    ------
    Exception
        Whatever the pickler raises, for a dictionary with keys of the program's own.
    """
    writer = _WRITERS.get(type(obj))
    if writer is None:
        return None
    found = writer(obj)
    return found if found is not None and len(found[1]) <= ROOM else None


def write(memory: memoryview, begin: int, call: int, found: Found) -> None:
    """Write a record."""
    bits, data = found
    HEADER.pack_into(memory, begin, call | bits, len(data))
    begin += 16
    memory[begin : begin + len(data)] = data


def read(call: int, heads: tuple[int, ...], data: bytes) -> list[Any] | None:
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
        objects.append(reader(data[begin : begin + nbytes]))
        begin += NBYTES
    return objects


def are_all(call: int, heads: tuple[int, ...]) -> bool:
    """Say whether all records are of the kinds that `read` knows."""
    return all(word ^ call in READERS for word in heads[::2]) and max(heads[1::2]) <= ROOM
