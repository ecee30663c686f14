"""The table from which a plain blocking call is made in one step, without looking at its arguments in Python.

See :mod:`mpicoll.kernels.table` for what it says. The long way fills it: an operation and element type that were used
once are in it from then on. It also counts the collectives of a communicator, for both ways.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from mpi4py import MPI

from mpicoll.kernels import job as layout
from mpicoll.kernels import reduce as kernels
from mpicoll.kernels import table
from mpicoll.runtime.supervisor import Signature

_OPS = [getattr(MPI, name) for name in kernels.OPS]
"""Kept alive, since their addresses stand in tables."""
NEWS_EVERY = 256
_MOST_RANKS = 1 << 20
"""A root is less than this, and a hash hardly ever."""
USER_OP = table.MAX_OPS
"""Operations that are not predefined have numbers from here on, made from their names."""


@lru_cache(maxsize=1)
def _layout_error() -> str:
    return table.layout_error()


class Front:
    """One communicator's table.

    Attributes
    ----------
    address
        For :func:`mpicoll.kernels.calls.call`.
    busy
        A word that is 1 while the short way is closed, because a call is being made the long way.
    """

    def __init__(self, size: int, job: np.ndarray | None, *, checked: bool = True) -> None:
        self._size = size
        self._words = np.zeros(table.table_words(size), np.int64)
        self._history = np.zeros((table.HISTORY_LENGTH, table.HISTORY_ENTRY), np.int64)
        self._agreed = np.zeros((table.AGREED_LENGTH, 2), np.int64)
        self.address = self._words.ctypes.data
        words = self._words
        self.busy = words[table.BUSY : table.BUSY + 1].data
        self._usable = job is not None and not _layout_error()
        if job is None:
            return
        words[table.JOB] = job.ctypes.data
        words[table.ARRAY_TYPE], words[table.IN_PLACE] = id(np.ndarray), id(MPI.IN_PLACE)
        words[table.HEADER] = table.header_nbytes()
        words[table.OPS], words[table.DTYPES] = len(_OPS), len(kernels.DTYPES)
        words[table.HISTORY], words[table.AGREED] = self._history.ctypes.data, self._agreed.ctypes.data
        words[table.CHECKED] = checked
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
        if self._usable:
            self._words[table.NEWS] = self._words[table.NUMBER] + NEWS_EVERY

    def shut(self) -> None:
        """Let every call go the long way from now on."""
        self._usable = False
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

    def choose(self, collective: str, bits: int, here: bool) -> None:
        """Say whether vectors of ``2**(bits - 1)`` to ``2**bits - 1`` bytes are handled on shared memory."""
        row = table.BUCKETS * layout.COLLECTIVES.index(collective)
        self._words[table.CHOSEN + row + bits] = here

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
        return Signature.of(describe(call, count)) if noted == number and number else None


def describe(call: int, count: int) -> str:
    """Return a call on shared memory, packed by `table.pack_call`, as signatures have it.

    Unequal counts of parts stand in the place of the root, as a hash.
    """
    call &= ~layout.WITHDRAWN
    collective, dtype, op, root = call & 0xFF, call >> 8 & 0xFF, call >> 16 & 0xFFFF, call >> 32
    parts = [f"count={count}", f"dtype={kernels.DTYPES[dtype]}"]
    if collective in layout.REDUCES:
        parts.append(f"op={kernels.OPS[op] if op < USER_OP else f'number {op}'}")
    if collective in layout.ROOTED and root < _MOST_RANKS:
        parts.append(f"root={root}")
    elif root:
        parts.append(f"unequal counts with hash {root:08x}")
    return f"{layout.COLLECTIVES[collective].capitalize()}({', '.join(parts)}, algorithm=shared)"
