"""Blocking collectives on tensors, over a communicator of mpicoll; arguments as ``torch.distributed`` has them.

Contiguous tensors are read and written where they lie. Others, and lists of tensors that do not follow each other in
memory, pass through a contiguous copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.torch import tensor_memory
from mpicoll.torch.reductions_of_tensors import Reduction, divide, prepared, reduce_into, reduction
from mpicoll.torch.tensor_memory import is_plain, memory, packed, plain_copy, readable, room_for, storage_place, unpack

_PACK_NBYTES = 1 << 20
"""Tensors of a coalesced call that have one dtype and together are no longer travel in one message."""


def make_call(comm: Intracomm, function: Callable[..., None], *arguments: Any) -> None:
    """Call ``function(comm, *arguments)``, one of this module.

    If it refuses its arguments before any rank could hear of it, the other ranks are told, so that they do not wait.
    """
    channel = comm.channel
    number = channel.dispatch.number
    try:
        function(comm, *arguments)
    except (TypeError, ValueError) as error:
        if channel.dispatch.number == number:
            channel.refuse(error)
        raise


def in_room(tensor: torch.Tensor, write: Callable[[torch.Tensor], None]) -> None:
    """Call `write` with a contiguous tensor that has the elements of `tensor`, and copy what it wrote back."""
    if tensor.layout == torch.strided and is_plain(tensor):
        write(tensor.detach())
        return
    tensor_memory.check_dense(tensor)
    room = plain_copy(tensor)
    write(room)
    tensor.detach().copy_(room)


def allreduce(comm: Intracomm, tensor: torch.Tensor, op: Any) -> None:
    """Reduce a tensor over all ranks, in place."""
    how = reduction(op, tensor.dtype)
    if how.factor is None and not how.mean and tensor.is_contiguous() and not tensor.requires_grad:
        comm.Allreduce(MPI.IN_PLACE, memory(tensor), how.op)
        return
    in_room(tensor, lambda room: _allreduce(comm, room, how))


def _allreduce(comm: Intracomm, tensor: torch.Tensor, how: Reduction) -> None:
    if how.factor is not None:
        tensor.mul_(how.factor)
    reduce_into(tensor, how, comm.size, lambda total: comm.Allreduce(MPI.IN_PLACE, memory(total), how.op))


def allreduce_coalesced(comm: Intracomm, tensors: Sequence[torch.Tensor], op: Any) -> None:
    """Reduce several tensors over all ranks, in place."""
    for pack in tensor_memory.packs_of(tensors, _PACK_NBYTES):
        if len(pack) == 1:
            allreduce(comm, pack[0], op)
        else:
            room = packed(pack)
            allreduce(comm, room, op)
            unpack(room, pack)


def sparse_allreduce(comm: Intracomm, tensor: torch.Tensor, op: Any) -> None:
    """Add sparse tensors in coordinate format over all ranks, in place; the result is coalesced.

    Raises
    ------
    ValueError
        If the operation is another than SUM.
    TypeError
        If the layout is another one.
    """
    how = reduction(op, tensor.dtype)
    if how.op != MPI.SUM or how.factor is not None or tensor.dtype == torch.bool:
        raise ValueError("op: only SUM and AVG are defined on sparse tensors")
    if tensor.layout != torch.sparse_coo:
        raise TypeError(f"tensor: its layout is {tensor.layout}; sparse tensors are torch.sparse_coo")
    own = tensor.detach().coalesce()
    counts = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([own._nnz()], np.int64), counts)
    indices = gathered_rows(comm, own.indices().t().contiguous(), counts.tolist())
    values = gathered_rows(comm, own.values().contiguous(), counts.tolist())
    values = values if how.wide is None else values.to(how.wide)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
    if how.mean:
        divide(total.values(), comm.size)
    with torch.no_grad():  # a detached sparse tensor has indices of its own
        tensor.copy_(total)


def gathered_rows(comm: Intracomm, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the rows of all ranks, of which there are `counts`."""
    whole = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
    width = rows[0].numel() if len(rows) else int(np.prod(rows.shape[1:]))
    _allgatherv(comm, rows, whole, [width * count for count in counts])
    return whole


def compressed_sum(
    comm: Intracomm, tensor: torch.Tensor, compression: str | Compressor | ErrorFeedback, *, mean: bool
) -> None:
    """Replace a tensor with its sum, or its mean, over the ranks, by compressed messages.

    Elements that are not float32 are compressed as float32.

    Raises
    ------
    TypeError
        If the elements are not real floating-point numbers.
    """
    check_compressible(tensor)

    def write(room: torch.Tensor) -> None:
        single = room.to(torch.float32)
        if mean:
            single.div_(comm.size)
        comm.Allreduce(MPI.IN_PLACE, memory(single).reshape(-1), MPI.SUM, compression=compression)
        if single.data_ptr() != room.data_ptr():
            room.copy_(single)

    in_room(tensor, write)


