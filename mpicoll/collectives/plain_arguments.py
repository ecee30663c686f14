"""Arguments of collectives as whole arrays, where their specifications say no more."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.plain_specs import array_of

_SEND_BLOCKS = frozenset(("scatter", "alltoall", "reduce_scatter_block"))
_RECV_BLOCKS = frozenset(("gather", "allgather", "alltoall"))
"""Collectives in whose sendbuf, or recvbuf, a count is that of one rank's block."""


def plain_arguments(collective: str, sendbuf: Any, recvbuf: Any, size: int) -> tuple[Any, Any] | None:
    """Return both arguments with arrays for specifications; None if one has to stay, or if there is none."""
    if type(sendbuf) is np.ndarray and type(recvbuf) is np.ndarray:
        return None
    if collective == "reduce_scatter_block" and in_place(sendbuf):
        return None  # recvbuf then has all blocks
    send = array_of(sendbuf, size if collective in _SEND_BLOCKS else 1, sent=True)
    if send is NotImplemented:
        return None
    recv = array_of(recvbuf, size if collective in _RECV_BLOCKS else 1)
    if recv is NotImplemented or (send is sendbuf and recv is recvbuf):
        return None
    return send, recv
