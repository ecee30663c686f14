"""Speed of copies between processes, compared with copies through shared memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from mpi4py import MPI

from mpicoll.kernels import atomics
from mpicoll.kernels import job as words
from mpicoll.runtime.buffers import view_at

_NBYTES = 2 << 20
_SEGMENT_NBYTES = 512 << 10
_REPEATS = 5
_known = [-1.0]
"""What was measured in this process; machine and processes are the same for all of its communicators."""


def ratio(comm: MPI.Intracomm, peers: np.ndarray) -> float:
    """Return the time of a copy between processes in units of a copy in shared memory, more than 0.

    Collective, and alike on all ranks. It is measured once, which takes some milliseconds: all ranks copy at the
    same time, each from the next one.

    Parameters
    ----------
    peers
        Words of every rank, see :mod:`mpicoll.kernels.job`; all ranks see each other's stages, and may copy.
    """
    known = np.array(_known)
    comm.Allreduce(MPI.IN_PLACE, known, MPI.MIN)
    if known[0] < 0:
        known[0] = _measure(comm, peers)
    _known[0] = float(known[0])
    return _known[0]


def _measure(comm: MPI.Intracomm, peers: np.ndarray) -> float:
    source, target, room = np.ones(_NBYTES, np.uint8), np.ones(_NBYTES, np.uint8), np.zeros(4, np.int64)
    places = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([source.ctypes.data], np.int64), places)
    peer = (comm.rank + 1) % comm.size
    own, theirs = (view_at(int(peers[rank, words.STAGES]), _SEGMENT_NBYTES, source.dtype) for rank in (comm.rank, peer))
    segments = [slice(start, start + _SEGMENT_NBYTES) for start in range(0, _NBYTES, _SEGMENT_NBYTES)]
    staged: list[Callable[[], object]] = []
    for segment in segments:
        staged += [partial(np.copyto, own, source[segment]), partial(np.copyto, target[segment], theirs)]
    pid, place = int(peers[peer, words.PID]), int(places[peer])
    single: list[Callable[[], object]] = [
        partial(atomics.fetch, room.ctypes.data, pid, target.ctypes.data, place, _NBYTES)
    ]
    works = atomics.fetch(room.ctypes.data, pid, target.ctypes.data, place, _NBYTES)
    least = np.array([np.inf, np.inf, works])
    for _ in range(_REPEATS):
        for number, steps in enumerate((staged, single)):
            source += 1  # as after a computation, in its owner's caches
            least[number] = min(least[number], sum(_seconds(comm, step) for step in steps))
    comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)  # ranks that were interrupted tell nothing
    return float(2 * least[1] / least[0]) if least[2] else math.inf


def _seconds(comm: MPI.Intracomm, step: Callable[[], object]) -> float:
    """Return what a step takes that all ranks take at the same time, and after each other's last one."""
    comm.Barrier()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    comm.Barrier()
    return seconds
