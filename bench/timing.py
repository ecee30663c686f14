"""Time contenders in turns drawn by lot, back to back or one call at a time.

*Back to back*, a sample is a batch of calls between two barriers, at least eight of them where they are not very long.
*Single*, a sample is one call by itself, as in a program that computes in between: all ranks begin it at the same
moment of the clock that they share. They agree on that moment by point-to-point messages, since a collective of the MPI
library, or one of ours, would leave its own code and memory in the caches; and it lies some way ahead, so that no
message of the agreement is still on its way. Where ranks share no clock, on several real hosts, each waits as long
after the last message.

In either pace a contender may have something to do before each call, such as writing its send buffer. That is left out
of the time. The time of a sample is that of the slowest rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple
from zlib import crc32

import numpy as np
from mpi4py import MPI

from bench.result_files import BACK_TO_BACK
from mpicoll.measure import MAX_SAMPLES, MIN_SAMPLES, SAMPLE_SECONDS, WARMUP_CALLS, turns
from mpicoll.progress.waiting import cores_on_node

LEAST_CALLS, _LONG_SECONDS = 8, 0.05
"""Calls back to back in a sample, unless a call takes so long: fewer would show how the ranks leave the barrier."""
DELAY_SECONDS = 50e-6
"""From the agreement to the start at least: what is left of messages has arrived by then."""
MAX_SINGLE = 500
"""Samples of single calls: five lie beyond the 99th percentile."""
_TURN, _SHORT_SECONDS = 4, 5e-3
"""Single calls in a row, after one that does not count since other contenders have been in the caches; long calls,
whose vectors do not fit there, come one by one."""
_AGREEMENTS = 15


class Contender(NamedTuple):
    """A call to be timed, and what runs untimed before each."""

    call: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class TurnTimes:
    """Seconds per call, one value a sample, each the maximum over ranks.

    Attributes
    ----------
    calls
        How many calls a sample is the mean of.
    skew
        By how much the last rank began later than agreed, in seconds, median over samples; None where ranks share no
        clock, or begin by a barrier.
    """

    samples: np.ndarray
    calls: int = 1
    skew: float | None = None

    @property
    def median(self) -> float:
        """The median."""
        return float(np.median(self.samples))


class Start:
    """Let all ranks begin at the same moment; collective over `comm`, which is plain MPI."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._own, self._others = comm, np.zeros(1), np.zeros(1)
        node = cores_on_node(comm)
        self._yields = node.ranks > node.together
        self.one_clock = _share_a_clock(comm)
        self._delay = 0.0
        self._delay = max(DELAY_SECONDS, 3 * _agreed(comm, median(self._seconds() for _ in range(_AGREEMENTS))))

    def _seconds(self) -> float:
        began = time.perf_counter()
        self._agree()
        return time.perf_counter() - began

    def _agree(self) -> float:
        """Return the moment at which the last rank has come, and the delay is over: the same number on all ranks."""
        comm, own, others = self._comm, self._own, self._others
        rank, size, distance = comm.rank, comm.size, 1
        own[0] = time.perf_counter() + self._delay
        while distance < size:
            comm.Sendrecv(own, (rank + distance) % size, 0, others, (rank - distance) % size, 0)
            own[0] = max(own[0], others[0])
            distance *= 2
        return float(own[0])

    def wait(self) -> float:
        """Return when it is time to begin: the moment that was agreed on, in seconds of `time.perf_counter`."""
        moment = self._agree()
        if not self.one_clock:
            moment = time.perf_counter() + self._delay
        while time.perf_counter() < moment:
            if self._yields:
                os.sched_yield()
        return moment


