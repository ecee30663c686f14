"""Dispatch table, from which compiled code makes plain calls without checks of their arguments in Python.

:mod:`mpicoll.kernels.dispatch_table` describes its words. Calls on the general path enter their operation and element
type. The table also numbers the collectives of a communicator, for both paths.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.known_types import room_for_copies
from mpicoll.buffers.plain_specs import dtype_of_code, dtypes_by_handle
from mpicoll.kernels import buffer_views, builtin_objects, dispatch_table, packed_views
from mpicoll.kernels import operation_words as layout
from mpicoll.kernels import reduce as kernels
from mpicoll.kernels.compared_calls import is_new
from mpicoll.progress.call_signature import Signature
from mpicoll.shared_memory.packed_calls import signature_of

_OPS = [getattr(MPI, name) for name in kernels.OPS]
"""Kept alive, since their addresses stand in tables."""
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(kernels.DTYPES)}
_OP_NUMBERS = {name: number for number, name in enumerate(kernels.OPS)}
NEWS_EVERY = 256
_DATATYPES = [each for each in vars(MPI).values() if type(each) is MPI.Datatype and each != MPI.DATATYPE_NULL]
"""Kept alive, too: predefined datatypes, which programs name in specifications such as ``[array, MPI.DOUBLE]``."""
_LETTERS = tuple({id(text): text for letter in np.typecodes["All"] for text in (letter, sys.intern(letter))}.values())
"""Kept alive, too: an interpreter has one text or two of each letter, which stands for a datatype."""
USER_OP = dispatch_table.MAX_OPS
"""Numbers of operations that are not predefined start here; they are hashes of names."""


_layout_error = cache(dispatch_table.layout_error)


@lru_cache(maxsize=1)
def _datatype_pairs() -> np.ndarray:
    """Return by row the address of a datatype, and the number of the element type for which it stands."""
    dtypes = dtypes_by_handle()
    pairs = {id(each): DTYPE_NUMBERS.get(dtypes.get(each.handle)) for each in _DATATYPES}
    first = [id(MPI.DOUBLE), id(MPI.FLOAT), id(MPI.INT), id(MPI.INT64_T)]  # the most common ones are found quickly
    order = [*first, *(address for address in pairs if address not in first)]
    rows = [(address, pairs[address]) for address in order if pairs[address] is not None]
    letters = [(id(letter), DTYPE_NUMBERS.get(dtype_of_code(letter))) for letter in _LETTERS]
    return np.array([*rows, *(row for row in letters if row[1] is not None)], np.int64)


_shown_rows = cache(buffer_views.shown_rows)


@cache
def _knows_numbers() -> bool:
    return builtin_objects.knows_numbers(dispatch_table.header_nbytes())


_NUMBER_WORDS = {
    dispatch_table.TUPLE_TYPE: id(tuple),
    dispatch_table.INT_TYPE: id(int),
    dispatch_table.NONE: id(None),
    dispatch_table.INT64_DTYPE: id(np.dtype(np.int64)),
    dispatch_table.INT32_DTYPE: id(np.dtype(np.int32)),
    dispatch_table.TUPLE_ITEMS: builtin_objects.tuple_items(),
    dispatch_table.INT_HAS_TAG: builtin_objects.has_tags(),
}
"""Words of a table for reading counts from specifications."""


def op_number(name: str, dtype: np.dtype, reducer: object) -> int | None:
    """Return the number of a predefined operation, None for one of :func:`mpicoll.op`, whatever its name."""
    number = _OP_NUMBERS.get(name)
    return number if number is not None and kernels.reducer(name, dtype) is reducer else None


def op_word(name: str, dtype: np.dtype, reducer: object) -> int:
    """Return the number of a predefined operation, or a hash of the name of another."""
    number = op_number(name, dtype, reducer)
    return USER_OP + zlib.crc32(name.encode()) % (0x10000 - USER_OP) if number is None else number


class CompiledCall(NamedTuple):
    """A call by messages that compiled code can repeat, in the words of :mod:`mpicoll.kernels.dispatch_table`."""

    call: int
    elements: int
    send: int
    recv: int
    job: int
    inbox: np.ndarray | None
    outbox: np.ndarray | None
    sent_nbytes: int
    signature: Signature


@cache
def _fixed_words(size: int) -> np.ndarray:
    """Return the words of a table that are the same for all communicators of `size` ranks."""
    words = np.zeros(dispatch_table.table_words(size), np.int64)
    words[dispatch_table.ARRAY_TYPE], words[dispatch_table.IN_PLACE] = id(np.ndarray), id(MPI.IN_PLACE)
    words[dispatch_table.HEADER] = dispatch_table.header_nbytes()
    words[dispatch_table.OPS], words[dispatch_table.DTYPES] = len(_OPS), len(kernels.DTYPES)
    for begin, values in (
        (dispatch_table.OP_IDS, [id(op) for op in _OPS]),
        (dispatch_table.DTYPE_IDS, [id(dtype) for dtype in kernels.DTYPES]),
        (dispatch_table.ITEMSIZES, [dtype.itemsize for dtype in kernels.DTYPES]),
    ):
        words[begin : begin + len(values)] = values
    return words


class FastDispatch:
    """Dispatch table of one communicator.

    Attributes
    ----------
    address
        Address of the table, for :func:`mpicoll.kernels.dispatch.call`.
    busy
        A word that is 1 while a call is being made on the general path, which closes the compiled path.
    usable
        Whether the compiled path is possible.
    """

    def __init__(self, size: int, job: np.ndarray | None, *, checked: bool = True) -> None:
        self._size, self._job = size, job
        self._known = np.zeros((dispatch_table.KNOWN_LENGTH, dispatch_table.KNOWN_WORDS), np.int64)
        self._known[:, dispatch_table.KNOWN_CALL] = -1
        self._signatures: dict[int, Signature] = {}
        self._learned = 0
        self._lasting: set[int] = set()  # numbers of signatures that stay
        self._room: np.ndarray | None = None
        self._words = _fixed_words(size).copy()
        self._history = np.zeros((dispatch_table.HISTORY_LENGTH, dispatch_table.HISTORY_ENTRY), np.int64)
        self._agreed = np.zeros((dispatch_table.AGREED_LENGTH, 2), np.int64)
        self.address = self._words.ctypes.data
        words = self._words
        self.busy = words[dispatch_table.BUSY : dispatch_table.BUSY + 1].data
        self._running = words[dispatch_table.RUNNING : dispatch_table.RUNNING + 1].data
        self.usable = job is not None and not _layout_error()
        if job is None:
            return
        words[dispatch_table.JOB] = job.ctypes.data
        if self.usable and builtin_objects.knows_lists():
            pairs = _datatype_pairs()
            words[dispatch_table.LIST_TYPE] = id(list)
            words[dispatch_table.DATATYPES], words[dispatch_table.DATATYPE_COUNT] = pairs.ctypes.data, len(pairs)
            if _knows_numbers():
                self._words[list(_NUMBER_WORDS)] = list(_NUMBER_WORDS.values())
        if self.usable:
            rows = _shown_rows()
            words[dispatch_table.SHOWN], words[dispatch_table.SHOWN_COUNT] = rows.ctypes.data, len(rows)
        words[dispatch_table.KNOWN] = self._known.ctypes.data
        words[dispatch_table.HISTORY], words[dispatch_table.AGREED] = (
            self._history.ctypes.data,
            self._agreed.ctypes.data,
        )
        words[dispatch_table.CHECKED], words[dispatch_table.METHOD] = checked, job[layout.METHOD]

    def begin_packing(self, by_messages: bool) -> None:
        """Let compiled code pack and unpack entries of derived datatypes."""
        if self._room is not None or not self.usable or not self._words[dispatch_table.LIST_TYPE]:
            return
        room = room_for_copies(dispatch_table.STAGED_NBYTES if by_messages else packed_views.PACKED_NBYTES, self._size)
        if room is not None and self._room is None:
            self._room = room
            self._words[dispatch_table.PACKING] = room.ctypes.data

    @contextmanager
    def unpacking(self) -> Iterator[None]:
        """Return a block that completes a call which has packed its arguments; then its result is in its places."""
        try:
            yield
        except BaseException:
            self.forget_packed()
            raise
        self._unpack()

    def _unpack(self) -> None:
        """Copy the result to its places, unless the packed copies were forgotten."""
        assert self._room is not None
        packed_views.unpack_later.run(self._room.ctypes.data)

    def forget_packed(self) -> None:
        """Forget the packed copies of a call, which has failed or is made in another way."""
        if self._room is not None:
            self._room[packed_views.IN_USE] = 0

    @property
    def is_at_work(self) -> bool:
        """True while compiled code makes a blocking call, or until the call that it has begun is completed."""
        return bool(self.running) or (self._job is not None and self._job[layout.STATE] != layout.IDLE)

    @property
    def number(self) -> int:
        """The number of the last collective."""
        return int(self._words[dispatch_table.NUMBER])

    def count(self) -> int:
        """Number a collective that is called on the general path."""
        number = int(self._words[dispatch_table.NUMBER]) + 1
        self._words[dispatch_table.NUMBER] = number
        return number

    def open(self) -> None:
        """Open the compiled path for the next :data:`NEWS_EVERY` collectives."""
        if self.usable:
            self._words[dispatch_table.NEWS] = self._words[dispatch_table.NUMBER] + NEWS_EVERY

    def shut(self) -> None:
        """Close the compiled path for good."""
        self.usable = False
        self.hold()

    def hold(self) -> None:
        """Close the compiled path until a call on the general path opens it again."""
        self._words[dispatch_table.NEWS] = 0

    def learn(self, op: int, dtype: int, reducer: int) -> None:
        """Enter the address of a reducer."""
        if op < USER_OP:
            self._words[dispatch_table.REDUCERS + dispatch_table.MAX_DTYPES * op + dtype] = reducer

    def learn_plan(self, collective: int, long: bool, root: int, plan: int) -> None:
        """Enter the address of a plan."""
        self._words[dispatch_table.plan_entry(collective, long, root, self._size)] = plan

    def learn_counted_plan(self, collective: int, is_root: bool, plan: int) -> None:
        """Enter the address of a plan of Gatherv or Scatterv."""
        self._words[dispatch_table.counted_plan_entry(collective, is_root)] = plan

    @property
    def running(self) -> int:
        """The number of the known call that has begun and not ended, 0 if there is none."""
        return int(self._running[0])

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all messages of calls that compiled code has repeated, and of those whose lengths it has read."""
        return int(self.sent_nbytes_word[0])

    @property
    def sent_nbytes_word(self) -> np.ndarray:
        """The word that counts them, int64 of shape (1,)."""
        return self._words[dispatch_table.SENT_NBYTES : dispatch_table.SENT_NBYTES + 1]

    @property
    def remembered(self) -> int:
        """The number of signatures that are remembered, without those that stay."""
        return len(self._signatures) - len(self._lasting)

    def know(self, known: CompiledCall) -> int:
        """Enter a call by messages, maybe in place of another one; return its number."""
        first = dispatch_table.known_entry(known.call, known.elements, known.send, known.recv)
        entries = self._known[first : first + 2]
        same = [entry for entry in entries if tuple(entry[:4].tolist()) == known[:4]]
        free = [entry for entry in entries if entry[dispatch_table.KNOWN_CALL] < 0]
        entry = [*same, *free, entries[known.elements & 1]][0]
        number = int(entry[dispatch_table.KNOWN_NUMBER])
        if not same or entry[dispatch_table.KNOWN_JOB] != known.job:
            number = self._learned = self._learned + 1
            boxes = [word for each in (known.inbox, known.outbox) for word in _place_of(each)]
            entry[:] = *known[:4], number, known.job, *boxes, known.sent_nbytes
        self._signatures[number] = known.signature
        return number

    def remember(self, signature: Signature) -> int:
        """Return a number for a signature, by which compiled code remembers calls that the MPI library executes."""
        self._learned += 1
        self._signatures[self._learned] = signature
        self._lasting.add(self._learned)
        return self._learned

    def known(self) -> set[int]:
        """Return the numbers of all known calls; the signatures of others are remembered for a while."""
        numbers = {int(row[dispatch_table.KNOWN_NUMBER]) for row in self._known if row[dispatch_table.KNOWN_CALL] >= 0}
        recent = {int(count) for _, call, count in self._history if call == dispatch_table.KNOWN_IN_HISTORY}
        self._signatures = {n: each for n, each in self._signatures.items() if n in numbers | recent | self._lasting}
        return numbers

    def forget(self, job: int) -> None:
        """Remove the calls that are made by the plan with this job."""
        self._known[self._known[:, dispatch_table.KNOWN_JOB] == job, dispatch_table.KNOWN_CALL] = -1

    def forget_all(self) -> None:
        """Remove all calls, since their plans are freed."""
        self._known[:, dispatch_table.KNOWN_CALL] = -1

    def end_known(self) -> None:
        """Mark the running call as ended, so that further calls can be made."""
        assert self._job is not None
        self._running[0], self._job[layout.STATE] = 0, layout.IDLE

    def choose(self, collective: str, bits: int, method: int | None) -> None:
        """Set the method for vectors of ``2**(bits - 1)`` to ``2**bits - 1`` bytes on shared memory; None for none."""
        row = dispatch_table.BUCKETS * layout.COLLECTIVES.index(collective)
        self._words[dispatch_table.CHOSEN + row + bits] = 0 if method is None else method + 1

    @property
    def chosen(self) -> np.ndarray:
        """A copy of all choices that :meth:`choose` has made."""
        return self._words[_CHOICES].copy()

    @chosen.setter
    def chosen(self, choices: np.ndarray) -> None:
        self._words[_CHOICES] = choices

    def is_new(self, call: int, count: int) -> bool:
        """Return whether a call has not been compared between the ranks yet, and mark it as compared."""
        return bool(is_new.run(self.address, call, count))

    def recall(self, number: int) -> Signature | None:
        """Return the signature of collective `number`, if compiled code made it recently; else None."""
        noted, call, count = self._history[number % dispatch_table.HISTORY_LENGTH].tolist()
        if noted != number or not number:
            return None
        return self._signatures.get(count) if call == dispatch_table.KNOWN_IN_HISTORY else signature_of(call, count)


_CHOICES = slice(dispatch_table.CHOSEN, dispatch_table.CHOSEN + len(layout.COLLECTIVES) * dispatch_table.BUCKETS)


def _place_of(memory: np.ndarray | None) -> tuple[int, int]:
    return (0, 0) if memory is None else (memory.ctypes.data, memory.nbytes)
