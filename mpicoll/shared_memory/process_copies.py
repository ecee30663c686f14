"""Times of copies between processes relative to copies through shared memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.flat_buffer import view_at
from mpicoll.kernels import atomics
from mpicoll.kernels import operation_words as words

LENGTHS = (512 << 10, 2 << 20, 8 << 20)
"""Lengths of the vectors measured, in bytes.

NumPy asks for huge pages from 4 MB on, and copies between processes are many times cheaper there. So each length is
measured in arrays of its own, the last one in arrays that consist of huge pages but for their ends.
"""
_REPEATS = 5
"""Repetitions of each phase, of which the fastest counts; with three, what else a machine does decided now and then."""
_SEGMENT_NBYTES, _SEGMENTS = 512 << 10, 2
"""Bytes of a stage, and the number of segments that are timed; further ones take as long."""
Steps = list[Callable[[], object]]


class Ratios(NamedTuple):
    """Times of copies between processes in units of copies in shared memory, a value for each of `LENGTHS`.

    Attributes
    ----------
    exchanged
        Each rank copies a part of every other rank's vector.
    broadcast
        All ranks copy one rank's whole vector: the system counts who uses a page, and ranks wait for that.
    """

    exchanged: tuple[float, ...] = (1.0,) * len(LENGTHS)
    broadcast: tuple[float, ...] = (1.0,) * len(LENGTHS)

    def at(self, nbytes: int) -> tuple[float, float]:
        """Return both ratios for a vector of `nbytes` bytes; infinity for short ones, as system calls cost more."""
        place = sum(length <= nbytes for length in LENGTHS) - 1
        return (self.exchanged[place], self.broadcast[place]) if place >= 0 else (math.inf, math.inf)


_known: list[Ratios] = []
"""Ratios measured in this process; machine and processes are the same for all of its communicators."""


def ratios(comm: MPI.Intracomm, peers: np.ndarray) -> Ratios:
    """Return the ratios, which are positive, and infinite if copies fail; collective, and equal on all ranks.

    They are measured once, which takes some tens of milliseconds. All ranks copy at the same time, and the slowest
    counts.

    Parameters
    ----------
    peers
        Words of every rank, see :mod:`mpicoll.kernels.operation_words`. All ranks must have mapped each other's stages
        and be allowed to copy.
    """
    known = np.array(_known[0] if _known else Ratios((-1.0,) * len(LENGTHS)))
    comm.Allreduce(MPI.IN_PLACE, known, MPI.MIN)
    if known[0, 0] < 0:
        known = _Copies(comm, peers).measure()
    _known[:] = [Ratios(*map(tuple, known.tolist()))]
    return _known[0]


class _Copies:
    """Copies between processes, and the same by way of stages."""

    def __init__(self, comm: MPI.Intracomm, peers: np.ndarray) -> None:
        self._comm, self._peers = comm, peers
        self._others = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
        self._places, self._room = np.empty(comm.size, np.int64), np.zeros(4, np.int64)
        self._works = True

    def measure(self) -> np.ndarray:
        """Return the ratios, a row for each kind."""
        kinds = (self._exchanged, self._broadcast)
        seconds = np.zeros((len(kinds), len(LENGTHS), 2, 2 * _SEGMENTS, _REPEATS))
        for place, nbytes in enumerate(LENGTHS):
            self._allocate(nbytes)
            for repeat in range(_REPEATS):
                for kind, phases in enumerate(kinds):
                    for which, single in enumerate((False, True)):
                        self._comm.Barrier()  # nobody copies any more
                        self._source += 1  # as after a computation, in its owner's caches
                        for phase, steps in enumerate(phases(nbytes, single)):
                            seconds[kind, place, which, phase, repeat] = self._seconds(steps)
        self._comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
        staged, single = np.moveaxis(seconds.min(axis=-1).sum(axis=-1), -1, 0)
        works = np.array([self._works])
        self._comm.Allreduce(MPI.IN_PLACE, works, MPI.LAND)
        timed = np.minimum(LENGTHS, _SEGMENTS * _SEGMENT_NBYTES) / np.array(LENGTHS)
        return 2 * timed * single / staged if works[0] else np.full_like(staged, math.inf)

    def _allocate(self, nbytes: int) -> None:
        """Make source and target, and tell all ranks where this rank's source is."""
        self._comm.Barrier()  # nobody reads the arrays of the length before any more
        self._source, self._target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._comm.Allgather(np.array([self._source.ctypes.data], np.int64), self._places)

    def _exchanged(self, nbytes: int, single: bool) -> Iterator[Steps]:
        """Yield what ranks do at a time: each of them copies its part of all other vectors."""
        if single:
            part = nbytes // self._comm.size
            mine = slice(self._comm.rank * part, (self._comm.rank + 1) * part)
            yield [partial(self._fetch, rank, mine) for rank in self._others]
            return
        part = _SEGMENT_NBYTES // self._comm.size
        own = self._stage(self._comm.rank)
        for start in _starts(nbytes):
            source, target = self._source[start:], self._target[start:]
            at = {rank: slice(rank * part, (rank + 1) * part) for rank in range(self._comm.size)}
            yield [partial(np.copyto, own[at[rank]], source[at[rank]]) for rank in self._others]
            mine = at[self._comm.rank]
            yield [partial(np.copyto, target[at[rank]], self._stage(rank)[mine]) for rank in self._others]

    def _broadcast(self, nbytes: int, single: bool) -> Iterator[Steps]:
        """Yield what ranks do at a time: all of them copy the first one's vector."""
        is_first = self._comm.rank == 0
        if single:
            yield [] if is_first else [partial(self._fetch, 0, slice(0, nbytes))]
            return
        stage = self._stage(0)
        for start in _starts(nbytes):
            segment = slice(start, start + _SEGMENT_NBYTES)
            yield [partial(np.copyto, stage, self._source[segment])] if is_first else []
            yield [] if is_first else [partial(np.copyto, self._target[segment], stage)]

    def _stage(self, rank: int) -> np.ndarray:
        return view_at(int(self._peers[rank, words.STAGES]), _SEGMENT_NBYTES, np.dtype(np.uint8))

    def _fetch(self, rank: int, where: slice) -> None:
        pid, remote = int(self._peers[rank, words.PID]), int(self._places[rank]) + where.start
        local, nbytes = self._target.ctypes.data + where.start, where.stop - where.start
        self._works &= bool(atomics.fetch.run(self._room.ctypes.data, pid, local, remote, nbytes))

    def _seconds(self, steps: Steps) -> float:
        """Return what steps take that all ranks take at the same time."""
        self._comm.Barrier()
        began = time.perf_counter()
        for step in steps:
            step()
        return time.perf_counter() - began


def _starts(nbytes: int) -> range:
    """Return where the segments begin that are timed."""
    return range(0, min(nbytes, _SEGMENTS * _SEGMENT_NBYTES), _SEGMENT_NBYTES)
