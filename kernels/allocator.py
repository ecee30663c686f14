"""An allocator for one large piece of memory, as C functions that NumPy can call.

Blocks come in classes, four to each power of two; a freed block waits in its class' list for the next array of about
its size. Each block begins with a header of 64 bytes: class, next free block, whether its pages are in memory. Large
blocks that are free beyond what is worth keeping give their pages back to the system.

What is smaller than the threshold, and what no longer fits, is left to libc. Addresses tell the two apart, so that any
mixture of the functions below is right for any block.

The heap's own words are private to the process and given by address. After a fork both processes would hand out the
same shared memory: the child sets OPEN to 0, and from then on neither takes nor returns blocks.
"""

import sys

from .atomics import copy, exchange, load, store, store_release, yield_core
from .decorators import helper, native, primitive, short_kernel

BASE, END, LOCK, NEXT, THRESHOLD, OPEN, USED, CACHED, KEEP = range(9)
_LISTS = 16
_CLASSES = 4 * 48
HEAP_WORDS = _LISTS + _CLASSES
HEADER_NBYTES = 64
_CLASS, _NEXT_FREE, _RESIDENT = range(3)
_PAGE = 4096
_RETURNED_NBYTES = 1 << 20
"""Blocks from this size on are given back, if there are too many."""
_MADV_REMOVE = 9
_MOST = (1 << 63) - 1


@primitive
def malloc(nbytes):
    """C's malloc; all addresses are int64."""


@primitive
def calloc(count, itemsize):
    """C's calloc."""


@primitive
def realloc(address, nbytes):
    """C's realloc."""


@primitive
def free(address):
    """C's free."""


@primitive
def memset(address, value, nbytes):
    """C's memset."""


if sys.platform.startswith("linux"):

    @primitive
    def madvise(address, nbytes, advice):
        """The system's madvise."""

else:

    @helper
    def madvise(address, nbytes, advice):
        """Do nothing."""
        return -1


@helper
def _word(heap, word):
    return load(heap + 8 * word)


@helper
def _set(heap, word, value):
    store(heap + 8 * word, value)


@helper
def _class_of(nbytes):
    """Return the class for this many bytes, header included, and the size of its blocks."""
    power = 12
    while 1 << power < nbytes:
        power += 1
    step = 1 << (power - 3)
    eighths = max(5, (nbytes + step - 1) // step)
    return 4 * power + eighths - 5, eighths * step


@helper
def _lock(heap):
    while exchange(heap + 8 * LOCK, 1) != 0:
        yield_core()


@helper
def _unlock(heap):
    store_release(heap + 8 * LOCK, 0)


@helper
def _take(heap, nbytes):
    """Return the address of a block's data and whether it is all zeros; address 0 if there is no room."""
    kind, size = _class_of(nbytes + HEADER_NBYTES)
    head = heap + 8 * (_LISTS + kind)
    _lock(heap)
    block, fresh = load(head), False
    if block:
        store(head, load(block + 8 * _NEXT_FREE))
        if load(block + 8 * _RESIDENT):
            _set(heap, CACHED, _word(heap, CACHED) - size)
    elif _word(heap, NEXT) + size <= _word(heap, END):
        block, fresh = _word(heap, NEXT), True
        _set(heap, NEXT, block + size)
    if block:
        _set(heap, USED, _word(heap, USED) + size)
        store(block + 8 * _CLASS, kind)
        store(block + 8 * _RESIDENT, 1)
    _unlock(heap)
    return (block + HEADER_NBYTES, fresh) if block else (0, False)


@helper
def _size_of(block):
    kind = load(block + 8 * _CLASS)
    return (kind % 4 + 5) << (kind // 4 - 3)


@helper
def _give(heap, data):
    block = data - HEADER_NBYTES
    size = _size_of(block)
    head = heap + 8 * (_LISTS + load(block + 8 * _CLASS))
    _lock(heap)
    _set(heap, USED, _word(heap, USED) - size)
    if size >= _RETURNED_NBYTES and _word(heap, CACHED) + size > _word(heap, KEEP):
        start = (block + _PAGE) // _PAGE * _PAGE
        stop = (block + size) // _PAGE * _PAGE
        madvise(start, stop - start, _MADV_REMOVE)
        store(block + 8 * _RESIDENT, 0)
    else:
        _set(heap, CACHED, _word(heap, CACHED) + size)
    store(block + 8 * _NEXT_FREE, load(head))
    store(head, block)
    _unlock(heap)


@helper
def _is_ours(heap, address):
    return _word(heap, BASE) <= address < _word(heap, END)


@helper
def _wanted(heap, nbytes):
    longest = _word(heap, END) - _word(heap, BASE)
    return _word(heap, OPEN) != 0 and _word(heap, THRESHOLD) <= nbytes < longest


@native("int64", "int64", "int64")
def allocate(heap, nbytes):
    """Like malloc."""
    if _wanted(heap, nbytes):
        data, _ = _take(heap, nbytes)
        if data:
            return data
    return malloc(nbytes)


@native("int64", "int64", "int64", "int64")
def allocate_zeros(heap, count, itemsize):
    """Like calloc."""
    nbytes = count * itemsize
    overflows = itemsize > 0 and count > _MOST // itemsize
    if not overflows and _wanted(heap, nbytes):
        data, fresh = _take(heap, nbytes)
        if data:
            if not fresh:
                memset(data, 0, nbytes)
            return data
    return calloc(count, itemsize)


@native("int64", "int64", "int64", "int64")
def resize(heap, data, nbytes):
    """Like realloc."""
    if not _is_ours(heap, data):
        return realloc(data, nbytes)
    room = _size_of(data - HEADER_NBYTES) - HEADER_NBYTES
    if nbytes <= room:
        return data
    moved = 0
    if _wanted(heap, nbytes):
        moved, _ = _take(heap, nbytes)
    if moved == 0:
        moved = malloc(nbytes)
    if moved:
        copy(moved, data, room)
        if _word(heap, OPEN):
            _give(heap, data)
    return moved


@native("void", "int64", "int64", "int64")
def release(heap, data, nbytes):
    """Like free."""
    if not _is_ours(heap, data):
        free(data)
    elif _word(heap, OPEN):
        _give(heap, data)


@short_kernel("int64", "int64")
def clear(data, nbytes):
    """Set a block's bytes to zero by giving its pages back, which takes no time for pages that were never used."""
    start = (data + _PAGE - 1) // _PAGE * _PAGE
    stop = (data + nbytes) // _PAGE * _PAGE
    if stop <= start or madvise(start, stop - start, _MADV_REMOVE) != 0:
        memset(data, 0, nbytes)
        return
    memset(data, 0, start - data)
    memset(stop, 0, data + nbytes - stop)
