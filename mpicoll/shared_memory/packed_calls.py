"""Packed calls: the word by which ranks on shared memory compare calls, and the signature that it stands for."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache

import numpy as np

from mpicoll.kernels import dispatch_table, uneven_parts
from mpicoll.kernels import operation_words as layout
from mpicoll.kernels import reduce as kernels
from mpicoll.progress.call_signature import Signature

_MOST_RANKS = 1 << 20
"""Roots are less than this number, hashes of counts very rarely."""


def hash_of_offsets(offsets: np.ndarray, root: int) -> int:
    """Return what stands in a packed call for the lengths of parts and the root."""
    return int(uneven_parts.distinction.run(offsets.ctypes.data, offsets.size - 1, root))


_wholes: OrderedDict[int, Signature] = OrderedDict()
_MOST_WHOLES = 1024
"""Calls whose parts are told apart; those under way are the last ones."""


def mix_distinction(distinction: int, whole: Signature) -> int:
    """Return what stands in a packed call in place of `distinction` where the call is a part of a `whole` one."""
    mixed = distinction ^ whole.code & uneven_parts.UNEVEN_BIT - 1 | uneven_parts.UNEVEN_BIT
    _wholes[mixed] = whole
    _wholes.move_to_end(mixed)
    if len(_wholes) > _MOST_WHOLES:
        _wholes.popitem(last=False)
    return mixed


def signature_of(call: int, count: int) -> Signature:
    """Return the signature of a call on shared memory, that of the whole call for a part of one."""
    return _wholes.get(call >> 32) or _described(call, count)


@lru_cache(maxsize=1024)
def _described(call: int, count: int) -> Signature:
    """Making the text takes longer than a short collective."""
    return Signature.of(describe(call, count))


def describe(call: int, count: int) -> str:
    """Return the text of the signature of a call on shared memory, packed by `dispatch_table.pack_call`.

    In place of the root the packed call may have a hash of unequal counts, or of the call that it is a part of.
    """
    call &= ~layout.WITHDRAWN
    whole = _wholes.get(call >> 32)
    if whole is not None:
        return whole.text
    collective, single_copy = (
        call & (1 << dispatch_table.SINGLE_COPY_BIT) - 1,
        call >> dispatch_table.SINGLE_COPY_BIT & 1,
    )
    dtype, op, root = call >> 8 & 0xFF, call >> 16 & 0xFFFF, call >> 32
    if layout.COLLECTIVES[collective] in ("bcast", "gather", "scatter") and op:  # counts that only the root knows
        return f"{layout.COLLECTIVES[op].capitalize()}v(root={root}, algorithm=shared)"
    moves = layout.COLLECTIVES[collective] != "barrier"
    parts = [f"count={count}", f"dtype={kernels.DTYPES[dtype]}"] if moves else []
    if collective in layout.REDUCES:
        parts.append(f"op={kernels.OPS[op] if op < dispatch_table.MAX_OPS else f'number {op}'}")
    if collective in layout.ROOTED and root < _MOST_RANKS:
        parts.append(f"root={root}")
    elif root:
        parts.append(f"other arguments with hash {root:08x}")
    parts.append("algorithm=single_copy" if single_copy else "algorithm=shared")
    return f"{layout.COLLECTIVES[collective].capitalize()}({', '.join(parts)})"
