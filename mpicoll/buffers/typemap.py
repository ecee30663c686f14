"""Typemaps: the bytes of an entry of a datatype, in the order of its type signature.

MPI's Pack and Unpack are not reliable enough: Open MPI 5.0 packs complex numbers whose stride is no multiple of their
size, and bytes of stride -1, as if they were contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

from mpicoll.buffers.strided import MOST_DIMENSIONS, Longs, Strided, strided, subarray

_MOST_PIECES = 8
_REGULAR = frozenset(("DUP", "RESIZED", "CONTIGUOUS", "VECTOR", "HVECTOR", "SUBARRAY"))
_MAX_KNOWN = 256
_known: dict[tuple[Any, ...], Typemap] = {}
"""Typemaps of regular datatypes by their contents: programs make the same datatypes again and again."""


class Typemap:
    """One entry of a datatype as runs of bytes, in the order of the type signature.

    Parameters
    ----------
    runs
        The runs where they have regular distances; or offset and length of each, in bytes, none of them empty.
    types
        The basic types in the signature.
    extent
        Bytes from one entry to the next.

    Attributes
    ----------
    nbytes
        Bytes of an entry, without gaps.
    reach
        Offsets of the first byte and of the first byte after the last.
    entries
        What :func:`~mpicoll.buffers.datatypes.entry_of` has found.
    pieces
        The entry as at most 8 pieces of equal runs at regular distances; None if that is impossible.
    """

    __slots__ = ("_runs", "entries", "extent", "nbytes", "pieces", "reach", "types")

    def __init__(self, runs: Strided | tuple[Longs, Longs], types: frozenset[np.dtype], extent: int) -> None:
        self.extent, self.types = extent, types
        self.entries: dict[bool, Any] = {}
        self._runs = None if isinstance(runs, Strided) else runs
        whole = runs if isinstance(runs, Strided) else strided(*runs)
        self.pieces = [whole] if whole is not None else None if self._runs is None else _few(*self._runs)
        if whole is not None:
            self.nbytes, self.reach = whole.packed_nbytes, whole.reach
        else:
            self.nbytes, self.reach = int(self.lengths.sum()), _reach(self.offsets, self.lengths)

    @property
    def strided(self) -> Strided | None:
        """The entry as one piece; None if that is impossible."""
        return self.pieces[0] if self.pieces is not None and len(self.pieces) == 1 else None

    @property
    def offsets(self) -> Longs:
        """Offset of each run from the start of the entry, in bytes."""
        return self._listed()[0]

    @property
    def lengths(self) -> Longs:
        """Length of each run in bytes."""
        return self._listed()[1]

    def _listed(self) -> tuple[Longs, Longs]:
        if self._runs is None:
            assert self.pieces is not None
            self._runs = self.pieces[0].runs()
        return self._runs

    def alignment(self) -> int:
        """Return the largest number of bytes that divides all offsets and lengths."""
        if self.pieces is None:
            return int(np.gcd.reduceat(np.concatenate(self._listed()), [0])[0])
        return math.gcd(*(n for piece in self.pieces for n in (piece.offset, piece.nbytes, *piece.strides)))


def _few(offsets: Longs, lengths: Longs) -> list[Strided] | None:
    if offsets.size > _MOST_PIECES:
        return None
    return [Strided(offset, nbytes, (), ()) for offset, nbytes in zip(offsets.tolist(), lengths.tolist(), strict=True)]


def _reach(offsets: Longs, lengths: Longs) -> tuple[int, int]:
    if not offsets.size:
        return 0, 0
    return int(offsets.min()), int((offsets + lengths).max())


@functools.cache
def _keyval() -> int:
    return MPI.Datatype.Create_keyval(nopython=False)


def typemap_of(datatype: MPI.Datatype) -> Typemap:
    """Return the typemap of a datatype; it is cached as an attribute of the datatype."""
    if datatype.is_predefined:
        return _predefined(datatype.handle)
    known: Any = datatype.Get_attr(_keyval())
    if known is None:
        known = _derived(datatype)
        datatype.Set_attr(_keyval(), known)
    made: Typemap = known
    return made


def named(datatype: MPI.Datatype) -> np.dtype:
    """Return the NumPy dtype of a predefined datatype, void of the same size if NumPy has none."""
    return _named(datatype.handle)


@functools.cache
def _named(handle: int) -> np.dtype:
    datatype = MPI.Datatype.fromhandle(handle)
    try:
        return dtlib.to_numpy_dtype(datatype)
    except (TypeError, ValueError):
        return np.dtype((np.void, datatype.Get_size()))


@functools.cache
def _predefined(handle: int) -> Typemap:
    datatype = MPI.Datatype.fromhandle(handle)
    dtype, extent = named(datatype), datatype.Get_extent()[1]
    if dtype.fields is None:
        nbytes = datatype.Get_size()
        return Typemap(Strided(0, nbytes, (), ()), frozenset([dtype]), extent) if nbytes else _nothing(extent)
    fields = [dtype.fields[name] for name in dtype.names or ()]
    offsets, lengths = _longs([field[1] for field in fields]), _longs([field[0].itemsize for field in fields])
    return _merged(offsets, lengths, frozenset(field[0] for field in fields), extent)


def _derived(datatype: MPI.Datatype) -> Typemap:
    inner, combiner, settings = datatype.decode()
    extent = datatype.Get_extent()[1]
    if combiner == "STRUCT":
        return _struct(extent, settings["blocklengths"], settings["displacements"], settings["datatypes"])
    made = typemap_of(inner)
    if not inner.is_predefined:
        inner.Free()  # MPI hands out a handle of its own
    if made.strided is not None and combiner in _REGULAR:
        key = combiner, made.strided, made.extent, made.types, extent, *map(_hashable, settings.values())
        found = _known.get(key)
        if found is None:
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            found = _known[key] = _of_regular(combiner, settings, made, extent)
        return found
    starts, counts = _blocks(combiner, settings, made.extent)
    return _merged(*_repeated(made, starts, counts), made.types, extent)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _of_regular(combiner: str, settings: dict[str, Any], inner: Typemap, extent: int) -> Typemap:
    assert inner.strided is not None
    regular = _regular(combiner, settings, inner.strided, inner.extent)
    if regular is None:
        return _nothing(extent)
    return Typemap(regular if len(regular.shape) <= MOST_DIMENSIONS else regular.runs(), inner.types, extent)


def _regular(combiner: str, settings: dict[str, Any], inner: Strided, extent: int) -> Strided | None:
    """Return the runs of a datatype that repeats one other at regular distances; None if there are none."""
    if combiner == "SUBARRAY":
        c_order = settings["order"] == MPI.ORDER_C
        return subarray(inner, extent, settings["sizes"], settings["subsizes"], settings["starts"], c_order=c_order)
    if combiner in ("VECTOR", "HVECTOR"):
        step = settings["stride"] * (extent if combiner == "VECTOR" else 1)
        return inner.repeated((settings["count"], step), (settings["blocklength"], extent))
    return inner.repeated((settings.get("count", 1), extent))


def _blocks(combiner: str, settings: dict[str, Any], extent: int) -> tuple[Longs, Longs]:
    """Return the offsets of blocks of entries, in bytes, and the number of entries in each."""
    if combiner in ("DUP", "RESIZED", "CONTIGUOUS"):
        return _longs([0]), _longs([settings.get("count", 1)])
    if combiner in ("VECTOR", "HVECTOR"):
        step = settings["stride"] * (extent if combiner == "VECTOR" else 1)
        return step * np.arange(settings["count"]), np.full(settings["count"], settings["blocklength"])
    if combiner in ("SUBARRAY", "DARRAY"):
        starts = extent * (_subarray(**settings) if combiner == "SUBARRAY" else _darray(**settings))
        return starts, np.ones(starts.size, np.int64)
    starts = _longs(settings["displacements"]) * (1 if combiner.startswith("H") else extent)
    if combiner.endswith("_BLOCK"):
        return starts, np.full(starts.size, settings["blocklength"])
    if combiner not in ("INDEXED", "HINDEXED"):
        raise NotImplementedError(f"a datatype made by {combiner}")
    return starts, _longs(settings["blocklengths"])


def _struct(extent: int, counts: Sequence[int], displs: Sequence[int], datatypes: Sequence[MPI.Datatype]) -> Typemap:
    types: set[np.dtype] = set()
    offsets, lengths = [_longs([])], [_longs([])]
    for count, displ, datatype in zip(counts, displs, datatypes, strict=True):
        part = typemap_of(datatype)
        if count and part.offsets.size:
            found = _repeated(part, _longs([displ]), _longs([count]))
            offsets.append(found[0])
            lengths.append(found[1])
            types |= part.types
        if not datatype.is_predefined:
            datatype.Free()
    return _merged(np.concatenate(offsets), np.concatenate(lengths), frozenset(types), extent)


def _subarray(sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int) -> Longs:
    chosen = [np.arange(start, start + count) for start, count in zip(starts, subsizes, strict=True)]
    return _grid(sizes, chosen, order)


def _darray(
    size: int,
    rank: int,
    gsizes: Sequence[int],
    distribs: Sequence[int],
    dargs: Sequence[int],
    psizes: Sequence[int],
    order: int,
) -> Longs:
    places = np.unravel_index(rank, psizes)  # ranks are in C order, whatever the order of the array
    chosen = []
    for place, count, distrib, wanted, ranks in zip(places, gsizes, distribs, dargs, psizes, strict=True):
        default = wanted == MPI.DISTRIBUTE_DFLT_DARG
        block = count
        if distrib == MPI.DISTRIBUTE_BLOCK:
            block = -(-count // ranks) if default else wanted
        elif distrib == MPI.DISTRIBUTE_CYCLIC:
            block = 1 if default else wanted
        every = np.arange(count)
        chosen.append(every[every // block % ranks == place])
    return _grid(gsizes, chosen, order)


def _grid(sizes: Sequence[int], chosen: Sequence[Longs], order: int) -> Longs:
    """Return the numbers of chosen elements of an array, in the array's order."""
    dimensions = list(zip(sizes, chosen, strict=True))
    numbers, step = _longs([0]), 1
    for size, indices in dimensions if order == MPI.ORDER_F else reversed(dimensions):
        numbers = (step * indices[:, None] + numbers).ravel()
        step *= size
    return numbers


