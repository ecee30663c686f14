"""Reductions that no kernel executes: short vectors are gathered in shared memory, and ranks combine them themselves.

MPI_Reduce_local combines elements of every type by every operation: MINLOC and MAXLOC on pairs, operations of
``MPI.Op.Create``, long double. The MPI library's own collective sends messages, and its nonblocking form, the only one
that can have a deadline, takes ten times as long as its blocking one::

    rank                  0              1              2              3
    gives                 x0             x1             x2             x3
    gathers           x0 x1 x2 x3    x0 x1 x2 x3    x0 x1 x2 x3    x0 x1 x2 x3
    combines, in rank order, each the same: x0 op (x1 op (x2 op x3))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import BOTTOM, Foreign, datatype_of, in_place, index, take_apart
from mpicoll.buffers.datatypes import BYTE, entry_of
from mpicoll.buffers.flat import array_of
from mpicoll.buffers.flat_buffer import Buffer, address_of
from mpicoll.buffers.reduction_ops import reducer_for
from mpicoll.buffers.typemap import named, typemap_of
from mpicoll.collectives import on_shared_memory, select
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.operation import CheckedOperation, NativeOperation
from mpicoll.communicator.channel import Channel
from mpicoll.kernels import dispatch
from mpicoll.kernels.operation_words import ALLGATHER, OTHER
from mpicoll.progress.call_signature import Signature
from mpicoll.shared_memory.packed_calls import mix_distinction

COLLECTIVES = ("allreduce", "reduce", "scan", "exscan")
_LONGEST_NBYTES = 32 << 10
"""Bytes of all ranks' vectors up to which they are gathered."""
_OPERATIONS = {each.handle: name for name, each in vars(MPI).items() if isinstance(each, MPI.Op)}
"""Names of predefined operations by their handles."""
_signature = lru_cache(maxsize=1024)(Signature.of)


@dataclass(frozen=True)
class Block:
    """Entries of a predefined datatype, one after the other.

    Attributes
    ----------
    memory : (nbytes,) uint8
        The memory from the first entry on, to the last byte of the last one at least.
    number, datatype
        Number of entries, and their type.
    """

    memory: np.ndarray
    number: int
    datatype: MPI.Datatype

    @property
    def nbytes(self) -> int:
        """Bytes of the entries, with the gaps in them and behind them."""
        return self.number * _shape_of(self.datatype.handle).extent

    @property
    def end(self) -> int:
        """Offset of the first byte behind the last entry, which a gap may follow that is not in memory."""
        shape = _shape_of(self.datatype.handle)
        return (self.number - 1) * shape.extent + shape.used if self.number else 0

    def fill(self, row: np.ndarray) -> None:
        """Copy entries from a row of bytes; gaps in them are not written."""
        shape = _shape_of(self.datatype.handle)
        if len(shape.places) == shape.extent:
            self.memory[: self.nbytes] = row[: self.nbytes]
        else:
            places = (shape.extent * np.arange(self.number)[:, None] + shape.places).ravel()
            self.memory[places] = row[places]


class _Shape(NamedTuple):
    """Bytes from one entry of a datatype to the next; those to its last byte; and offsets of all bytes that it has."""

    extent: int
    used: int
    places: np.ndarray


@cache
def _shape_of(handle: int) -> _Shape:
    datatype = MPI.Datatype.fromhandle(handle)
    dtype, extent = named(datatype), datatype.Get_extent()[1]
    fields = [(0, datatype.Get_size())]
    if dtype.fields is not None:
        fields = [(offset, kind.itemsize) for kind, offset, *_ in dtype.fields.values()]
    places = np.array([place for offset, nbytes in fields for place in range(offset, offset + nbytes)])
    return _Shape(extent, int(places.max(initial=-1)) + 1, places)


@cache
def _type_of_elements(dtype: np.dtype) -> MPI.Datatype | None:
    try:
        return MPI.Datatype.fromcode(dtype.char)
    except ValueError:
        return None


def block_of(spec: Any, argument: str, *, writable: bool) -> Block | None:
    """Return the entries that a buffer specification names; None for others than predefined ones without distances.

    Raises
    ------
    TypeError, ValueError
        If the specification is wrong.
    """
    parts = take_apart(spec, argument)
    if parts.data is MPI.BOTTOM or parts.displs is not None or np.ndim(parts.counts):
        return None
    array = array_of(parts, argument, writable)
    is_flat = array.flags.c_contiguous or array.flags.f_contiguous
    if array is BOTTOM or not is_flat or not array.dtype.isnative or (writable and not array.flags.writeable):
        return None
    given = parts.datatype
    datatype = _type_of_elements(array.dtype) if given is None else datatype_of(given, argument)
    if datatype is None or not datatype.is_predefined or not datatype.Get_size():
        return None
    memory, shape = array.reshape(-1, order="A").view(BYTE), _shape_of(datatype.handle)
    if parts.counts is None and array.nbytes % shape.extent:
        return None
    count = array.nbytes // shape.extent if parts.counts is None else index(parts.counts, argument, "count")
    block = Block(memory, count, datatype)
    return block if block.end <= memory.size else None


@cache
def _has_kernel(op: int, datatype: int) -> bool:
    """Return whether mpicoll's own kernels execute a predefined operation on entries of a datatype, by handles."""
    try:
        elements = entry_of(typemap_of(MPI.Datatype.fromhandle(datatype)), moved=False).dtype
    except Foreign:
        return False
    return reducer_for(MPI.Op.fromhandle(op), elements) is not None