def check_compressible(tensor: torch.Tensor) -> None:
    """Raise TypeError unless a tensor has real floating-point numbers."""
    if not tensor.is_floating_point():
        raise TypeError(f"compression: tensors of {tensor.dtype} cannot be compressed")


def broadcast(comm: Intracomm, tensor: torch.Tensor, root: int) -> None:
    """Broadcast a tensor from the root."""
    in_room(tensor, lambda room: comm.Bcast(memory(room), root))


def reduce(comm: Intracomm, tensor: torch.Tensor, root: int, op: Any) -> None:
    """Reduce over all ranks to the root, in place; tensors of the other ranks stay as they are."""
    how = reduction(op, tensor.dtype)
    given = prepared(tensor, how)
    if comm.rank != root:
        comm.Reduce(readable(given), None, how.op, root)
        return

    def write(room: torch.Tensor) -> None:
        comm.Reduce(MPI.IN_PLACE, memory(room), how.op, root)
        if how.mean:
            divide(room, comm.size)

    in_room(given, write)
    if given is not tensor:
        tensor.detach().copy_(given)


def allgather_into(comm: Intracomm, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Gather tensors of equal length on all ranks, in rank order, in one tensor."""
    _check_alike(output, tensor)

    def write(room: torch.Tensor) -> None:
        comm.Allgather(_apart(tensor, room, comm.rank * tensor.nbytes), memory(room))

    in_room(output, write)


def _apart(tensor: torch.Tensor, room: torch.Tensor, place: int) -> Any:
    """Return the elements of a tensor that may lie in `room`: MPI.IN_PLACE if they lie at byte `place` of it."""
    if is_plain(tensor) and tensor.data_ptr() == room.data_ptr() + place and tensor.nbytes:
        return MPI.IN_PLACE
    if storage_place(tensor) == storage_place(room):
        return memory(tensor.detach().clone(memory_format=torch.contiguous_format))
    return readable(tensor)


def _check_alike(output: torch.Tensor, tensor: torch.Tensor) -> None:
    if output.dtype != tensor.dtype:
        raise ValueError(f"output: it has elements of {output.dtype}, but the input of {tensor.dtype}")


def _check_list(name: str, tensors: Sequence[torch.Tensor], size: int, like: torch.Tensor) -> None:
    if len(tensors) != size:
        raise ValueError(f"{name}: {len(tensors)} tensors, but the group has {size} ranks")
    for tensor in tensors:
        if tensor.dtype != like.dtype:
            raise ValueError(f"{name}: a tensor of {tensor.dtype} with one of {like.dtype}")


def allgather(comm: Intracomm, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    """Gather tensors on all ranks, in rank order, in a list; their lengths may differ."""
    _check_list("output_tensors", outputs, comm.size, tensor)
    room = tensor_memory.joined_view(outputs)
    if room is None:
        room = room_for(outputs)
    counts = [output.numel() for output in outputs]
    if len(set(counts)) == 1:
        comm.Allgather(_apart(tensor, room, comm.rank * tensor.nbytes), memory(room))
    else:
        _allgatherv(comm, tensor, room, counts)
    unpack(room, outputs)


def _allgatherv(comm: Intracomm, tensor: torch.Tensor, room: torch.Tensor, counts: Sequence[int]) -> None:
    given = _apart(tensor, room, sum(counts[: comm.rank]) * tensor.element_size())
    comm.Allgatherv(given if given is MPI.IN_PLACE else given.reshape(-1), [memory(room).reshape(-1), list(counts)])


def gather(comm: Intracomm, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
    """Gather tensors of equal length on the root, in rank order; `outputs` is empty on the other ranks."""
    if comm.rank != root:
        if len(outputs):
            raise ValueError(f"gather_list: rank {comm.rank} is not the root {root} and must give none")
        comm.Gather(readable(tensor), None, root)
        return
    _check_list("gather_list", outputs, comm.size, tensor)
    for output in outputs:
        if output.numel() != tensor.numel():
            raise ValueError(f"gather_list: {output.numel()} elements in one tensor, but {tensor.numel()} in the input")
    room = room_for(outputs)
    comm.Gather(readable(tensor), memory(room), root)
    unpack(room, outputs)


def gather_into(comm: Intracomm, output: torch.Tensor, tensor: torch.Tensor, root: int) -> None:
    """Gather tensors of equal length on the root, in rank order, in one tensor; `output` is of no use elsewhere."""
    if comm.rank != root:
        comm.Gather(readable(tensor), None, root)
        return
    _check_alike(output, tensor)
    given = readable(_distinct(tensor, output))
    in_room(output, lambda room: comm.Gather(given, memory(room), root))


def scatter(comm: Intracomm, output: torch.Tensor, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Scatter a list of tensors of equal length from the root; `tensors` is empty on the other ranks."""
    given = None
    if comm.rank == root:
        _check_list("scatter_list", tensors, comm.size, output)
        wrong = [tensor.numel() for tensor in tensors if tensor.numel() != output.numel()]
        if wrong:
            raise ValueError(f"scatter_list: {wrong[0]} elements in one tensor, but {output.numel()} in the output")
        given = memory(_distinct(packed(tensors), output))
    elif len(tensors):
        raise ValueError(f"scatter_list: rank {comm.rank} is not the root {root} and must give none")
    in_room(output, lambda room: comm.Scatter(given, memory(room), root))


def _distinct(room: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return a vector of the same elements that shares no storage with `output`."""
    if storage_place(room) == storage_place(output):
        return room.clone()
    return room


def reduce_scatter_from(comm: Intracomm, output: torch.Tensor, tensor: torch.Tensor, op: Any) -> None:
    """Reduce a tensor over all ranks; rank r gets the r-th of equal parts."""
    _check_alike(output, tensor)
    if tensor.numel() != output.numel() * comm.size:
        raise ValueError(f"input: {tensor.numel()} elements, but {comm.size} ranks get {output.numel()} each")
    reduce_scatter_parts(comm, output, tensor, [output.numel()] * comm.size, op)


def reduce_scatter(comm: Intracomm, output: torch.Tensor, tensors: Sequence[torch.Tensor], op: Any) -> None:
    """Reduce a list of tensors over all ranks; rank r gets the r-th, and their lengths may differ."""
    _check_list("input_tensors", tensors, comm.size, output)
    reduce_scatter_parts(comm, output, packed(tensors), [tensor.numel() for tensor in tensors], op)


def reduce_scatter_parts(
    comm: Intracomm, output: torch.Tensor, tensor: torch.Tensor, counts: Sequence[int], op: Any
) -> None:
    """Reduce a tensor over all ranks; rank r gets the r-th part, of ``counts[r]`` elements."""
    how = reduction(op, output.dtype)
    given = readable(_distinct(prepared(tensor, how), output))

    def reduce_to(total: torch.Tensor) -> None:
        if len(set(counts)) == 1:
            comm.Reduce_scatter_block(given, memory(total), how.op)
        else:
            comm.Reduce_scatter(given.reshape(-1), memory(total).reshape(-1), list(counts), how.op)

    in_room(output, lambda room: reduce_into(room, how, comm.size, reduce_to))


def alltoall(comm: Intracomm, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Send the r-th tensor to rank r; get one from every rank, in rank order. Lengths may differ."""
    _check_list("output_tensor_list", outputs, comm.size, outputs[0])
    _check_list("input_tensor_list", tensors, comm.size, outputs[0])
    room = tensor_memory.joined_view(outputs)
    if room is None:
        room = room_for(outputs)
    given = _distinct(packed(tensors), room)
    _alltoallv(comm, given, [each.numel() for each in tensors], room, [each.numel() for each in outputs])
    unpack(room, outputs)


def _alltoallv(
    comm: Intracomm, given: torch.Tensor, sent: Sequence[int], room: torch.Tensor, received: Sequence[int]
) -> None:
    comm.Alltoallv([readable(given).reshape(-1), list(sent)], [memory(room).reshape(-1), list(received)])


def alltoall_single(
    comm: Intracomm,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> None:
    """Send the r-th part of a tensor's rows to rank r; get a part from every rank, in rank order.

    Parameters
    ----------
    output_splits, input_splits
        Numbers of rows; equal parts if empty.
    """
    _check_alike(output, tensor)
    given = _distinct(tensor, output)
    if not output_splits and not input_splits:
        if tensor.shape and tensor.shape[0] % comm.size:
            raise ValueError(f"input: {tensor.shape[0]} rows cannot be divided among {comm.size} ranks")
        in_room(output, lambda room: comm.Alltoall(readable(given), memory(room)))
        return
    sent, received = (
        _counts("input", tensor, input_splits, comm.size),
        _counts("output", output, output_splits, comm.size),
    )
    in_room(output, lambda room: _alltoallv(comm, given, sent, room, received))


def _counts(name: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the numbers of elements in the parts of a tensor."""
    rows = tensor.shape[0] if tensor.dim() else 0
    width = tensor.numel() // rows if rows else 0
    parts = list(splits) if splits else [rows // size] * size
    if len(parts) != size or sum(parts) != rows:
        raise ValueError(f"{name}_split_sizes: {parts} are not {size} numbers that add up to {rows} rows")
    return [part * width for part in parts]
