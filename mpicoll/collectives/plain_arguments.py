"""Arguments of collectives as whole arrays, where their specifications say no more."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.plain_specs import Apart, array_of, as_moved
from mpicoll.kernels.operation_words import COLLECTIVES, REDUCES

_SEND_BLOCKS = frozenset(("scatter", "alltoall", "reduce_scatter_block"))
_RECV_BLOCKS = frozenset(("gather", "allgather", "alltoall"))
"""Collectives in whose sendbuf, or recvbuf, a count is that of one rank's block."""
_TO_ROOT = frozenset(("reduce", "gather"))
_REDUCING = frozenset((*(COLLECTIVES[number] for number in REDUCES), "reduce_scatter_block"))


class PlainArguments(NamedTuple):
    """Arguments as C-contiguous arrays.

    Attributes
    ----------
    sendbuf, recvbuf
        The arrays, or what is none, such as MPI.IN_PLACE.
    place
        The view of the caller's memory that gets the elements of `recvbuf` after the call; None if they are there.
    """

    sendbuf: Any
    recvbuf: Any
    place: np.ndarray | None = None

    def unpack(self) -> None:
        """Copy the elements of the result to their places; to be called after the call."""
        if self.place is not None:
            self.place[...] = self.recvbuf


def plain_arguments(
    collective: str, sendbuf: Any, recvbuf: Any, size: int, at_root: bool = True
) -> PlainArguments | None:
    """Return both arguments with C-contiguous arrays for others and for specifications; None if one has to stay.

    Parameters
    ----------
    at_root
        Whether this rank is the root of a collective that has one. Other ranks may give anything where only the root's
        argument counts.
    """
    send, recv, moved = sendbuf, recvbuf, collective not in _REDUCING
    try:
        if type(sendbuf) is not np.ndarray or type(recvbuf) is not np.ndarray:
            if collective == "reduce_scatter_block" and in_place(sendbuf):
                return None  # recvbuf then has all blocks
            if at_root or collective != "scatter":
                send = array_of(sendbuf, size if collective in _SEND_BLOCKS else 1, sent=True, moved=moved)
            if at_root or collective not in _TO_ROOT:
                recv = array_of(recvbuf, size if collective in _RECV_BLOCKS else 1, moved=moved)
            if send is NotImplemented or recv is NotImplemented:
                return None
        send = _packed(send, moved)
        recv, place = _landing(recv, moved)
    except Exception:  # no memory, no such datatype: the general path raises it, and tells the other ranks
        return None
    return None if send is sendbuf and recv is recvbuf else PlainArguments(send, recv, place)


def _packed(array: Any, moved: bool) -> Any:
    """Return an argument that is only read as a contiguous array; anything but an array or entries as it is."""
    return array.packed() if type(array) is Apart else _in_order(array, moved)


def _landing(array: Any, moved: bool) -> tuple[Any, np.ndarray | None]:
    """Return an argument that is written as a contiguous array, and its places if they are elsewhere."""
    return (array.packed(), array.view) if isinstance(array, Apart) else (_in_order(array, moved), None)


def sent_array(spec: Any, *, moved: bool = True) -> Any:
    """Return an argument that is only read as a contiguous array; what is no array, or cannot be made one, otherwise.

    See :func:`~mpicoll.buffers.plain_specs.array_of`.
    """
    try:
        return _packed(array_of(spec, sent=True, moved=moved), moved)
    except Exception:  # see above
        return NotImplemented


def received_array(spec: Any, *, moved: bool = True) -> tuple[Any, np.ndarray | None]:
    """Return an argument that is written as a contiguous array, and its places if they are elsewhere.

    See :func:`sent_array`.
    """
    try:
        return _landing(array_of(spec, moved=moved), moved)
    except Exception:  # see above
        return NotImplemented, None


def _in_order(array: Any, moved: bool) -> Any:
    """Return an array in Fortran's order as one of the same memory in C's, which is how it goes; others as they are.

    If its elements are only `moved`, those that no kernel knows are bytes.
    """
    if type(array) is not np.ndarray:
        return array
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        array = array.T
    return as_moved(array) if moved and array.flags.c_contiguous else array
