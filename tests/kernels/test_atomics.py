"""Atomic operations: here, and as machine code for the other architecture that matters."""

from __future__ import annotations

import os
import re

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import config

from mpicoll.kernels import atomics
from mpicoll.kernels.decorators import kernel, uncached_kernel

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="there is no machine code without a JIT")


@kernel
def exercise(words):
    base = words.ctypes.data
    seen = atomics.load_acquire(base)
    atomics.store_release(base + 8, seen)
    before = atomics.fetch_add(base + 16, 3)
    atomics.exchange(base + 24, before)
    atomics.fence()
    atomics.pause()
    return seen


def test_self_test_passes() -> None:
    assert atomics.self_test() == ""


def test_self_test_notices_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomics._single, "run", lambda words: False)
    assert "wrong result" in atomics.self_test()


def test_each_operation() -> None:
    words = np.array([7, 0, 10, 5], np.int64)
    assert exercise(words) == 7
    assert words.tolist() == [7, 7, 13, 10]


@kernel
def copy_bytes(target, source, nbytes):
    atomics.copy(target, source, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 1024, 2047, 2048, 2049, 3071, 3072, 5000, 70_000])
@pytest.mark.parametrize("ahead", [0, 1, 8, 16, 31, 32, 100, 4080])
def test_copies_are_complete_and_leave_the_rest(nbytes: int, ahead: int) -> None:
    """The distance modulo 4096 decides how long ranges are copied."""
    room = np.random.default_rng(nbytes).integers(1, 255, 1 << 18, np.uint8)
    begin = -room.ctypes.data % 4096
    source, target = begin + 48, begin + (1 << 17) + 48 + ahead
    expected = room.copy()
    expected[target : target + nbytes] = room[source : source + nbytes]
    copy_bytes(room.ctypes.data + target, room.ctypes.data + source, nbytes)
    assert (room == expected).all()


def test_processes_that_do_not_exist_cannot_be_read() -> None:
    room = np.zeros(5, np.int64)
    assert not atomics.try_transfers(2**22 + 12345, 4096, room.ctypes.data, 0)


def test_a_stranger_is_not_written_to() -> None:
    """In another PID namespace the number of a process is that of another one."""
    room, theirs = np.zeros(5, np.int64), np.array([77, 0], np.int64)
    arguments = os.getpid(), theirs.ctypes.data, room.ctypes.data
    if not atomics.try_transfers(*arguments, 77):
        pytest.skip("processes may not read each other here")
    theirs[1] = 0
    assert not atomics.try_transfers(*arguments, 78)
    assert theirs.tolist() == [77, 0]


def test_the_compiler_is_told_the_order() -> None:
    fresh = uncached_kernel(exercise.function)  # Numba does not show the code of what comes from the cache
    fresh(np.zeros(4, np.int64))
    (code,) = fresh.inspect_llvm().values()
    assert re.search(r"load atomic i64, .* acquire, align 8", code)
    assert re.search(r"store atomic i64 .* release, align 8", code)
    assert len(re.findall(r"atomicrmw (?:add|xchg) .* acq_rel", code)) == 2
    assert re.search(r"fence seq_cst", code)


def test_that_order_is_an_instruction_on_aarch64() -> None:
    """On x86-64 every load and store is ordered enough; on AArch64 only these are."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    from mpicoll.kernels import intrinsics

    triple = "aarch64-unknown-linux-gnu"
    module = llvm.parse_assembly(f"""
        target triple = "{triple}"
        define i64 @f(i64* %p, i64* %q) {{
            %a = load atomic i64, i64* %p acquire, align 8
            store atomic i64 %a, i64* %q release, align 8
            call void @llvm.aarch64.isb(i32 15)
            %b = atomicrmw add i64* %p, i64 %a acq_rel
            ret i64 %b
        }}
        declare void @llvm.aarch64.isb(i32)
    """)
    assembly = llvm.Target.from_triple(triple).create_target_machine().emit_assembly(module)
    for wanted in (r"\blda[p]?r\b", r"\bstlr\b", r"\bisb\b", r"\bldaxr\b|\bldaddal\b"):
        assert re.search(wanted, assembly), wanted
    assert intrinsics._PAUSES["aarch64"][0] == "llvm.aarch64.isb"


def test_reducers_are_called_by_address() -> None:
    from mpicoll.kernels import reduce

    @kernel
    def apply(function, out, a, b, count, itemsize):
        return atomics.call_reducer(function, out, a, b, count, itemsize)

    for op, dtype in (("SUM", np.float32), ("MAX", np.int8), ("PROD", np.complex128), ("SUM", np.float16)):
        function = reduce.reducer(op, np.dtype(dtype))
        assert function is not None
        address = reduce.native_address(function, np.dtype(dtype))
        a, b = np.arange(1, 38).astype(dtype), np.arange(2, 39).astype(dtype)
        out, wanted = np.zeros_like(a), np.zeros_like(a)
        carrier = reduce.carrier(np.dtype(dtype))
        function(wanted.view(carrier), a.view(carrier), b.view(carrier))
        assert apply(address, out.ctypes.data, a.ctypes.data, b.ctypes.data, a.size, a.itemsize) == 0
        assert (out == wanted).all()


def test_a_reducer_that_raises_says_so() -> None:
    from mpicoll.kernels import reduce

    def picky(a: float, b: float) -> float:
        if a > 20:
            raise ValueError("too much")
        return a + b

    @kernel
    def apply(function, out, a, b, count, itemsize):
        return atomics.call_reducer(function, out, a, b, count, itemsize)

    dtype = np.dtype(np.float64)
    function = reduce.user_reducer(picky, dtype)
    a, out = np.arange(30.0), np.zeros(30)
    for count, raised in ((20, 0), (30, 1)):
        address = reduce.native_address(function, dtype)
        assert apply(address, out.ctypes.data, a.ctypes.data, a.ctypes.data, count, 8) == raised
