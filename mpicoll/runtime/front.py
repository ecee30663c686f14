"""The table from which a plain blocking call is made in one step, without looking at its arguments in Python.

See :mod:`mpicoll.kernels.table` for what it says. The long way fills it: an operation and element type that were used
once are in it from then on. It also counts the collectives of a communicator, for both ways.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.kernels import job as layout
from mpicoll.kernels import reduce as kernels
from mpicoll.kernels import table
from mpicoll.runtime.supervisor import Signature

_OPS = [getattr(MPI, name) for name in kernels.OPS]
"""Kept alive, since their addresses stand in tables."""
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(kernels.DTYPES)}
_OP_NUMBERS = {name: number for number, name in enumerate(kernels.OPS)}
NEWS_EVERY = 256
_MOST_RANKS = 1 << 20
"""A root is less than this, and a hash hardly ever."""
USER_OP = table.MAX_OPS
"""Operations that are not predefined have numbers from here on, made from their names."""


@lru_cache(maxsize=1)
def _layout_error() -> str:
    return table.layout_error()


def op_number(name: str, dtype: np.dtype, reducer: object) -> int | None:
    """Return the number of a predefined operation, None for a function of the user's, whatever it is called."""
    number = _OP_NUMBERS.get(name)
    return number if number is not None and kernels.reducer(name, dtype) is reducer else None


class Known(NamedTuple):
    """A call by messages that is made again by compiled code; words as in :mod:`mpicoll.kernels.table`."""

    call: int
    elements: int
    send: int
    recv: int
    job: int
    inbox: np.ndarray | None
    outbox: np.ndarray | None
    sent_nbytes: int
    signature: Signature


