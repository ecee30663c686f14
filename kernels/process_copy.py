"""Copies from the memory of another process to this one, between two layouts of equal length."""

import numpy as np

from .atomics import load, read_vectors, store
from .decorators import helper
from .strided_copy import bytes_left, go_on, next_byte

PIECES = 128
"""Contiguous pieces on either side that the system copies in one call."""
VECTORS_WORDS = 4 * PIECES
_LONGEST_NBYTES = 64 << 20
"""Bytes of one call; the system's own limit is 2 GB."""


@helper
def _append(pieces, number, address, nbytes):
    """Add bytes to a list that has `number` pieces; return how many it has then."""
    last = pieces + 16 * (number - 1)
    if number and load(last) + load(last + 8) == address:
        store(last + 8, load(last + 8) + nbytes)
        return number
    store(last + 16, address)
    store(last + 24, nbytes)
    return number + 1


@helper
def copy_from_process(pid, vectors, target, source, nbytes):
    """Copy the next `nbytes` bytes from a cursor in process `pid` to one in this process; return whether it worked.

    Parameters
    ----------
    vectors
        Address of VECTORS_WORDS words, for the lists of pieces that `process_vm_readv` takes.
    """
    remote = vectors + 16 * PIECES
    while nbytes > 0:
        here = there = total = 0
        most = min(nbytes, _LONGEST_NBYTES)
        while total < most and here < PIECES and there < PIECES:
            piece = min(most - total, bytes_left(target), bytes_left(source))
            here = _append(vectors, here, next_byte(target), piece)
            there = _append(remote, there, next_byte(source), piece)
            go_on(target, piece, 1)
            go_on(source, piece, 1)
            total += piece
        if read_vectors(np.int32(pid), vectors, here, remote, there, 0) != total:
            return False
        nbytes -= total
    return True
