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

from mpicoll.buffers.buffer_specs import BOTTOM, Foreign, Spec, datatype_of, in_place, index, take_apart
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


@lru_cache(maxsize=1024)
def _signature(collective: str, count: int, datatype: int, op: str, root: int) -> Signature:
    """Return the signature of a call; types with the same elements are one, as MPI_LONG and MPI_INT64_T."""
    elements = named(MPI.Datatype.fromhandle(datatype))
    end = f", root={root}" if collective == "reduce" else ""
    return Signature.of(f"{collective.capitalize()}(count={count}, dtype={elements}, op={op}{end})")


class Block:
    """Entries of a predefined datatype, one after the other.

    Attributes
    ----------
    memory : (nbytes,) uint8
        The memory from the first entry on, to the last byte of the last one at least.
    count, datatype
        Number of entries, and their type.
    nbytes
        Bytes of the entries, with the gaps in them and behind them.
    end
        Offset of the first byte behind the last entry, which a gap may follow that is not in memory.
    """

    __slots__ = ("_shape", "count", "datatype", "end", "memory", "nbytes")

    def __init__(self, memory: np.ndarray, count: int, datatype: MPI.Datatype, shape: _Shape) -> None:
        self.memory, self.count, self.datatype, self._shape = memory, count, datatype, shape
        self.nbytes = count * shape.extent
        self.end = self.nbytes - shape.extent + shape.used if count else 0

    def overlaps(self, other: Block) -> bool:
        """Return whether some memory, but not all, is that of another block, too; all of it is as IN_PLACE."""
        if self is other or not np.may_share_memory(self.memory[: self.end], other.memory[: other.end]):
            return False
        return address_of(self.memory) != address_of(other.memory)

    def runs(self) -> list[tuple[int, int]]:
        """Return offset and length of each run of an entry with gaps; an empty list for one without gaps."""
        places = self._shape.places
        if len(places) == self._shape.extent:
            return []
        pieces = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        return [(int(piece[0]), len(piece)) for piece in pieces]

    def fill(self, row: np.ndarray) -> None:
        """Copy entries from a row of bytes; gaps in them are not written."""
        extent, places = self._shape.extent, self._shape.places
        if len(places) == extent:
            self.memory[: self.nbytes] = row
        else:
            chosen = places if self.count == 1 else (extent * np.arange(self.count)[:, None] + places).ravel()
            self.memory[chosen] = row[chosen]


class _Shape(NamedTuple):
    """Bytes from one entry of a datatype to the next; those to its last byte; and offsets of all bytes that it has."""

    extent: int
    used: int
    places: np.ndarray


class _Entries(NamedTuple):
    """A predefined datatype and its shape."""

    datatype: MPI.Datatype
    shape: _Shape


_predefined: dict[int, _Entries | None] = {}
"""By handle, which other datatypes never have; None for datatypes without bytes."""


def _entries_of(datatype: MPI.Datatype) -> _Entries | None:
    """Return a datatype with its shape, None for one that is not predefined, or has no bytes."""
    handle = datatype.handle
    if handle not in _predefined:
        if not datatype.is_predefined:
            return None
        shape = _shape_of(datatype)
        _predefined[handle] = _Entries(datatype, shape) if shape.used else None
    return _predefined[handle]


def _shape_of(datatype: MPI.Datatype) -> _Shape:
    dtype, extent = named(datatype), datatype.Get_extent()[1]
    fields = [(0, datatype.Get_size())]
    if dtype.fields is not None:
        fields = [(offset, kind.itemsize) for kind, offset, *_ in dtype.fields.values()]
    places = np.array([place for offset, nbytes in fields for place in range(offset, offset + nbytes)], np.int64)
    return _Shape(extent, int(places.max(initial=-1)) + 1, places)


@cache
def _entries_of_array(dtype: np.dtype) -> _Entries | None:
    """Return the datatype that mpi4py takes for elements of an array; None if it has none."""
    try:
        return _entries_of(MPI.Datatype.fromcode(dtype.char))
    except ValueError:
        return None


