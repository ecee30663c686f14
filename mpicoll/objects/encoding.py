"""Objects as bytes, with a description that fits into a record.

Exact built-in scalars, ``bytes``, ``str``, NumPy scalars and arrays of plain element types are described by kind,
element type and shape. Anything else is a pickle: subclasses, integers of more than 64 bits, arrays in another order
than C's, structured and object arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpicoll.errors import CorruptPayload, described
from mpicoll.kernels.object_items import DICT, LIST
from mpicoll.kernels.object_scalars import NUMBER_BIT
from mpicoll.kernels.object_words import (
    APART,
    ARRAY,
    BYTES,
    COMPLEX,
    DTYPE_BIT,
    ERROR,
    FALSE,
    FLAGS_BIT,
    FLOAT,
    INT,
    ITEMS,
    MAX_DEPTH,
    MAX_NDIM,
    NONE,
    PICKLE,
    READ_ONLY,
    SCALAR,
    STR,
    TRUE,
    TRUSTED,
    kind_of,
    ndim_of,
)
from mpicoll.objects import pickling

DTYPES = tuple(np.dtype(char) for char in "?bBhHiIlLefdgFDG")
"""Element types of arrays and scalars that are not pickled, by number."""
_DTYPE_NUMBERS = {dtype.char: number for number, dtype in enumerate(DTYPES)}
_INT64, _FLOAT64, _COMPLEX128 = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<dd")
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
"""Exact types whose objects need no copy, and run no code of the program."""
_FEW = 32
"""Longer containers are not looked through before they are pickled."""
_BUFFER_ALIGNMENT = 64
IN_PLACE_NBYTES = 512 << 10
"""Buffers of this length are broadcast from where they lie."""


class Payload(NamedTuple):
    """An object as bytes.

    Attributes
    ----------
    dtype
        Number of the element type.
    shape
        Of an array; of a pickle with buffers, the bytes of the last one if a broadcast sends it from where it lies.
    parts
        Contiguous buffers, which are `nbytes` bytes together.
    """

    kind: int
    nbytes: int
    parts: Sequence[Any]
    dtype: int = 0
    flags: int = 0
    shape: tuple[int, ...] = ()

    def write(self, out: memoryview) -> None:
        """Copy the parts, or the first of them, to memory that they fill."""
        begin = 0
        for part in self.parts:
            if begin == len(out):
                return
            view = memoryview(part).cast("B") if not isinstance(part, bytes) else part
            out[begin : begin + len(view)] = view
            begin += len(view)


def encode(obj: Any) -> Payload:
    """Return an object as bytes; arrays are referred to, not copied.

    Raises
    ------
    Exception
        Whatever the pickler, or a method of the object, raises.
    """
    known = _ENCODERS.get(type(obj))
    if known is not None:
        return known(obj)
    if isinstance(obj, np.generic):
        return _encode_scalar(obj)
    return _pickle(obj)


def in_place_nbytes(kind: int, flags: int, shape: tuple[int, ...], nbytes: int) -> int:
    """Return how many of an object's last bytes a broadcast sends from where they lie on the root."""
    if kind == APART and len(shape) == 1:
        return shape[0]
    return nbytes if kind == ARRAY and nbytes >= IN_PLACE_NBYTES and not flags & READ_ONLY else 0


def failure(error: Exception) -> Payload:
    """Return what travels in place of an object that could not be encoded."""
    text = described(error).encode("utf-8", "replace")[:400]
    return Payload(ERROR, len(text), (text,))


def _encode_int(obj: int) -> Payload:
    try:
        return Payload(INT, 8, (_INT64.pack(obj),))
    except struct.error:
        return _pickle(obj, TRUSTED)


def _encode_str(obj: str) -> Payload:
    data = obj.encode("utf-8", "surrogatepass")
    return Payload(STR, len(data), (data,))


def _encode_array(obj: np.ndarray) -> Payload:
    number = _DTYPE_NUMBERS.get(obj.dtype.char)
    if number is None or DTYPES[number] is not obj.dtype or obj.ndim > MAX_NDIM:
        return _pickle(obj)
    data, flags = obj, 0
    if obj.flags.c_contiguous:
        flags = 0 if obj.flags.writeable else READ_ONLY
    elif obj.ndim > 2 or obj.flags.f_contiguous:
        return _pickle(obj)  # which keeps the order of its axes in memory
    else:
        data = np.ascontiguousarray(obj)
    parts = (data.reshape(-1).view(np.uint8).data,) if data.nbytes else ()
    return Payload(ARRAY, data.nbytes, parts, number, flags, data.shape)


