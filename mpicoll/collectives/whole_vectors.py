"""All parts of a vector collective in one array: where they are, and a temporary vector in which they are in order.

Parts are blocks of elements, or of entries of a derived datatype. Descriptions that were made before are kept.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpicoll.buffers.plain_specs import KNOWN, blocks_in, key_of, key_of_entries
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS

_MAX_KNOWN = 256


class Lengths(NamedTuple):
    """Lengths of the parts of a whole vector.

    Attributes
    ----------
    counts, total
        Elements of each part, and of all.
    places
        Slices of the first axis of the caller's array that hold the parts, in rank order; empty if the parts are the
        first elements of the array, one after the other.
    overlap
        True if two parts have an element in common.
    """

    counts: tuple[int, ...]
    total: int
    places: tuple[slice, ...] = ()
    overlap: bool = False


class Whole(NamedTuple):
    """All parts, one after the other.

    Attributes
    ----------
    vector
        The caller's array, or a temporary one.
    apart
        The caller's array if the parts are elsewhere in it.
    """

    vector: np.ndarray
    lengths: Lengths
    apart: np.ndarray | None = None

    def pack(self) -> None:
        """Copy the parts from the caller's array."""
        if self.apart is not None:
            np.concatenate([self.apart[place] for place in self.lengths.places], out=self.vector)

    def unpack(self) -> None:
        """Copy the parts to the caller's array."""
        if self.apart is None:
            return
        begin = 0
        for place in self.lengths.places:
            end = begin + place.stop - place.start
            self.apart[place] = self.vector[begin:end]
            begin = end


class _Entries(NamedTuple):
    """Entries of a derived datatype in an array of known length: NumPy's description of the view, and its parts."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    strides: tuple[int, ...]
    lengths: Lengths

    def view_of(self, array: np.ndarray) -> np.ndarray:
        """Return the entries in an array."""
        return np.ndarray(self.shape, self.dtype, array, self.offset, self.strides)


class WholeVectors:
    """Descriptions of whole vectors on one communicator, by counts, displacements and element type as given."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lengths: dict[Any, Lengths] = {}
        self._entries: dict[Any, _Entries] = {}

    def find(self, spec: Any, *, written: bool) -> Whole | None:
        """Return the blocks of an array; None for others, and for what cannot be `written` if that is asked for."""
        try:
            return self._find(spec, written)
        except Exception:  # no memory, no such counts: the general path raises it, and tells the other ranks
            return None

    def _find(self, spec: Any, written: bool) -> Whole | None:
        array, key = key_of(spec)
        if key is None and (entries_key := key_of_entries(spec)) is not None:
            return self._find_entries(spec, array, entries_key, written)
        if key is not None and array.dtype not in KNOWN:
            key = None
        lengths = None if key is None else self._lengths.get(key)
        if lengths is None:
            found = _described(spec, self._size)
            if found is None:
                return None
            array, lengths = found
            if key is not None:
                _keep(self._lengths, key, lengths)
        else:
            array = array.reshape(-1)
        return _whole(array, lengths, written)

    def _find_entries(self, spec: Any, array: np.ndarray, key: Any, written: bool) -> Whole | None:
        """Return blocks of entries of a derived datatype; None if they have no regular distances, or are elsewhere."""
        known = self._entries.get(key)
        if known is not None:
            return _whole(known.view_of(array), known.lengths, written)
        found = _described(spec, self._size)
        if found is None:
            return None
        view, lengths = found
        if view.size:
            offset = view.ctypes.data - array.ctypes.data
            _keep(self._entries, key, _Entries(view.shape, view.dtype, offset, view.strides, lengths))
        return _whole(view, lengths, written)


def _keep(known: dict[Any, Any], key: Any, made: Any) -> None:
    """Keep a description, and drop all others if there are too many: of freed datatypes, of lengths used once."""
    if len(known) >= _MAX_KNOWN:
        known.clear()
    known[key] = made


def _whole(array: np.ndarray, lengths: Lengths, written: bool) -> Whole | None:
    if lengths.places:
        return _apart(array, lengths, written)
    if lengths.total == array.size:
        return Whole(array, lengths)
    return Whole(array.reshape(-1)[: lengths.total], lengths) if lengths.total < array.size else None


def _apart(array: np.ndarray, lengths: Lengths, written: bool) -> Whole | None:
    """Return a temporary vector for blocks that do not follow each other; None if they are not all in the array."""
    if max(place.stop for place in lengths.places) > len(array):
        return None
    if written and (lengths.overlap or not array.flags.writeable):
        return None
    entries = sum(place.stop - place.start for place in lengths.places)
    return Whole(np.empty((entries, *array.shape[1:]), array.dtype), lengths, array)


def _described(spec: Any, size: int) -> tuple[np.ndarray, Lengths] | None:
    """Return the array, and the lengths of its blocks, of any plain specification; None for others."""
    blocks = blocks_in(spec, size)
    if blocks is None:
        return None
    places: tuple[slice, ...] = ()
    overlap = False
    array = blocks.array if blocks.of_entries else blocks.array.reshape(-1)
    unit = math.prod(array.shape[1:])
    if blocks.displs == tuple([0, *accumulate(blocks.counts)][:-1]):
        places = () if array.flags.c_contiguous else (slice(0, sum(blocks.counts)),)
    else:
        # A block without elements may be anywhere.
        begins = [displ if count else 0 for displ, count in zip(blocks.displs, blocks.counts, strict=True)]
        places = tuple(slice(begin, begin + count) for begin, count in zip(begins, blocks.counts, strict=True))
        ends = sorted((place.start, place.stop) for place in places if place.start < place.stop)
        overlap = any(second[0] < first[1] for first, second in pairwise(ends))
    counts = tuple(count * unit for count in blocks.counts)
    if array.dtype not in DTYPE_NUMBERS:
        return None
    return array, Lengths(counts, sum(counts), places, overlap)
