"""Shared-memory domain of a communicator: records and slots of its ranks, and access to each other's memory.

It is made together with the channel of a communicator whose ranks are all on one node; :mod:`mpicoll.kernels.executor`
describes the use of the memory. All decisions are equal on all ranks: if one rank cannot take part, none does, and the
communicator uses point-to-point messages, as between nodes.

An *operation lane* is the memory for one operation in flight: records, slots and stages of every rank. There is one for
blocking operations, :mod:`~mpicoll.shared_memory.nonblocking_lanes` has those of nonblocking ones, and there are
:data:`~mpicoll.shared_memory.domain_memory.PLAN_LANES` for persistent ones.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import plans
from mpicoll.environment import address_space_left, warn_alone
from mpicoll.kernels import atomics
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.counted_parts import exchange_parts
from mpicoll.progress.driver_thread import driver
from mpicoll.shared_memory import common_file, method_times, peers, segment, slot_lengths, wait_policy
from mpicoll.shared_memory.announcements import Announcements
from mpicoll.shared_memory.domain_memory import (
    PLAN_LANES,
    STAGE_NBYTES,
    STAGES_NBYTES,
    SharedArrays,
    common_nbytes,
    memory_for,
    page_from,
    parts_of_records,
    records_nbytes,
)
from mpicoll.shared_memory.nonblocking_lanes import NonblockingLanes
from mpicoll.shared_memory.trials import Trials

_INTENDED = ("MPICOLL_NODE=off", "the JIT is disabled")


class SharedMemoryDomain:
    """One rank's side of the shared memory of a communicator.

    Parameters
    ----------
    known
        Domain that knows the processes of all ranks already.

    Attributes
    ----------
    oversubscribed, peers, reach
        Whether ranks share cores; processes of all ranks; whether they may copy from each other's private memory.
    method
        The method of access to private memory, see :mod:`mpicoll.kernels.operands`.
    segments
        Whether every rank has mapped the memory segments of all others.
    copies, trials
        Times of collectives by copies between processes relative to those through stages, and trials of both; None if
        only one of them is possible.
    announcements
        Numbers that the ranks tell each other outside collectives.
    exchange_memory
        Memory for exchanges of blocks, see :mod:`mpicoll.collectives.exchange_memory`; None before the first object of
        the communicator.
    """

    def __init__(
        self, comm: MPI.Intracomm, oversubscribed: bool, known: Known | None = None, *, driven: bool = False
    ) -> None:
        self.size, self.rank = comm.size, comm.rank
        self.driven: bool = known.facts.driven if known is not None else driven
        self.oversubscribed = oversubscribed
        self.slot_nbytes = slot_lengths.for_all(self.size, oversubscribed)
        self._lane_nbytes = slot_lengths.records_nbytes(self.size)
        self._lane_slots = 2 * self.size * slot_lengths.largest(self.size)
        self._memory = known.memory if known is not None and known.memory is not None else memory_for(comm)
        self._scratch: dict[int, np.ndarray] = {}
        self._plans: dict[tuple[str, int, bool], np.ndarray] = {}
        if known is None:
            self.peers = peers.meet(comm, self._memory)
        else:
            self.peers = peers.inherit(comm, self._memory, known.facts.peers, known.ranks, known.places)
        self._peers, self.reach, self.segments, records, slots = self.peers
        self.method = words.STAGE if self.segments else words.TRANSFER if self.reach else words.NOTHING
        if not self.segments:
            common = common_file.common_memory(comm, common_nbytes(self.size))
            self._memory, records = self._memory._replace(records=common, slots=common[:0]), common.ctypes.data
            slots = records + records_nbytes(self.size)
        lines, trials, self._base = parts_of_records(records, self.size)
        self._slots = page_from(slots)
        self.announcements = Announcements(lines, self.size, self.rank, 1 if oversubscribed else wait_policy.SPINS)
        self.blocking = self._job(0, self.slot_nbytes)
        self.blocking_address = self.blocking.ctypes.data
        self.copies = self._ratios(comm, known)
        self.trials = Trials(self.blocking, trials, oversubscribed) if self.copies is not None else None
        self._sequences = [0] * PLAN_LANES
        self._nonblocking_jobs: dict[int, np.ndarray] = {}
        self.nonblocking = NonblockingLanes(driven=self.driven)
        self.exchange_memory: Any = None
        self._busy: set[int] = set()  # changed in one step each, as requests may be freed in between

    def _ratios(self, comm: MPI.Intracomm, known: Known | None) -> method_times.Ratios | None:
        if not (self.reach and self.segments):
            return None
        if known is not None and known.facts.copies is not None:
            return known.facts.copies
        measured = method_times.ratios(comm, self.blocking, self.plan)
        return measured if measured.is_possible else None

    def _job(self, lane: int, slot_nbytes: int) -> np.ndarray:
        """Return the job of a lane; lane 0 is for blocking operations."""
        records = self._base + lane * self._lane_nbytes
        slots = self._slots + lane * self._lane_slots
        job = np.zeros(words.job_words(self.size), np.int64)
        if lane not in self._scratch:  # one for each lane, since several threads may be at work on different lanes
            self._scratch[lane] = np.empty(words.SCRATCH_NBYTES + 64, np.uint8)
        scratch = self._scratch[lane].ctypes.data
        reduced = slot_nbytes
        if self.method != words.NOTHING:  # there is another way for longer ones
            reduced = slot_lengths.for_allreduce(self.size, slot_nbytes)
        for word, value in (
            (words.RECORDS, records),
            (words.SIZE, self.size),
            (words.RANK, self.rank),
            (words.PEERS, self.peers_address),
            (words.SLOTS, slots),
            (words.SLOT_NBYTES, slot_nbytes),
            (words.ALLREDUCE_SLOT_NBYTES, reduced),
            (words.SCRATCH, scratch + -scratch % 64),
            (words.METHOD, self.method),
            (words.STAGE_NBYTES, STAGE_NBYTES),
            (words.LANE, lane),
            (words.AHEAD, slot_lengths.ahead(self.size)),
            *wait_policy.of_calls(self.size, self.oversubscribed),
        ):
            job[word] = value
        return job

    def plan(self, collective: str, root: int, long: bool) -> int:
        """Return the address of a plan, which is valid as long as the domain."""
        key = (collective, root, long)
        if key not in self._plans:
            rows = plans.make(collective, self.size, self.rank, root=root, long=long)
            self._plans[key] = np.array(rows, np.int64)
        return self._plans[key].ctypes.data

    def counted_plan(self, collective: str, is_root: bool) -> int:
        """Return the address of this rank's plan of a Gatherv or Scatterv in one round."""
        key = (f"{collective}v", int(is_root), False)
        if key not in self._plans:
            rows = plans.make_counted(collective, self.rank, is_root=is_root, function=exchange_parts.address)
            self._plans[key] = np.array(rows, np.int64)
        return self._plans[key].ctypes.data

    @property
    def facts(self) -> Facts:
        """The facts that hold for any of the ranks."""
        return Facts(self.driven, self.peers, self.copies)

    @property
    def peers_address(self) -> int:
        """Address of what is known about each rank, see :mod:`mpicoll.kernels.operation_words`."""
        return self._peers.ctypes.data

    @property
    def busy_lanes(self) -> int:
        """The persistent operation lanes in use on this rank, as bits."""
        return sum(1 << lane for lane in self._busy.copy())

    def near_slot_nbytes(self, collective: str) -> int:
        """Return the longest vector, in bytes, that passes through slots where all ranks' buffers lie in segments."""
        return slot_lengths.for_segments(collective, self.size, self.oversubscribed)

    def take_lane(self, lane: int, longest_in_slots: int | None = None) -> np.ndarray:
        """Take a persistent operation lane that is free on all ranks, and return its job.

        Parameters
        ----------
        longest_in_slots
            The longest vector, in bytes, that passes through slots; by default as in blocking operations.
        """
        job = self._job(1 + lane, self.slot_nbytes if longest_in_slots is None else longest_in_slots)
        job[words.SEQUENCE] = job[words.SEEN] = self._sequences[lane]
        self._busy.add(lane)
        return job

    def nonblocking_job(self, number: int) -> np.ndarray:
        """Return the job of a nonblocking lane, for callers that see to it that one operation at a time uses it."""
        job = self._nonblocking_jobs.get(number)
        if job is None:
            job = self._nonblocking_jobs[number] = self._job(1 + PLAN_LANES + number, self.slot_nbytes)
            for word, value in wait_policy.of_nonblocking(self.oversubscribed):
                job[word] = value
        return job

    def in_own_arena(self, address: int) -> bool:
        """Return whether an address lies in this process' memory segment, which the other ranks have mapped."""
        _, start, _, nbytes, _ = self._peers[self.rank].tolist()
        return bool(0 <= address - start < nbytes)

    def is_running(self, rank: int) -> bool:
        """Return whether the process of a rank runs; a process that has ended, reaped or not, accesses no memory."""
        try:
            stat = Path(f"/proc/{self._peers[rank, words.PID]}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def return_lane(self, lane: int, job: np.ndarray) -> None:
        """Return a persistent operation lane whose last operation has ended; local."""
        self._sequences[lane] = int(job[words.SEQUENCE])
        self._busy.discard(lane)

    @property
    def longest(self) -> float:
        """The longest vector, in bytes, that shared memory can be used for."""
        return float("inf") if self.reach or self.segments else self.slot_nbytes


_wrong_with_atomics = functools.cache(atomics.self_test)
"""Returns what does not work here; tested once, since it starts a thread."""


def obstacle(size: int) -> str:
    """Return the reason why this process cannot share memory with others, "" if there is none."""
    if os.environ.get("MPICOLL_NODE", "on") == "off":
        return "MPICOLL_NODE=off"
    wrong = _wrong_with_atomics()
    if wrong:
        return wrong
    if segment.own().nbytes:
        return ""
    with contextlib.suppress(OSError):
        free = os.statvfs("/dev/shm")
        if free.f_bavail * free.f_frsize < 2 * common_nbytes(size):
            return f"/dev/shm has {free.f_bavail * free.f_frsize >> 20} MB left"
    left, needed = address_space_left(), 2 * common_nbytes(size) + STAGES_NBYTES
    if left < 2 * needed:  # the program wants some, too
        return f"the limit on the address space leaves {left >> 20} MB, and it needs {needed >> 20} MB"
    return ""


class Facts(NamedTuple):
    """Facts of a domain that hold for any of its ranks; for their meaning see :class:`SharedMemoryDomain`."""

    driven: bool
    peers: peers.Peers
    copies: method_times.Ratios | None


class Known(NamedTuple):
    """Facts for a domain that is made from one of more ranks.

    Attributes
    ----------
    facts, ranks
        Those of the other domain, and which of its ranks the ranks of the new one are.
    memory, places
        Memory of this rank for the new one, and the places that the ranks have told each other, if they have.
    """

    facts: Facts
    ranks: np.ndarray
    memory: SharedArrays | None = None
    places: np.ndarray | None = None


def make(comm: MPI.Intracomm, oversubscribed: bool) -> SharedMemoryDomain | None:
    """Return the domain of a communicator whose ranks are all on one node, None if they share no memory; collective.

    Parameters
    ----------
    oversubscribed
        Whether this machine has fewer cores than ranks.
    """
    if comm.size == 1:
        return None
    possible, driven = _agreed(comm)
    return _made(comm, oversubscribed, None, driven=driven) if possible else None


def derive(comm: MPI.Intracomm, oversubscribed: bool, facts: Facts | None, *others: Any) -> SharedMemoryDomain | None:
    """Return the domain of some ranks of another one, None if they share no memory; collective.

    Parameters
    ----------
    facts
        Facts of the other domain, None if its ranks shared no memory.
    others
        The other fields of :class:`Known`.
    """
    if comm.size == 1 or facts is None:
        return None
    # A file takes room in /dev/shm, which may be full by now.
    if not facts.peers.segments and not _agreed(comm).possible:
        return None
    return _made(comm, oversubscribed, Known(facts, *others))


def _made(
    comm: MPI.Intracomm, oversubscribed: bool, known: Known | None, *, driven: bool = False
) -> SharedMemoryDomain | None:
    """Return a new domain; None, with a warning on the first rank, if the ranks have no common memory. Collective."""
    try:
        return SharedMemoryDomain(comm, oversubscribed, known, driven=driven)
    except common_file.NoCommonMemory as problem:
        if comm.rank == 0:
            warn_alone(f"shared memory is not used: {problem}")
        return None


class _Agreed(NamedTuple):
    """Facts that hold on all ranks: they can share memory; each has a driver thread."""

    possible: bool
    driven: bool


def _agreed(comm: MPI.Intracomm) -> _Agreed:
    """Return what holds on all ranks; warn if one cannot share memory. Collective."""
    reason = obstacle(comm.size)
    least = np.array([comm.rank if reason else comm.size, driver() is not None], np.int64)
    comm.Allreduce(MPI.IN_PLACE, least, MPI.MIN)
    first, driven = map(int, least)
    if first == comm.rank and reason not in _INTENDED:
        warn_alone(f"shared memory is not used: {reason}")
    return _Agreed(first == comm.size, bool(driven))