def _share_a_clock(comm: MPI.Intracomm) -> bool:
    """Say whether the clocks of all ranks show the same: they are one clock of one running kernel."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/time").readlink())
    except OSError:
        name = ""
    number = crc32(name.encode()) if name else -1 - comm.rank
    found = np.array([number, -number], np.int64)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
    return bool(found[0] == -found[1])


def _agreed(comm: MPI.Intracomm, value: float) -> float:
    result = np.array([value])
    comm.Allreduce(MPI.IN_PLACE, result, MPI.MAX)
    return float(result[0])


def compare(
    comm: MPI.Intracomm,
    contenders: Mapping[str, Contender],
    seconds: float,
    pace: str,
    sample_seconds: float = SAMPLE_SECONDS,
) -> dict[str, TurnTimes]:
    """Time every contender for about `seconds` seconds in all, after a warm-up; collective over `comm`, plain MPI.

    Parameters
    ----------
    pace
        `bench.result_files.BACK_TO_BACK` or `SINGLE`.
    sample_seconds
        How long a sample of calls back to back takes at least.
    """
    costs = {name: _warm_up(comm, one) for name, one in contenders.items()}
    if pace == BACK_TO_BACK:
        return _batches(comm, contenders, costs, seconds, sample_seconds)
    return _singles(comm, contenders, costs, seconds)


def _warm_up(comm: MPI.Intracomm, one: Contender) -> tuple[float, float]:
    """Return the seconds of a call, and of it with what comes before, roughly; the same on all ranks."""
    _batch(comm, one, 1)
    found = [_agreed(comm, value) for value in _batch(comm, one, 2)]
    # Long calls need fewer warm-up calls to have been warmed up as long.
    warm = _batch(comm, one, max(1, min(WARMUP_CALLS, int(0.5 / found[1]))))
    call, whole = (min(before, _agreed(comm, value)) for before, value in zip(found, warm, strict=True))
    return call, whole


def _batch(comm: MPI.Intracomm, one: Contender, calls: int) -> tuple[float, float]:
    """Return the seconds per call, and those with what comes before each."""
    call, before = one
    comm.Barrier()
    begin = time.perf_counter()
    if before is None:
        for _ in range(calls):
            call()
        seconds = whole = time.perf_counter() - begin
    else:
        seconds = 0.0
        for _ in range(calls):
            before()
            began = time.perf_counter()
            call()
            seconds += time.perf_counter() - began
        whole = time.perf_counter() - begin
    return seconds / calls, whole / calls


def _batches(
    comm: MPI.Intracomm,
    contenders: Mapping[str, Contender],
    costs: Mapping[str, tuple[float, float]],
    seconds: float,
    sample_seconds: float,
) -> dict[str, TurnTimes]:
    # A busy moment would leave too few calls in a sample, so that the less of two estimates counts.
    calls = {
        name: max(LEAST_CALLS if call < _LONG_SECONDS else 1, int(sample_seconds / call))
        for name, (call, _) in costs.items()
    }
    wanted = seconds / sum((calls[name] + 1) * whole for name, (_, whole) in costs.items())
    count = int(_agreed(comm, min(MAX_SAMPLES, max(MIN_SAMPLES, wanted))))
    samples = {name: np.empty(count) for name in contenders}
    for number, names in enumerate(turns(contenders, count)):
        for name in names:
            _batch(comm, contenders[name], 1)  # does not count: another contender has been in the caches
            samples[name][number] = _batch(comm, contenders[name], calls[name])[0]
    return {name: TurnTimes(_slowest(comm, values), calls[name]) for name, values in samples.items()}


def _singles(
    comm: MPI.Intracomm,
    contenders: Mapping[str, Contender],
    costs: Mapping[str, tuple[float, float]],
    seconds: float,
) -> dict[str, TurnTimes]:
    start = Start(comm)
    agreement = _agreed(comm, median(_waited(start) for _ in range(_AGREEMENTS)))
    short = max(call for call, _ in costs.values()) < _SHORT_SECONDS
    turn, uncounted = (_TURN, 1) if short else (1, 0)
    each = sum(whole + agreement for _, whole in costs.values()) * (turn + uncounted) / turn
    count = int(_agreed(comm, min(MAX_SINGLE, max(MIN_SAMPLES, seconds / each))))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for names in turns(contenders, -(-count // turn)):
        for name in names:
            found[name] += _turn(start, contenders[name], turn, uncounted)
    return {name: _timing(comm, start, np.array(values)) for name, values in found.items()}


def _waited(start: Start) -> float:
    began = time.perf_counter()
    start.wait()
    return time.perf_counter() - began


def _turn(start: Start, one: Contender, counted: int, uncounted: int) -> list[tuple[float, float]]:
    """Return seconds and lateness of some calls, one at a time, after some that do not count."""
    found = []
    for _ in range(uncounted + counted):
        if one.before is not None:
            one.before()
        moment = start.wait()
        began = time.perf_counter()
        one.call()
        found.append((time.perf_counter() - began, began - moment))
    return found[uncounted:]


def _timing(comm: MPI.Intracomm, start: Start, values: np.ndarray) -> TurnTimes:
    slowest = _slowest(comm, np.ascontiguousarray(values[:, 0]))
    late = _slowest(comm, np.ascontiguousarray(values[:, 1]))
    return TurnTimes(slowest, 1, float(np.median(late)) if start.one_clock else None)


def _slowest(comm: MPI.Intracomm, values: np.ndarray) -> np.ndarray:
    comm.Allreduce(MPI.IN_PLACE, values, MPI.MAX)
    return values
