"""The shared-memory protocol on simulated memory: ranks interleaved access by access, every data race reported.

The modules of the executor (`_NAMES`, of `kernels/`) are loaded a second time, as Python functions, with `atomics`
replaced by :class:`Machine`. Each rank is a greenlet that gives control back to a seeded scheduler at every access to
memory that others may see. Checks are made:

- Happens-before (vector clocks, as in FastTrack: Flanagan and Freund, PLDI 2009): two accesses to common bytes, one of
  them a write, must be ordered by a store-release and the load-acquire that read it. This does not depend on what the
  hardware does with the order of accesses, and finds an error in interleavings whose results happen to be right.
- The same for all interleavings at once (`least`): flags only grow, and each wait is for one value of one flag, so that
  a rank makes the same accesses in the same order in every interleaving. A wait is then ordered after the *first*
  release of that value or a greater one, which holds in each of them; what this leaves unordered is a race in some.
- Values: stores pass through a FIFO buffer per rank and reach memory later, as on x86-64 (TSO), so that results are
  those of a real machine, and a missing fence shows.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from greenlet import greenlet

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
_NAMES = ("job", "plan", "records", "operands", "executor", "withdrawal")


class Race(AssertionError):
    """Two accesses that nothing orders."""


class Lost(AssertionError):
    """No rank can go on."""


class Machine:
    """Memory of some ranks, and who has seen what of it.

    Parameters
    ----------
    size
        Number of ranks.
    nbytes
        Length of the memory; addresses run from 0, and 0 is never handed out.
    seed
        Decides the interleaving.
    least
        Order a wait after the first release that ends it, not after those that this interleaving happens to have seen.
        For protocols without withdrawals, in which loads decide more than when a wait ends.
    """

    def __init__(self, size: int, nbytes: int, seed: int, *, least: bool = False) -> None:
        self.size, self.random, self.least = size, random.Random(seed), least
        self._history: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.memory = np.zeros(nbytes, np.uint8)
        self._free = 64
        self._private_end = 0
        self._owners: list[tuple[int, int, int]] = []
        self._writer = np.zeros(nbytes, np.int32)
        self._written = np.zeros(nbytes, np.int32)
        self._read = np.zeros((size, nbytes), np.int32)
        self._clocks = np.zeros((size, size), np.int32)
        self._clocks[np.diag_indices(size)] = 1
        self._released: dict[int, np.ndarray] = {}
        self._buffers: list[deque[tuple[int, bytes, np.ndarray | None]]] = [deque() for _ in range(size)]
        self.rank = -1
        self.steps = 0
        self.made: list[list[tuple[str, int, int]]] = [[] for _ in range(size)]
        """Per rank what it did to shared memory: accesses with address and length, releases with address and value."""

    # Allocation -----------------------------------------------------------------------------------------------------

    def private(self, nbytes: int) -> int:
        """Return memory that one rank uses alone, neither interleaved nor checked; to be asked for first."""
        address = self._take(nbytes)
        self._private_end = self._free
        return address

    def shared(self, nbytes: int) -> int:
        """Return memory whose accesses are interleaved and checked."""
        return self._take(nbytes)

    def _take(self, nbytes: int) -> int:
        address = self._free
        self._free = -(-(address + nbytes) // 64) * 64
        assert self._free <= self.memory.size
        return address

    # Accesses of the rank whose turn it is --------------------------------------------------------------------------

    def load(self, address: int) -> int:
        if address >= self._private_end:
            self._interleave()
            self._check_read(address, 8)
        return int.from_bytes(self._see(address, 8), "little", signed=True)

    def store(self, address: int, value: int) -> None:
        if address >= self._private_end:
            self._interleave()
            self._check_write(address, 8)
        self._put(address, int(value).to_bytes(8, "little", signed=True))

    def load_acquire(self, address: int) -> int:
        self._interleave()
        clock = self._released.get(address)
        if clock is not None and not self.least:
            self._join(clock)
        return int.from_bytes(self._see(address, 8), "little", signed=True)

    def store_release(self, address: int, value: int) -> None:
        self._interleave()
        clock = self._clocks[self.rank].copy()
        self._clocks[self.rank, self.rank] += 1
        self._put(address, int(value).to_bytes(8, "little", signed=True), clock)
        self.made[self.rank].append(("release", address, value))
        if self.least:
            self._history.setdefault(address, []).append((value, clock))

    def waited(self, address: int, value: int) -> None:
        """Note the end of a wait until the word at `address` is at least `value`."""
        if self.least:
            self._join(next(clock for reached, clock in self._history[address] if reached >= value))

    def _join(self, clock: np.ndarray) -> None:
        np.maximum(self._clocks[self.rank], clock, out=self._clocks[self.rank])

    def fence(self) -> None:
        self._interleave()
        while self._buffers[self.rank]:
            self._drain(self.rank)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        if nbytes <= 0:
            return
        self._interleave()
        self._check_read(source, nbytes)
        data = self._see(source, nbytes)
        self._interleave()
        self._check_write(target, nbytes)
        self._put(target, data)

    def reduce(self, function: int, out: int, a: int, b: int, count: int, itemsize: int) -> int:
        """Add int64 elements; with `function` 2, raise (return 1)."""
        self._interleave()
        self._check_read(a, count * itemsize)
        self._check_read(b, count * itemsize)
        if function == 2:
            return 1
        left, right = (np.frombuffer(self._see(at, count * itemsize), np.int64) for at in (a, b))
        self._interleave()
        self._check_write(out, count * itemsize)
        self._put(out, (left + right).tobytes())
        return 0

    def read_process(self, vectors: int, pid: int, local: int, remote: int, nbytes: int) -> bool:
        self.copy(local, remote, nbytes)
        return True

    def write_process(self, vectors: int, pid: int, local: int, remote: int, nbytes: int) -> bool:
        self.copy(remote, local, nbytes)
        return True

    # The caller's accesses: what a program does with its buffers before and after a call ------------------------------

    def write(self, address: int, values: np.ndarray) -> None:
        self._interleave()
        self._check_write(address, values.nbytes)
        self._put(address, values.tobytes())

    def read(self, address: int, count: int) -> np.ndarray:
        self._interleave()
        self._check_read(address, 8 * count)
        return np.frombuffer(self._see(address, 8 * count), np.int64)

    # Store buffers --------------------------------------------------------------------------------------------------

    def _put(self, address: int, data: bytes, clock: np.ndarray | None = None) -> None:
        if address < self._private_end:
            self.memory[address : address + len(data)] = np.frombuffer(data, np.uint8)
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

    # Happens-before -------------------------------------------------------------------------------------------------

    def _after_writes(self, does: str, address: int, nbytes: int) -> tuple[slice, np.ndarray]:
        """See that what was written there happened before this access; return the bytes and this rank's clock."""
        part, me = slice(address, address + nbytes), self._clocks[self.rank]
        unordered = me[self._writer[part]] < self._written[part]
        if unordered.any():
            self._report(does, address, unordered, self._writer[part])
        return part, me

    def _check_read(self, address: int, nbytes: int) -> None:
        if address < self._private_end:
            return
        self.made[self.rank].append(("read", address, nbytes))
        part, me = self._after_writes("reads", address, nbytes)
        self._read[self.rank, part] = me[self.rank]

    def _check_write(self, address: int, nbytes: int) -> None:
        if address < self._private_end:
            return
        self.made[self.rank].append(("write", address, nbytes))
        part, me = self._after_writes("writes", address, nbytes)
        for other in range(self.size):
            if other != self.rank:
                unordered = self._read[other, part] > me[other]
                if unordered.any():
                    self._report("writes", address, unordered, np.full(nbytes, other), "read")
        self._writer[part], self._written[part] = self.rank, me[self.rank]

    def _report(self, does: str, address: int, where: np.ndarray, others: np.ndarray, did: str = "written") -> None:
        first = int(where.argmax())
        raise Race(
            f"rank {self.rank} {does} byte {address + first} that rank {others[first]} has {did}, and nothing says in "
            "which order"
        )

    # Scheduling -----------------------------------------------------------------------------------------------------

    def _interleave(self) -> None:
        if self.rank >= 0:
            self.steps += 1
            if self.random.random() < self._eagerness:
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
        self._eagerness = 0.0 if self.least else self.random.choice((0.02, 0.2, 0.7))
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
                while self._buffers[rank] and (self.least or self.random.random() < 0.3):
                    self._drain(rank)
        else:
            raise Lost(f"no end after {most} turns")
        for rank in range(self.size):
            while self._buffers[rank]:
                self._drain(rank)
        self.rank = -1


