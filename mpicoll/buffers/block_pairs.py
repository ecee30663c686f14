"""Two arguments of an exchange of blocks: the same memory, overlaps, the type of their elements."""

from __future__ import annotations

import numpy as np

from mpicoll.buffers.typed_blocks import TypedBlocks
from mpicoll.kernels import strided_copy as words


def is_same_memory(send: TypedBlocks, recv: TypedBlocks) -> bool:
    """Return whether two arguments are the same blocks of the same memory, which stands for IN_PLACE."""
    if send.address != recv.address:
        return False
    return send.description is recv.description or np.array_equal(
        send.description.layouts.rows, recv.description.layouts.rows
    )


def ranges_meet(send: TypedBlocks, recv: TypedBlocks) -> bool:
    """Return whether blocks of the two arguments may lie between each other."""
    sent, got = send.description.layouts, recv.description.layouts
    first, behind = (
        max(send.address + sent.low, recv.address + got.low),
        min(send.address + sent.high, recv.address + got.high),
    )
    return first < behind


def have_bytes_in_common(send: TypedBlocks, recv: TypedBlocks) -> bool:
    """Return whether contiguous blocks of the two arguments overlap."""
    ends = []
    for blocks in (send, recv):
        rows = blocks.description.layouts.rows
        begins = blocks.address + rows[:, words.ADDRESS]
        ends.append([(int(begin), int(begin + n)) for begin, n in zip(begins, rows[:, words.NBYTES], strict=True) if n])
    return any(begin < last and first < end for begin, end in ends[0] for first, last in ends[1])


def common_type(send: TypedBlocks, recv: TypedBlocks) -> np.dtype:
    """Return the type of all elements.

    Raises
    ------
    ValueError
        If there are two, or if the buffers overlap.
    """
    sent, got = sum(send.description.nbytes), sum(recv.description.nbytes)
    if send is not recv and sent and got:
        if send.array.dtype != recv.array.dtype:
            raise ValueError(f"sendbuf has elements of {send.array.dtype}, but recvbuf of {recv.array.dtype}")
        if ranges_meet(send, recv) and have_bytes_in_common(send, recv):
            raise ValueError("sendbuf and recvbuf overlap in memory")
    return (recv if got else send).array.dtype
