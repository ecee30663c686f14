"""Atomic loads and stores, fences and copies by address, for memory that processes share.

Addresses are int64 and never part of compiled code, so that kernels which use these can be cached on disk. `load` and
`store` are ordinary accesses; `load_acquire` and `store_release` order them: what a process wrote before its
`store_release` is there for every process whose `load_acquire` sees the stored value. On x86-64 both are plain moves
that the compiler may not move others across; on AArch64 they are `ldar` and `stlr`. A word that several processes use
must be 8-byte aligned.

`self_test` says whether all of this works here; who uses it must be able to do without.
"""

import sys
import threading

import numpy as np

from .decorators import DISABLED, helper, kernel_for, primitive


@primitive
def load(address):
    """Return the word at `address`."""


@primitive
def load_int32(address):
    """Return the 32-bit integer at `address`."""


@primitive
def load_float64(address):
    """Return the float64 at `address`."""


@primitive
def store(address, value):
    """Write a word at `address`."""


@primitive
def store_float64(address, value):
    """Write a float64 at `address`."""


@primitive
def load_acquire(address):
    """Return the word at `address`; nothing after this happens before it."""


@primitive
def store_release(address, value):
    """Write a word at `address`; nothing before this happens after it."""


@primitive
def fetch_add(address, value):
    """Add to the word at `address` in one step; return what it was."""


@primitive
def exchange(address, value):
    """Write a word at `address` and return what it was, in one step."""


@primitive
def fence():
    """Order what is before it before what is after it, stores before loads too."""


@primitive
def pause():
    """Tell the processor that this is a waiting loop."""


@primitive
def copy(target, source, nbytes):
    """Copy `nbytes` bytes between addresses; the two ranges do not overlap. About as fast wherever they begin."""


@primitive
def call_reducer(function, out, a, b, count, itemsize):
    """Call a reducer by the address that `reduce.native_address` returns, on memory given by address.

    Return 1 if it raised an exception, which is lost, else 0.
    """


@primitive
def call_row(function, job, what):
    """Execute a row of a plan by a `native` function, given by its address; return its status."""


@primitive
def yield_core():
    """Let another process have the core."""


@primitive
def sleep(microseconds):
    """Sleep for a while."""


@primitive
def system_call(number, a, b, c, d, e, f):
    """Make a system call, which is known by its number, with up to six arguments."""


@primitive
def clock_gettime(clock, time):
    """Write the seconds and the nanoseconds of a clock of the system to two words."""


@primitive
def release_interpreter():
    """Let other threads of the interpreter run; return what `take_interpreter` wants."""


@primitive
def take_interpreter(state):
    """Wait until this thread may use the interpreter again."""


if sys.platform.startswith("linux"):

    @primitive
    def read_vectors(pid, local, locals_, remote, remotes, flags):
        """Call process_vm_readv."""

    @primitive
    def write_vectors(pid, local, locals_, remote, remotes, flags):
        """Call process_vm_writev."""

else:

    @helper
    def read_vectors(pid, local, locals_, remote, remotes, flags):
        """Fail."""
        return -1

    write_vectors = read_vectors


@helper
def _describe(vectors, local, remote, nbytes):
    store(vectors, local)
    store(vectors + 8, nbytes)
    store(vectors + 16, remote)
    store(vectors + 24, nbytes)


@helper
def read_process(vectors, pid, local, remote, nbytes):
    """Copy memory of process `pid` at `remote` to `local`; `vectors` is room for four words. Return whether it worked.

    Linux lets processes of one user do so unless the administrator forbids it; elsewhere it never works.
    """
    done = 0
    while done < nbytes:
        _describe(vectors, local + done, remote + done, nbytes - done)
        moved = read_vectors(np.int32(pid), vectors, 1, vectors + 16, 1, 0)
        if moved <= 0:
            return False
        done += moved
    return True


@helper
def write_process(vectors, pid, local, remote, nbytes):
    """Copy memory at `local` to `remote` in process `pid`; see `read_process`."""
    done = 0
    while done < nbytes:
        _describe(vectors, local + done, remote + done, nbytes - done)
        moved = write_vectors(np.int32(pid), vectors, 1, vectors + 16, 1, 0)
        if moved <= 0:
            return False
        done += moved
    return True


@kernel_for("int64", "int64", "int64", "int64")
def try_transfers(pid, theirs, mine, expected):
    """Write the word at `theirs` in process `pid`, plus one, to the next word there; return whether that worked.

    Nothing is written unless the word is `expected`: in another PID namespace the number may be that of a stranger.
    `mine` is room for five words.
    """
    if not read_process(mine + 8, pid, mine, theirs, 8) or load(mine) != expected:
        return False
    store(mine, expected + 1)
    return write_process(mine + 8, pid, mine, theirs + 8, 8)


_TURNS = 50


@kernel_for("int64", "int64")
def _take_turns(words, first):
    """Be one of two threads that answer each other; return whether this one saw what the other had written.

    `words` is the address of four zeros: whose turn it is, what was written before the turn was given away, a sum, and
    a stop.
    """
    turn = words
    text, total, stop = turn + 8, turn + 16, turn + 24
    good = True
    for number in range(1 - first, 2 * _TURNS, 2):
        while load_acquire(turn) < number:
            if load_acquire(stop):
                return False
            pause()
            yield_core()
        good &= load(text) == number
        store(text, number + 1)
        fetch_add(total, number)
        store_release(turn, number + 1)
    return good


@kernel_for("int64")
def _single(words):
    """Return whether each intrinsic does what its name says; `words` is the address of eight zeros."""
    base = words
    store(base, -7)
    store_release(base + 8, load(base) - 1)
    copy(base + 16, base, 16)
    good = load_acquire(base + 24) == -8 and load_int32(base + 16) == -7
    good &= fetch_add(base, 9) == -7 and load(base) == 2
    good &= exchange(base, 5) == 2 and load_acquire(base) == 5
    fence()
    pause()
    yield_core()
    return good


def self_test() -> str:
    """Return what does not work here, or "". Takes a millisecond once the kernels are cached."""
    if DISABLED:
        return "the JIT is disabled"
    words = np.zeros(8, np.int64)
    if not _single.run(words.ctypes.data):
        return "an atomic operation gave a wrong result"
    words, seen = np.zeros(4, np.int64), []
    other = threading.Thread(target=lambda: seen.append(_take_turns.run(words.ctypes.data, 0)), daemon=True)
    other.start()
    good = _take_turns.run(words.ctypes.data, 1)
    other.join(timeout=10)
    words[3] = 1
    if not (good and seen == [True]) or words[2] != sum(range(2 * _TURNS)):
        return "two threads did not see each other's writes in order"
    return ""
