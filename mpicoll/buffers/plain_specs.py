"""Buffer specifications that say no more than an array does: ``[array, MPI.DOUBLE]``, ``[array, count]``, ...

Calls with whole arrays are made by compiled code; with these, the most common specifications, they can be, too.
"""

from __future__ import annotations

import contextlib
from array import array as array_of_numbers
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers import known_types
from mpicoll.buffers.buffer_specs import array_of_view, memory_of
from mpicoll.buffers.datatypes import entry_of_array
from mpicoll.buffers.strided_views import entries_in
from mpicoll.buffers.typemap import named, typemap_of
from mpicoll.kernels.reduce import DTYPES

KNOWN = frozenset(DTYPES)
"""Element types that kernels know."""


class Apart(NamedTuple):
    """Elements that do not follow each other in memory, in C's order: the entries of a derived datatype."""

    view: np.ndarray

    def packed(self) -> np.ndarray:
        """Return a copy in which they follow each other."""
        return np.ascontiguousarray(self.view)


def array_of(spec: Any, blocks: int = 1, *, sent: bool = False, moved: bool = True) -> Any:
    """Return a specification as an array; what is no buffer as it is; NotImplemented where it says something else.

    Entries of a derived datatype are a view of the array, :class:`Apart` if they have gaps.

    Parameters
    ----------
    blocks
        So many times the count of the specification are meant.
    sent
        Whether it may be one of NumPy's scalars, which nothing can be received into.
    moved
        Whether the elements are moved only, see :func:`~mpicoll.buffers.strided_views.entries_in`.
    """
    if type(spec) not in (list, tuple):
        return _memory(spec, sent)
    if len(spec) == 2 and type(spec[1]) is MPI.Datatype and type(spec[0]) is np.ndarray:  # the usual case, quickly
        array, datatype = spec
        if array.dtype is dtypes_by_handle().get(datatype.handle) and array.flags.c_contiguous:
            return array
    if len(spec) < 2:
        return NotImplemented
    array, *where = spec
    array = _NO_MEMORY if array is None else _memory(array, sent)
    if type(array) is not np.ndarray or not array.flags.c_contiguous or not array.dtype.isnative:
        return NotImplemented
    datatype = where.pop() if isinstance(where[-1], (MPI.Datatype, str)) else None
    if datatype is None and len(spec) > 2:
        return NotImplemented
    count, displ = None, 0
    if where:
        count, displ = _pair(where, 0)
        if type(count) is not int or type(displ) is not int:
            return NotImplemented
        count *= blocks
    if datatype is not None and not fits(array.dtype, datatype):
        found = _entries(array, datatype, count, displ, moved, sent)
        is_whole = count is not None or blocks == 1 or found is NotImplemented or len(_view(found)) % blocks == 0
        return found if is_whole else NotImplemented
    if count is None:
        return array
    stop = displ + count
    if not 0 <= displ <= stop <= array.size:
        return NotImplemented
    return array if stop - displ == array.size else array.reshape(-1)[displ:stop]


_NO_MEMORY = np.empty(0, np.uint8)


def as_moved(array: Any) -> Any:
    """Return a contiguous array of elements that no kernel knows as one of what is moved for them, mostly bytes.

    Anything else is returned as it is.
    """
    if type(array) is not np.ndarray or array.dtype in KNOWN or not array.dtype.isnative:
        return array
    return array.reshape(-1).view(entry_of_array(array.dtype, "", moved=True).dtype)


def _entries(
    array: np.ndarray, datatype: MPI.Datatype | str, count: int | None, displ: int, moved: bool, sent: bool
) -> Any:
    """Return entries of a datatype other than that of the array's elements, as :func:`array_of` does."""
    if isinstance(datatype, str):
        return NotImplemented
    view = entries_in(array, datatype, count, displ, moved=moved)
    if view is None or not (sent or view.flags.writeable):
        return NotImplemented
    known_types.note(datatype, typemap_of(datatype))
    return view if view.flags.c_contiguous else Apart(view)


def _pair(where: list[Any], default: Any) -> tuple[Any, Any]:
    """Return counts and displacements, which may be given as a pair; None for what is neither."""
    if len(where) == 1 and type(where[0]) is tuple:
        where = [*where[0]]
    elif len(where) == 1:
        where = [*where, default]
    return (where[0], where[1]) if len(where) == 2 else (None, None)


