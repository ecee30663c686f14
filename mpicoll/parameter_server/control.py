"""Shared state of the ranks of a parameter server: clocks, signs of life, finished and failed ranks.

It consists of words in one region of the first server. Each word is written in one way: ranks add to clocks, beats and
the histogram; each rank replaces its own state and the number of the worker that it waits for; the first server writes
which workers are dropped; and the first rank that knows how the session ends writes that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntFlag

import numpy as np

from mpicoll.errors import CollectiveTimeout, RemoteError
from mpicoll.parameter_server.partition import Partition
from mpicoll.parameter_server.polling import Pause
from mpicoll.parameter_server.remote_memory import Memory, word_at
from mpicoll.progress.running_clock import RunningClock

NEVER = 1 << 60
"""The clock of a worker that has finished or was dropped, for which no rank waits. Several ranks may retire a worker at
once: the sum of what they add is a clock, too."""
BINS = 1024
"""Number of elements of the histogram of staleness; the last one also counts all larger values."""
_LOOK_EVERY = 0.2
_FREE, _KEEP = 1, 2


class State(IntFlag):
    """Final states of a rank; 0 as long as it pushes or serves.

    A worker that is ``SETTLING`` pushes nothing more, but still needs the servers. A rank that has ``LEFT`` accesses no
    memory any more.
    """

    FINISHED, FAILED, CLOSING, SETTLING, LEFT = 1, 2, 4, 8, 16


class Control:
    """One rank's view of the state of all ranks.

    Parameters
    ----------
    memory
        Remote memory of these ranks.
    timeout
        Seconds without a sign of life of a rank after which ranks that wait for it raise CollectiveTimeout.
    owner
        The rank that owns the region.

    Attributes
    ----------
    clocks, states, dropped : arrays of int64
        As of the last :meth:`look`: steps of each worker, :class:`State` of each rank, and whether each worker has been
        dropped.
    """

    def __init__(self, memory: Memory, layout: Partition, timeout: float, owner: int) -> None:
        self._memory, self.comm, self._layout, self._timeout = memory, memory.comm, layout, timeout
        self._rank, workers, size = self.comm.rank, layout.workers, self.comm.size
        self._clock, self._beat, self._state = 0, workers, workers + size
        self._dropped = self._state + size
        self._waits = self._dropped + workers
        self._bins = self._waits + size
        self._late = self._bins + BINS
        self._end = self._late + 1
        self._region = memory.region(owner, word_at(self._end + 1))
        self._words = np.zeros(self._bins, np.int64)
        self.clocks = self._words[:workers]
        self._beats = self._words[workers : self._state]
        self.states = self._words[self._state : self._dropped]
        self.dropped = self._words[self._dropped : self._waits]
        self._awaited = self._words[self._waits :]
        self._seen = self._beats.copy()
        self._running = RunningClock()  # others that were suspended with this rank have had no time for a sign of life
        self._heard = np.full(size, self._running.read())
        self._beaten = -math.inf
        self._own = self._waits_for = 0

    def progress(self) -> bool:
        """Let accesses of other ranks go on; return whether there were any; raises as remote memory does."""
        return self._memory.progress()

    def look(self) -> None:
        """Read the state of all ranks, and give a sign of life."""
        now = self._running.read()
        if now - self._beaten > _LOOK_EVERY / 2:
            self._beaten = now
            self._region.add(word_at(self._beat + self._rank), np.ones(1, np.int64))
        self._region.read(0, self._words)
        fresh = self._beats != self._seen
        self._heard[fresh] = now
        self._seen[fresh] = self._beats[fresh]

    def silent(self, ranks: Sequence[int], seconds: float) -> list[int]:
        """Return those of `ranks` without a sign of life for more than `seconds` seconds, as of the last looks."""
        now = self._running.read()
        return [rank for rank in ranks if now - self._heard[rank] > seconds]

    def is_awaited(self, worker: int) -> bool:
        """Return whether another rank waits for a worker, as of the last :meth:`look`."""
        return bool((self._awaited == 1 + worker).any())

    def _tell_awaited(self, ranks: Sequence[int]) -> None:
        """Write the worker that this rank waits for: of `ranks` the one with the oldest sign of life, or none."""
        workers = [rank for rank in ranks if rank < self._layout.workers and rank != self._rank]
        found = 1 + min(workers, key=self._heard.__getitem__) if workers else 0
        if found != self._waits_for:
            self._waits_for = found
            self._region.replace(word_at(self._waits + self._rank), np.array([found], np.int64))

    def tick(self) -> None:
        """Count a step of this worker."""
        self._region.add(word_at(self._clock + self._rank), np.ones(1, np.int64))

    def retire(self, worker: int) -> None:
        """Retire a worker: raise its clock to :data:`NEVER`. A concurrent :meth:`tick` raises it by one more."""
        clock = np.empty(1, np.int64)
        self._region.read(word_at(self._clock + worker), clock)
        if clock[0] < NEVER // 2:
            self._region.add(word_at(self._clock + worker), NEVER - clock)

    def drop(self, worker: int) -> None:
        """Drop and retire a worker that gives no sign of life; for the first server."""
        self._region.replace(word_at(self._dropped + worker), np.ones(1, np.int64))
        self.retire(worker)

    def enter(self, state: State) -> None:
        """Add a flag to the state of this rank."""
        self._own |= state
        self._region.replace(word_at(self._state + self._rank), np.array([self._own], np.int64))

    def count(self, histogram: np.ndarray, late: int = 0) -> None:
        """Add to the histogram of staleness, and to the number of pushes that were left out."""
        self._region.add(word_at(self._bins), np.append(histogram, late))

    def counted(self) -> tuple[np.ndarray, int]:
        """Return the histogram of staleness, and the number of pushes that were left out."""
        found = np.empty(BINS + 1, np.int64)
        self._region.read(word_at(self._bins), found)
        return found[:BINS], int(found[BINS])

    def all_free(self, come: bool) -> bool:
        """Return whether the ranks free their memory, all of them or none; the first call decides by its `come`."""
        return self._region.decide(word_at(self._end), _FREE if come else _KEEP) == _FREE

    def raise_failures(self) -> None:
        """Raise RemoteError if a server has failed."""
        rank = self.failed_server()
        if rank is not None:
            raise RemoteError(f"parameter server: rank {rank}, a server, failed; its own exception has the reason")

    def raise_dropped(self) -> None:
        """Raise CollectiveTimeout if this rank is a worker that has been dropped, as of the last :meth:`look`."""
        if self._rank < self._layout.workers and self.dropped[self._rank]:
            text = f"parameter server: rank {self._rank} was silent for longer than its lease and has been dropped"
            raise CollectiveTimeout(text, [self._rank])

    def failed_server(self) -> int | None:
        """Return the rank of a server that has failed, as of the last :meth:`look`; else None."""
        return next((rank for rank in self._layout.server_ranks if self.states[rank] & State.FAILED), None)

    def wait(
        self, done: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str, *, failures: bool = True
    ) -> None:
        """Call `done` with polling back-off until it returns True.

        Parameters
        ----------
        missing
            Returns the ranks that this rank waits for, as of the last :meth:`look`.
        what
            What is waited for, for the message.
        failures
            Whether the failure of a server ends the wait, and whether it ends when this rank has been dropped.

        Raises
        ------
        CollectiveTimeout
            If one of these ranks gives no sign of life for the timeout, the message names all such ranks; or if this
            rank has been dropped.
        RemoteError
            If a server has failed.
        """
        started = looked = self._running.read()
        pause = Pause()
        try:
            while not done():
                now = self._running.read()
                if now - looked > _LOOK_EVERY:
                    looked = now
                    self.look()
                    if failures:
                        self.raise_failures()
                        self.raise_dropped()
                    self._tell_awaited(missing())
                    if now - started > self._timeout:
                        self._give_up(missing(), what)
                if self._memory.progress():
                    pause.reset()
                else:
                    pause.rest()
        finally:
            self._tell_awaited([])

    def wait_at_most(self, done: Callable[[], bool], rank: int, what: str) -> None:
        """Wait until `done` returns True, at most for the timeout, even if `rank` gives signs of life.

        Time in which this process was stopped does not count: the other ranks may have dropped it meanwhile, and it
        has to read that before it takes them for silent.

        Raises
        ------
        CollectiveTimeout, RemoteError
            As in :meth:`wait`.
        """
        clock = RunningClock(_LOOK_EVERY)

        def over() -> bool:
            if done():
                return True
            if clock.read() > self._timeout:
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
