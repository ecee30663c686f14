"""Views of the entries of a datatype in an array: elements at regular distances, as NumPy sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import Foreign
from mpicoll.buffers.datatypes import entry_of
from mpicoll.buffers.typemap import Typemap, typemap_of


def entries_in(
    array: np.ndarray, datatype: MPI.Datatype, count: int | None, displ: int, *, moved: bool
) -> np.ndarray | None:
    """Return entries of a datatype as a view of shape ``(count, *runs, elements of a run)``.

    Elements have the type in which a collective takes them; in C's order they are those of the type signature. For a
    vector of 3 blocks of 2, 5 apart, ``count = 2`` (extent 12)::

        array   0 1 . . . 5 6 . . . 10 11 | 12 13 . . . 17 18 . . . 22 23
        view    [[[0 1] [5 6] [10 11]], [[12 13] [17 18] [22 23]]]

    Parameters
    ----------
    array
        Contiguous memory.
    count, displ
        Number of entries, None for all that the array has; the first one.
    moved
        True for a collective that only moves data, in which elements of several types count as bytes.

    Returns
    -------
    np.ndarray or None
        None if the runs are not at regular distances, or not all in the array, or if no kernel knows the elements.
    """
    if datatype == MPI.DATATYPE_NULL or array.dtype.hasobject:
        return None
    typemap = typemap_of(datatype)
    runs, extent = typemap.strided, typemap.extent
    if runs is None:
        return None
    if count is None:
        if extent <= 0 or array.nbytes % extent:
            return None
        count = array.nbytes // extent - displ
    if count < 0 or displ < 0 or not _lie_inside(typemap, count, displ, array.nbytes):
        return None
    try:
        entry = entry_of(typemap, moved=moved)
    except Foreign:
        return None
    itemsize = entry.dtype.itemsize
    shape: Any = (count, *runs.shape, runs.nbytes // itemsize)
    if not count:
        return np.empty(shape, entry.dtype)
    return np.ndarray(shape, entry.dtype, array, displ * extent + runs.offset, (extent, *runs.strides, itemsize))


def _lie_inside(typemap: Typemap, count: int, displ: int, nbytes: int) -> bool:
    """Return whether entries are within so many bytes; NumPy itself takes an empty array for memory without an end."""
    if not count:
        return True
    low, high = typemap.reach
    first, last = displ * typemap.extent, (displ + count - 1) * typemap.extent
    return min(first, last) + low >= 0 and max(first, last) + high <= nbytes