def load_protocol(machine: Machine, edits: dict[str, tuple[str, str]] | None = None) -> types.SimpleNamespace:
    """Return the modules of the protocol as Python functions on the memory of `machine`.

    Parameters
    ----------
    edits
        Per module a text of its source and what stands in its place: errors planted to see them found.
    """
    package = f"interleaved_{id(machine)}"
    atomics = types.ModuleType(f"{package}.atomics")
    for name in ("load", "store", "load_acquire", "store_release", "fence", "copy", "read_process", "write_process"):
        setattr(atomics, name, getattr(machine, name))
    atomics.call_reducer = machine.reduce  # type: ignore[attr-defined]
    atomics.pause = atomics.yield_core = lambda: None  # type: ignore[attr-defined]
    jit = types.ModuleType(f"{package}.jit")
    for name in ("helper", "inline_helper", "kernel", "short_kernel"):
        setattr(jit, name, lambda function: function)
    top = types.ModuleType(package)
    top.__path__ = []
    made: dict[str, Any] = {package: top, f"{package}.atomics": atomics, f"{package}.jit": jit}
    sys.modules.update(made)
    try:
        for name in _NAMES:
            spec = importlib.util.spec_from_file_location(f"{package}.{name}", KERNELS / f"{name}.py")
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = made[spec.name] = module
            old, new = (edits or {}).get(name, ("", ""))
            source = (KERNELS / f"{name}.py").read_text()
            assert old in source
            exec(compile(source.replace(old, new) if old else source, str(spec.origin), "exec"), module.__dict__)
    finally:
        for name in made:
            sys.modules.pop(name, None)
    modules = types.SimpleNamespace(**{name: made[f"{package}.{name}"] for name in _NAMES})
    _note_waits(machine, modules)
    return modules


def _note_waits(machine: Machine, modules: types.SimpleNamespace) -> None:
    """Let the one function that waits for a flag tell the machine for which value."""
    has_come, record_of = modules.records.has_come, modules.job.record_of

    def noted(job: int, rank: int, sequence: int, stage: int) -> bool:
        came: bool = has_come(job, rank, sequence, stage)
        if came:
            machine.waited(record_of(job, rank, sequence), 4 * sequence + stage)
        return came

    modules.records.has_come = modules.executor.has_come = noted
