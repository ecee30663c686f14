"""Tensor files in the format of safetensors, written and read without that library.

The library's writer returns no hash of what it has written. Its reader maps the whole file, and reading a mapped file
that is cut short ends the process. Here a range is read directly into its array.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpicoll.checkpoint.durable_files import write_durably
from mpicoll.errors import CheckpointFailed

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
_TYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in _DTYPES.values()}
_CODES = {name: code for code, name in _DTYPES.items()}
_METADATA = "__metadata__"
_ALIGNMENT = 8
_BLOCK_BYTES = 1 << 20
_MAX_HEADER = 1 << 24
_MAX_DIMENSIONS = 32
_MAX_COUNT = 1 << 60


class Entry(NamedTuple):
    """Description of a tensor in a file; `offset` is in bytes from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def dtype_name(dtype: np.dtype) -> str:
    """Return the name of a dtype that can be saved, such as ``"float32"``; TypeError for others."""
    for name, known in _TYPES.items():
        if known == dtype:
            return name
    raise TypeError(f"dtype {dtype!s:.80} cannot be saved")


def dtype_of(name: str) -> np.dtype:
    """Return the dtype with a name that :func:`dtype_name` gives; KeyError for others."""
    return _TYPES[name]


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Write contiguous arrays in native byte order to a new file; see :func:`durable_files.write_durably`.

    Parameters
    ----------
    metadata
        Texts by name for the header; None for none.

    Returns
    -------
    tuple
        Length in bytes and SHA-256.
    """
    # Those with the largest elements first, so that all are aligned.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header = _header(ordered, metadata)
    return write_durably(path, itertools.chain([header], _blocks(array for _, array in ordered)))


def _header(arrays: Sequence[tuple[str, np.ndarray]], metadata: Mapping[str, str] | None) -> bytes:
    """Return the header of a file in which these arrays follow each other."""
    table: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    at = 0
    for name, array in arrays:
        shape, offsets = list(array.shape), [at, at + array.nbytes]
        table[name] = {"dtype": _CODES[dtype_name(array.dtype)], "shape": shape, "data_offsets": offsets}
        at += array.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise CheckpointFailed(f"a header of {len(text)} bytes is too long; use fewer tensors")
    return struct.pack("<Q", len(text)) + text


def _blocks(arrays: Iterable[np.ndarray]) -> Iterator[memoryview]:
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _BLOCK_BYTES):
            yield flat[start : start + _BLOCK_BYTES].data


def read_header(descriptor: int, path: Path) -> dict[str, Entry]:
    """Read and check a file's header, which may have no metadata; see :func:`read_annotated_header`.

    Raises
    ------
    CheckpointFailed
        If the header is damaged or has metadata, or its tensors do not cover exactly the bytes that follow.
    """
    entries, metadata = read_annotated_header(descriptor, path)
    if metadata is not None:
        raise CheckpointFailed(f"{path}: damaged header: {_METADATA!r} is not described as a tensor")
    return entries


def read_annotated_header(descriptor: int, path: Path) -> tuple[dict[str, Entry], dict[str, str] | None]:
    """Read and check a file's header; allocates no more memory than the file has bytes.

    Returns
    -------
    entries, metadata
        Tensors by name, and the header's texts by name; None for no metadata.

    Raises
    ------
    CheckpointFailed
        If the header is damaged, or its tensors do not cover exactly the bytes that follow.
    """
    length = os.fstat(descriptor).st_size
    if length < 8:
        raise CheckpointFailed(f"{path}: {length} bytes are too few for a safetensors file")
    (nbytes,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    if nbytes > _MAX_HEADER:  # as of text, or of another binary format
        raise CheckpointFailed(f"{path}: not a safetensors file")
    if not 2 <= nbytes <= length - 8:
        raise CheckpointFailed(f"{path}: a header of {nbytes} bytes in a file of {length}")
    try:
        table = json.loads(os.pread(descriptor, nbytes, 8), object_pairs_hook=_without_duplicates)
        metadata = _texts(table.pop(_METADATA)) if _METADATA in table else None
        entries = {name: _entry(name, said, 8 + nbytes) for name, said in table.items()}
        _check_no_gaps(entries, 8 + nbytes, length)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointFailed(f"{path}: damaged header: {' '.join(str(error).split())[:200]}") from None
    return entries, metadata


def _texts(said: Any) -> dict[str, str]:
    if not isinstance(said, dict) or not all(isinstance(text, str) for text in said.values()):
        raise ValueError(f"{_METADATA!r} is not a table of texts")
    return said


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def is_count(value: object) -> bool:
    """Return True if a value read from JSON is an int from 0 to 2**60: a number of elements or bytes."""
    return type(value) is int and 0 <= value <= _MAX_COUNT


def is_shape(value: object) -> bool:
    """Return True if a value read from JSON is a shape of at most 32 dimensions and 2**60 elements."""
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS or not all(is_count(extent) for extent in value):
        return False
    return math.prod(extent for extent in value if extent) <= _MAX_COUNT


def _entry(name: str, said: Any, base: int) -> Entry:
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.80} is not described as a tensor")
    shape, offsets = said["shape"], said["data_offsets"]
    dtype = _DTYPES.get(said["dtype"])
    if dtype is None or not is_shape(shape):
        raise ValueError(f"{name!r:.80} has dtype {said['dtype']!r:.40} and shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_count(offset) for offset in offsets):
        raise ValueError(f"{name!r:.80} lies at {offsets!r:.80}")
    if offsets[1] - offsets[0] != nbytes_of(dtype, shape):
        raise ValueError(f"{name!r:.80} of {dtype} {shape!r:.80} lies at {offsets}")
    return Entry(dtype, tuple(shape), base + offsets[0])


def nbytes_of(dtype: str, shape: list[int] | tuple[int, ...]) -> int:
    """Return the number of bytes of an array."""
    return math.prod(shape) * _TYPES[dtype].itemsize


def _check_no_gaps(entries: Mapping[str, Entry], base: int, length: int) -> None:
    at = base
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, nbytes_of(entry.dtype, entry.shape))):
        if entry.offset != at:
            raise ValueError(f"tensors overlap or leave a gap at byte {min(at, entry.offset)}")
        at += nbytes_of(entry.dtype, entry.shape)
    if at != length:
        raise ValueError(f"tensors end at byte {at} of {length}")


def read_range(descriptor: int, entry: Entry, start: int, out: np.ndarray, path: Path) -> None:
    """Fill the contiguous vector `out`, of the entry's dtype, with elements from `start` on.

    Raises
    ------
    CheckpointFailed
        If the file ends before the range does.
    """
    target: memoryview = out.view(np.uint8).data
    offset, done = entry.offset + start * out.itemsize, 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise CheckpointFailed(f"{path}: ends at byte {offset + done}, before the end of its tensors")
        done += count
