"""Blocks of Alltoallw that compiled code copies, and those that have to be packed first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpicoll.buffers.block_pairs import ranges_meet
from mpicoll.buffers.flat_buffer import address_of
from mpicoll.buffers.typed_blocks import Layouts, TypedBlocks
from mpicoll.kernels.decorators import DISABLED
from mpicoll.kernels.strided_copy import ADDRESS, CURSORS, LAYOUT_WORDS, NBYTES, RUN, copy_block
from mpicoll.shared_memory import numpy_allocator


def copy_own(send: TypedBlocks, recv: TypedBlocks) -> None:
    """Copy the block of the only rank."""
    source, target = send.description.layouts, recv.description.layouts
    nbytes = send.description.nbytes[0]
    if send is recv or not nbytes:
        return
    if DISABLED or source.irregular or target.irregular or ranges_meet(send, recv):
        packed = np.empty(nbytes, np.uint8)
        send.entries(0, packed).pack()
        recv.entries(0, packed).unpack()
        return
    cursors = np.empty(CURSORS, np.int64)
    copy_block.run(target.address, recv.address, source.address, send.address, cursors.ctypes.data)


def layouts_of(blocks: TypedBlocks) -> tuple[Layouts, dict[int, np.ndarray]]:
    """Return layouts for all blocks, and memory for those that need to be packed, which the other ranks see."""
    layouts = blocks.description.layouts
    if not layouts.irregular:
        return layouts, {}
    rows, packed = layouts.rows.copy(), {}
    for rank in layouts.irregular:
        nbytes = int(rows[rank, NBYTES])
        packed[rank] = numpy_allocator.empty(nbytes, np.uint8)
        rows[rank, ADDRESS], rows[rank, RUN] = packed[rank].ctypes.data - blocks.address, nbytes
    return layouts._replace(rows=rows, address=rows.ctypes.data), packed


def rows_of(*sides: Sequence[np.ndarray]) -> np.ndarray:
    """Return a layout for each contiguous array of some sequences, relative to address 0."""
    rows = np.zeros((len(sides), len(sides[0]), LAYOUT_WORDS), np.int64)
    for side, arrays in zip(rows, sides, strict=True):
        side[:, ADDRESS] = [address_of(each) if each.size else 0 for each in arrays]
        side[:, NBYTES] = [each.nbytes for each in arrays]
        side[:, RUN] = np.maximum(side[:, NBYTES], 1)
    return rows


def parts_of(memory: np.ndarray, counts: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the ranks that have a part of `memory`, and the parts."""
    begin = 0
    for rank, count in enumerate(counts):
        if count:
            yield rank, memory[begin : begin + count]
        begin += count
