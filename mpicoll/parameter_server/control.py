"""Shared state of the ranks of a parameter server: clocks, signs of life, who has finished or failed.

All of it is words in one region of the first server. Each word has one kind of writer: to clocks, beats and the
histogram ranks add, of states and of whom it waits for each rank replaces its own, who is dropped is for the first
server to write, and how it ends is for the first to write who knows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from enum import IntFlag

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout, RemoteError
from mpicoll.parameter_server.partition import Partition
from mpicoll.parameter_server.remote_memory import Window, word_at

NEVER = 1 << 62
"""The clock of a worker that will not come again; nobody waits for it."""
BINS = 1024
"""The last counts whatever is staler."""
_YIELDS = 5
_FIRST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3
_LOOK_EVERY = 0.2
_FREE, _KEEP = 1, 2


class State(IntFlag):
    """Final states of a rank; 0 as long as it pushes or serves.

    A worker that is ``SETTLING`` pushes nothing more, but still needs the servers.
    """

    FINISHED, FAILED, CLOSING, SETTLING = 1, 2, 4, 8


class Pause:
    """Polling back-off: yield the core first, then sleep with exponential delay."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, since something has come."""
        self._yields, self._seconds = _YIELDS, _FIRST_SLEEP

    def rest(self) -> None:
        """Do it."""
        if self._yields:
            self._yields -= 1
            os.sched_yield()
            return
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _LONGEST_SLEEP)


