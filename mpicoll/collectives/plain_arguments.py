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
    """Return both arguments with C-contiguous arrays for others and for specifications; None if one has to stay."""
    if type(sendbuf) is np.ndarray and type(recvbuf) is np.ndarray:
        return _changed(sendbuf, recvbuf, sendbuf, recvbuf)
    if collective == "reduce_scatter_block" and in_place(sendbuf):
        return None  # recvbuf then has all blocks
    send = array_of(sendbuf, size if collective in _SEND_BLOCKS else 1, sent=True)
    if send is NotImplemented:
        return None
    recv = array_of(recvbuf, size if collective in _RECV_BLOCKS else 1)
    if recv is NotImplemented:
        return None
    return _changed(sendbuf, recvbuf, send, recv)


def _changed(sendbuf: Any, recvbuf: Any, send: Any, recv: Any) -> tuple[Any, Any] | None:
    """Return what both arguments are as arrays; None if that is what they are themselves."""
    send, recv = _in_order(send), _in_order(recv)
    return None if send is sendbuf and recv is recvbuf else (send, recv)


def _in_order(array: Any) -> Any:
    """Return an array in Fortran's order as one of the same memory in C's, which is how it goes; others as they are."""
    if type(array) is np.ndarray and array.flags.f_contiguous and not array.flags.c_contiguous:
        return array.T
    return array