def _encode_scalar(obj: np.generic) -> Payload:
    number = _DTYPE_NUMBERS.get(obj.dtype.char)
    if number is None or type(obj) is not DTYPES[number].type:
        return _pickle(obj)
    data = obj.tobytes()
    return Payload(SCALAR, len(data), (data,), number)


def _encode_sequence(obj: list[Any] | tuple[Any, ...]) -> Payload:
    if len(obj) <= _FEW and PLAIN.issuperset(map(type, obj)):
        data = pickling.dumps(obj)
        return Payload(PICKLE, len(data), (data,), 0, TRUSTED)
    return _pickle(obj)


def _encode_dict(obj: dict[Any, Any]) -> Payload:
    if len(obj) <= _FEW and PLAIN.issuperset(map(type, obj.values())):
        data = pickling.dumps(obj)
        return Payload(PICKLE, len(data), (data,))
    return _pickle(obj)


def _pickle(obj: Any, flags: int = 0) -> Payload:
    return pickled(*pickling.dumps_apart(obj), flags)


def pickled(data: bytes, buffers: Sequence[Any], flags: int = 0) -> Payload:
    """Return what `pickling.dumps_apart` has made of an object as bytes."""
    if not buffers:
        return Payload(PICKLE, len(data), (data,), 0, flags)
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    lengths = np.array([len(views), len(data), *map(len, views)], np.int64).tobytes()
    parts: list[Any] = [lengths, data]
    end = len(lengths) + len(data)
    for view in views:
        padding = -end % _BUFFER_ALIGNMENT
        parts += [bytes(padding), view]
        end += padding + len(view)
    last = views[-1]
    return Payload(
        APART, end, parts, 0, flags, (len(last),) if len(last) >= IN_PLACE_NBYTES and not last.readonly else ()
    )


_ENCODERS: dict[type, Callable[[Any], Payload]] = {
    type(None): lambda obj: Payload(NONE, 0, ()),
    bool: lambda obj: Payload(TRUE if obj else FALSE, 0, ()),
    int: _encode_int,
    float: lambda obj: Payload(FLOAT, 8, (_FLOAT64.pack(obj),)),
    complex: lambda obj: Payload(COMPLEX, 16, (_COMPLEX128.pack(obj.real, obj.imag),)),
    bytes: lambda obj: Payload(BYTES, len(obj), (obj,)),
    str: _encode_str,
    np.ndarray: _encode_array,
    list: _encode_sequence,
    tuple: _encode_sequence,
    dict: _encode_dict,
}


def decode(kind: int, dtype: int, flags: int, shape: tuple[int, ...], data: Any) -> Any:
    """Return a new object from its bytes.

    Parameters
    ----------
    data
        Exactly the bytes of the payload. If they are writable, arrays may stay in them.

    Raises
    ------
    CorruptPayload
        If description and bytes do not fit together.
    """
    if kind == PICKLE:
        return pickling.loads(data)
    try:
        return _DECODERS[kind](dtype, flags, shape, data)
    except (KeyError, IndexError, ValueError, OverflowError, TypeError, struct.error) as error:
        if kind == APART:
            raise
        raise CorruptPayload(f"object: kind {kind} of {len(data)} bytes cannot be read: {error}") from None


def _decode_array(dtype: int, flags: int, shape: tuple[int, ...], data: Any) -> np.ndarray:
    flat = np.frombuffer(data, DTYPES[dtype]) if len(data) else np.empty(0, DTYPES[dtype])
    array = flat.reshape(shape)
    if not array.flags.writeable:
        array = array.copy()
    if flags & READ_ONLY:
        array.flags.writeable = False
    return array


def _decode_scalar(dtype: int, flags: int, shape: tuple[int, ...], data: Any) -> np.generic:
    (value,) = np.frombuffer(data, DTYPES[dtype])
    return value


