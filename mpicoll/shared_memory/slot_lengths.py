"""Records and slots of a communicator on shared memory: how many there are, and which vectors pass through slots.

Through slots a collective takes one round of waiting, and copies every vector once more; a longer vector is read in
place, or through stages, with one more round. All ranks have the same facts, and so the same lengths.
"""

from __future__ import annotations

import numpy as np

from mpicoll.kernels import operation_words as words
from mpicoll.kernels.operation_words import RECORD_NBYTES

_MOST_AHEAD = 16
"""Short operations that a rank may be ahead of others. Where ranks take turns on the cores, a loop of short broadcasts
takes less time the more of them the root makes in its turn: with 8 ranks on 2 cores 15 us each with 1, 6 us with 16."""
_RECORDS_NBYTES = 64 << 10
"""Bytes of all records of one operation lane together, at most, but for more than 256 ranks."""
_PAGE = 4096
_MAX_NBYTES = 256 << 10
_SLOTS_NBYTES = 4 << 20
"""Bytes of all slots of one operation lane together, for many ranks."""
_ALLREDUCE_NBYTES = 64 << 10
"""In bytes, for an allreduce: every rank reads all slots, where in place they share the work."""
_ALLREDUCE_ALL_NBYTES = 256 << 10
"""Bytes of all slots together for an allreduce where ranks take turns on the cores. Of 8 ranks on 2 cores one of 64 KB
takes 147 us through slots and 98 us in place, one of 256 KB 462 and 200; of 4 ranks one of 128 KB 180 and 142 us."""
_ALL_SLOTS_NBYTES = 32 << 10
"""Bytes of all slots together if every rank has a core: reading them takes less time than another round of waiting."""
_NEAR_NBYTES = 64 << 10
"""In bytes, for vectors that lie in memory segments. Another round of waiting costs most where ranks take turns on the
cores: there an Alltoall of 64 KB by 8 ranks on 2 cores takes a quarter less through slots; from 128 KB on copies cost
more."""
_NEAR_REDUCED_NBYTES = 32 << 10
"""The same for allreduce and reduce, of which every rank or the root reads all slots: in place they share the work."""
_NEAR_CORES_NBYTES = 4 << 10
"""The same where every rank has a core; but in bcast and scatter no more than the root's slot is read, once."""
_NEAR_CORES_READ_NBYTES = 8 << 10
"""Bytes of all slots together that every rank reads for an allreduce there. With 8 ranks on 16 cores a vector of n KB
takes 2.1 + 2.8 n us through slots, and 4.2 + 0.16 n us in place."""


def ahead(size: int) -> int:
    """Return how many short operations a rank may be ahead of others, a power of two; it has twice as many records."""
    most = max(1, min(_MOST_AHEAD, _RECORDS_NBYTES // (2 * RECORD_NBYTES * size)))
    return 1 << most.bit_length() - 1


def records_nbytes(size: int) -> int:
    """Return the bytes of all ranks' records in one operation lane."""
    return 2 * RECORD_NBYTES * ahead(size) * size


def largest(size: int) -> int:
    """Return the room of a slot in bytes, with `size` ranks."""
    return max(_PAGE, min(_MAX_NBYTES, _SLOTS_NBYTES // (2 * size) // _PAGE * _PAGE))


def for_all(size: int, oversubscribed: bool) -> int:
    """Return the longest vector, in bytes, that passes through slots wherever it lies."""
    if oversubscribed:
        return largest(size)
    # Every rank reads every slot, which costs more the more there are; a second round costs only a microsecond.
    return min(largest(size), max(1 << 10, _ALL_SLOTS_NBYTES // size))


def for_allreduce(size: int, slot_nbytes: int) -> int:
    """Return the longest vector, in bytes, of an allreduce that passes through slots of `slot_nbytes`."""
    return min(slot_nbytes, _ALLREDUCE_NBYTES, max(1 << 10, _ALLREDUCE_ALL_NBYTES // size))


def is_long(job: np.ndarray, collective: str, nbytes: int) -> bool:
    """Return whether a vector of `nbytes` is too long for the slots of a job, as compiled code decides it."""
    return bool(nbytes > job[words.ALLREDUCE_SLOT_NBYTES if collective == "allreduce" else words.SLOT_NBYTES])


def for_segments(collective: str, size: int, oversubscribed: bool) -> int:
    """Return the longest vector, in bytes, that passes through slots where the buffers of all ranks lie in segments."""
    if collective in ("bcast", "scatter"):
        return min(_NEAR_NBYTES, largest(size))
    if not oversubscribed:
        read = _NEAR_CORES_READ_NBYTES // size if collective == "allreduce" else _NEAR_CORES_NBYTES
        return min(read, _NEAR_CORES_NBYTES, for_all(size, oversubscribed))
    return min(_NEAR_REDUCED_NBYTES if collective in ("allreduce", "reduce") else _NEAR_NBYTES, largest(size))
