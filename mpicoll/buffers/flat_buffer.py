"""Flat memory: address, count and type of one argument's elements, and the checks of pairs of arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI


class Buffer:
    """One argument as flat memory.

    Attributes
    ----------
    address, count, dtype
        Where the elements are, how many, and their type in native byte order.
    nbytes
        ``count * dtype.itemsize``.
    owner
        Keeps the memory alive.
    destination
        None, or the caller's array if the elements stand in for it in a contiguous copy; see :meth:`give_back`.
    order
        "C" or "F" for arrays whose memory order matters, "" for flat memory.
    unit
        How many elements stand for one element of the caller's array, or of its datatype.
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
        """Copy the result into the caller's array, if the elements stand in for it."""
        if self.destination is not None:
            self.destination[...] = self.owner

    def take_in(self) -> None:
        """Copy the caller's present data into the stand-in; persistent operations do so at each start."""
        if self.destination is not None:
            self.owner[...] = self.destination

    def reorder(self) -> bool:
        """Let the stand-in lie in memory in the other order; return whether there is one."""
        if self.destination is None:
            return False
        self.owner = np.array(self.destination, dtype=self.owner.dtype, order="F" if self.order == "C" else "C")
        self.address, self.order = self.owner.ctypes.data, order_of(self.owner)
        return True

    def view(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Return the memory as a flat array of `dtype`, which has the elements' item size."""
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
    """Return where contiguous memory begins; much quicker than ``array.ctypes.data``."""
    return MPI.buffer.frombuffer(array if array.flags.c_contiguous else array.T, readonly=True).address


def check_alike(send: Buffer, recv: Buffer) -> None:
    """Refuse a pair of buffers of different type, or of different memory order; no elements are of any type."""
    if send.dtype != recv.dtype and send.count and recv.count:
        raise ValueError(f"sendbuf has elements of {send.dtype}, but recvbuf of {recv.dtype}")
    if send.order and recv.order and send.order != recv.order and not (send.reorder() or recv.reorder()):
        raise TypeError("sendbuf and recvbuf lie in memory in different order (C and Fortran)")


def check_apart(send: Buffer, recv: Buffer) -> None:
    """Refuse buffers that overlap; the very same memory has been taken for IN_PLACE before."""
    if send.destination is not None or recv.destination is not None:
        return  # one of them is a copy
    if send.address < recv.address + recv.nbytes and recv.address < send.address + send.nbytes:
        raise ValueError("sendbuf and recvbuf overlap in memory")
