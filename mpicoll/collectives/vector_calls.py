"""Vector collectives on shared memory: the plain cases of Allgatherv, Gatherv, Scatterv and Reduce_scatter.

Where blocks follow each other in ordinary arrays such a call is one compiled call; other blocks of an array are packed.
In Gatherv and Scatterv it begins with a broadcast of the root's counts, to which short parts are attached
(:mod:`mpicoll.kernels.told_counts`). Compiled code reads the most common specifications
(:mod:`mpicoll.kernels.vector_specs`), Python some others. Everything else takes the general path, which makes the same
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.plain_specs import are_counts, array_of, key_of, listed, plain_blocks
from mpicoll.collectives import counts_from_root
from mpicoll.collectives.call_context import AnyOp, CallArguments, CallContext
from mpicoll.collectives.dispatched_requests import start_quickly
from mpicoll.collectives.execute import complete, run
from mpicoll.collectives.requests import Request
from mpicoll.kernels.attached_parts import scatter_words
from mpicoll.kernels.dispatch import UNEVEN, call
from mpicoll.kernels.operation_words import (
    ALLGATHER,
    DONE,
    GATHER,
    OTHER,
    REDUCE_SCATTER,
    SCATTER,
)
from mpicoll.kernels.told_counts import TOLD, call_read, call_told, end_told
from mpicoll.kernels.uneven_calls import call_uneven, call_uneven_in
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS, hash_of_offsets

_MAX_KNOWN = 256


class _Parts(NamedTuple):
    """Lengths of parts as compiled code takes them: the words, and their address."""

    words: np.ndarray
    address: int


class _Lengths(NamedTuple):
    """Lengths of the parts of a whole vector.

    Attributes
    ----------
    counts, total
        Elements of each part, and of all.
    told
        What a root tells the others: the counts, the number of the element type, and zeros.
    places
        Where each part is in the caller's array; empty if the parts follow each other from its begin.
    overlap
        True if two parts have an element in common.
    """

    counts: tuple[int, ...]
    total: int
    told: np.ndarray
    places: tuple[slice, ...] = ()
    overlap: bool = False


class _Whole(NamedTuple):
    """All parts, one after the other.

    Attributes
    ----------
    vector
        The caller's array, or a temporary one.
    apart
        The caller's array if the parts are elsewhere in it.
    """

    vector: np.ndarray
    lengths: _Lengths
    apart: np.ndarray | None = None

    def pack(self) -> None:
        """Copy the parts from the caller's array."""
        if self.apart is not None:
            np.concatenate([self.apart[place] for place in self.lengths.places], out=self.vector)

    def unpack(self) -> None:
        """Copy the parts to the caller's array."""
        if self.apart is None:
            return
        begin = 0
        for place, count in zip(self.lengths.places, self.lengths.counts, strict=True):
            self.apart[place] = self.vector[begin : begin + count]
            begin += count


class _Plain(NamedTuple):
    """Arrays to send from and to receive into, and counts of all ranks; `whole` is that of an Allgatherv."""

    send: Any
    recv: Any
    counts: tuple[int, ...]
    whole: _Whole | None = None


