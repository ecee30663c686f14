"""Words for uneven parts: offsets, and the number by which ranks compare their lengths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpicoll.kernels import machine_code, uneven_parts
from mpicoll.kernels.decorators import DISABLED, uncached_kernel

pytestmark = pytest.mark.skipif(DISABLED, reason="addresses are for compiled code")


def distinction(counts: tuple[int, ...], root: int = 0) -> int:
    offsets = np.array([0, *itertools.accumulate(counts)], np.int64)
    return int(uneven_parts.distinction.run(offsets.ctypes.data, len(counts), root))


def test_equal_parts_are_told_apart_by_their_root_only() -> None:
    for root in range(5):
        assert distinction((7,) * 5, root) == distinction((0,) * 5, root) == root


def test_other_lengths_or_another_root_give_another_number() -> None:
    some = [counts for counts in itertools.product(range(6), repeat=4) if len(set(counts)) > 1]
    numbers = [distinction(counts, root) for counts in some for root in range(4)]
    assert all(1 << 30 <= number < 1 << 31 for number in numbers)
    assert len(set(numbers)) >= len(numbers) - 3  # of five thousand hashes of 30 bits hardly two are equal
    assert distinction((1 << 40, 0)) != distinction((0, 1 << 40)) != distinction((1 << 41, 0))


@uncached_kernel
def lay_out(counts: int, size: int, root: int, parts: int) -> int:
    uneven_parts.lay_out_counts(counts, size, root, parts, 88)
    return 0


@pytest.mark.parametrize("counts", [(3,), (2, 0, 3, 1), (0, 0, 5), tuple(range(40))])
def test_counts_are_laid_out_as_offsets(counts: tuple[int, ...]) -> None:
    size, root = len(counts), len(counts) - 1
    told, parts = np.array([*counts, 77], np.int64), np.full(size + 5, -1, np.int64)
    lay_out(told.ctypes.data, size, root, parts.ctypes.data)
    assert parts.tolist() == [root, distinction(counts, root), 0, *itertools.accumulate(counts), 88, -1]


def test_functions_of_several_kernels_are_compiled_once() -> None:
    """Their kernels are short, and refer to them by symbol."""
    from mpicoll.kernels import counted_calls, dispatch, exchange_calls, executor

    assert {"mpicoll.executor.progress", "mpicoll.dispatch.make_call"} <= set(machine_code.linked)
    if machine_code.obstacle():
        return
    for kernel in (dispatch.call, executor.advance, counted_calls.call_counted, exchange_calls.exchange):
        kernel.load()
    called = {dispatch.call.native: "dispatch.make_call", executor.advance: "executor.progress"}
    from mpicoll.kernels import decorators
    from mpicoll.kernels.source_stamps import stamp_of

    for kernel, symbol in called.items():
        text = decorators.signature_text(kernel, kernel.signature)
        entry = machine_code.read(decorators.entry_name(kernel.function), text, stamp_of(kernel.function.__module__))
        assert entry is not None
        assert f"mpicoll.{symbol}" in entry.image.imports
        assert len(entry.image.code) < 20_000