def _decode_apart(dtype: int, flags: int, shape: tuple[int, ...], data: Any) -> Any:
    view = memoryview(data).cast("B")
    (count,) = _INT64.unpack_from(view)
    if not 0 <= count <= len(view) // 8 - 2:
        raise CorruptPayload(f"object: {count} buffers in {len(view)} bytes")
    lengths = np.frombuffer(view, np.int64, count + 1, 8).tolist()
    begin = 8 * (count + 2)
    pieces = []
    for number, length in enumerate(lengths):
        begin += -begin % _BUFFER_ALIGNMENT if number else 0
        if length < 0 or begin + length > len(view):
            raise CorruptPayload(f"object: a buffer of {length} bytes at {begin} of {len(view)}")
        pieces.append(view[begin : begin + length])
        begin += length
    return pickling.loads_apart(pieces[0], pieces[1:])


def _decode_items(dtype: int, flags: int, shape: tuple[int, ...], data: Any) -> Any:
    """Return a container; see `mpicoll.kernels.object_items`."""
    if len(data) < 8 or data[0] < LIST:
        raise ValueError("no container")
    return _read_item(data, 0, 0)[0]


def _read_item(data: Any, begin: int, depth: int) -> tuple[Any, int]:
    """Return the item at a byte, and the byte after it."""
    (word,) = _INT64.unpack_from(data, begin)
    kind, number = word & 0xFF, word >> NUMBER_BIT
    begin += 8
    if kind >= LIST:
        return _read_container(data, begin, depth, kind, number)
    description, shape = 0, ()
    if kind in (ARRAY, SCALAR):
        (description,) = _INT64.unpack_from(data, begin)
        ndim, begin = int(ndim_of(description)), begin + 8
        if kind_of(description) != kind or description >> FLAGS_BIT or (kind == SCALAR and ndim):
            raise ValueError(f"an item of kind {kind} and description {description}")
        shape = struct.unpack_from(f"<{ndim}Q", data, begin)
        begin += 8 * ndim
    if kind > ARRAY or not 0 <= number <= len(data) - begin or (kind <= TRUE and number):
        raise ValueError(f"an item of kind {kind} and {number} bytes at byte {begin}")
    item = _DECODERS[kind](description >> DTYPE_BIT & 0xFF, 0, shape, bytes(data[begin : begin + number]))
    return item, begin + number + -number % 8


def _read_container(data: Any, begin: int, depth: int, kind: int, size: int) -> tuple[Any, int]:
    """Return a container whose items begin at a byte, and the byte after it."""
    if kind > DICT or depth == MAX_DEPTH or not 0 <= size <= len(data) - begin >> 3:
        raise ValueError(f"a container of kind {kind} and {size} items")
    items = []
    for _ in range(2 * size if kind == DICT else size):
        item, begin = _read_item(data, begin, depth + 1)
        items.append(item)
    if kind == DICT:
        return dict(zip(items[::2], items[1::2], strict=True)), begin
    return (items if kind == LIST else tuple(items)), begin


_DECODERS: dict[int, Callable[[int, int, tuple[int, ...], Any], Any]] = {
    NONE: lambda dtype, flags, shape, data: None,
    FALSE: lambda dtype, flags, shape, data: False,
    TRUE: lambda dtype, flags, shape, data: True,
    INT: lambda dtype, flags, shape, data: _INT64.unpack(data)[0],
    FLOAT: lambda dtype, flags, shape, data: _FLOAT64.unpack(data)[0],
    COMPLEX: lambda dtype, flags, shape, data: complex(*_COMPLEX128.unpack(data)),
    BYTES: lambda dtype, flags, shape, data: bytes(data),
    STR: lambda dtype, flags, shape, data: str(data, "utf-8", "surrogatepass"),
    SCALAR: _decode_scalar,
    ARRAY: _decode_array,
    ITEMS: _decode_items,
    APART: _decode_apart,
}


def copied(obj: Any) -> Any:
    """Return an object as it would arrive on another rank."""
    if type(obj) in PLAIN:
        return obj
    payload = encode(obj)
    memory = bytearray(payload.nbytes)
    payload.write(memoryview(memory))
    return decode(payload.kind, payload.dtype, payload.flags, payload.shape, memory)