class VectorCalls:
    """Vector collectives on one communicator whose ranks share memory.

    Parameters
    ----------
    table
        Address of the table for plain calls, 0 if they are made on the general path.
    """

    def __init__(self, scope: CallContext, table: int) -> None:
        self._scope = scope
        self.table = table if scope.channel.node is not None else 0
        """0 where all of these calls take the general path."""
        self._known: dict[tuple[Sequence[int], int], _Parts] = {}
        self._lengths: dict[tuple[Any, int], _Lengths] = {}  # by counts and displacements as given, and datatype
        self._in_use: _Parts | None = None  # by the last call, while others may be dropped
        self._size = scope.channel.size
        self._told = np.zeros(scatter_words(self._size), np.int64)  # by the root of the call that compiled code makes
        if scope.channel.node is not None:
            scope.channel.dispatch.learn_tell(scope.channel.node.tell_plan())

    def allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Make an Allgatherv."""
        status = call_uneven.run(self.table, ALLGATHER, sendbuf, recvbuf, None, None)
        plain = None  # of which a part may be a temporary array: it has to live until the call has ended
        if status == OTHER:
            plain = self._plain_allgatherv(sendbuf, recvbuf)
            status = self._call(ALLGATHER, plain)
        if status != DONE:
            self._complete(status, CallArguments("allgatherv", sendbuf, recvbuf))
        if status != OTHER and plain is not None and plain.whole is not None:
            plain.whole.unpack()

    def reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: AnyOp) -> None:
        """Make a Reduce_scatter, whose counts every rank gives."""
        status = call_uneven.run(self.table, REDUCE_SCATTER, sendbuf, recvbuf, op, recvcounts)
        plain = None  # see above
        if status == OTHER:
            plain = self._plain_reduce_scatter(sendbuf, recvbuf, recvcounts)
            status = self._call(REDUCE_SCATTER, plain, op)
        if status != DONE:
            self._complete(status, CallArguments("reduce_scatter", sendbuf, recvbuf, op, recvcounts=recvcounts))

    def gatherv(self, sendbuf: Any, recvbuf: Any, root: int) -> None:
        """Make a Gatherv, in which the root tells the counts."""
        status = call_told.run(self.table, GATHER, sendbuf, recvbuf, root, self._told)
        if status != TOLD + DONE:
            made = CallArguments("gatherv", sendbuf, recvbuf, MPI.SUM, root)
            self._go_on_rooted(GATHER, status, made, sendbuf, recvbuf)

    def scatterv(self, sendbuf: Any, recvbuf: Any, root: int) -> None:
        """Make a Scatterv, in which the root tells the counts."""
        status = call_told.run(self.table, SCATTER, sendbuf, recvbuf, root, self._told)
        if status != TOLD + DONE:
            made = CallArguments("scatterv", sendbuf, recvbuf, MPI.SUM, root)
            self._go_on_rooted(SCATTER, status, made, recvbuf, sendbuf)

    def start_allgatherv(self, table: int, sendbuf: Any, recvbuf: Any) -> Request | None:
        """Start a plain Allgatherv with the table for nonblocking calls; None, having done nothing, if it is not."""
        quick = None
        if type(recvbuf) in (list, tuple):
            quick = start_quickly(
                self._scope, table, ALLGATHER, sendbuf, recvbuf, None, None, kept=(*recvbuf,), kernel=call_uneven_in
            )
        if quick is not None:
            return quick
        plain = self._plain_allgatherv(sendbuf, recvbuf)
        if plain is not None and plain.whole is not None and plain.whole.apart is not None:
            return None
        return self._start(table, ALLGATHER, plain, None)

    def start_reduce_scatter(
        self, table: int, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: AnyOp
    ) -> Request | None:
        """Start a plain Reduce_scatter whose counts every rank gives; see :meth:`start_allgatherv`."""
        quick = start_quickly(
            self._scope, table, REDUCE_SCATTER, sendbuf, recvbuf, op, recvcounts, kernel=call_uneven_in
        )
        if quick is not None:
            return quick
        return self._start(table, REDUCE_SCATTER, self._plain_reduce_scatter(sendbuf, recvbuf, recvcounts), op)

    def _start(self, table: int, number: int, plain: _Plain | None, op: Any) -> Request | None:
        if plain is None:
            return None
        parts = self._parts_of(plain.counts, 0)
        return start_quickly(self._scope, table, number + UNEVEN, plain.send, plain.recv, op, parts.address, kept=parts)

    def _plain_allgatherv(self, sendbuf: Any, recvbuf: Any) -> _Plain | None:
        send, whole = array_of(sendbuf, sent=True), self._whole(recvbuf, written=True)
        if whole is None or not (type(send) is np.ndarray or (send is MPI.IN_PLACE and whole.apart is None)):
            return None
        if whole.apart is not None and np.may_share_memory(send, whole.apart):
            return None
        return _Plain(send, whole.vector, whole.lengths.counts, whole)

    def _plain_reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any) -> _Plain | None:
        send, recv, recvcounts = array_of(sendbuf, sent=True), array_of(recvbuf), listed(recvcounts)
        if type(send) is not np.ndarray or type(recv) is not np.ndarray or not are_counts(recvcounts, self._size):
            return None
        return _Plain(send, recv, tuple(recvcounts))

    def _go_on_rooted(self, number: int, status: int, made: CallArguments, part: Any, parts: Any) -> None:
        """Go on with a Gatherv or Scatterv for which :func:`call_told` has returned `status`, which is not its end.

        Parameters
        ----------
        part, parts
            The specifications of this rank's part, and of the root's parts of all ranks.
        """
        told, whole = self._told, None
        if status < TOLD:
            found = self._plain_ends(number, made.root, part, parts)
            if found is None:
                run(self._scope, *made)
                return
            own, whole, counts = found
            vector = None if whole is None else whole.vector
            if status == OTHER:  # nothing has happened
                told = counts
                status = call_read.run(self.table, number, own, vector, made.root, told)
            if status == OTHER:
                run(self._scope, *made)
                return
            if status < TOLD:
                complete(self._scope, status, CallArguments("bcast", None, told, root=made.root))
                status = end_told.run(self.table, number, own, vector, made.root, told)
        self._complete(status - TOLD, made, told)
        if number == GATHER and whole is not None and status - TOLD != OTHER:
            whole.unpack()

    def _plain_ends(
        self, number: int, root: int, part_spec: Any, whole_spec: Any
    ) -> tuple[Any, _Whole | None, np.ndarray] | None:
        """Return arrays of the own part and of all parts, and memory for the counts; None if they are not plain."""
        part, whole = array_of(part_spec, sent=number == GATHER), None
        if self._scope.channel.rank == root:
            whole = self._whole(whole_spec, written=number == GATHER)
            if whole is None:
                return None
        if type(part) is not np.ndarray:
            return None
        if whole is None:
            return part, None, np.zeros(scatter_words(self._size), np.int64)
        if whole.apart is not None and np.may_share_memory(part, whole.apart):
            return None
        if number == SCATTER:
            whole.pack()
        return part, whole, whole.lengths.told

    def _call(self, number: int, plain: _Plain | None, op: AnyOp = MPI.SUM) -> int:
        """Make the compiled call of a collective without a root; return its status, OTHER if it is not plain."""
        if plain is None:
            return OTHER
        parts = self._in_use = self._parts_of(plain.counts, 0)
        return call.run(self.table, number + UNEVEN, plain.send, plain.recv, op, parts.address)

    def _parts_of(self, counts: Sequence[int], root: int) -> _Parts:
        """Return the words for counts; they are kept, since a call that is on its way uses them."""
        known = self._known.get((counts, root))
        if known is not None:
            return known
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        offsets = np.array([0, *accumulate(counts)], np.int64)
        words = np.array([root, hash_of_offsets(offsets, root), *offsets], np.int64)
        made = self._known[counts, root] = _Parts(words, words.ctypes.data)
        return made

    def _complete(self, status: int, made: CallArguments, told: np.ndarray | None = None) -> None:
        """Complete a call that has begun, or make it on the general path."""
        if status == DONE:
            return
        if told is not None:
            made = made._replace(recvcounts=counts_from_root.read(self._scope.channel, told, made.root))
        if status == OTHER:
            run(self._scope, *made)
        else:
            complete(self._scope, status, made)

    def _whole(self, spec: Any, *, written: bool) -> _Whole | None:
        """Return the blocks of an array; None for others, and for what cannot be `written` if that is asked for."""
        array, key = key_of(spec)
        try:
            lengths = None if key is None else self._lengths.get(key)
        except TypeError:  # a list of lists has no hash
            key = lengths = None
        if lengths is None:
            found = _described(spec, self._size)
            if found is None:
                return None
            array, lengths = found
            if key is not None and len(self._lengths) < _MAX_KNOWN:
                self._lengths[key] = lengths
        if lengths.places:
            return _apart(array.reshape(-1), lengths, written)
        if lengths.total == array.size:
            return _Whole(array, lengths)
        return _Whole(array.reshape(-1)[: lengths.total], lengths) if lengths.total < array.size else None


def _apart(array: np.ndarray, lengths: _Lengths, written: bool) -> _Whole | None:
    """Return a temporary vector for blocks that do not follow each other; None if they are not all in the array."""
    if max(place.stop for place in lengths.places) > array.size:
        return None
    if written and (lengths.overlap or not array.flags.writeable):
        return None
    return _Whole(np.empty(lengths.total, array.dtype), lengths, array)


def _described(spec: Any, size: int) -> tuple[np.ndarray, _Lengths] | None:
    """Return the array, and the lengths of its blocks, of any plain specification; None for others."""
    blocks = plain_blocks(spec, size)
    if blocks is None:
        return None
    places: tuple[slice, ...] = ()
    overlap = False
    if blocks.displs != tuple([0, *accumulate(blocks.counts)][:-1]):
        # A block without elements may be anywhere.
        begins = [displ if count else 0 for displ, count in zip(blocks.displs, blocks.counts, strict=True)]
        places = tuple(slice(begin, begin + count) for begin, count in zip(begins, blocks.counts, strict=True))
        ends = sorted((place.start, place.stop) for place in places if place.start < place.stop)
        overlap = any(second[0] < first[1] for first, second in pairwise(ends))
    number, total = DTYPE_NUMBERS.get(blocks.array.dtype), sum(blocks.counts)
    if number is None or total == 0:
        return None
    told = np.zeros(scatter_words(size), np.int64)
    told[:size], told[size] = blocks.counts, number
    return blocks.array, _Lengths(blocks.counts, total, told, places, overlap)
