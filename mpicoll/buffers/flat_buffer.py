"""Flat buffers: address, count and type of one argument's elements, and checks of pairs of arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI


class Buffer:
    """One buffer argument as a flat run of elements.

    Attributes
    ----------
    address, count, dtype
        Address of the first element, number of elements, and their type in native byte order.
    nbytes
        ``count * dtype.itemsize``.
    owner
        Object that keeps the memory alive.
    destination
        The caller's array, if the elements are a contiguous copy of it, else None; see :meth:`give_back`.
    order
        "C" or "F" for arrays whose memory order matters, "" for flat memory.
    unit
        Number of elements for each element of the caller's array, or of its datatype.
    is_recast
        True if the caller's array may have elements of another type than `dtype`.
    """

    __slots__ = ("address", "count", "destination", "dtype", "is_recast", "nbytes", "order", "owner", "unit")

    def __init__(
        self,
        owner: Any,
        address: int,
        count: int,
        dtype: np.dtype[Any],
        *,
        destination: np.ndarray | None = None,
        order: str = "",
        unit: int = 1,
        is_recast: bool = False,
    ) -> None:
        self.owner = owner
        self.address = address
        self.count = count
        self.dtype = dtype
        self.nbytes = count * dtype.itemsize
        self.destination = destination
        self.order = order
        self.unit = unit
        self.is_recast = is_recast

    def give_back(self) -> None:
        """Copy the result into the caller's array, if the elements are a copy of it."""
        if self.destination is not None:
            self.destination[...] = self.owner

    def take_in(self) -> None:
        """Copy the caller's present data into the copy; persistent operations do so at each start."""
        if self.destination is not None:
            self.owner[...] = self.destination

    def reorder(self) -> None:
        """Make the copy anew in the other memory order; what is no copy stays as it is."""
        if self.destination is None:
            return
        self.owner = np.array(self.destination, dtype=self.owner.dtype, order="F" if self.order == "C" else "C")
        self.address, self.order = self.owner.ctypes.data, order_of(self.owner)

    def view(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Return the memory as an array of shape (count,) and of `dtype`, which has the elements' item size."""
        return view_at(self.address, self.count, dtype)


def view_at(address: int, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `count` elements at `address` as an array that does not own them."""
    if count == 0:
        return np.empty(0, dtype)
    memory: Any = MPI.buffer.fromaddress(address, count * dtype.itemsize)
    return np.frombuffer(memory, dtype)


def order_of(array: np.ndarray) -> str:
    """Return "C" or "F" for a contiguous array, "" if both are the same or if it is not contiguous."""
    flags = array.flags
    return "" if flags.c_contiguous == flags.f_contiguous else "C" if flags.c_contiguous else "F"


def address_of(array: np.ndarray) -> int:
    """Return the address of a contiguous array; much faster than ``array.ctypes.data``."""
    return MPI.buffer.frombuffer(array if array.flags.c_contiguous else array.T, readonly=True).address


def check_alike(send: Buffer, recv: Buffer) -> None:
    """Raise ValueError if two buffers differ in type; zero elements match any type.

    A copy that is received into takes the memory order of what is sent. Whatever else is C-ordered and meets something
    Fortran-ordered has its elements at other indices there, as in mpi4py: arrays go as they lie in memory. What a rank
    sends must not depend on how its recvbuf lies there, which other ranks do not know.
    """
    if send.dtype != recv.dtype and send.count and recv.count:
        raise ValueError(f"sendbuf has elements of {send.dtype}, but recvbuf of {recv.dtype}")
    if send.order and recv.order and send.order != recv.order:
        recv.reorder()


def is_part(part: Buffer, whole: Buffer, begin: int, end: int) -> bool:
    """Return True if a buffer is the elements from `begin` to `end` of another one, and neither is a copy.

    A rank that gives its own part of the result sends from where the result has to be, as with IN_PLACE. Some MPI
    libraries let programs do so.
    """
    is_copied = part.destination is not None or whole.destination is not None
    starts_there = part.address == whole.address + begin * whole.dtype.itemsize
    return not is_copied and starts_there and 0 < part.count == end - begin and part.dtype == whole.dtype


def check_apart(send: Buffer, recv: Buffer) -> None:
    """Raise ValueError if two buffers overlap; those that count as IN_PLACE do not come here."""
    if send.destination is not None or recv.destination is not None or not (send.nbytes and recv.nbytes):
        return  # one of them is a copy, or has no bytes
    if send.address < recv.address + recv.nbytes and recv.address < send.address + send.nbytes:
        raise ValueError("sendbuf and recvbuf overlap in memory")
