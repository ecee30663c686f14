"""Timeline of all ranks in Chrome's trace event format (JSON), for ui.perfetto.dev.

Every rank keeps its latest spans (:mod:`mpicoll.tracing`) in memory of fixed size. At the end rank 0 receives them,
one rank after the other, and writes them with times of its own clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import tracing
from mpicoll.consensus import all_succeed
from mpicoll.errors import TrainingError
from mpicoll.train.config import TrainConfig
from mpicoll.train.run_report import Replacing

CAPACITY = 1 << 16
"""Largest number of spans that a rank keeps, in 2 MiB."""
_ROUNDS = 9
_TAG = 77
_COMPUTE, _COMMUNICATION = 1, 2


class ClockOffset(NamedTuple):
    """Seconds by which a rank's clock is ahead of rank 0's; wrong by at most half of `round_trip`."""

    offset: float
    round_trip: float
    measured_at: float


class Trace:
    """Trace of a run; does nothing without ``--trace``. Collective over `comm`: construction and `write`.

    Its messages travel on a private duplicate, so that receives of the user's program do not take them.
    """

    def __init__(self, config: TrainConfig, comm: MPI.Intracomm) -> None:
        self._path, self._steps, self._comm = config.trace, config.trace_steps, comm
        if self._path is not None:
            self._began = time.perf_counter()
            self._private = MPI.Intracomm(comm).Dup()
            self._before = clock_offsets(self._private)
            self._ring = tracing.keep(CAPACITY)

    def close(self) -> None:
        """Stop recording spans."""
        if self._path is not None:
            tracing.stop()

    def write(self) -> None:
        """Collect all spans on rank 0 and write the file, replacing an old one only when it is complete; call it once.

        Raises
        ------
        TrainingError
            On every rank, if rank 0 cannot write the file.
        """
        if self._path is None:
            return
        after, own = clock_offsets(self._private), self._ring.latest(self._steps)
        self.close()
        all_succeed(self._comm, lambda: self._send(own) if self._private.Get_rank() else self._collect(own, after))
        self._private.Free()

    def _send(self, own: np.ndarray) -> None:
        self._private.Send(np.array([own.size]), 0, _TAG)
        self._private.Send(own.view(np.uint8), 0, _TAG)

    def _collect(self, own: np.ndarray, after: list[ClockOffset]) -> None:
        """Write the spans of all ranks; take those of the others also if that fails, since they wait for it."""
        tables = self._tables(own)
        try:
            self._write_tables(tables, after)
        except OSError as error:
            raise TrainingError(f"--trace {self._path}: cannot write this file: {error.strerror}") from error
        finally:
            for _ in tables:
                pass

    def _write_tables(self, tables: Iterator[np.ndarray], after: list[ClockOffset]) -> None:
        assert self._path is not None
        with Replacing(self._path) as stream:
            facts = json.dumps(_facts(self._steps, self._before, after), allow_nan=False)
            stream.write(f'{{"displayTimeUnit": "ms", "otherData": {facts}, "traceEvents": [\n')
            separator = ""
            for rank, table in enumerate(tables):
                shifted = _on_our_clock(table, self._before[rank], after[rank], self._began)
                for event in events(rank, shifted):
                    stream.write(separator + json.dumps(event, allow_nan=False))
                    separator = ",\n"
            stream.write("\n]}\n")

    def _tables(self, own: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the spans of one rank after the other, so that rank 0 has those of one other rank at a time."""
        yield own
        for rank in range(1, self._private.Get_size()):
            count = np.empty(1, np.int64)
            self._private.Recv(count, rank, _TAG)
            table = np.empty(int(count[0]), own.dtype)
            self._private.Recv(table.view(np.uint8), rank, _TAG)
            yield table


