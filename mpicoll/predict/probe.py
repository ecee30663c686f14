"""Measure what the simulator wants to know: links, overheads, kernels, our executor.

Messages go as the executor sends them: persistent requests, started together and tested until they are through. Every
rank takes part in every measurement; those with nothing to do sleep, so that they cost the others no core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.kernels import reduce as kernels
from mpicoll.runtime.waiting import wait_until

SAMPLES, SAMPLE_SECONDS, WARMUP_CALLS = 9, 1e-3, 4
BURST = 32
_TAG = 1
_PATIENCE = 60.0
_SLEEP = 300e-6
_LATE = 8e-3


@dataclass
class LinkTimes:
    """Seconds by message length: of an exchange between two ranks, alone and while all pairs exchange.

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

    def gather(self) -> None:
        """Wait for all ranks, asleep."""
        request, begin = self.comm.Ibarrier(), time.monotonic()
        while not request.Test():
            time.sleep(_SLEEP)
            if time.monotonic() - begin > _PATIENCE:
                raise CollectiveTimeout(f"a rank has not come to the next measurement within {_PATIENCE:.0f} s")

    def largest(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the element-wise maximum over ranks."""
        found = np.array(values, np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return found

    def seconds(self, call: Callable[[], float | None] | None) -> float:
        """Time a call on the ranks that have one: the median of the slowest rank's means.

        A call that measures a part of itself returns the seconds of that part.
        """
        self.gather()
        once = self.largest([_mean(call, WARMUP_CALLS)[1]])[0]
        calls = max(1, int(self.sample_seconds / max(once, 1e-9)))
        samples = np.empty(SAMPLES)
        for number in range(SAMPLES):
            self.gather()
            samples[number] = _mean(call, calls)[0]
        return float(np.median(self.largest(samples)))

    def wait(self, requests: list[MPI.Prequest] | list[MPI.Request]) -> None:
        """Wait as the executor does."""
        wait_until(lambda: MPI.Request.Testall(requests), self.polls, _give_up)

    def exchange(self, peer: int | None, nbytes: int) -> float:
        """Time an exchange with `peer`; None on ranks that have none."""
        if peer is None:
            return self.seconds(None)
        data, room = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        requests = [self.comm.Recv_init(room, peer, _TAG), self.comm.Send_init(data, peer, _TAG)]

        def call() -> None:
            MPI.Prequest.Startall(requests)
            self.wait(requests)

        found = self.seconds(call)
        for request in requests:
            request.Free()
        return found

    def burst(self, peer: int | None, sends: bool, nbytes: int) -> tuple[float, float]:
        """Time a burst of messages to `peer`: seconds to post one more, and between them."""
        if peer is None:
            return self.seconds(None), self.seconds(None)
        data = np.zeros((BURST, max(nbytes, 1)), np.uint8)
        make = self.comm.Send_init if sends else self.comm.Recv_init
        requests = [make(row[:nbytes], peer, _TAG) for row in data]
        token = np.zeros(1, np.uint8)

        def run(first: int) -> tuple[float, float]:
            if not sends:
                MPI.Prequest.Startall(requests[:first])
            self._sync(peer, token)
            begin = time.perf_counter()
            if sends:
                MPI.Prequest.Startall(requests[:first])
            posted = time.perf_counter() - begin
            self.wait(requests[:first])
            self._sync(peer, token)
            return (posted, time.perf_counter() - begin) if sends else (0.0, 0.0)

        one, many = ([self.seconds(lambda n=n, i=i: run(n)[i]) for i in (0, 1)] for n in (1, BURST))  # type: ignore[misc]
        for request in requests:
            request.Free()
        return tuple(max(0.0, (m - o) / (BURST - 1)) for o, m in zip(one, many, strict=True))  # type: ignore[return-value]

    def _sync(self, peer: int, token: np.ndarray) -> None:
        self.wait([self.comm.Irecv(np.empty_like(token), peer, _TAG + 1), self.comm.Isend(token, peer, _TAG + 1)])

    def waits(self, peer: int | None, sends: bool, nbytes: int) -> bool:
        """Say whether a message of this length is only sent when its receiver is ready."""
        self.gather()
        waited = False
        if peer is not None:
            data, token = np.zeros(nbytes, np.uint8), np.zeros(1, np.uint8)
            self._sync(peer, token)
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

    def link(self, alone: int | None, together: int | None, lengths: Sequence[int]) -> LinkTimes:
        """Measure one kind of link; the arguments are this rank's peers while one pair, and all pairs, exchange."""
        times, first = LinkTimes(), alone is not None and self.comm.rank < alone
        for nbytes in lengths:
            times.alone[nbytes] = self.exchange(alone, nbytes)
            times.together[nbytes] = self.exchange(together, nbytes)
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