_BUFFERS = frozenset((array_of_numbers, bytearray, bytes, memoryview))
_TENSOR_METHODS = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")


def _memory(data: Any, sent: bool) -> Any:
    """Return the memory of a buffer, an array of a subclass or a tensor as a plain array; anything else as it is.

    So are scalars of NumPy if they are sent; what is read-only stays as it is if it is received into.
    """
    kind = type(data)
    if kind is np.ndarray or data is None:
        return data
    if isinstance(data, np.ndarray):
        return np.ndarray.view(data, np.ndarray)
    if isinstance(data, np.generic):
        return np.asarray(data) if sent else data
    if kind in _BUFFERS:
        view = memoryview(data)
        return data if view.readonly and not sent else array_of_view(data, view)
    with contextlib.suppress(Exception):  # the general path raises it
        if any(hasattr(data, name) for name in _TENSOR_METHODS):
            return memory_of(data, "", not sent)
    return data


def fits(dtype: np.dtype, datatype: MPI.Datatype | str) -> bool:
    """Return whether a datatype is that of an array's elements."""
    found = dtype_of_code(datatype) if isinstance(datatype, str) else dtypes_by_handle().get(datatype.handle)
    return found is not None and (found is dtype or found == dtype)  # NumPy has None equal to float64


@cache
def dtypes_by_handle() -> dict[int, np.dtype]:
    """Return element types by the handles of predefined datatypes, which no other datatype ever has."""
    found = {}
    for each in vars(MPI).values():
        if isinstance(each, MPI.Datatype) and each != MPI.DATATYPE_NULL:
            dtype = named(each)
            if dtype.kind in "biufc":
                found[each.handle] = dtype
    return found


@cache
def dtype_of_code(code: str) -> np.dtype | None:
    """Return the element type for which a letter stands; None for any other text."""
    try:
        return dtypes_by_handle().get(MPI.Datatype.fromcode(code).handle)
    except ValueError:
        return None


class PlainBlocks(NamedTuple):
    """Blocks of elements of a contiguous array, or of entries of another datatype along the first axis of a view."""

    array: np.ndarray
    counts: tuple[int, ...]
    displs: tuple[int, ...]
    of_entries: bool = False


def are_counts(counts: Any, size: int) -> bool:
    """Return whether this is a list or tuple of a count for each rank."""
    if type(counts) not in (list, tuple) or len(counts) != size:
        return False
    return all(type(count) is int and count >= 0 for count in counts)


def listed(counts: Any) -> Any:
    """Return a vector of whole numbers as a list, anything else as it is."""
    if type(counts) is np.ndarray and counts.ndim == 1 and counts.dtype.kind in "iu":
        return counts.tolist()
    return counts


def divided(count: int, size: int) -> list[int]:
    """Return how elements are divided evenly, as mpi4py does: the first blocks are longer by one if need be."""
    each, longer = divmod(count, size)
    return [each + 1] * longer + [each] * (size - longer)


def plain_blocks(spec: Any, size: int) -> PlainBlocks | None:
    """Return the blocks of ``array``, ``[array, counts]``, ``[array, (counts, displs), MPI.DOUBLE]``, ...

    Counts and displacements are lists, tuples or vectors of whole numbers; one count is that of each block, one
    displacement the distance between blocks. None is returned for others, also where the datatype is not that of the
    array's elements.
    """
    blocks = blocks_in(spec, size)
    return blocks if blocks is not None and not blocks.of_entries else None


def blocks_in(spec: Any, size: int) -> PlainBlocks | None:
    """Return the same, and the blocks of entries of other datatypes.

    Then `array` is a view of entries, see :func:`~mpicoll.buffers.strided_views.entries_in`.
    """
    if type(spec) not in (list, tuple):
        spec = (spec,)
    if not 1 <= len(spec) <= 4:
        return None
    data, *where = spec
    array = _memory(data, sent=True)
    if type(array) is not np.ndarray or not array.flags.c_contiguous:
        return None
    datatype = where.pop() if where and isinstance(where[-1], (MPI.Datatype, str)) else None
    if datatype is None and len(spec) > 2:
        return None
    if datatype is None or fits(array.dtype, datatype):
        datatype = None
        if array.dtype.kind not in "biufc" or not array.dtype.isnative:
            return None
    if where:
        counts, displs = _given_blocks(where, size)
    else:
        counts, displs = _following(divided(array.size, size)) if datatype is None else (None, None)
    if counts is None or displs is None:
        return None
    if datatype is None and array.dtype in KNOWN:
        return PlainBlocks(array, tuple(counts), tuple(displs))
    view = _view_of_entries(array, datatype, counts, displs)
    return None if view is None else PlainBlocks(view, tuple(counts), tuple(displs), of_entries=True)


