"""Measurements for the simulator: links, overheads, kernels, and the executor.

Messages are sent as by the executor: persistent requests, started together and tested until they are complete. Every
rank takes part in every measurement; idle ranks sleep, so that they use no core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.kernels import reduce as kernels
from mpicoll.progress.waiting import wait_until

SAMPLES, SAMPLE_SECONDS, WARMUP_CALLS = 11, 1e-3, 4
BURST = 32
_TAG = 1
_PATIENCE = 60.0
_SLEEP = 1e-3
_LATE = 8e-3


class Route(NamedTuple):
    """Whom a rank sends to, and receives from."""

    dest: int
    source: int


@dataclass
class LinkTimes:
    """Seconds by message length: of an exchange between two ranks alone, and of one in rings of all ranks.

    Attributes
    ----------
    waits
        Lengths of messages that are not sent before they are received.
    post, gap
        Seconds to post another message, and between messages of a burst.
    """

    alone: dict[int, float] = field(default_factory=dict)
    together: dict[int, float] = field(default_factory=dict)
    waits: dict[int, bool] = field(default_factory=dict)
    post: dict[int, float] = field(default_factory=dict)
    gap: dict[int, float] = field(default_factory=dict)


class Probe:
    """All ranks of a communicator, one measurement at a time.

    Parameters
    ----------
    comm
        Plain MPI, of our own.
    polls
        How often the executor polls before it yields.
    sample_seconds
        Short calls are repeated until a sample takes so long.
    """

    def __init__(self, comm: MPI.Intracomm, polls: int, sample_seconds: float = SAMPLE_SECONDS) -> None:
        self.comm, self.polls, self.sample_seconds = comm, polls, sample_seconds

    def gather(self, *, at_once: bool = False) -> None:
        """Wait for all ranks, asleep; then `at_once` lets them go together, which sleepers would not."""
        request, begin = self.comm.Ibarrier(), time.monotonic()
        while not request.Test():
            time.sleep(_SLEEP)
            if time.monotonic() - begin > _PATIENCE:
                raise CollectiveTimeout(f"a rank has not come to the next measurement within {_PATIENCE:.0f} s")
        if at_once:
            self.comm.Barrier()

    def largest(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the element-wise maximum over ranks."""
        found = np.array(values, np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return found

    def seconds(self, call: Callable[[], float | None] | None, *, at_once: bool = False) -> float:
        """Time a call on the ranks that have one: the lower quartile of the slowest rank's means.

        What else the machine does makes samples longer, never shorter.

        A call that measures a part of itself returns the seconds of that part.
        """
        self.gather(at_once=at_once)
        once = self.largest([_mean(call, WARMUP_CALLS)[1]])[0]
        calls = max(1, int(self.sample_seconds / max(once, 1e-9)))
        samples = np.empty(SAMPLES)
        for number in range(SAMPLES):
            self.gather(at_once=at_once)
            samples[number] = _mean(call, calls)[0]
        return float(np.quantile(self.largest(samples), 0.25))

    def wait(self, requests: list[MPI.Prequest] | list[MPI.Request]) -> None:
        """Wait as the executor does."""
        wait_until(lambda: MPI.Request.Testall(requests), self.polls, _give_up)

    def exchange(self, route: Route | None, nbytes: int, *, at_once: bool = False) -> float:
        """Time sending to one rank and receiving from another at the same time; None on ranks that do nothing."""
        if route is None:
            return self.seconds(None, at_once=at_once)
        data, room = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        requests = [self.comm.Recv_init(room, route.source, _TAG), self.comm.Send_init(data, route.dest, _TAG)]

        def call() -> None:
            MPI.Prequest.Startall(requests)
            self.wait(requests)

        found = self.seconds(call, at_once=at_once)
        for request in requests:
            request.Free()
        return found

    def burst(self, peer: int | None, sends: bool, nbytes: int) -> tuple[float, float]:
        """Time bursts of messages to `peer`: seconds to post one more message, and between messages."""
        requests: list[MPI.Prequest] = []
        if peer is not None:
            data = np.zeros((BURST, max(nbytes, 1)), np.uint8)
            make = self.comm.Send_init if sends else self.comm.Recv_init
            requests = [make(row[:nbytes], peer, _TAG) for row in data]
        found = {}
        for count in (1, BURST):
            for until_posted in (True, False):
                call = _Burst(self, peer, sends, requests[:count], until_posted) if peer is not None else None
                found[count, until_posted] = self.seconds(call)
        for request in requests:
            request.Free()
        post, gap = ((found[BURST, part] - found[1, part]) / (BURST - 1) for part in (True, False))
        return max(0.0, post), max(0.0, gap)

    def meet(self, peer: int) -> None:
        """Wait for `peer`."""
        data, room = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        self.wait([self.comm.Irecv(room, peer, _TAG + 1), self.comm.Isend(data, peer, _TAG + 1)])

    def waits(self, peer: int | None, sends: bool, nbytes: int) -> bool:
        """Say whether a message of this length is only sent when its receiver is ready."""
        self.gather()
        waited = False
        if peer is not None:
            data = np.zeros(nbytes, np.uint8)
            self.meet(peer)
            if sends:
                request = self.comm.Isend(data, peer, _TAG)
                until = time.monotonic() + _LATE / 2
                while not request.Test() and time.monotonic() < until:
                    pass
                waited = not request.Test()
            else:
                time.sleep(_LATE)
                request = self.comm.Irecv(data, peer, _TAG)
            self.wait([request])
        return bool(self.largest([waited])[0])

    def link(self, alone: int | None, together: Route | None, lengths: Sequence[int]) -> LinkTimes:
        """Measure one kind of link.

        Parameters
        ----------
        alone, together
            This rank's peer while one pair exchanges, and its neighbours while rings of ranks do.
        """
        times, first = LinkTimes(), alone is not None and self.comm.rank < alone
        for nbytes in lengths:
            times.alone[nbytes] = self.exchange(None if alone is None else Route(alone, alone), nbytes)
            times.together[nbytes] = self.exchange(together, nbytes, at_once=True)
            times.waits[nbytes] = self.waits(alone, first, nbytes)
        for nbytes in lengths[::3]:
            times.post[nbytes], times.gap[nbytes] = self.burst(alone, first, nbytes)
        return times

    def step(self) -> float:
        """Return what it costs to start two requests and test them, when there is nothing to wait for."""
        token = np.zeros(1, np.uint8)
        requests = [
            self.comm.Recv_init(token, MPI.PROC_NULL, _TAG),
            self.comm.Send_init(token, MPI.PROC_NULL, _TAG),
        ]

        def call() -> None:
            MPI.Prequest.Startall(requests)
            MPI.Request.Testall(requests)

        found = self.seconds(call if self.comm.rank == 0 else None)
        for request in requests:
            request.Free()
        return found

    def reduce(self, nbytes: int, active: bool) -> float:
        """Time the kernel that adds float32 on vectors of `nbytes` bytes, on the active ranks at the same time."""
        kernel = kernels.reducer("SUM", np.dtype(np.float32))
        assert kernel is not None
        out, left, right = (np.ones(max(1, nbytes // 4), np.float32) for _ in range(3))
        return self.seconds((lambda: kernel(out, left, right)) if active else None)


@dataclass
class _Burst:
    """Messages posted at once; the sender takes the time until they are posted, or until they have all come."""

    probe: Probe
    peer: int
    sends: bool
    requests: list[MPI.Prequest]
    until_posted: bool

    def __call__(self) -> float:
        if not self.sends:
            MPI.Prequest.Startall(self.requests)
        self.probe.meet(self.peer)
        begin = time.perf_counter()
        if self.sends:
            MPI.Prequest.Startall(self.requests)
        posted = time.perf_counter()
        self.probe.wait(self.requests)
        self.probe.meet(self.peer)
        end = posted if self.until_posted else time.perf_counter()
        return end - begin if self.sends else 0.0


def _mean(call: Callable[[], float | None] | None, calls: int) -> tuple[float, float]:
    """Return the mean of what a call measures, and the time of a call, after one that brings the ranks together."""
    if call is None:
        return 0.0, 0.0
    measures = call() is not None
    begin, within = time.perf_counter(), 0.0
    for _ in range(calls):
        within += call() or 0.0
    whole = time.perf_counter() - begin
    return (within if measures else whole) / calls, whole / calls


def _give_up(waited: float) -> float:
    if waited > _PATIENCE:
        raise CollectiveTimeout(f"a message has not come within {_PATIENCE:.0f} s")
    return 1.0
