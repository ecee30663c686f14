"""Times of collectives on private memory by copies between processes, relative to those through stages.

Which of the two ways is faster depends on the machine, on the length, and on the cores that the ranks have got: where
they share no cache, to write a stage that another core has read takes five times as long as where they do. So the
collectives themselves are timed, when the first communicator is made, until enough runs have done so
(:mod:`mpicoll.shared_memory.kept_times`).
"""

from __future__ import annotations

import bisect
import contextlib
import math
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.reduction_ops import reducer_for
from mpicoll.environment import cores
from mpicoll.errors import RemoteError
from mpicoll.kernels import executor, withdrawal
from mpicoll.kernels import operation_words as words
from mpicoll.kernels import reduce as kernels
from mpicoll.kernels.dispatch_table import pack_call
from mpicoll.shared_memory import kept_times
from mpicoll.shared_memory.cache_sharing import sharing

LENGTHS = (32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)
"""Lengths in bytes that are measured."""
_HUGE_PAGES_FROM = 8 << 20
"""NumPy asks for huge pages from 4 MB on, and copies between processes take less time there. A vector of 2 MB in huge
pages is measured in place of one that consists of them but for its ends."""
_LONGEST = 2 << 20
_REPEATS = (5, 5, 4, 3, 3)
"""Repetitions for each length, of which the median counts: where ranks outnumber cores, the fastest is a rare one."""
_CALLS_IN_TURN = 4
"""Calls in a repetition where ranks take turns on the cores: most of the time of a single one passes until each rank
has had its turn, however long they are at work."""
_DEADLINE = 60.0
_PREEMPTED = 20
"""Times that a rank with a core of its own may lose it during a measurement of 40 ms that is kept."""
_DTYPE = np.dtype(np.float64)
_WAYS = (words.STAGE, words.TRANSFER)
_CHECKED, _AGREES = [1, 2], 1.6
"""Of `LENGTHS`, those of an allreduce by which ratios of earlier runs are checked, and by how much they may differ."""


class Ratios(NamedTuple):
    """Times by copies between processes in units of times through stages, a value for each of `LENGTHS`."""

    allreduce: tuple[float, ...] = (1.0,) * len(LENGTHS)
    reduce: tuple[float, ...] = (1.0,) * len(LENGTHS)
    bcast: tuple[float, ...] = (1.0,) * len(LENGTHS)
    reduce_scatter: tuple[float, ...] = (1.0,) * len(LENGTHS)
    allgather: tuple[float, ...] = (1.0,) * len(LENGTHS)
    gather: tuple[float, ...] = (1.0,) * len(LENGTHS)
    scatter: tuple[float, ...] = (1.0,) * len(LENGTHS)
    alltoall: tuple[float, ...] = (1.0,) * len(LENGTHS)
    scan: tuple[float, ...] = (1.0,) * len(LENGTHS)
    exscan: tuple[float, ...] = (1.0,) * len(LENGTHS)

    def at(self, collective: str, nbytes: int) -> float:
        """Return the ratio for a vector of `nbytes` bytes; infinity where it was not measured.

        It is interpolated on logarithmic scales, and the same from each power of two up to the next one.
        """
        if nbytes < LENGTHS[0] or collective not in _FIELDS:
            return math.inf
        measured = getattr(self, collective)
        place = min(bisect.bisect_right(LENGTHS, nbytes), len(LENGTHS) - 1)
        below, above = math.log2(LENGTHS[place - 1]), math.log2(LENGTHS[place])
        share = min(1.0, (nbytes.bit_length() - 0.5 - below) / (above - below))
        if math.inf in measured:
            return math.inf
        return float(measured[place - 1] ** (1 - share) * measured[place] ** share)

    @property
    def is_possible(self) -> bool:
        """False if some copy between processes has failed."""
        return math.isfinite(self.bcast[0])


_FIELDS = frozenset(Ratios._fields)
PlanOf = Callable[[str, int, bool], int]
"""Function that returns the address of this rank's plan for a collective, a root, and a long vector."""
_known: list[Ratios] = []
"""Ratios measured in this process; machine and processes are the same for all of its communicators."""