def clock_offsets(comm: MPI.Intracomm) -> list[ClockOffset]:
    """Return each rank's clock offset on rank 0, an empty list on the others. Collective over `comm`, a private one.

    Of nine exchanges with a rank the shortest counts, which bounds the offset best: the rank read its clock between the
    two times of rank 0. An offset that cannot be told from 0 is 0, as between ranks of one host. (Cristian,
    "Probabilistic clock synchronization", Distributed Computing 3, 1989.)
    """
    rank, stamp = comm.Get_rank(), np.zeros(1)
    if rank:
        for _ in range(_ROUNDS):
            comm.Recv(stamp, 0, _TAG)
            stamp[0] = time.perf_counter()
            comm.Send(stamp, 0, _TAG)
        return []
    return [ClockOffset(0.0, 0.0, time.perf_counter())] + [
        min((_ping(comm, other, stamp) for _ in range(_ROUNDS)), key=lambda found: found.round_trip)
        for other in range(1, comm.Get_size())
    ]


def _ping(comm: MPI.Intracomm, other: int, stamp: np.ndarray) -> ClockOffset:
    before = time.perf_counter()
    comm.Send(stamp, other, _TAG)
    comm.Recv(stamp, other, _TAG)
    after = time.perf_counter()
    offset, round_trip = float(stamp[0]) - (before + after) / 2, after - before
    return ClockOffset(offset if abs(offset) > round_trip / 2 else 0.0, round_trip, after)


def _on_our_clock(table: np.ndarray, first: ClockOffset, last: ClockOffset, zero: float) -> np.ndarray:
    """Return the spans in seconds since `zero` of rank 0's clock; the offset is interpolated linearly."""
    shifted = table.copy()
    drift = (last.offset - first.offset) / max(last.measured_at - first.measured_at, 1e-9)
    for field in ("start", "end"):
        ours = table[field] - first.offset
        shifted[field] = ours - drift * (ours - first.measured_at) - zero
    return shifted


def _facts(steps: int, before: list[ClockOffset], after: list[ClockOffset]) -> dict[str, Any]:
    return {
        "ranks": len(before),
        "at most so many steps": steps,
        "clock offsets to rank 0, at the start and at the end, us": [
            [round(1e6 * found.offset, 3) for found in pair] for pair in zip(before, after, strict=True)
        ],
        "round trips that they were measured with, us": [
            [round(1e6 * found.round_trip, 3) for found in pair] for pair in zip(before, after, strict=True)
        ],
    }


def events(rank: int, table: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield a rank's events: a process, with a thread for computation and threads for allreduces of buckets.

    Parameters
    ----------
    table
        Spans of :meth:`mpicoll.tracing.Ring.latest`, with times in seconds since the trace's begin.
    """
    yield _named("process_name", rank, 0, name=f"rank {rank}")
    yield _named("process_sort_index", rank, 0, sort_index=rank)
    yield _named("thread_name", rank, _COMPUTE, name="compute")
    yield _named("thread_sort_index", rank, _COMPUTE, sort_index=_COMPUTE)
    table = table[np.argsort(table["start"], kind="stable")]
    buckets = table["name"] == tracing.BUCKET
    yield from (_event(rank, _COMPUTE, *span) for span in table[~buckets].tolist())
    free: list[float] = []
    for span in table[buckets].tolist():
        yield _event(rank, _COMMUNICATION + _lane(free, *span[:2]), *span)
    for lane in range(len(free)):
        thread = _COMMUNICATION + lane
        yield _named("thread_name", rank, thread, name="communication" if lane == 0 else f"communication {lane + 1}")
        yield _named("thread_sort_index", rank, thread, sort_index=thread)


def _lane(free: list[float], start: float, end: float) -> int:
    """Return the first lane that is free at `start`: spans of one thread must not overlap partly."""
    lane = next((lane for lane, time in enumerate(free) if time <= start), len(free))
    free[lane : lane + 1] = [end]
    return lane


def _named(what: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": arguments}


def _event(rank: int, thread: int, start: float, end: float, step: int, number: int, name: int) -> dict[str, Any]:
    label = tracing.NAMES[name]
    begin, stop = round(1e6 * start, 3), round(1e6 * end, 3)
    return {
        "ph": "X",
        "name": label if number < 0 else f"{label} {number}",
        "cat": "communication"
        if thread > _COMPUTE or label in ("communication", "tally", "pull", "push")
        else "compute",
        "pid": rank,
        "tid": thread,
        "ts": begin,
        "dur": round(stop - begin, 3),
        "args": {"step": step},
    }
