"""Lengths of parts that differ: offsets of all parts, and numbers that stand for them where calls are compared."""

from .atomics import load, store
from .decorators import helper, kernel_for

_FACTOR, _MASK = 0x2545F4914F6CDD1D, (1 << 62) - 1
UNEVEN_BIT = 1 << 30


@helper
def _mix(mixed, number):
    mixed = ((mixed ^ number) * _FACTOR) & _MASK
    return mixed ^ mixed >> 31


@helper
def hash_of_counts(counts, size):
    """Return a number for counts; the same for the same counts."""
    mixed = 0
    for rank in range(size):
        mixed = _mix(mixed, load(counts + 8 * rank))
    return mixed


@helper
def _distinction(offsets, size, root):
    """Return a number for the lengths of parts and the root: the root itself if all parts are equally long."""
    mixed, equal = _mix(0, root + 1), True
    for rank in range(size):
        count = load(offsets + 8 * rank + 8) - load(offsets + 8 * rank)
        equal = equal and count == load(offsets + 8) - load(offsets)
        mixed = _mix(mixed, count)
    return root if equal else (mixed & (UNEVEN_BIT - 1)) | UNEVEN_BIT


@kernel_for("int64", "int64", "int64")
def distinction(offsets, size, root):
    """Return a number that stands for the lengths of parts, and the root, in the comparison of calls.

    See `dispatch.call`.

    Parameters
    ----------
    offsets : int
        Address of size + 1 offsets.

    Returns
    -------
    int
        The root if all parts are equally long, else a hash, which no root is: from 2**30 to 2**31 - 1.
    """
    return _distinction(offsets, size, root)


@helper
def lay_out_counts(counts, size, root, parts, displs):
    """Write counts as the words that `dispatch.call` takes for uneven parts; `displs` is an address, or 0."""
    offset = 0
    for rank in range(size):
        store(parts + 16 + 8 * rank, offset)
        offset += load(counts + 8 * rank)
    store(parts + 16 + 8 * size, offset)
    store(parts + 8 * (size + 3), displs)
    store(parts, root)
    store(parts + 8, _distinction(parts + 16, size, root))