def _repeated(inner: Typemap, starts: Longs, counts: Longs) -> tuple[Longs, Longs]:
    """Return the runs of blocks of entries."""
    if inner.offsets.size == 1 and inner.lengths[0] == inner.extent:  # entries leave no holes
        return starts + inner.offsets[0], counts * inner.extent
    places = np.repeat(starts - inner.extent * _before(counts), counts) + inner.extent * np.arange(counts.sum())
    offsets = (places[:, None] + inner.offsets).ravel()
    return offsets, np.tile(inner.lengths, places.size)


def _before(counts: Longs) -> Longs:
    return np.cumsum(counts) - counts


def _merged(offsets: Longs, lengths: Longs, types: frozenset[np.dtype], extent: int) -> Typemap:
    """Make a typemap: drop empty runs, and join those that follow each other."""
    offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
    if offsets.size > 1:
        first = np.append(True, offsets[1:] != offsets[:-1] + lengths[:-1])
        lengths = np.add.reduceat(lengths, np.flatnonzero(first))
        offsets = offsets[first]
    return Typemap((offsets, lengths), types if offsets.size else frozenset(), extent)


def _nothing(extent: int) -> Typemap:
    return Typemap((_longs([]), _longs([])), frozenset(), extent)


def _longs(values: Any) -> Longs:
    return np.asarray(values, np.int64).reshape(-1)


EMPTY = _nothing(0)
"""Typemap without bytes, for entries that do not exist."""