def ratios(comm: MPI.Intracomm, job: np.ndarray, plan_of: PlanOf) -> Ratios:
    """Return the ratios, which are positive, and infinite if copies fail; collective, and equal on all ranks.

    They are measured at most once in a process, which takes some tens of milliseconds, longer where ranks outnumber
    cores. The slowest rank counts.

    Parameters
    ----------
    job
        The job for blocking operations of a domain whose ranks have mapped each other's stages, and may copy.
    """
    known = np.array(_known[0] if _known else Ratios(*[(-1.0,) * len(LENGTHS)] * len(Ratios._fields)))
    comm.Allreduce(MPI.IN_PLACE, known, MPI.MIN)
    if known[0, 0] < 0:
        method = int(job[words.METHOD])
        known = _found(comm, _Collectives(comm, job, plan_of), known.shape)
        job[words.METHOD] = method
    _known[:] = [Ratios(*map(tuple, known.tolist()))]
    return _known[0]


def _found(comm: MPI.Intracomm, collectives: _Collectives, shape: tuple[int, ...]) -> np.ndarray:
    """Return the ratios of earlier runs if they hold in this one, else measure them; collective."""
    caches = sharing(comm)
    known = _of_earlier_runs(comm, caches, shape)
    is_first = known[0, 0] < 0
    if not is_first and collectives.confirm(known):
        return known
    known = collectives.measure()
    if is_first and comm.rank == 0 and collectives.is_quiet:
        kept_times.add(caches, known)
    return known


def _of_earlier_runs(comm: MPI.Intracomm, caches: list[list[int]], shape: tuple[int, ...]) -> np.ndarray:
    """Return the ratios that the first rank finds in its file, negative if there are none; collective."""
    found = kept_times.median(caches, shape) if comm.rank == 0 else None
    known = np.full(shape, -1.0) if found is None else found
    comm.Bcast(known)
    return known


