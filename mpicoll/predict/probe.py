"""Measurements for the simulator: links, overheads and kernels.

Messages are sent as the executor sends them: by persistent requests, started together and tested until complete. Every
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
    """Destination and source of a rank in an exchange."""

    dest: int
    source: int


@dataclass
class LinkTimes:
    """Measurements of a link by message length in bytes.

    Attributes
    ----------
    alone, together
        Seconds of an exchange between two ranks alone, and in rings of all ranks at the same time.
    waits
        True for lengths that are sent by rendezvous: only once the receive is posted.
    post, gap
        Seconds to post one more message of a burst, and seconds between its arrivals.
    """

    alone: dict[int, float] = field(default_factory=dict)
    together: dict[int, float] = field(default_factory=dict)
    waits: dict[int, bool] = field(default_factory=dict)
    post: dict[int, float] = field(default_factory=dict)
    gap: dict[int, float] = field(default_factory=dict)


class Probe:
    """Measurements on the ranks of a communicator, one at a time; every method is collective over it.

    Parameters
    ----------
    comm
        A communicator of mpi4py that carries no other messages.
    polls
        Number of polls before a wait yields the core.
    sample_seconds
        Seconds of a sample, in which short calls are repeated.
    """

    def __init__(self, comm: MPI.Intracomm, polls: int, sample_seconds: float = SAMPLE_SECONDS) -> None:
        self.comm, self.polls, self.sample_seconds = comm, polls, sample_seconds

    def gather(self, *, at_once: bool = False) -> None:
        """Wait for all ranks, asleep; with `at_once`, let all continue at the same time.

        Raises
        ------
        CollectiveTimeout
            If a rank has not arrived within 60 s.
        """
        request, begin = self.comm.Ibarrier(), time.monotonic()
        while not request.Test():
            time.sleep(_SLEEP)
            if time.monotonic() - begin > _PATIENCE:
                raise CollectiveTimeout(f"a rank has not reached the next measurement within {_PATIENCE:.0f} s")
        if at_once:
            self.comm.Barrier()

    def largest(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the element-wise maximum over ranks."""
        found = np.array(values, np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return found

    def seconds(self, call: Callable[[], float | None] | None, *, at_once: bool = False) -> float:
        """Return the seconds of a call on the ranks that have one, on every rank.

        The result is the lower quartile over samples of the slowest rank's mean: other load of the machine makes
        samples longer, never shorter. A call that returns a number of seconds is timed by that number.
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
        """Complete requests as the executor does; raises CollectiveTimeout after 60 s."""
        wait_until(lambda: MPI.Request.Testall(requests), self.polls, _give_up)

    def exchange(self, route: Route | None, nbytes: int, *, at_once: bool = False) -> float:
        """Return the seconds of a concurrent send and receive along `route`, None on ranks without one."""
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
        """Return the seconds to post one more message of a burst to `peer`, and the seconds between messages."""
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
        """Synchronise with `peer` by an exchange of one byte."""
        data, room = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
        self.wait([self.comm.Irecv(room, peer, _TAG + 1), self.comm.Isend(data, peer, _TAG + 1)])

    def waits(self, peer: int | None, sends: bool, nbytes: int) -> bool:
        """Return True if a message of this length is sent by rendezvous, only once its receive is posted."""
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
            This rank's peer while one pair exchanges, and its neighbours while rings of ranks do; None for no part.
        lengths
            Message sizes in bytes. Every third one is used for the measurements by bursts.
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
        """Return the seconds to start two requests and test them when there is nothing to wait for."""
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
        """Return the seconds of the kernel that adds two float32 vectors of `nbytes`, on all active ranks at once."""
        kernel = kernels.reducer("SUM", np.dtype(np.float32))
        assert kernel is not None
        out, left, right = (np.ones(max(1, nbytes // 4), np.float32) for _ in range(3))
        return self.seconds((lambda: kernel(out, left, right)) if active else None)


@dataclass
class _Burst:
    """Burst of messages; the sender returns the seconds until all are posted, or until all have arrived."""

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
    """Return a call's mean seconds, by its own measure if it has one, and its mean wall time; one warm-up call."""
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
        raise CollectiveTimeout(f"a message has not arrived within {_PATIENCE:.0f} s")
    return 1.0