class Front:
    """One communicator's table.

    Attributes
    ----------
    address
        For :func:`mpicoll.kernels.calls.call`.
    busy
        A word that is 1 while the short way is closed, because a call is being made the long way.
    usable
        Whether calls can be made the short way.
    """

    def __init__(self, size: int, job: np.ndarray | None, *, checked: bool = True) -> None:
        self._size, self._job = size, job
        self._known = np.zeros((table.KNOWN_LENGTH, table.KNOWN_WORDS), np.int64)
        self._known[:, table.KNOWN_CALL] = -1
        self._signatures: dict[int, Signature] = {}
        self._learned = 0
        self._words = np.zeros(table.table_words(size), np.int64)
        self._history = np.zeros((table.HISTORY_LENGTH, table.HISTORY_ENTRY), np.int64)
        self._agreed = np.zeros((table.AGREED_LENGTH, 2), np.int64)
        self.address = self._words.ctypes.data
        words = self._words
        self.busy = words[table.BUSY : table.BUSY + 1].data
        self._running = words[table.RUNNING : table.RUNNING + 1].data
        self.usable = job is not None and not _layout_error()
        if job is None:
            return
        words[table.JOB] = job.ctypes.data
        words[table.ARRAY_TYPE], words[table.IN_PLACE] = id(np.ndarray), id(MPI.IN_PLACE)
        words[table.HEADER] = table.header_nbytes()
        words[table.OPS], words[table.DTYPES] = len(_OPS), len(kernels.DTYPES)
        words[table.KNOWN] = self._known.ctypes.data
        words[table.HISTORY], words[table.AGREED] = self._history.ctypes.data, self._agreed.ctypes.data
        words[table.CHECKED], words[table.METHOD] = checked, job[layout.METHOD]
        words[table.OP_IDS : table.OP_IDS + len(_OPS)] = [id(op) for op in _OPS]
        words[table.DTYPE_IDS : table.DTYPE_IDS + len(kernels.DTYPES)] = [id(dtype) for dtype in kernels.DTYPES]
        words[table.ITEMSIZES : table.ITEMSIZES + len(kernels.DTYPES)] = [dtype.itemsize for dtype in kernels.DTYPES]

    @property
    def number(self) -> int:
        """The number of the last collective."""
        return int(self._words[table.NUMBER])

    def count(self) -> int:
        """Number a collective that is called the long way."""
        number = int(self._words[table.NUMBER]) + 1
        self._words[table.NUMBER] = number
        return number

    def open(self) -> None:
        """Let the short way be taken for some time."""
        if self.usable:
            self._words[table.NEWS] = self._words[table.NUMBER] + NEWS_EVERY

    def shut(self) -> None:
        """Let every call go the long way from now on."""
        self.usable = False
        self.hold()

    def hold(self) -> None:
        """Let calls go the long way until one of them opens the short way again."""
        self._words[table.NEWS] = 0

    def learn(self, op: int, dtype: int, reducer: int) -> None:
        """Enter a reducer."""
        if op < USER_OP:
            self._words[table.REDUCERS + table.MAX_DTYPES * op + dtype] = reducer

    def learn_plan(self, collective: int, long: bool, root: int, plan: int) -> None:
        """Enter the address of a plan."""
        self._words[table.plan_entry(collective, long, root, self._size)] = plan

    @property
    def running(self) -> int:
        """The number of the known call that has begun and not ended, 0 if there is none."""
        return int(self._running[0])

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the messages of all known calls."""
        return int(self._words[table.SENT_NBYTES])

    @property
    def remembered(self) -> int:
        """The number of signatures that are remembered."""
        return len(self._signatures)

    def know(self, known: Known) -> int:
        """Enter a call that was made by messages, perhaps in the place of another one; return its number."""
        first = table.known_entry(known.call, known.elements, known.send, known.recv)
        entries = self._known[first : first + 2]
        same = [entry for entry in entries if tuple(entry[:4].tolist()) == known[:4]]
        free = [entry for entry in entries if entry[table.KNOWN_CALL] < 0]
        entry = [*same, *free, entries[known.elements & 1]][0]
        number = int(entry[table.KNOWN_NUMBER])
        if not same or entry[table.KNOWN_JOB] != known.job:
            number = self._learned = self._learned + 1
            boxes = [word for each in (known.inbox, known.outbox) for word in _place_of(each)]
            entry[:] = *known[:4], number, known.job, *boxes, known.sent_nbytes
        self._signatures[number] = known.signature
        return number

    def known(self) -> set[int]:
        """Return the numbers of all known calls; the signatures of others are remembered for a while."""
        numbers = {int(row[table.KNOWN_NUMBER]) for row in self._known if row[table.KNOWN_CALL] >= 0}
        recent = {int(count) for _, call, count in self._history if call == table.KNOWN_IN_HISTORY}
        self._signatures = {n: each for n, each in self._signatures.items() if n in numbers | recent}
        return numbers

    def forget(self, job: int) -> None:
        """Remove the calls that are made by the plan with this job."""
        self._known[self._known[:, table.KNOWN_JOB] == job, table.KNOWN_CALL] = -1

    def forget_all(self) -> None:
        """Remove all calls, since their plans are freed."""
        self._known[:, table.KNOWN_CALL] = -1

    def end_known(self) -> None:
        """Let calls be made again after the running one."""
        assert self._job is not None
        self._running[0], self._job[layout.STATE] = 0, layout.IDLE

    def choose(self, collective: str, bits: int, method: int | None) -> None:
        """Say how vectors of ``2**(bits - 1)`` to ``2**bits - 1`` bytes are handled on shared memory; None: not."""
        row = table.BUCKETS * layout.COLLECTIVES.index(collective)
        self._words[table.CHOSEN + row + bits] = 0 if method is None else method + 1

    def is_new(self, call: int, count: int) -> bool:
        """Say whether a call has not been compared with the others' yet; from now on it has."""
        entry = self._agreed[table.agreed_entry(call, count)]
        if (entry == (call, count)).all():
            return False
        entry[:] = call, count
        return True

    def recall(self, number: int) -> Signature | None:
        """Return the call that was made the short way under `number`, as far back as is remembered."""
        noted, call, count = self._history[number % table.HISTORY_LENGTH].tolist()
        if noted != number or not number:
            return None
        return self._signatures.get(count) if call == table.KNOWN_IN_HISTORY else Signature.of(describe(call, count))


def _place_of(memory: np.ndarray | None) -> tuple[int, int]:
    return (0, 0) if memory is None else (memory.ctypes.data, memory.nbytes)


def describe(call: int, count: int) -> str:
    """Return a call on shared memory, packed by `table.pack_call`, as signatures have it.

    Unequal counts of parts stand in the place of the root, as a hash.
    """
    call &= ~layout.WITHDRAWN
    collective, single_copy = call & (1 << table.SINGLE_COPY_BIT) - 1, call >> table.SINGLE_COPY_BIT & 1
    dtype, op, root = call >> 8 & 0xFF, call >> 16 & 0xFFFF, call >> 32
    parts = [f"count={count}", f"dtype={kernels.DTYPES[dtype]}"]
    if collective in layout.REDUCES:
        parts.append(f"op={kernels.OPS[op] if op < USER_OP else f'number {op}'}")
    if collective in layout.ROOTED and root < _MOST_RANKS:
        parts.append(f"root={root}")
    elif root:
        parts.append(f"unequal counts with hash {root:08x}")
    parts.append("algorithm=single_copy" if single_copy else "algorithm=shared")
    return f"{layout.COLLECTIVES[collective].capitalize()}({', '.join(parts)})"