class _Collectives:
    """Collectives on vectors in private memory, executed on the job for blocking operations.

    Attributes
    ----------
    is_quiet
        Whether nothing else wanted the ranks' cores during :meth:`measure`, as far as they could see.
    """

    def __init__(self, comm: MPI.Intracomm, job: np.ndarray, plan_of: PlanOf) -> None:
        self._comm, self._job, self._plan_of = comm, job, plan_of
        self._offsets = np.zeros(comm.size + 1, np.int64)
        self._vectors = tuple(_private(_LONGEST) for _ in range(2))
        self._works = self._gives = True
        in_turn = np.array([comm.size > cores()])
        comm.Allreduce(MPI.IN_PLACE, in_turn, MPI.LOR)
        self._calls = _CALLS_IN_TURN if in_turn[0] else 1
        self.is_quiet = False
        job[words.ITEMSIZE], job[words.ROOT], job[words.CAREFUL] = _DTYPE.itemsize, 0, 0
        job[words.BOUNDS] = self._offsets.ctypes.data
        job[words.REDUCER] = kernels.native_address(reducer_for(MPI.SUM, _DTYPE), _DTYPE)

    def measure(self) -> np.ndarray:
        """Return the ratios, a row for each collective."""
        undisturbed = _Undisturbed(self._comm.size)
        measured = self._ratios(self._cases())
        agreed = np.array([self._works, undisturbed()])
        self._comm.Allreduce(MPI.IN_PLACE, agreed, MPI.LAND)
        works, self.is_quiet = agreed.tolist()
        return measured if works else np.full_like(measured, math.inf)

    def confirm(self, known: np.ndarray) -> bool:
        """Return whether a few measurements agree with what earlier runs have found.

        They do not where a virtual machine has given the ranks cores that share no cache. If ranks take turns on the
        cores, a few say nothing.
        """
        if self._calls > 1 or not np.isfinite(known).all():
            return True
        repeats = range(max(_REPEATS))
        measured = self._ratios((0, length, way, repeat) for length in _CHECKED for repeat in repeats for way in (0, 1))
        change = np.log(measured[0, _CHECKED] / known[0, _CHECKED]).mean()
        return bool(abs(change) < math.log(_AGREES))

    def _ratios(self, cases: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
        """Return ratios of medians, a row for each collective, for the cases that are given; of others NaN."""
        seconds = np.full((len(Ratios._fields), len(LENGTHS), len(_WAYS), max(_REPEATS)), math.nan)
        for case in cases:
            collective, length, way, _ = case
            self._prepare(Ratios._fields[collective], min(LENGTHS[length], _LONGEST), _WAYS[way])
            seconds[case] = self._run()
        self._comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
        staged, single = np.moveaxis(_median(seconds), -1, 0)
        return single / staged

    def _cases(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield collective, length, way and repetition; both ways in turn, since what disturbs comes and goes."""
        for length, repeats in enumerate(_REPEATS):
            if LENGTHS[length] >= _HUGE_PAGES_FROM:
                self._vectors = tuple(_private(_LONGEST, huge_pages=True) for _ in self._vectors)
            for collective in range(len(Ratios._fields)):
                for repeat in range(repeats):
                    yield from ((collective, length, way, repeat) for way in range(len(_WAYS)))

    def _prepare(self, collective: str, nbytes: int, way: int) -> None:
        """Write a call to the job, all but its sequence number."""
        job, rank, count = self._job, self._comm.rank, nbytes // _DTYPE.itemsize
        number, is_root = words.COLLECTIVES.index(collective), self._comm.rank == 0
        self._gives = is_root or collective not in ("bcast", "scatter")
        self._offsets[:] = np.arange(self._comm.size + 1) * count // self._comm.size
        source, target = (vector.ctypes.data for vector in self._vectors)
        own = int(self._offsets[rank]) * _DTYPE.itemsize
        if collective in ("reduce", "gather") and not is_root:
            target = 0
        if collective == "scatter" and not is_root:
            source = 0
        if collective == "bcast":
            target = source
        if collective in ("reduce_scatter", "scatter"):
            target += own
        if collective in ("allgather", "gather"):
            source += own
        job[words.COLLECTIVE], job[words.COUNT], job[words.SEND], job[words.RECV] = number, count, source, target
        job[words.METHOD] = way
        job[words.CALL] = pack_call(number, int(way == words.TRANSFER), 0, 0, 0)
        # The plan of long vectors, also where the slots are as long: the ways differ in no other.
        job[words.PLAN] = self._plan_of(collective, 0, True)

    def _run(self) -> float:
        """Execute the call of the job, as often as one repetition has it, and return the seconds on this rank."""
        given = self._vectors[0][: self._job[words.COUNT] if self._gives else 0]
        given[:] = 1  # written lately, as the results of a computation
        self._comm.Barrier()
        began = time.perf_counter()
        self._call(began)
        for _ in range(1, self._calls):
            given[:] = 1
            self._call(began)
        return time.perf_counter() - began

    def _call(self, began: float) -> None:
        status = executor.begin.run(self._job.ctypes.data)
        while status == words.WAITING and time.perf_counter() - began < _DEADLINE:
            status = executor.advance.run(self._job.ctypes.data)
        if status not in (words.DONE, words.FALLBACK):
            withdrawal.withdraw(self._job.ctypes.data)
            raise RemoteError(f"another rank did not take part in the measurement of copies within {_DEADLINE:.0f} s")
        self._works &= status == words.DONE


class _Undisturbed:
    """Check that other programs have left this process its core since the object was made."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def __call__(self) -> bool:
        if self._ranks > cores():  # they take the cores from each other; as many of an earlier run may be in the load
            return os.getloadavg()[0] <= self._ranks
        return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - self._before <= _PREEMPTED


def _median(seconds: np.ndarray) -> np.ndarray:
    """Return medians over the last axis without NaN; NumPy's `nanmedian` imports masked arrays, in 15 ms."""
    there = np.isfinite(seconds).sum(axis=-1, keepdims=True)
    inner = np.concatenate([(there - 1) // 2, there // 2], axis=-1)
    return np.take_along_axis(np.sort(seconds, axis=-1), inner, axis=-1).mean(axis=-1)  # NaN come last


def _private(nbytes: int, huge_pages: bool = False) -> np.ndarray:
    """Return ordinary memory of this process, also where NumPy allocates arrays in shared memory."""
    unit = 2 << 20
    memory = mmap.mmap(-1, nbytes + unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    octets = np.frombuffer(memory, np.uint8)
    begin = -octets.ctypes.data % unit
    array = octets[begin : begin + nbytes].view(_DTYPE)
    array[:] = 1
    return array