def block_of(spec: Any, argument: str, *, writable: bool) -> Block | None:
    """Return the entries that a buffer specification names; None for datatypes that are not predefined.

    Raises
    ------
    TypeError, ValueError
        If the specification is wrong.
    """
    parts = Spec(spec, None, None, None) if type(spec) is np.ndarray else take_apart(spec, argument)
    counts, displs, given = parts.counts, parts.displs, parts.datatype
    if (type(counts) is not int and np.ndim(counts)) or parts.data is MPI.BOTTOM:
        return None
    array = parts.data if type(parts.data) is np.ndarray else array_of(parts, argument, writable)
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous) or (writable and not flags.writeable):
        return None
    entries = _entries_of_array(array.dtype) if given is None else _entries_of(datatype_of(given, argument))
    if entries is None or (given is None and not array.dtype.isnative) or array is BOTTOM:
        return None
    memory, extent = (array if array.ndim == 1 else array.reshape(-1, order="A")).view(BYTE), entries.shape.extent
    if displs is not None:
        memory = memory[extent * index(displs, argument, "displacement") :]
    if counts is None and memory.size % extent:
        return None
    count = memory.size // extent if counts is None else index(counts, argument, "count")
    block = Block(memory, count, entries.datatype, entries.shape)
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
        if result is not None and (result.count, result.datatype) != (given.count, given.datatype):
            return None
        if result is not None and given.overlaps(result):
            return None
        if op.handle in _OPERATIONS and _has_kernel(op.handle, given.datatype.handle):
            return None
        return cls(channel, collective, op, root, given, result)

    def whole(self) -> Signature:
        """Return the signature of the call."""
        op, given = _OPERATIONS.get(self.op.handle, "of MPI.Op.Create"), self.given
        return _signature(self.collective, given.count, given.datatype.handle, op, self.root)

    def own_row(self) -> np.ndarray:
        """Return this rank's entries as bytes."""
        row, end = np.zeros(self.given.nbytes, BYTE), self.given.end
        row[:end] = self.given.memory[:end]
        return row

    @property
    def last(self) -> int:
        """Rank of the last entries that this rank's result has; -1 if it gets none."""
        if self.result is None:
            return -1
        rank = self.channel.rank
        return {"scan": rank, "exscan": rank - 1}.get(self.collective, self.channel.size - 1)

    def combine(self, rows: np.ndarray) -> None:
        """Combine the entries of all ranks, a row for each, which are overwritten, and copy the result to its place."""
        count, datatype, last = self.given.count, self.given.datatype, self.last
        if self.result is None or last < 0 or not count:
            return
        combined = rows[last]
        for row in range(last - 1, -1, -1):
            self.op.Reduce_local([rows[row], count, datatype], [combined, count, datatype])
        self.result.fill(combined)


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
    own, rows, parts
        What this rank gives to the gathering and gets from it, and the places of the parts; they have to live until it
        has ended.
    vectors
        The vectors, to be combined after it.
    """

    status: int
    own: np.ndarray
    rows: np.ndarray
    parts: np.ndarray
    vectors: Vectors


def begin(
    channel: Channel, table: int, collective: str, sendbuf: Any, recvbuf: Any, op: Any, root: int
) -> Begun | None:
    """Begin to gather, by compiled code; None, and nothing has happened, where the general path has to do it.

    Other ranks may be on that path: for them it is the same call.

    Parameters
    ----------
    table
        See :func:`mpicoll.kernels.dispatch.call`.
    """
    vectors = Vectors.of(channel, collective, sendbuf, recvbuf, op, root)
    if vectors is None:
        return None
    own, size = vectors.own_row(), vectors.channel.size
    rows = np.empty((size, own.size), BYTE)
    parts = parts_of(vectors)
    status = dispatch.call.run(
        (table & -8) + dispatch.FOR_SHARED, ALLGATHER + dispatch.UNEVEN, own, rows, None, address_of(parts)
    )
    return None if status == OTHER else Begun(status, own, rows, parts, vectors)


def parts_of(vectors: Vectors) -> np.ndarray:
    """Return the words of parts for compiled code."""
    return _parts(vectors.channel.size, vectors.given.nbytes, mix_distinction(0, vectors.whole()))


@lru_cache(maxsize=256)
def _parts(size: int, nbytes: int, distinction: int) -> np.ndarray:
    """Return the words of parts for compiled code: root, what tells the call apart, offsets, no displacements."""
    return np.array([0, distinction, *(nbytes * rank for rank in range(size + 1)), 0], np.int64)