@dataclass(frozen=True)
class Vectors:
    """Vectors of one reduction, which no kernel executes.

    Attributes
    ----------
    channel, collective, op, root
        The call; the root is 0 where the collective has none.
    given, result
        The entries that this rank gives and gets; it may get none.
    """

    channel: Channel
    collective: str
    op: MPI.Op
    root: int
    given: Block
    result: Block | None

    @classmethod
    def of(cls, channel: Channel, collective: str, sendbuf: Any, recvbuf: Any, op: Any, root: int) -> Vectors | None:
        """Return the vectors of a call if they can be gathered, else None.

        All ranks of a correct program get the same: operation, count and datatype are equal on all of them.
        """
        node = channel.node
        if node is None or not node.segments or collective not in COLLECTIVES or type(op) is not MPI.Op:
            return None
        gets = collective != "reduce" or channel.rank == root
        try:
            result = block_of(recvbuf, "recvbuf", writable=True) if gets else None
            given = result if in_place(sendbuf) else block_of(sendbuf, "sendbuf", writable=False)
        except (TypeError, ValueError):  # mpi4py says so
            return None
        if given is None or (gets and result is None) or given.nbytes * channel.size > _LONGEST_NBYTES:
            return None
        if result is not None and (result.number, result.datatype) != (given.number, given.datatype):
            return None
        if op.handle in _OPERATIONS and _has_kernel(op.handle, given.datatype.handle):
            return None
        return cls(channel, collective, op, root, given, result)

    def whole(self) -> Signature:
        """Return the signature of the call."""
        root = f", root={self.root}" if self.collective == "reduce" else ""
        op = _OPERATIONS.get(self.op.handle, "of MPI.Op.Create")
        title, given = self.collective.capitalize(), self.given
        return _signature(f"{title}(count={given.number}, {given.datatype.name}, op={op}{root})")

    def own_row(self) -> np.ndarray:
        """Return this rank's entries as bytes."""
        row, end = np.zeros(self.given.nbytes, BYTE), self.given.end
        row[:end] = self.given.memory[:end]
        return row

    def combine(self, rows: np.ndarray) -> None:
        """Combine the entries of all ranks, a row for each, which are overwritten, and copy the result to its place."""
        number, datatype = self.given.number, self.given.datatype
        rank, last = self.channel.rank, len(rows) - 1
        last = {"scan": rank, "exscan": rank - 1}.get(self.collective, last)
        if self.result is None or last < 0 or not number:
            return
        for row in rows[:last][::-1]:
            self.op.Reduce_local([row, number, datatype], [rows[last], number, datatype])
        self.result.fill(rows[last])


class GatheredReduction(NativeOperation):
    """A blocking reduction of short vectors by MPI_Reduce_local; see the module."""

    vectors: Vectors

    @classmethod
    def of(cls, call: NativeOperation, vectors: Vectors) -> GatheredReduction:
        """Return the reduction in place of a call of the MPI library."""
        made = cls(call.channel, call.collective, call.title, call.arguments, False)
        made.vectors = vectors
        return made

    def run(self, timeout: float) -> None:
        """Execute the operation."""
        size, rank, own = self.channel.size, self.channel.rank, self.vectors.own_row()
        rows, nbytes = np.empty((size, own.size), BYTE), own.size
        gathering = CheckedOperation(
            self.channel,
            "allgather",
            self.title,
            select.SHARED,
            size * nbytes,
            BYTE,
            VectorPart(Buffer(own, address_of(own), nbytes, BYTE), rank * nbytes, (rank + 1) * nbytes),
            VectorPart(Buffer(rows, address_of(rows), size * nbytes, BYTE), 0, size * nbytes),
            counts=(nbytes,) * size,
            whole=self.vectors.whole(),
        )
        if on_shared_memory.run(gathering, timeout):
            self.vectors.combine(rows)
        else:  # the ranks do not reach each other's memory any more
            super().run(timeout)


class Begun(NamedTuple):
    """A reduction whose vectors compiled code gathers.

    Attributes
    ----------
    status
        See :func:`mpicoll.kernels.dispatch.call`.
    own, rows
        What this rank gives to the gathering and gets from it; they have to live until it has ended.
    vectors
        The vectors, to be combined after it.
    """

    status: int
    own: np.ndarray
    rows: np.ndarray
    vectors: Vectors


def begin(
    channel: Channel, table: int, collective: str, sendbuf: Any, recvbuf: Any, op: Any, root: Any
) -> Begun | None:
    """Begin to gather, by compiled code; None, and nothing has happened, where the general path has to do it.

    Other ranks may be on that path: for them it is the same call.

    Parameters
    ----------
    table
        See :func:`mpicoll.kernels.dispatch.call`.
    """
    if type(root) is not int or not 0 <= root < channel.size:
        return None
    vectors = Vectors.of(channel, collective, sendbuf, recvbuf, op, root)
    if vectors is None:
        return None
    own, size = vectors.own_row(), vectors.channel.size
    rows = np.empty((size, own.size), BYTE)
    parts = _parts(size, own.size, mix_distinction(0, vectors.whole()))
    status = dispatch.call.run(
        (table & -8) + dispatch.FOR_SHARED, ALLGATHER + dispatch.UNEVEN, own, rows, None, address_of(parts)
    )
    return None if status == OTHER else Begun(status, own, rows, vectors)


@lru_cache(maxsize=256)
def _parts(size: int, nbytes: int, distinction: int) -> np.ndarray:
    """Return the words of parts for compiled code: root, what tells the call apart, offsets, no displacements."""
    return np.array([0, distinction, *(nbytes * rank for rank in range(size + 1)), 0], np.int64)
