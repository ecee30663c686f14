"""The allocator of shared arrays: blocks never overlap, keep their contents, and come back."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import config

from mpicoll.kernels import allocator

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="there is no machine code without a JIT")
SEGMENT_NBYTES = 1 << 22
WORD = ctypes.c_ssize_t


class Heap:
    """A heap in ordinary memory, called as NumPy calls it."""

    def __init__(self, threshold: int = 0) -> None:
        self.memory = np.zeros(SEGMENT_NBYTES, np.uint8)
        self.words = np.zeros(allocator.HEAP_WORDS, np.int64)
        base = self.memory.ctypes.data + -self.memory.ctypes.data % 4096
        self.words[[allocator.BASE, allocator.NEXT]] = base
        self.words[allocator.END] = self.memory.ctypes.data + SEGMENT_NBYTES
        self.words[allocator.THRESHOLD], self.words[allocator.OPEN], self.words[allocator.KEEP] = (
            threshold,
            1,
            SEGMENT_NBYTES,
        )
        self.at = self.words.ctypes.data
        self.allocate = ctypes.CFUNCTYPE(WORD, WORD, WORD)(allocator.allocate.address)
        self.zeros = ctypes.CFUNCTYPE(WORD, WORD, WORD, WORD)(allocator.allocate_zeros.address)
        self.resize = ctypes.CFUNCTYPE(WORD, WORD, WORD, WORD)(allocator.resize.address)
        self.release = ctypes.CFUNCTYPE(None, WORD, WORD, WORD)(allocator.release.address)

    def has(self, address: int) -> bool:
        return bool(self.words[allocator.BASE] <= address < self.words[allocator.END])

    @property
    def used(self) -> int:
        return int(self.words[allocator.USED])


@pytest.fixture
def space() -> Iterator[Heap]:
    made = Heap()
    yield made
    assert made.used == 0, "a block was not given back"


def fill(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, nbytes: int, value: int) -> bool:
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "zeros", "resize", "release"]), st.integers(0, 300_000), st.integers(0, 50)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_blocks_keep_what_is_theirs(actions: list[tuple[str, int, int]]) -> None:
    space, blocks = Heap(), {}
    for turn, (action, nbytes, which) in enumerate(actions):
        value = turn % 251 + 1
        if action == "allocate":
            address = space.allocate(space.at, nbytes)
        elif action == "zeros":
            address = space.zeros(space.at, nbytes, 1)
            assert holds(address, nbytes, 0)
        elif not blocks:
            continue
        else:
            address = list(blocks)[which % len(blocks)]
            old, kept = blocks.pop(address)
            if action == "release":
                assert holds(address, old, kept)
                space.release(space.at, address, old)
                continue
            address = space.resize(space.at, address, nbytes)
            assert holds(address, min(old, nbytes), kept)
        assert address
        assert address not in blocks
        fill(address, nbytes, value)
        blocks[address] = nbytes, value
        assert all(holds(where, size, content) for where, (size, content) in blocks.items())
    for address, (nbytes, _) in blocks.items():
        space.release(space.at, address, nbytes)
    assert space.used == 0


def test_a_freed_block_is_used_again(space: Heap) -> None:
    first = space.allocate(space.at, 50_000)
    space.release(space.at, first, 50_000)
    again = space.allocate(space.at, 50_100)
    assert again == first
    space.release(space.at, again, 50_100)


def test_what_does_not_fit_is_ordinary_memory(space: Heap) -> None:
    large = space.allocate(space.at, 2 * SEGMENT_NBYTES)
    assert large
    assert not space.has(large)
    space.release(space.at, large, 2 * SEGMENT_NBYTES)


def test_short_blocks_are_ordinary_memory() -> None:
    space = Heap(threshold=1000)
    short, long = space.allocate(space.at, 999), space.allocate(space.at, 1000)
    assert (space.has(short), space.has(long)) == (False, True)
    grown = space.resize(space.at, short, 5000)
    assert not space.has(grown)
    for address in (grown, long):
        space.release(space.at, address, 1000)
    assert space.used == 0


def test_blocks_are_aligned(space: Heap) -> None:
    blocks = [space.allocate(space.at, nbytes) for nbytes in (1, 100, 5000, 100_000)]
    assert all(block % 64 == 0 for block in blocks)
    for block in blocks:
        space.release(space.at, block, 0)


def test_a_closed_heap_neither_gives_nor_takes(space: Heap) -> None:
    """As after a fork, in the child."""
    block = space.allocate(space.at, 5000)
    used = space.used
    space.words[allocator.OPEN] = 0
    other = space.allocate(space.at, 5000)
    assert not space.has(other)
    space.release(space.at, other, 5000)
    space.release(space.at, block, 5000)
    assert space.used == used
    space.words[allocator.OPEN] = 1
    space.release(space.at, block, 5000)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("begin", "nbytes"), [(64, 20_000), (4096, 8192), (100, 50), (4000, 200), (0, 0)])
def test_clearing_sets_these_bytes_and_no_others_to_zero(shared: bool, begin: int, nbytes: int) -> None:
    """In shared memory pages are given back; in memory of other kinds the system refuses, and bytes are written."""
    if shared:
        memory = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)
    else:
        memory = np.empty(1 << 16, np.uint8)
    memory[:] = 7
    allocator.clear(memory.ctypes.data + begin, nbytes)
    assert not memory[begin : begin + nbytes].any()
    assert (memory[:begin] == 7).all()
    assert (memory[begin + nbytes :] == 7).all()