class Control:
    """One rank's view of the others.

    Parameters
    ----------
    comm
        Of these ranks alone.
    timeout
        Seconds of silence of a rank after which those who wait for it give up.
    owner
        The rank that has the memory.

    Attributes
    ----------
    clocks, states, dropped : arrays of int64
        What the last :meth:`look` found: steps that each worker has taken, :class:`State` of each rank, and whether
        each worker has been dropped.
    """

    def __init__(self, comm: MPI.Intracomm, layout: Partition, timeout: float, owner: int) -> None:
        self.comm, self._layout, self._timeout, self._rank = comm, layout, timeout, comm.rank
        workers, size = layout.workers, comm.size
        self._clock, self._beat, self._state = 0, workers, workers + size
        self._dropped = self._state + size
        self._waits = self._dropped + workers
        self._bins = self._waits + size
        self._late = self._bins + BINS
        self._end = self._late + 1
        self._region = Window(comm, owner, word_at(self._end + 1))
        self._words = np.zeros(self._bins, np.int64)
        self.clocks = self._words[:workers]
        self._beats = self._words[workers : self._state]
        self.states = self._words[self._state : self._dropped]
        self.dropped = self._words[self._dropped : self._waits]
        self._awaited = self._words[self._waits :]
        self._seen = self._beats.copy()
        self._heard = np.full(size, time.monotonic())
        self._beaten = 0.0
        self._own = self._waits_for = 0

    def look(self) -> None:
        """Read everything, and say that this rank is alive."""
        now = time.monotonic()
        if now - self._beaten > _LOOK_EVERY / 2:
            self._beaten = now
            self._region.add(word_at(self._beat + self._rank), np.ones(1, np.int64))
        self._region.read(0, self._words)
        fresh = self._beats != self._seen
        self._heard[fresh] = now
        self._seen[fresh] = self._beats[fresh]

    def silent(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Return those of the ranks from which nothing has come for so long, as far as this rank has looked."""
        now = time.monotonic()
        return [rank for rank in ranks if now - self._heard[rank] > seconds]

    def is_awaited(self, worker: int) -> bool:
        """Return whether another rank waits for a worker, as far as this rank has looked."""
        return bool((self._awaited == 1 + worker).any())

    def _tell_awaited(self, ranks: Sequence[int]) -> None:
        """Say for which worker this rank waits: of these the one that was heard of least recently, or none."""
        workers = [rank for rank in ranks if rank < self._layout.workers and rank != self._rank]
        found = 1 + min(workers, key=self._heard.__getitem__) if workers else 0
        if found != self._waits_for:
            self._waits_for = found
            self._region.replace(word_at(self._waits + self._rank), np.array([found], np.int64))

    def tick(self) -> None:
        """Note that this worker has taken a step."""
        self._region.add(word_at(self._clock + self._rank), np.ones(1, np.int64))

    def retire(self, worker: int) -> None:
        """Let nobody wait for a worker any more; its clock may not move meanwhile, but by less than a lifetime."""
        clock = np.empty(1, np.int64)
        self._region.read(word_at(self._clock + worker), clock)
        if clock[0] < NEVER // 2:
            self._region.add(word_at(self._clock + worker), NEVER - clock)

    def drop(self, worker: int) -> None:
        """Retire a worker that has fallen silent. For the first server."""
        self._region.replace(word_at(self._dropped + worker), np.ones(1, np.int64))
        self.retire(worker)

    def enter(self, state: State) -> None:
        """Say what has become of this rank, besides what it has said before."""
        self._own |= state
        self._region.replace(word_at(self._state + self._rank), np.array([self._own], np.int64))

    def count(self, histogram: np.ndarray, late: int = 0) -> None:
        """Add to the histogram of staleness, and to the number of pushes that were left out."""
        self._region.add(word_at(self._bins), np.append(histogram, late))

    def counted(self) -> tuple[np.ndarray, int]:
        """Return how many pushes were so many updates late, and how many were left out."""
        found = np.empty(BINS + 1, np.int64)
        self._region.read(word_at(self._bins), found)
        return found[:BINS], int(found[BINS])

    def all_free(self, come: bool) -> bool:
        """Return whether all ranks free their memory, or none does: the first to call this says whether all `come`."""
        return self._region.decide(word_at(self._end), _FREE if come else _KEEP) == _FREE

    def raise_failures(self) -> None:
        """Raise RemoteError if a server has failed."""
        rank = self.failed_server()
        if rank is not None:
            raise RemoteError(f"parameter server: rank {rank}, a server, failed; its own error says why")

    def failed_server(self) -> int | None:
        """Return the rank of a server that has failed, as far as this rank has looked."""
        return next((rank for rank in self._layout.server_ranks if self.states[rank] & State.FAILED), None)

    def wait(
        self, done: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str, *, failures: bool = True
    ) -> None:
        """Call `done`, less and less often, until it is true.

        Parameters
        ----------
        missing
            Returns the ranks that this rank waits for, as :meth:`look` has found them.
        failures
            Whether the failure of a server ends the wait.

        Raises
        ------
        CollectiveTimeout
            If one of those is silent for longer than the timeout; names all such.
        RemoteError
            If a server has failed.
        """
        started = looked = time.monotonic()
        pause = Pause()
        try:
            while not done():
                now = time.monotonic()
                if now - looked > _LOOK_EVERY:
                    looked = now
                    self.look()
                    if failures:
                        self.raise_failures()
                    self._tell_awaited(missing())
                    if now - started > self._timeout:
                        self._give_up(missing(), what)
                pause.rest()
        finally:
            self._tell_awaited([])

    def wait_at_most(self, done: Callable[[], bool], rank: int, what: str) -> None:
        """Wait for what a rank that is not stuck does at once: however alive it is, for no longer than the timeout.

        Raises
        ------
        CollectiveTimeout, RemoteError
            As in :meth:`wait`.
        """
        until = time.monotonic() + self._timeout

        def over() -> bool:
            if done():
                return True
            if time.monotonic() > until:
                raise CollectiveTimeout(self._text([rank], what), [rank])
            return False

        self.wait(over, lambda: [rank], what)

    def _give_up(self, ranks: Sequence[int], what: str) -> None:
        gone = self.silent(ranks, self._timeout)
        if gone:
            raise CollectiveTimeout(self._text(gone, what), gone)

    def _text(self, ranks: Sequence[int], what: str) -> str:
        named = ", ".join(f"rank {rank} ({self._layout.role(rank)}{self._steps(rank)})" for rank in ranks)
        return f"parameter server: rank {self._rank} waited for {what}; after {self._timeout:g} s it gave up on {named}"

    def _steps(self, rank: int) -> str:
        if rank >= self._layout.workers or self.clocks[rank] >= NEVER // 2:
            return ""
        return f", {self.clocks[rank]} steps"

    def close(self) -> None:
        """Free the memory; collective."""
        self._region.close()
