"""Calls that the ranks have compared, of collectives in which a rank need not hear of all others.

The first call with a signature waits for all ranks all the same: then all of them raise in it if their calls differ.
"""

from .atomics import load, store
from .decorators import helper, short_kernel
from .dispatch_table import AGREED, AGREED_LENGTH, mix_call
from .operation_words import get


@helper
def _entry(table, call, count):
    """Return the address of the entries of a call, of which there are two."""
    return get(table, AGREED) + 32 * (mix_call(call, count) % (AGREED_LENGTH // 2))


@helper
def was_compared(table, call, count):
    """Return True if a call was compared between the ranks."""
    entry = _entry(table, call, count)
    if load(entry) == call and load(entry + 8) == count:
        return True
    return load(entry + 16) == call and load(entry + 24) == count


@helper
def must_compare(table, call, count):
    """Return True if a call was not compared between the ranks, and note that it is now."""
    if was_compared(table, call, count):
        return False
    entry = _entry(table, call, count)
    store(entry + 16, load(entry))
    store(entry + 24, load(entry + 8))
    store(entry, call)
    store(entry + 8, count)
    return True


@short_kernel("int64", "int64", "int64")
def is_new(table, call, count):
    """Return True if a call was not compared between the ranks, and note that it is now."""
    return must_compare(table, call, count)
