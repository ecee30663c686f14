"""Simulated memory with stores that arrive late, and ranks interleaved access by access at random.

:class:`mpicoll.plans.simulated_memory.Memory` decides for all interleavings at once, where loads decide only when a
wait ends. What withdrawals do depends on what a rank happens to see: they are run here, in random interleavings. Each
rank is a greenlet that gives control back to a seeded scheduler at every access to memory that others may see.

- Happens-before: a load-acquire is ordered after the store-release that it has read.
- Values: stores pass through a FIFO buffer per rank and reach memory later, as on x86-64 (TSO), so that results are
  those of a real machine, and a missing fence shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np
from greenlet import greenlet

from mpicoll.plans.simulated_memory import Memory


class Lost(AssertionError):
    """No rank can go on."""


class Machine(Memory):
    """Memory of some ranks that take turns at random.

    Parameters
    ----------
    seed
        Decides the interleaving.
    """

    def __init__(self, size: int, nbytes: int, seed: int) -> None:
        super().__init__(size, nbytes)
        self.random = random.Random(seed)
        self._released: dict[int, np.ndarray] = {}
        self._buffers: list[deque[tuple[int, bytes, np.ndarray | None]]] = [deque() for _ in range(size)]

    def load_acquire(self, address: int) -> int:
        self._interleave()
        clock = self._released.get(address)
        if clock is not None:
            self._join(clock)
        return int.from_bytes(self._see(address, 8), "little", signed=True)

    def waited(self, address: int, value: int) -> None:
        """The load that ended the wait has ordered it."""

    def fence(self) -> None:
        self._interleave()
        while self._buffers[self.rank]:
            self._drain(self.rank)

    # Store buffers --------------------------------------------------------------------------------------------------

    def _put(self, address: int, data: bytes, clock: np.ndarray | None = None) -> None:
        if address < self._private_end:
            super()._put(address, data)
            return
        self._buffers[self.rank].append((address, data, clock))
        if len(self._buffers[self.rank]) > 6:
            self._drain(self.rank)

    def _drain(self, rank: int) -> None:
        address, data, clock = self._buffers[rank].popleft()
        self.memory[address : address + len(data)] = np.frombuffer(data, np.uint8)
        for word in [word for word in self._released if address - 8 < word < address + len(data)]:
            del self._released[word]  # a plain store, or another release, is what is read from now on
        if clock is not None:
            self._released[address] = clock

    def _see(self, address: int, nbytes: int) -> bytes:
        seen = self.memory[address : address + nbytes]
        waiting = self._buffers[self.rank] if self.rank >= 0 and address >= self._private_end else ()
        if waiting:
            seen = seen.copy()
            for at, data, _ in waiting:
                first, last = max(at, address), min(at + len(data), address + nbytes)
                if first < last:
                    seen[first - address : last - address] = np.frombuffer(data[first - at : last - at], np.uint8)
        return seen.tobytes()

    # Scheduling -----------------------------------------------------------------------------------------------------

    def _interleave(self) -> None:
        if self.rank >= 0 and self.random.random() < self._eagerness:
            self._hub.switch()

    def wait(self) -> None:
        """Let the others go on: this rank has nothing to do."""
        self._hub.switch()

    def run(self, programs: list[Callable[[], None]], most: int = 200_000) -> None:
        """Run one program a rank to the end, interleaved.

        Raises
        ------
        Race, AssertionError
            As found.
        Lost
            If they have not ended after `most` turns.
        """
        self._hub = greenlet.getcurrent()
        self._eagerness = self.random.choice((0.02, 0.2, 0.7))
        fibers = [greenlet(program) for program in programs]
        stalled = [0] * self.size
        for turn in range(most):
            alive = [rank for rank, fiber in enumerate(fibers) if not fiber.dead]
            if not alive:
                break
            ready = [rank for rank in alive if stalled[rank] <= turn] or alive
            self.rank = self.random.choice(ready)
            fibers[self.rank].switch()
            if self.random.random() < 0.01:
                stalled[self.rank] = turn + self.random.randrange(300)
            for rank in range(self.size):
                while self._buffers[rank] and self.random.random() < 0.3:
                    self._drain(rank)
        else:
            raise Lost(f"no end after {most} turns")
        for rank in range(self.size):
            while self._buffers[rank]:
                self._drain(rank)
        self.rank = -1
