"""Vector collectives on shared memory: the plain cases of Allgatherv, Gatherv, Scatterv and Reduce_scatter.

Where blocks follow each other in ordinary arrays such a call is one compiled call, after a broadcast of the root's
counts in Gatherv and Scatterv. Everything else takes the general path, which makes the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.plain_specs import are_counts, array_of, plain_blocks
from mpicoll.collectives.call_context import AnyOp, CallArguments, CallContext, ToldCounts
from mpicoll.collectives.execute import complete, go_on, run
from mpicoll.collectives.select import SHARED
from mpicoll.kernels.dispatch import FOR_SHARED, UNEVEN, call
from mpicoll.kernels.operation_words import (
    ALLGATHER,
    BCAST,
    DONE,
    GATHER,
    OTHER,
    REDUCE_SCATTER,
    SCATTER,
)
from mpicoll.kernels.reduce import DTYPES
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS, hash_of_offsets

_MAX_KNOWN = 256


class _Parts(NamedTuple):
    """Lengths of parts as compiled code takes them: the words, and their address."""

    words: np.ndarray
    address: int


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
        self._in_use: _Parts | None = None  # by the last call, while others may be dropped
        self._size = scope.channel.size

    def allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Make an Allgatherv."""
        send, blocks = array_of(sendbuf, sent=True), _blocks(recvbuf, self._size)
        status = OTHER
        if blocks is not None and (type(send) is np.ndarray or send is MPI.IN_PLACE):
            whole, counts = blocks
            status = self._call(ALLGATHER, send, whole, counts)
        self._complete(status, CallArguments("allgatherv", sendbuf, recvbuf))

    def reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: AnyOp) -> None:
        """Make a Reduce_scatter, whose counts every rank gives."""
        send, recv, status = array_of(sendbuf, sent=True), array_of(recvbuf), OTHER
        if type(send) is np.ndarray and type(recv) is np.ndarray and are_counts(recvcounts, self._size):
            status = self._call(REDUCE_SCATTER, send, recv, tuple(recvcounts), op)
        self._complete(status, CallArguments("reduce_scatter", sendbuf, recvbuf, op, recvcounts=recvcounts))

    def gatherv(self, sendbuf: Any, recvbuf: Any, root: int) -> None:
        """Make a Gatherv, in which the root tells the counts."""
        self._rooted(GATHER, "gatherv", sendbuf, recvbuf, root, sendbuf, recvbuf)

    def scatterv(self, sendbuf: Any, recvbuf: Any, root: int) -> None:
        """Make a Scatterv, in which the root tells the counts."""
        self._rooted(SCATTER, "scatterv", sendbuf, recvbuf, root, recvbuf, sendbuf)

    def _rooted(
        self, number: int, collective: str, sendbuf: Any, recvbuf: Any, root: int, part_spec: Any, whole_spec: Any
    ) -> None:
        scope, at_root = self._scope, self._scope.channel.rank == root
        made = CallArguments(collective, sendbuf, recvbuf, MPI.SUM, root)
        part, whole = array_of(part_spec, sent=number == GATHER), None
        words = np.zeros(self._size + 1, np.int64)
        if at_root:
            blocks = _blocks(whole_spec, self._size)
            if blocks is None or blocks[0].dtype not in DTYPE_NUMBERS:
                self._complete(OTHER, made)
                return
            whole, counts = blocks
            words[:-1], words[-1] = counts, DTYPE_NUMBERS[whole.dtype]
        if type(part) is not np.ndarray:
            self._complete(OTHER, made)
            return
        # Always on shared memory, as on the general path: a tuning table may say otherwise for broadcasts.
        table = self.table + FOR_SHARED
        status = call.run(table, BCAST, 0, id(words), 0, root)
        if status != DONE:
            go_on(scope, table, status, SHARED, "bcast", None, words, MPI.SUM, root)
        *counts, dtype = words.tolist()
        send, recv = (part, whole) if number == GATHER else (whole, part)
        status = self._call(number, send, recv, tuple(counts), root=root)
        self._complete(status, made._replace(recvcounts=ToldCounts(counts, DTYPES[dtype])))

    def _call(
        self, number: int, send: Any, recv: Any, counts: Sequence[int], op: AnyOp = MPI.SUM, root: int = 0
    ) -> int:
        """Make the compiled call; return its status."""
        parts = self._in_use = self._known.get((counts, root)) or self._parts(counts, root)
        return call.run(self.table, number + UNEVEN, id(send), id(recv), id(op), parts.address)

    def _parts(self, counts: Sequence[int], root: int) -> _Parts:
        """Return the words for counts; they are kept, since a call that is on its way uses them."""
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        offsets = np.array([0, *accumulate(counts)], np.int64)
        distinction = hash_of_offsets(offsets, root) if len(set(counts)) > 1 else root
        words = np.array([root, distinction, *offsets], np.int64)
        made = self._known[counts, root] = _Parts(words, words.ctypes.data)
        return made

    def _complete(self, status: int, made: CallArguments) -> None:
        if status == OTHER:
            run(self._scope, *made)
        elif status != DONE:
            complete(self._scope, status, made)


def _blocks(spec: Any, size: int) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """Return array and counts of blocks that make up, in order, the beginning of an ordinary array; None for others."""
    blocks = plain_blocks(spec, size)
    if blocks is None or blocks.displs != tuple([0, *accumulate(blocks.counts)][:-1]):
        return None
    array, total = blocks.array, sum(blocks.counts)
    if not 0 < total <= array.size:
        return None
    return (array if total == array.size else array.reshape(-1)[:total]), blocks.counts