def _view_of_entries(
    array: np.ndarray, datatype: MPI.Datatype | str | None, counts: Sequence[int], displs: Sequence[int]
) -> np.ndarray | None:
    """Return a view whose first axis are the entries of a datatype, or elements that no kernel knows as bytes."""
    if datatype is None:
        return as_moved(array).reshape(array.size, -1) if array.size else None
    ends = [displ + count for count, displ in zip(counts, displs, strict=True) if count]
    found = _entries(array, datatype, max(ends, default=0), 0, moved=True, sent=True)
    return None if found is NotImplemented else _view(found)


def _view(entries: Any) -> np.ndarray:
    """Return entries as a view, whether they have gaps or not."""
    view: np.ndarray = entries.view if isinstance(entries, Apart) else entries
    return view


def _given_blocks(where: list[Any], size: int) -> tuple[Any, Any]:
    """Return given counts and displacements as lists, None for those that are none."""
    counts, displs = (listed(each) for each in _pair(where, None))
    if type(counts) is int:
        counts = [counts] * size
    if not are_counts(counts, size):
        return None, None
    if displs is None:
        return _following(counts)
    if type(displs) is int:
        displs = [displs * rank for rank in range(size)]
    return counts, displs if are_counts(displs, size) else None


def _following(counts: Sequence[int]) -> tuple[Sequence[int], list[int]]:
    """Return counts, and displacements by which the blocks follow each other."""
    return counts, [0, *accumulate(counts)][:-1]


def key_of(spec: Any) -> tuple[Any, Any]:
    """Return the array of a specification, and a key of its element type, counts and displacements.

    None takes the place of the key where the specification is not one that many programs use.
    """
    if type(spec) not in (list, tuple):
        array = _memory(spec, sent=True)
        is_plain = type(array) is np.ndarray and array.flags.c_contiguous
        return array, (array.dtype, array.size) if is_plain else None
    if not 2 <= len(spec) <= 4:
        return spec, None
    data, *where = spec
    array = _memory(data, sent=True)
    if type(array) is not np.ndarray or not array.flags.c_contiguous:
        return array, None
    if type(where[-1]) is MPI.Datatype:
        if array.dtype is not dtypes_by_handle().get(where.pop().handle):
            return array, None
    elif len(spec) > 2:
        return array, None
    if not where:
        return array, (array.dtype, array.size)
    blocks = _key_of_blocks(where)
    return array, None if blocks is None else (array.dtype, *blocks)


def key_of_entries(spec: Any) -> Any:
    """Return a key of ``[array, counts, datatype]`` and these with displacements, if the datatype is a derived one.

    None is returned for others. Equal keys mean equal typemaps, counts and displacements, and arrays of as many bytes;
    datatypes that have the same handle one after the other have keys of their own.
    """
    if type(spec) not in (list, tuple) or not 3 <= len(spec) <= 4:
        return None
    array, *where, datatype = spec
    if type(array) is not np.ndarray or not array.flags.c_contiguous or type(datatype) is not MPI.Datatype:
        return None
    if datatype == MPI.DATATYPE_NULL or datatype.is_predefined:
        return None
    blocks = _key_of_blocks(where)
    return None if blocks is None else (typemap_of(datatype), array.dtype, array.nbytes, *blocks)


def _key_of_blocks(where: list[Any]) -> tuple[Any, Any] | None:
    """Return counts and displacements, which may be given as a pair, as parts of a key; None for others."""
    counts, displs = _pair(where, None)
    frozen = _frozen(counts), _frozen(displs)
    return None if counts is None or NotImplemented in frozen else frozen


def _frozen(counts: Any) -> Any:
    """Return counts or displacements as part of a key; NotImplemented for those that cannot be."""
    if counts is None or type(counts) is int:
        return counts
    if type(counts) is np.ndarray:
        return counts.dtype.str, counts.shape, counts.tobytes()
    if type(counts) in (list, tuple) and all(type(count) is int for count in counts):
        return tuple(counts)
    return NotImplemented
