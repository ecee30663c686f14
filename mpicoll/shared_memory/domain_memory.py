"""Memory of a shared-memory domain: how much there is of it, and for what."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.kernels import method_trials
from mpicoll.kernels import operation_words as words
from mpicoll.shared_memory import numpy_allocator, segment, slot_lengths
from mpicoll.shared_memory.announcements import lines_nbytes

PLAN_LANES = 62
"""Largest number of persistent operations of one communicator on shared memory; they are bits of one word."""
NONBLOCKING_LANES = 8
"""Largest number of nonblocking operations of one communicator at work at the same time; further ones wait."""
LONG_LANES = 3
"""The same for those on long vectors, see :mod:`mpicoll.shared_memory.nonblocking_lanes`."""
_LANES = 1 + PLAN_LANES + NONBLOCKING_LANES + LONG_LANES
STAGE_NBYTES = 512 << 10
"""Bytes of a stage; the stages of some ranks together fit into the caches."""
STAGES_NBYTES = words.STAGES_PER_LANE * _LANES * STAGE_NBYTES
_PAGE = 4096


class SharedArrays(NamedTuple):
    """Memory of one rank that the others access.

    Attributes
    ----------
    stages
        This rank's stages.
    records, slots
        On the first rank the memory for the records, which are zero, and the slots of all ranks; elsewhere empty.
    """

    stages: np.ndarray
    records: np.ndarray
    slots: np.ndarray

    def places(self) -> list[int]:
        """Return their addresses, and 1 if the others see them there: a full segment gives ordinary memory."""
        own = segment.own()
        seen = all(0 <= each.ctypes.data - own.address < own.nbytes for each in self if each.size)
        return [*(each.ctypes.data for each in self), seen]


def memory_for(comm: MPI.Intracomm) -> SharedArrays:
    """Return the memory of this rank for the domain of a communicator; local."""
    size, first = comm.size, comm.rank == 0
    return SharedArrays(
        numpy_allocator.empty(STAGES_NBYTES, np.uint8),
        # Zero before the others know where they are. Most lanes are never used.
        numpy_allocator.untouched_zeros(records_nbytes(size) if first else 0),
        numpy_allocator.empty(slots_nbytes(size) if first else 0, np.uint8),
    )


def records_nbytes(size: int) -> int:
    """Return the bytes of the lines, trials and records of `size` ranks, and to the start of a page."""
    return lines_nbytes(size) + _trials_nbytes(size) + _LANES * slot_lengths.records_nbytes(size) + _PAGE


def parts_of_records(address: int, size: int) -> tuple[int, int, int]:
    """Return where the lines, the trials and the records begin in memory of :func:`records_nbytes` bytes."""
    lines = page_from(address)
    trials = lines + lines_nbytes(size)
    return lines, trials, trials + _trials_nbytes(size)


def _trials_nbytes(size: int) -> int:
    return page_from(8 * method_trials.shared_words(size))


def slots_nbytes(size: int) -> int:
    """Return the bytes of the slots of `size` ranks, and to the start of a page."""
    return _LANES * 2 * size * slot_lengths.largest(size) + _PAGE


def common_nbytes(size: int) -> int:
    """Return the bytes of shared memory that `size` ranks need in common."""
    return records_nbytes(size) + slots_nbytes(size)


def page_from(address: int) -> int:
    """Return the start of the first page at an address or behind it; of a length, that of whole pages."""
    return address + -address % _PAGE
