"""Atomic loads and stores, fences and copies by address, for memory that processes share.

Addresses are int64 and never part of compiled code, so that kernels which use these can be cached on disk. `load` and
`store` are ordinary accesses; `load_acquire` and `store_release` order them: what a process wrote before its
`store_release` is there for every process whose `load_acquire` sees the stored value. On x86-64 both are plain moves
that the compiler may not move others across; on AArch64 they are `ldar` and `stlr`. A word that several processes use
must be 8-byte aligned.

`self_test` says whether all of this works here; who uses it must be able to do without.
"""

import platform
import sys
import threading

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import helper, kernel

_WORD = ir.IntType(64)
_BYTE = ir.IntType(8)
_VOID = ir.VoidType()
_PAUSES = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "AMD64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.isb", (15,)),
    "arm64": ("llvm.aarch64.isb", (15,)),
}
"""Instructions that let the other thread of a core go on; `isb` waits longer than `yield`, which does nothing."""


def _word_at(builder, address):
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def load(typingctx, address):
    """Return the word at `address`."""

    def generate(context, builder, signature, arguments):
        return builder.load(_word_at(builder, arguments[0]))

    return types.int64(types.int64), generate


@intrinsic
def load_int32(typingctx, address):
    """Return the 32-bit integer at `address`."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.sext(builder.load(pointer), _WORD)

    return types.int64(types.int64), generate


@intrinsic
def store(typingctx, address, value):
    """Write a word at `address`."""

    def generate(context, builder, signature, arguments):
        builder.store(arguments[1], _word_at(builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_acquire(typingctx, address):
    """Return the word at `address`; nothing after this happens before it."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(_word_at(builder, arguments[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typingctx, address, value):
    """Write a word at `address`; nothing before this happens after it."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], _word_at(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def fetch_add(typingctx, address, value):
    """Add to the word at `address` in one step; return what it was."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", _word_at(builder, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def exchange(typingctx, address, value):
    """Write a word at `address` and return what it was, in one step."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("xchg", _word_at(builder, arguments[0]), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fence(typingctx):
    """Order what is before it before what is after it, stores before loads too."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pause(typingctx):
    """Tell the processor that this is a waiting loop."""

    def generate(context, builder, signature, arguments):
        name, numbers = _PAUSES.get(platform.machine(), ("", ()))
        if name:
            operands = [ir.Constant(ir.IntType(32), number) for number in numbers]
            kind = ir.FunctionType(_VOID, [operand.type for operand in operands])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def copy(typingctx, target, source, nbytes):
    """Copy `nbytes` bytes between addresses; the two ranges do not overlap."""

    def generate(context, builder, signature, arguments):
        target, source = (builder.inttoptr(address, _BYTE.as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_OPERAND = types.Array(types.uint8, 1, "C")


@intrinsic
def call_reducer(typingctx, function, out, a, b, count, itemsize):
    """Call a reducer by the address that `reduce.native_address` returns, on memory given by address.

    Return 1 if it raised an exception, which is lost, else 0.
    """

    def generate(context, builder, signature, arguments):
        function, *addresses, count, itemsize = arguments
        operands = []
        for address in addresses:
            array = context.make_array(_OPERAND)(context, builder)
            context.populate_array(
                array,
                data=builder.inttoptr(address, array.data.type),
                shape=cgutils.pack_array(builder, [count]),
                strides=cgutils.pack_array(builder, [itemsize]),
                itemsize=itemsize,
                meminfo=None,
            )
            operands.append(array._getvalue())
        kinds = [_OPERAND] * 3
        pointer = context.call_conv.get_function_type(types.none, kinds).as_pointer()
        target = builder.inttoptr(function, pointer)
        status, _ = context.call_conv.call_function(builder, target, types.none, kinds, operands)
        return builder.zext(builder.not_(status.is_ok), _WORD)

    return types.int64(*[types.int64] * 6), generate


yield_core = types.ExternalFunction("sched_yield", types.int32())
"""Let another process have the core."""
release_interpreter = types.ExternalFunction("PyEval_SaveThread", types.int64())
"""Let other threads of the interpreter run; return what `take_interpreter` wants."""
take_interpreter = types.ExternalFunction("PyEval_RestoreThread", types.void(types.int64))
"""Wait until this thread may use the interpreter again."""

_TRANSFER = types.int64(types.int32, types.int64, types.int64, types.int64, types.int64, types.int64)
if sys.platform.startswith("linux"):
    _read_memory = types.ExternalFunction("process_vm_readv", _TRANSFER)
    _write_memory = types.ExternalFunction("process_vm_writev", _TRANSFER)
else:

    @helper
    def _read_memory(pid, local, locals_, remote, remotes, flags):
        return -1

    _write_memory = _read_memory


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
        moved = _read_memory(np.int32(pid), vectors, 1, vectors + 16, 1, 0)
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
        moved = _write_memory(np.int32(pid), vectors, 1, vectors + 16, 1, 0)
        if moved <= 0:
            return False
        done += moved
    return True


@kernel
def try_transfers(pid, theirs, mine, expected):
    """Write the word at `theirs` in process `pid`, plus one, to the next word there; return whether that worked.

    Nothing is written unless the word is `expected`: in another PID namespace the number may be that of a stranger.
    `mine` is room for five words.
    """
    if not read_process(mine + 8, pid, mine, theirs, 8) or load(mine) != expected:
        return False
    store(mine, expected + 1)
    return write_process(mine + 8, pid, mine, theirs + 8, 8)


@kernel
def fetch(vectors, pid, local, remote, nbytes):
    """Copy memory of another process; see `read_process`."""
    return read_process(vectors, pid, local, remote, nbytes)


_TURNS = 50


@kernel
def _take_turns(words, first):
    """Be one of two threads that answer each other; return whether this one saw what the other had written.

    `words` are four zeros: whose turn it is, what was written before the turn was given away, a sum, a stop.
    """
    turn = words.ctypes.data
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


@kernel
def _single(words):
    """Return whether each intrinsic does what its name says, on eight zeros."""
    base = words.ctypes.data
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
    if config.DISABLE_JIT:
        return "the JIT is disabled"
    if not _single(np.zeros(8, np.int64)):
        return "an atomic operation gave a wrong result"
    words, seen = np.zeros(4, np.int64), []
    other = threading.Thread(target=lambda: seen.append(_take_turns(words, 0)), daemon=True)
    other.start()
    good = _take_turns(words, 1)
    other.join(timeout=10)
    words[3] = 1
    if not (good and seen == [True]) or words[2] != sum(range(2 * _TURNS)):
        return "two threads did not see each other's writes in order"
    return ""
