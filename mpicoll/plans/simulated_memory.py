"""Simulated memory of several ranks that reports all data races.

Two accesses to the same bytes, one of them a write, must be ordered by a store-release and the wait that it ended
(vector clocks, as in FastTrack: Flanagan and Freund, PLDI 2009). Flags only grow, and each wait is for one value of one
flag, so that a rank makes the same accesses in the same order in every interleaving. A wait is therefore ordered after
the *first* release of that value or a greater one. Accesses that remain unordered race in some interleaving, so that
one run decides for all interleavings.

Addresses are plain integers; no allocation has address 0.
"""

from __future__ import annotations

import mmap

import numpy as np

Array = np.ndarray


class Race(AssertionError):
    """Data race: two unordered accesses to the same bytes, one of them a write."""


def _zeros(nbytes: int) -> Array:
    """Return bytes of which those that are never touched take neither memory nor time."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def behind(address: int, nbytes: int, end: int) -> int:
    """Return where the next allocation begins."""
    behind = -(-(address + nbytes) // 64) * 64
    if behind > end:
        raise MemoryError(f"{nbytes} bytes do not fit into the simulated memory")
    return behind


class Memory:
    """Memory of some ranks, with the vector clocks of their accesses.

    Parameters
    ----------
    size
        Number of ranks, each of which is one thread.
    nbytes
        Bytes of memory; a third of it is for :meth:`private`.

    Attributes
    ----------
    rank
        The rank that runs; -1 outside of all ranks, when accesses are not checked.
    made
        By rank, its accesses to shared memory with address and length, and its releases with address and value.
    hidden
        Processes whose private memory the system does not copy.
    """

    def __init__(self, size: int, nbytes: int) -> None:
        self.size, self.rank = size, -1
        self.memory = _zeros(nbytes)
        self._words = self.memory.data.cast("q")
        self.made: list[list[tuple[str, int, int]]] = [[] for _ in range(size)]
        self._private_free, self._private_end = 64, nbytes // 3 // 64 * 64
        self._free = self._private_end
        self._writer = _zeros(4 * nbytes).view(np.int32)
        self._written = _zeros(4 * nbytes).view(np.int32)
        self._read = _zeros(4 * nbytes * size).view(np.int32).reshape(size, nbytes)
        self._clocks = np.zeros((size, size), np.int32)
        self._clocks[np.diag_indices(size)] = 1
        self._history: dict[int, list[tuple[int, Array]]] = {}
        self.hidden: set[int] = set()

    def release(self) -> None:
        """Give the memory back: modules refer to this object and to themselves until garbage is collected."""
        self.memory = self._writer = self._written = np.zeros(0, np.uint8)
        self._read = np.zeros((0, 0), np.int32)
        self._words = memoryview(b"")
        self.made, self._history = [], {}

    # Allocation -----------------------------------------------------------------------------------------------------

    def private(self, nbytes: int) -> int:
        """Allocate memory that one rank uses alone, without checks; return its address."""
        address = self._private_free
        self._private_free = behind(address, nbytes, self._private_end)
        return address

    def shared(self, nbytes: int) -> int:
        """Allocate memory whose accesses are checked; return its address."""
        address = self._free
        self._free = behind(address, nbytes, self.memory.size)
        return address

    def fill(self, address: int, values: Array) -> None:
        """Write an array without checks, before ranks run."""
        self.memory[address : address + values.nbytes] = values.view(np.uint8).reshape(-1)

    def pid(self, process: int) -> int:
        """Return the number by which the system knows a process."""
        return process

    def reducer(self, *, raises: bool) -> int:
        """Return the address of a reducer, for :meth:`reduce`."""
        return 2 if raises else 1

    # What `mpicoll.kernels.atomics` has, for the rank whose turn it is ------------------------------------------------

    def load(self, address: int) -> int:
        """Return the word at `address`."""
        if address < self._private_end:
            return self._words[address >> 3]
        self._interleave()
        self._check_read(address, 8)
        return int.from_bytes(self._see(address, 8), "little", signed=True)

    def store(self, address: int, value: int) -> None:
        """Write a word."""
        if address < self._private_end:
            self._words[address >> 3] = int(value)
            return
        self._interleave()
        self._check_write(address, 8)
        self._put(address, int(value).to_bytes(8, "little", signed=True))

    def load_acquire(self, address: int) -> int:
        """Return the word at `address`; :meth:`waited` records the order when a wait for it ends."""
        self._interleave()
        return int.from_bytes(self._see(address, 8), "little", signed=True)

    def store_release(self, address: int, value: int) -> None:
        """Write a word, ordered after all earlier accesses of the rank."""
        self._interleave()
        clock = self._clocks[self.rank].copy()
        self._clocks[self.rank, self.rank] += 1
        self._put(address, int(value).to_bytes(8, "little", signed=True), clock)
        self.made[self.rank].append(("release", address, value))
        self._history.setdefault(address, []).append((value, clock))

    def waited(self, address: int, value: int) -> None:
        """Record the end of a wait until the word at `address` is at least `value`."""
        self._join(next(clock for reached, clock in self._history[address] if reached >= value))

    def fence(self) -> None:
        """Do nothing: only withdrawals need fences, and they are not simulated."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes."""
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
        """Copy bytes of another rank's private memory to `local`."""
        self.copy(local, remote, nbytes)
        return True

    def write_process(self, vectors: int, pid: int, local: int, remote: int, nbytes: int) -> bool:
        """Copy bytes to another rank's private memory."""
        self.copy(remote, local, nbytes)
        return True

    def read_vectors(self, pid: int, local: int, locals_: int, remote: int, remotes: int, flags: int) -> int:
        """Copy pieces of another rank's private memory; return how many bytes, -1 from a process that is `hidden`."""
        if int(pid) in self.hidden:
            return -1
        here, there = (
            [(self.load(words + 16 * piece), self.load(words + 16 * piece + 8)) for piece in range(pieces)]
            for words, pieces in ((local, locals_), (remote, remotes))
        )
        done = 0
        while here and there:
            (target, room), (source, left) = here.pop(0), there.pop(0)
            nbytes = min(room, left)
            self.copy(target, source, nbytes)
            here[:0] = [(target + nbytes, room - nbytes)] * (room > nbytes)
            there[:0] = [(source + nbytes, left - nbytes)] * (left > nbytes)
            done += nbytes
        return done

    def clock_gettime(self, clock: int, time: int) -> int:
        """Write two words to private memory: no time passes here."""
        self.store(time, 0)
        self.store(time + 8, 0)
        return 0

    # The caller's accesses: what a program does with its buffers before and after a call ------------------------------

    def write(self, address: int, values: Array) -> None:
        """Write an array, as the program does before a call."""
        self._interleave()
        self._check_write(address, values.nbytes)
        self._put(address, values.tobytes())

    def read(self, address: int, count: int) -> Array:
        """Return int64 elements, as the program reads them after a call."""
        self._interleave()
        self._check_read(address, 8 * count)
        return np.frombuffer(self._see(address, 8 * count), np.int64)

    # Memory as it is; a subclass may delay stores and change turns ----------------------------------------------------

    def _interleave(self) -> None:
        """Do nothing; called before every access to shared memory, for subclasses that switch ranks."""

    def _put(self, address: int, data: bytes, clock: Array | None = None) -> None:
        self.memory[address : address + len(data)] = np.frombuffer(data, np.uint8)

    def _see(self, address: int, nbytes: int) -> bytes:
        return self.memory[address : address + nbytes].tobytes()

    # Happens-before -------------------------------------------------------------------------------------------------

    def _join(self, clock: Array) -> None:
        np.maximum(self._clocks[self.rank], clock, out=self._clocks[self.rank])

    def _after_writes(self, does: str, address: int, nbytes: int) -> tuple[slice, Array]:
        """Check that earlier writes happened before this access; return the range and this rank's clock."""
        part, me = slice(address, address + nbytes), self._clocks[self.rank]
        unordered = me[self._writer[part]] < self._written[part]
        if np.count_nonzero(unordered):
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
        unordered = self._read[:, part] > me[:, None]  # never in this rank's own row
        if np.count_nonzero(unordered):
            self._report("writes", address, np.logical_or.reduce(unordered), unordered.argmax(axis=0), "read")
        self._writer[part], self._written[part] = self.rank, me[self.rank]

    def _report(self, does: str, address: int, where: Array, others: Array, did: str = "written") -> None:
        first = int(where.argmax())
        raise Race(
            f"rank {self.rank} {does} byte {address + first} that rank {others[first]} has {did}, and nothing orders "
            "the two"
        )
