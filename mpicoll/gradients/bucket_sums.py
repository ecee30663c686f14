"""Nonblocking allreduces of several buckets, each started when its elements are complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import tracing
from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback

_MOST_PERSISTENT = 32
"""Up to this number, buckets use persistent operations, of which a communicator has a limited number."""


class Sum(NamedTuple):
    """A buffer to be summed over the ranks, in place, once all elements of the vector from `start` on are complete."""

    start: int
    data: np.ndarray
    compression: Compressor | ErrorFeedback | None = None


class Sums:
    """The allreduces of each step, started in the given order.

    Parameters
    ----------
    sums
        The buffers, in the order of decreasing `start`.
    """

    def __init__(self, comm: MPI.Intracomm, sums: Sequence[Sum]) -> None:
        self._starters = [_starter(comm, each, len(sums) <= _MOST_PERSISTENT) for each in sums]
        self._starts = [each.start for each in sums]
        self._requests: list[Any] = []
        self._began: dict[int, float] = {}  # those not seen to have ended, where that is wanted for a trace

    def start(self, first: int) -> None:
        """Start the sums whose elements are complete if all from `first` on are; progress those in flight."""
        if tracing.wanted():
            self._note_ended()
        else:
            for request in self._requests[-1:]:
                request.Test()
        while (place := len(self._requests)) < len(self._starts) and self._starts[place] >= first:
            if tracing.wanted():
                self._began[place] = time.perf_counter()
            self._requests.append(self._starters[place]())

    @property
    def all_begun(self) -> bool:
        """True if all sums of this step have been started."""
        return len(self._requests) == len(self._starts)

    def wait(self) -> None:
        """Wait for all sums of this step."""
        for place, request in enumerate(self._requests):
            request.Wait()
            self._note_end(place)
        self._requests.clear()

    def _note_ended(self) -> None:
        for place in [place for place in self._began if self._requests[place].Test()]:
            self._note_end(place)

    def _note_end(self, place: int) -> None:
        if place in self._began:
            # Numbered as they stand in memory; the last one begins first.
            number = len(self._starters) - 1 - place
            tracing.note("bucket", self._began.pop(place), time.perf_counter(), number)


def _starter(comm: MPI.Intracomm, each: Sum, persistent: bool) -> Callable[[], Any]:
    """Return a function that starts a sum and returns its request."""
    if not isinstance(comm, Intracomm):
        return lambda: comm.Iallreduce(MPI.IN_PLACE, each.data, MPI.SUM)
    if each.compression is not None or not persistent:
        return lambda: comm.Iallreduce(MPI.IN_PLACE, each.data, MPI.SUM, compression=each.compression)
    request = comm.Allreduce_init(MPI.IN_PLACE, each.data, MPI.SUM)

    def start() -> Any:
        request.Start()
        return request

    return start


def cut(buffer: np.ndarray, run: slice, length: int) -> list[Sum]:
    """Return buckets of at most `length` elements."""
    starts = range(run.start, run.stop, length)
    return [Sum(start, buffer[start : min(start + length, run.stop)]) for start in starts]


def put_back(sums: Sequence[Sum], ranks: int) -> None:
    """Return sums that are not used to the residuals that they came from, an equal part on each of the ranks."""
    for each in sums:
        if isinstance(each.compression, ErrorFeedback) and each.compression.residual is not None:
            each.compression.residual += each.data / np.float32(ranks)


def runs(sizes: Sequence[int], least: int) -> tuple[list[slice], list[slice]]:
    """Return the runs of neighbours of at least `least` elements, and of shorter ones; the last counts as short."""
    found: tuple[list[slice], list[slice]] = [], []
    start = 0
    for place, size in enumerate(sizes):
        kind = found[size < least or place == len(sizes) - 1]
        if kind and kind[-1].stop == start:
            kind[-1] = slice(kind[-1].start, start + size)
        elif size:
            kind.append(slice(start, start + size))
        start += size
    return found
