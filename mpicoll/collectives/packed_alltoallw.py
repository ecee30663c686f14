"""Alltoallw of blocks that are packed, and travel as bytes by Alltoallv."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.typed_blocks import TypedBlocks
from mpicoll.collectives.block_layouts import parts_of
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.execute import run
from mpicoll.messages.call_agreement import refuse


def by_messages(scope: CallContext, send: TypedBlocks, recv: TypedBlocks, algorithm: str | None) -> None:
    """Pack blocks, send them as bytes by Alltoallv, and unpack them."""
    counts, expected = list(send.description.nbytes), list(recv.description.nbytes)
    try:
        out, into = np.empty(sum(counts), np.uint8), np.empty(sum(expected), np.uint8)
        for rank, memory in parts_of(out, counts):
            send.entries(rank, memory).pack()
    except Exception as error:
        refuse(scope.channel, "alltoallw", error, scope.timeout)
    run(scope, "alltoallv", [out, counts], [into, expected], MPI.SUM, 0, algorithm)
    for rank, memory in parts_of(into, expected):
        recv.entries(rank, memory).unpack()
