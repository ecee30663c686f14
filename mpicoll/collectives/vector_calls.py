"""Vector collectives on shared memory: the plain cases of Allgatherv, Gatherv, Scatterv and Reduce_scatter.

Where blocks follow each other in ordinary arrays such a call is one compiled call; other blocks of an array are packed.
Of Gatherv and Scatterv only the root knows all counts (:mod:`mpicoll.kernels.counted_parts`). Compiled code reads the
most common specifications (:mod:`mpicoll.kernels.vector_specs`), Python some others. Everything else takes the general
path, which makes the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.held_memory import held
from mpicoll.buffers.plain_specs import are_counts, key_of, listed
from mpicoll.collectives import on_shared_memory
from mpicoll.collectives.call_context import AnyOp, CallArguments, CallContext
from mpicoll.collectives.dispatched_requests import start_quickly
from mpicoll.collectives.execute import complete, run
from mpicoll.collectives.plain_arguments import received_array, sent_array
from mpicoll.collectives.requests import Request
from mpicoll.collectives.whole_vectors import Whole, WholeVectors
from mpicoll.kernels.counted_calls import call_counted
from mpicoll.kernels.dispatch import UNEVEN, call
from mpicoll.kernels.one_rank_calls import copy_block
from mpicoll.kernels.operation_words import (
    ALLGATHER,
    DONE,
    GATHER,
    OTHER,
    REDUCE_SCATTER,
    SCATTER,
    WAITING,
)
from mpicoll.kernels.packed_views import PACKED
from mpicoll.kernels.uneven_calls import call_uneven, call_uneven_in
from mpicoll.shared_memory.packed_calls import hash_of_offsets

_MAX_KNOWN = 256


class _Parts(NamedTuple):
    """Lengths of parts as compiled code takes them: the words, and their address."""

    words: np.ndarray
    address: int


class _Ends(NamedTuple):
    """Arrays of a Gatherv or Scatterv.

    Attributes
    ----------
    part
        This rank's part; a temporary array if the part is elsewhere.
    whole
        The root's parts of all ranks; None on other ranks.
    place
        Where the part is; None if it is in `part`.
    """

    part: np.ndarray
    whole: Whole | None
    place: np.ndarray | None = None

    @property
    def spec(self) -> list[Any] | None:
        """All parts, as a specification with counts; None on ranks other than the root."""
        return None if self.whole is None else [self.whole.vector, list(self.whole.lengths.counts)]

    def unpack(self, collective: int) -> None:
        """Copy the result to its places."""
        if collective == GATHER and self.whole is not None:
            self.whole.unpack()
        if collective == SCATTER and self.place is not None:
            self.place[...] = self.part


class _Plain(NamedTuple):
    """Arrays to send from and to receive into, and counts of all ranks; `whole` is that of an Allgatherv."""

    send: Any
    recv: Any
    counts: tuple[int, ...]
    whole: Whole | None = None


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
        self._alone = table if scope.channel.size == 1 else 0
        self._known: dict[tuple[Sequence[int], int], _Parts] = {}
        self._in_use: _Parts | None = None  # by the last call, while others may be dropped
        self._size = scope.channel.size
        self._wholes = WholeVectors(self._size)

    def allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Make an Allgatherv."""
        status = call_uneven.run(self.table, ALLGATHER, sendbuf, recvbuf, None, None)
        if status != DONE:
            self._go_on_allgatherv(status, sendbuf, recvbuf)

    def _go_on_allgatherv(self, status: int, sendbuf: Any, recvbuf: Any) -> None:
        if status >= PACKED:
            with self._scope.channel.dispatch.unpacking():
                self._go_on_allgatherv(status - PACKED, sendbuf, recvbuf)
            return
        plain = None  # of which a part may be a temporary array: it has to live until the call has ended
        if status == OTHER:
            plain = self._plain_allgatherv(sendbuf, recvbuf)
            self._begin_packing(plain is not None and plain.whole is not None and plain.whole.apart is not None)
            status = self._call(ALLGATHER, plain)
        if status == OTHER:
            plain = None  # the general path takes what was given
        elif plain is not None:
            sendbuf, recvbuf = plain.send, [plain.recv, list(plain.counts)]
        if status != DONE:
            self._complete(status, CallArguments("allgatherv", sendbuf, recvbuf))
        if plain is not None and plain.whole is not None:
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

    def go_on_gatherv(self, status: int, sendbuf: Any, recvbuf: Any, root: int) -> None:
        """Go on with a Gatherv for which :func:`call_counted` has returned `status`, which is not its end."""
        self._go_on_rooted(GATHER, status, CallArguments("gatherv", sendbuf, recvbuf, MPI.SUM, root), sendbuf, recvbuf)

    def go_on_scatterv(self, status: int, sendbuf: Any, recvbuf: Any, root: int) -> None:
        """Go on with a Scatterv; see :meth:`go_on_gatherv`."""
        self._go_on_rooted(
            SCATTER, status, CallArguments("scatterv", sendbuf, recvbuf, MPI.SUM, root), recvbuf, sendbuf
        )

    def is_copied(self, sendbuf: Any, recvbuf: Any, algorithm: Any, root: Any = 0) -> bool:
        """Make a collective that moves data, if this is the only rank and its blocks are plain; else return False."""
        if not self._alone or algorithm is not None or type(root) is not int or root != 0:
            return False
        return copy_block.run(self._alone, sendbuf, recvbuf) == DONE

    def start_allgatherv(self, table: int, sendbuf: Any, recvbuf: Any) -> Request | None:
        """Start a plain Allgatherv with the table for nonblocking calls; None, having done nothing, if it is not."""
        quick = None
        if type(recvbuf) in (list, tuple):
            quick = start_quickly(
                self._scope, table, ALLGATHER, sendbuf, recvbuf, None, None, kept=(*recvbuf,), kernel=call_uneven_in
            )
        if quick is not None:
            return quick
        return self._start(table, ALLGATHER, self._plain_allgatherv(sendbuf, recvbuf), None)

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
        unpack = plain.whole.unpack if plain.whole is not None and plain.whole.apart is not None else None
        return start_quickly(
            self._scope, table, number + UNEVEN, plain.send, plain.recv, op, parts.address, kept=parts, unpack=unpack
        )

    def _plain_allgatherv(self, sendbuf: Any, recvbuf: Any) -> _Plain | None:
        send, whole = sent_array(sendbuf), self._wholes.find(recvbuf, written=True)
        if whole is None or not (type(send) is np.ndarray or (send is MPI.IN_PLACE and whole.apart is None)):
            return None
        if whole.apart is not None and np.may_share_memory(send, whole.apart):
            return None
        return _Plain(send, whole.vector, whole.lengths.counts, whole)

    def _plain_reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any) -> _Plain | None:
        if type(recvbuf) in (list, tuple) and key_of(recvbuf)[1] is None:
            return None  # it may have entries of another datatype, of which counts are then
        send, (recv, place) = sent_array(sendbuf, moved=False), received_array(recvbuf, moved=False)
        recvcounts = listed(recvcounts)
        if type(send) is not np.ndarray or type(recv) is not np.ndarray or place is not None:
            return None
        if not are_counts(recvcounts, self._size) or sum(recvcounts) != send.size:
            return None
        return _Plain(send, recv, tuple(recvcounts))

    def _go_on_rooted(self, number: int, status: int, made: CallArguments, part: Any, whole: Any) -> None:
        """Go on with a Gatherv or Scatterv.

        Parameters
        ----------
        part, whole
            The specifications of this rank's part, and of the root's parts of all ranks.
        """
        if status >= PACKED:
            with self._scope.channel.dispatch.unpacking():
                self._go_on_rooted(number, status - PACKED, made, part, whole)
            return
        ends = self._plain_ends(number, made.root, part, whole) if status == OTHER else None
        if ends is not None:
            part, whole = ends.part, ends.spec
            self._begin_packing(ends.place is not None or (ends.whole is not None and ends.whole.apart is not None))
            status = call_counted.run(self.table, number, part, whole, made.root)
        if status == OTHER:
            run(self._scope, *made)
            return
        kept = held(part), held(whole)
        if status == WAITING:
            status = on_shared_memory.go_on(self._scope.channel)
        if status != DONE:
            complete(self._scope, status, made)
        del kept
        if ends is not None:
            ends.unpack(number)

    def _begin_packing(self, packs: bool) -> None:
        """Let compiled code pack entries of derived datatypes from the next call on, if Python packs those of this."""
        if packs:
            self._scope.channel.dispatch.begin_packing(self._scope.channel.node is None)

    def _plain_ends(self, number: int, root: int, part_spec: Any, whole_spec: Any) -> _Ends | None:
        """Return the arrays of a Gatherv or Scatterv; None if they are not plain."""
        part, place = (sent_array(part_spec), None) if number == GATHER else received_array(part_spec)
        if type(part) is not np.ndarray:
            return None
        if self._scope.channel.rank != root:
            return _Ends(part, None, place)
        whole = self._wholes.find(whole_spec, written=number == GATHER)
        if whole is None or (whole.apart is not None and np.may_share_memory(part, whole.apart)):
            return None
        if number == SCATTER:
            whole.pack()
        return _Ends(part, whole, place)

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
        words = np.array([root, hash_of_offsets(offsets, root), *offsets, 0], np.int64)
        made = self._known[counts, root] = _Parts(words, words.ctypes.data)
        return made

    def _complete(self, status: int, made: CallArguments) -> None:
        """Complete a call that has begun, or make it on the general path."""
        if status == OTHER:
            run(self._scope, *made)
        elif status != DONE:
            complete(self._scope, status, made)
