"""Known reductions of a communicator: what compiled code needs to make gathered reductions again.

See :mod:`mpicoll.collectives.gathered_reductions`, which makes the first one of a kind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.datatypes import BYTE
from mpicoll.buffers.flat_buffer import address_of
from mpicoll.buffers.known_types import handle_word
from mpicoll.collectives.gathered_reductions import COLLECTIVES, Vectors, parts_of
from mpicoll.kernels import known_reductions as words
from mpicoll.kernels.operation_words import OTHER
from mpicoll.messages.bound_plan import functions

_PATIENCE = 64
"""Rows that are written without one being used: a program whose vectors have new lengths each time pays for no more."""
_NUMBERS = {name: number for number, name in enumerate(COLLECTIVES)}


class _Kept(NamedTuple):
    """Objects and memory whose addresses stand in a row."""

    objects: tuple[Any, ...]
    own: np.ndarray
    rows: np.ndarray


class KeptReductions:
    """Table of the reductions made last.

    Attributes
    ----------
    address
        Where compiled code finds the table; see :mod:`mpicoll.kernels.known_reductions`.
    """

    def __init__(self, reduce_local: int) -> None:
        self._words = np.zeros(words.TABLE_WORDS, np.int64)
        self._words[words.REDUCE_LOCAL], self._words[words.HANDLE_NBYTES] = reduce_local, MPI._sizeof(MPI.Op)
        self._rows = self._words[words.FIRST_ROW :].reshape(words.ROWS, words.ROW_WORDS)
        self._rows[:, words.COLLECTIVE] = -1
        self.address = int(self._words.ctypes.data)
        self._kept: list[_Kept | None] = [None] * words.ROWS
        self._next, self._left = 0, _PATIENCE

    def begin(self, table: int, collective: str, sendbuf: Any, recvbuf: Any, op: Any, root: int) -> int:
        """Make a reduction, or begin it, if it is known; see `kernels.known_reductions.reduce_known`."""
        root, number = root if collective == "reduce" else 0, _NUMBERS[collective]
        status: int = words.reduce_known.run(self.address, table & -8, number, sendbuf, recvbuf, op, root)
        if status != OTHER:
            self._left = _PATIENCE
        return status

    @property
    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """The vector of this rank and those of all, for the reduction that has begun."""
        place = (int(self._words[words.BEGUN]) - self._rows.ctypes.data) // (8 * words.ROW_WORDS)
        kept = self._kept[place]
        assert kept is not None
        return kept.own, kept.rows

    def combine(self) -> int:
        """Combine the vectors of the reduction that has begun; return DONE or NOT_COMBINED."""
        return words.combine_known.run(self.address)

    def end(self) -> None:
        """End the reduction that has begun, whatever has become of it."""
        self._words[words.IN_USE] = 0

    @property
    def error(self) -> MPI.Exception:
        """The error of MPI_Reduce_local."""
        return MPI.Exception(int(self._words[words.CODE]))

    def note(self, vectors: Vectors, sendbuf: Any, recvbuf: Any) -> None:
        """Enter a reduction that has been made, in place of the oldest one, if its arguments are of the usual forms."""
        if self._words[words.IN_USE] or not self._left:
            return
        send = _Form() if in_place(sendbuf) else _form_of(sendbuf)
        recv = _Form() if vectors.result is None else _form_of(recvbuf)
        runs = vectors.given.runs()
        if send is None or recv is None or not vectors.given.count or len(runs) > words.MOST_RUNS:
            return
        row, kept = _row_of(vectors, send, recv, runs)
        self._rows[self._next, words.COLLECTIVE] = -1  # an exception of a signal handler may come after it
        self._kept[self._next] = kept
        self._rows[self._next] = row
        self._next, self._left = (self._next + 1) % words.ROWS, self._left - 1


class _Form(NamedTuple):
    """Element type and length of the array of an argument, and the datatype beside it; None for what there is not."""

    dtype: np.dtype | None = None
    length: int = 0
    datatype: MPI.Datatype | None = None

    def words(self) -> tuple[int, int, int]:
        """Return what compiled code compares."""
        dtype, datatype = (0 if each is None else id(each) for each in (self.dtype, self.datatype))
        return dtype, datatype, self.length


def _form_of(spec: Any) -> _Form | None:
    """Return the form of an array, or of an array with its datatype; None for other specifications."""
    if type(spec) in (list, tuple) and len(spec) == 2:
        array, datatype = spec
    else:
        array, datatype = spec, None
    if type(array) is not np.ndarray or not array.flags.c_contiguous:
        return None
    if datatype is not None and not (type(datatype) is MPI.Datatype and datatype.is_predefined):
        return None
    return _Form(array.dtype, array.size, datatype)


def _row_of(vectors: Vectors, send: _Form, recv: _Form, runs: list[tuple[int, int]]) -> tuple[np.ndarray, _Kept]:
    """Return the row of a reduction, and what has to live as long as it."""
    given, size = vectors.given, vectors.channel.size
    own, rows, parts = np.zeros(given.nbytes, BYTE), np.empty((size, given.nbytes), BYTE), parts_of(vectors)
    row = np.zeros(words.ROW_WORDS, np.int64)
    row[words.COLLECTIVE], row[words.ROOT] = _NUMBERS[vectors.collective], vectors.root
    row[words.OP], row[words.OP_HANDLE] = id(vectors.op), handle_word(vectors.op)
    row[words.SEND_DTYPE : words.SEND_LENGTH + 1] = send.words()
    row[words.RECV_DTYPE : words.RECV_LENGTH + 1] = recv.words()
    row[words.ENTRIES], row[words.TYPE_HANDLE] = given.count, handle_word(given.datatype)
    row[words.NBYTES], row[words.END], row[words.PARTS] = given.nbytes, given.end, address_of(parts)
    row[words.OWN], row[words.OWN_DATA], row[words.ALL], row[words.ALL_DATA] = (
        id(own),
        address_of(own),
        id(rows),
        address_of(rows),
    )
    row[words.LAST], row[words.EXTENT] = vectors.last, given.nbytes // given.count
    row[words.RUNS] = len(runs)
    row[words.FIRST_RUN : words.FIRST_RUN + 2 * len(runs)] = np.ravel(runs)
    return row, _Kept((vectors.op, send, recv, given.datatype, parts), own, rows)


def note(vectors: Vectors, sendbuf: Any, recvbuf: Any) -> None:
    """Let compiled code make such a reduction from now on."""
    channel, found = vectors.channel, functions()
    if channel.kept_reductions is None:
        if found is None or not channel.dispatch.usable:
            return
        channel.kept_reductions = KeptReductions(found.reduce_local)
    channel.kept_reductions.note(vectors, sendbuf, recvbuf)
