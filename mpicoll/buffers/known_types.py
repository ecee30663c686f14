"""Known types: the table in which compiled code finds the layouts of datatypes other than those of array elements.

One table serves all communicators of a process. A datatype is entered when it is used for the first time, and removed
when it is freed, since the MPI library gives its handle to another datatype then.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import Foreign
from mpicoll.buffers.datatypes import entry_of
from mpicoll.buffers.typemap import Typemap
from mpicoll.kernels import packed_views as words
from mpicoll.kernels import strided_copy
from mpicoll.kernels.dispatch_table import header_nbytes
from mpicoll.kernels.reduce import DTYPES

_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
_rows = np.zeros((words.TYPES_LENGTH, words.TYPE_WORDS), np.int64)
_LENGTH = words.TYPE_LAYOUT + strided_copy.NBYTES
_noted = itertools.count()
_PATIENCE = 64
"""So many datatypes are entered without one being found by a call; after that, one in as many is."""
_left = _PATIENCE
_is_entering = False
"""True while a datatype is entered. A second thread, or a signal handler, that entered the same datatype in another row
would leave the first row behind when the datatype is freed, since a datatype has one attribute."""


def note(datatype: MPI.Datatype, typemap: Typemap) -> None:
    """Enter a datatype, in place of another one if need be; not those that only Python can unfold.

    If a program frees most of its datatypes before they are used again, few of them are entered.
    """
    global _is_entering
    if _is_entering:
        return
    _is_entering = True  # read and set without a break, see NonblockingLanes
    try:
        _enter(datatype, typemap)
    finally:
        _is_entering = False


def _enter(datatype: MPI.Datatype, typemap: Typemap) -> None:
    global _left
    turn = next(_noted)
    if _left <= 0 and turn % _PATIENCE:
        return
    word = handle_word(datatype)
    first = words.type_entry(word)
    places = (first, first + 1)
    if any(_rows[place, words.HANDLE] == word and _rows[place, _LENGTH] for place in places):
        return
    row = _row_of(datatype, typemap)
    if row is None:
        return
    place = next((place for place in places if not _rows[place, _LENGTH]), first + turn % 2)
    _left = _PATIENCE if _rows[place, words.USED] else _left - 1
    # An exception of a signal handler may come between any two of these.
    _rows[place, _LENGTH] = 0
    if not datatype.is_predefined:
        datatype.Set_attr(_keyval(), _rows[place].ctypes.data)
    _rows[place] = row


@functools.cache
def _keyval() -> int:
    """Return the key of an attribute whose value is the address of a row, which is emptied when a datatype is freed."""
    return MPI.Datatype.Create_keyval(delete_fn=words.forget_type.run)


def _row_of(datatype: MPI.Datatype, typemap: Typemap) -> list[int] | None:
    runs, extent = typemap.strided, typemap.extent
    if runs is None or not typemap.nbytes or len(runs.shape) > words.MOST_TYPE_DIMENSIONS:
        return None
    if max(abs(extent), typemap.nbytes, *map(abs, typemap.reach)) >= words.MOST_BYTES:
        return None
    rest = [0] * (strided_copy.MAX_DIMENSIONS - len(runs.shape))
    layout = [runs.offset, typemap.nbytes, runs.nbytes, len(runs.shape), *runs.shape, *rest, *runs.strides, *rest]
    return [handle_word(datatype), extent, *typemap.reach, _number(typemap, True), _number(typemap, False), 0, *layout]


def _number(typemap: Typemap, moved: bool) -> int:
    """Return the number of the type of elements that are moved only, or reduced; -1 if kernels do not know it."""
    try:
        return _DTYPE_NUMBERS.get(entry_of(typemap, moved=moved).dtype, -1)
    except Foreign:
        return -1


def handle_word(thing: MPI.Datatype | MPI.Op) -> int:
    """Return a handle as compiled code reads it: a word, or a half of one with its sign."""
    handle, half = int(thing.handle), 1 << (8 * MPI._sizeof(thing) - 1)
    return (handle + half) % (2 * half) - half


def room_for_copies(longest: int, size: int) -> np.ndarray | None:
    """Return room for a communicator's packed copies of so many bytes; None where datatypes are of unknown form."""
    if MPI._addressof(MPI.INT) - id(MPI.INT) != header_nbytes():
        return None
    room = np.empty(words.COPIES + 2 * longest // 8 + 2 * size, np.int64)
    room[: words.COPIES] = 0
    room[words.TYPES], room[words.DATATYPE_TYPE] = _rows.ctypes.data, id(MPI.Datatype)
    room[words.HANDLE_NBYTES], room[words.LONGEST_COPY] = MPI._sizeof(MPI.Datatype), longest
    return room
