"""Memory of CPU tensors as NumPy arrays, without a copy where a tensor is contiguous."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from mpicoll.shared_memory import numpy_allocator

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
MOVED_ONLY = {getattr(torch, name) for name in _FLOAT8 if hasattr(torch, name)}
"""Element types that NumPy does not have, and whose tensors can only be moved."""
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    **{getattr(torch, name): np.dtype(name) for name in (
        "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )},
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    **{dtype: np.dtype(np.uint8) for dtype in MOVED_ONLY},
}  # fmt: skip
"""Elements that NumPy takes those of a tensor for."""


def empty(*size: Any, dtype: torch.dtype | None = None, group: Any = None) -> torch.Tensor:
    """Uninitialised tensor in this process' memory segment, which the ranks of a node share; local.

    Collectives among the ranks of a node read and write such tensors, and views of them, without a copy. Other ranks
    access the memory in collectives only. It is freed when the last tensor that lies in it is gone, on each rank by
    itself. Where there are no memory segments, and where the segment is full, the tensor is an ordinary one.

    Parameters
    ----------
    size
        The lengths of the dimensions, as numbers or as one sequence. There are no dimensions if it is left out.
    dtype
        The element type; None is ``torch.get_default_dtype()``.
    group
        A process group, or None. The tensor serves all groups of the process.

    Returns
    -------
    torch.Tensor
        A contiguous tensor of the CPU. Its storage cannot be resized.

    Raises
    ------
    TypeError
        If a length is not an integer, `dtype` is not an element type that lies in ordinary memory, or `group` is
        neither a process group nor None.
    ValueError
        If a length is negative.

    Examples
    --------
    >>> weights = mpicoll.torch.empty(1000, 1000).normal_()
    >>> dist.all_reduce(weights)  # no copy
    """
    shape = _shape(size)
    chosen = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(chosen, torch.dtype):
        raise TypeError(f"dtype: {dtype!r} is not a torch.dtype")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: {group!r} is neither a process group nor None")
    if 0 in shape:
        return torch.empty(shape, dtype=chosen)
    room = torch.from_numpy(numpy_allocator.empty(math.prod(shape) * chosen.itemsize, np.uint8))
    try:
        return room.view(chosen).view(shape)
    except RuntimeError as error:
        raise TypeError(f"dtype: tensors of {chosen} cannot lie in shared memory: {error}") from error


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the lengths of the dimensions as integers."""
    given = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    try:
        shape = tuple(operator.index(length) for length in given)
    except TypeError as error:
        raise TypeError(f"size: {tuple(given)} are not integers") from error
    if any(length < 0 for length in shape):
        raise ValueError(f"size: {shape} has a negative length")
    return shape


class _Exporter:
    """Owner of the memory of an array that lies in a tensor.

    ``tensor.numpy()`` would do, but marks the storage: it cannot be resized from then on, which
    ``FullyShardedDataParallel`` does with its parameters in every step.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[Any]) -> None:
        self.tensor = tensor
        place = tensor.data_ptr(), False
        self.__array_interface__ = {"data": place, "shape": tensor.shape, "typestr": dtype.str, "version": 3}


def memory(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as an array of its shape, which keeps the tensor alive.

    Raises
    ------
    ValueError
        If the tensor is not on the CPU, or not contiguous.
    TypeError
        If NumPy has no such elements, or the tensor is not dense.
    """
    dtype = checked_dtype(tensor)
    array = np.asarray(_Exporter(tensor, dtype))
    return array if array.dtype is dtype else array.view(dtype)


def checked_dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    """Return the element type that NumPy takes a contiguous tensor's for; raise as :func:`memory` does."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.data_ptr():
        check_dense(tensor)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"tensor: elements of {tensor.dtype} cannot be communicated")
    if not is_plain(tensor):
        kind = "it is a conjugate or negative view" if tensor.is_contiguous() else "it is not contiguous"
        raise ValueError(f"tensor: of shape {tuple(tensor.shape)} and strides {tensor.stride()}, {kind}")
    return dtype


def check_dense(tensor: torch.Tensor) -> None:
    """Raise ValueError unless a tensor is on the CPU, and TypeError unless it is dense and has memory."""
    if not tensor.is_cpu:
        raise ValueError(f"tensor: it is on {tensor.device}; the backend mpicoll takes tensors of the CPU")
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor: its layout is {tensor.layout}; this call takes dense tensors only")
    if not tensor.data_ptr() and tensor.numel():
        kind = f"{type(tensor).__name__} of shape {tuple(tensor.shape)}"
        raise TypeError(f"tensor: {kind} has no memory of its own; give the tensor of this rank that it stands for")


def waited_for(argument: Any) -> Any:
    """Return an argument with the results of functional collectives, also in lists, in place of their wrappers.

    Call it in the thread of the program: PyTorch lets one thread only wait for such a result.
    """
    if isinstance(argument, (list, tuple)):
        found = [waited_for(each) for each in argument]
        return found if any(map(operator.is_not, found, argument)) else argument  # a list may be for results
    if isinstance(argument, torch.Tensor) and type(argument) is not torch.Tensor and hasattr(argument, "trigger_wait"):
        return argument.trigger_wait()
    return argument


def check_rows(tensor: torch.Tensor) -> None:
    """Raise ValueError or TypeError unless a tensor has rows that can be communicated."""
    check_dense(tensor)
    if not tensor.dim():
        raise ValueError("tensor: it has no dimension, and so no rows")
    checked_dtype(tensor.new_empty(0))


def packs_of(tensors: Sequence[torch.Tensor], nbytes: int) -> list[list[torch.Tensor]]:
    """Return tensors that may travel together: of one dtype, at most `nbytes` in total unless it is only one."""
    packs: list[list[torch.Tensor]] = []
    open_packs: dict[torch.dtype, tuple[list[torch.Tensor], int]] = {}
    for tensor in tensors:
        pack, total = open_packs.get(tensor.dtype, ([], 0))
        if not pack or total + tensor.nbytes > nbytes:
            pack, total = [], 0
            packs.append(pack)
        pack.append(tensor)
        open_packs[tensor.dtype] = pack, total + tensor.nbytes
    return packs


def storage_place(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; raise as :func:`check_dense` does."""
    check_dense(tensor)
    return tensor.untyped_storage().data_ptr()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie in memory one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: torch.Tensor) -> np.ndarray:
    """Return the elements of a tensor as a contiguous array; a copy if it is not contiguous."""
    check_dense(tensor)
    return memory(tensor if is_plain(tensor) else plain_copy(tensor))


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same elements."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def room_for(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an uninitialised vector for the elements of all tensors."""
    check_alike(tensors)
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)


def check_alike(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless all tensors have the dtype of the first; raise as :func:`check_dense` does."""
    for tensor in tensors:
        check_dense(tensor)
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"tensors: of {tensor.dtype} and {tensors[0].dtype}; one call takes tensors of one dtype")


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors, one after the other, as a vector; a view if they lie so in memory."""
    joined = joined_view(tensors)
    if joined is not None:
        return joined
    check_alike(tensors)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split(room: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parts of a vector in the shapes of the tensors, as views."""
    parts = room.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def unpack(room: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the parts of a vector to the tensors, unless it is a view of them."""
    if tensors and storage_place(room) == storage_place(tensors[0]):
        return
    for part, tensor in zip(split(room, tensors), tensors, strict=True):
        tensor.detach().copy_(part)


def joined_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensors as one vector if they follow each other in one storage, else None."""
    first = tensors[0]
    storage, place = storage_place(first), first.storage_offset()
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or not is_plain(tensor)
            or storage_place(tensor) != storage
            or tensor.storage_offset() != place
        ):
            return None
        place += tensor.numel()
    return first.detach().as_strided((place - first.storage_offset(),), (1,), first.storage_offset())
