"""Exchanges of records, and of the objects that are too long for them, by the collectives on arrays.

Every rank reads in the records who has a long object, so that all take the same way from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.collectives.alltoallw import BlockExchange
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.execute import go_on, start
from mpicoll.errors import CommunicatorBusy, MismatchError, MpicollError, RemoteError, named_ranks
from mpicoll.kernels.dispatch import call
from mpicoll.kernels.object_words import ERROR, LONG_SOMEWHERE
from mpicoll.kernels.operation_words import COLLECTIVES, DONE, OTHER
from mpicoll.messages.call_agreement import announced
from mpicoll.objects import records, swapped_objects
from mpicoll.objects.compiled_records import ASIDE, PENDING, CompiledRecords, known_layout
from mpicoll.objects.encoding import Payload
from mpicoll.objects.folding import OP_NAMES
from mpicoll.objects.long_objects import (
    EMPTY,
    OWN_MEMORY_NBYTES,
    packed,
    padded,
    restored,
    room_for,
    rounded,
    taken,
    to_send,
)
from mpicoll.objects.records import NBYTES, Description, Workspace

_making = threading.Lock()
_NUMBERS = {name: number for number, name in enumerate(COLLECTIVES)}
_EQUAL_NBYTES, _OVERLAPPED_NBYTES = 64 << 10, 4 << 20


Stage = tuple[str, Any, Any, int]
"""An exchange of a compiled collective: the collective on arrays, what is sent and received, and the root."""
Stages = Callable[[CompiledRecords], Sequence[Stage]]
"""Returns the exchanges of a collective in their order, up to the one that goes on."""


class Exchange:
    """Exchanges of objects on one communicator.

    Parameters
    ----------
    table
        Address of the table for plain calls, 0 if they are made on the general path.
    blocks
        Exchange of blocks on the same communicator.

    Attributes
    ----------
    words
        Address of the words of the compiled collectives, 0 before the first call, and where there are none.
    """

    def __init__(self, scope: CallContext, table: int, blocks: BlockExchange) -> None:
        self.scope, self.table, self._blocks = scope, table, blocks
        self.rank, self.size = scope.channel.rank, scope.channel.size
        self.workspaces: list[Workspace] = []
        self.words = 0
        self._compiled: CompiledRecords | None = None

    @property
    def compiled(self) -> CompiledRecords:
        """Memory of the compiled collectives, after the first call of one."""
        assert self._compiled is not None
        return self._compiled

    def begin(self, kernel: Any, *arguments: Any) -> Any:
        """Make the first call of a compiled collective; return ASIDE where there is none."""
        if self.size == 1 or not self.table or not known_layout():
            return ASIDE
        with _making:
            if self._compiled is None:
                self._compiled = CompiledRecords(self.rank, self.size, self.table)
            self.words = self._compiled.address
        return kernel.run(self.words, *arguments)

    def complete(self, kernel: Any, stages: Stages, arguments: tuple[Any, ...], op: MPI.Op = MPI.SUM) -> Any:
        """Complete the exchanges that a compiled collective has begun; return what it returns then."""
        found: Any = PENDING
        try:
            while found is PENDING:
                status = self.compiled.status
                collective, sendbuf, recvbuf, root = stages(self.compiled)[self.compiled.stage]
                go_on(self.scope, self.table, status, None, collective, sendbuf, recvbuf, op, root)
                found = kernel.run(self.words, *arguments, None)
        except CommunicatorBusy:
            self.compiled.release()  # the other call uses none of this memory
            raise
        except BaseException:
            self.abandon()
            raise
        return found

    def abandon(self) -> None:
        """Leave the memory of compiled collectives to the next call, unless an operation may still use it."""
        channel = self.scope.channel
        if channel.broken is None and not channel.dispatch.is_at_work:
            self.compiled.release()

    def attempted(self, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Exception | None]:
        """Return the objects of an exchange, or None and why they cannot be read, which the other ranks have to hear.

        A failure of the exchange itself, of which the others know, is raised. A KeyboardInterrupt while an object is
        read is told to them at once, and raised.
        """
        channel = self.scope.channel
        try:
            return function(*arguments), None
        except MpicollError:
            raise
        except BaseException as error:
            if channel.broken is not None or channel.refusal is not None or channel.dispatch.is_at_work:
                raise  # of a signal handler, for instance, in the wait
            if isinstance(error, Exception):
                return None, error
            channel.refuse(error)
            raise

    def workspace(self) -> Workspace:
        """Return memory for a call, to be put back; a thread or a callback that makes another call takes its own."""
        try:
            return self.workspaces.pop()
        except IndexError:
            return Workspace(self.size)

    def plain(self, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """Make a collective on whole arrays, in one compiled call if it can."""
        number = _NUMBERS[collective]
        status = call.run(self.table, number, sendbuf, recvbuf, op, root) if self.table else OTHER
        if status != DONE:
            go_on(self.scope, self.table, status, None, collective, sendbuf, recvbuf, op, root)

    def run(
        self, collective: str, sendbuf: Any = None, recvbuf: Any = None, op: MPI.Op = MPI.SUM, root: int = 0
    ) -> None:
        """Make a collective on arrays."""
        go_on(self.scope, 0, OTHER, None, collective, sendbuf, recvbuf, op, root)

    def own_record(self) -> bytes:
        """Return the record that a compiled collective has left to be read."""
        return self.compiled.taken(self.compiled.own)

    def record_of_each(self) -> bytes:
        """Return the records of all ranks that a compiled collective has left to be read."""
        return self.compiled.taken(self.compiled.all)

    def all_records(self, call_word: int, payload: Payload) -> list[Description]:
        """Return the records of all ranks.

        Raises
        ------
        MismatchError
            On every rank, if they make different calls.
        RemoteError
            If another rank has no object.
        """
        work = self.workspace()
        records.write(work.memory, 0, call_word, payload)
        self.plain("allgather", work.own, work.all)
        data = work.all.tobytes()
        self.workspaces.append(work)
        return self.checked(data, call_word)

    def checked(self, data: bytes, call_word: int) -> list[Description]:
        """Read the records of all ranks and compare their calls; see :meth:`all_records`."""
        found = [records.read(data, begin) for begin in range(0, len(data), NBYTES)]
        if any(each.call != call_word for each in found):
            self._raise_difference(found)
        for rank, each in enumerate(found):
            if each.kind == ERROR and rank != self.rank:
                raise remote_error(rank, call_word, each)
        return found

    def _raise_difference(self, found: Sequence[Description]) -> None:
        calls: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            calls.setdefault(records.describe(each.call, OP_NAMES), []).append(rank)
        parts = [f"{named_ranks(ranks)} called {text}" for text, ranks in calls.items()]
        raise MismatchError(f"this call differs between ranks: {'; '.join(parts)}")

    def from_root(self, collective: str, call_word: int, root: int, payloads: Sequence[Payload] | None) -> Description:
        """Return the record that the root sends in a broadcast, or for this rank in a scatter; it has `payloads`."""
        work = self.workspace()
        sent = None
        if collective == "scatter" and payloads is not None:
            self._write_all(work.to_all().data, call_word, payloads)
            sent = work.to_all()
        elif payloads is not None:
            records.write(work.memory, 0, call_word, payloads[0])
        self.plain(collective, sent, work.own, root=root)
        data = work.own.tobytes()
        self.workspaces.append(work)
        return self.read_from_root(data, call_word, root)

    def read_from_root(self, data: bytes, call_word: int, root: int) -> Description:
        """Read the record that the root has sent."""
        found = records.read(data, 0)
        if found.call != call_word:
            texts = [records.describe(each, OP_NAMES) for each in (call_word, found.call)]
            raise MismatchError(f"this call differs between ranks: {texts[0]} here, {texts[1]} on rank {root}")
        if found.kind == ERROR and self.rank != root:
            raise remote_error(root, call_word, found)
        return found

    def swap_records(self, call_word: int, payloads: Sequence[Payload], *, is_equal: bool = True) -> list[Description]:
        """Return the records of all ranks for this one; see :meth:`all_records`.

        Parameters
        ----------
        is_equal
            Whether long objects follow in parts of equal length if they are short enough.
        """
        work = self.workspace()
        self._write_all(work.to_all().data, call_word, payloads, is_equal=is_equal)
        self.plain("alltoall", work.to_all(), work.all)
        data = work.all.tobytes()
        self.workspaces.append(work)
        return self.checked(data, call_word)

    def _write_all(
        self, memory: memoryview, call_word: int, payloads: Sequence[Payload], *, is_equal: bool = True
    ) -> None:
        """Write a record for each rank."""
        longest = max((each.nbytes for each in payloads if records.is_long(each)), default=0)
        flags = LONG_SOMEWHERE if longest else 0
        room = (longest - 1).bit_length() if is_equal and 0 < longest <= _EQUAL_NBYTES else 0
        for rank, payload in enumerate(payloads):
            records.write(memory, rank * NBYTES, call_word, payload, flags, room)

    def gather_long(self, payload: Payload, found: Sequence[Description], root: int | None = None) -> list[Any]:
        """Return the objects of all ranks, of which some are long; to `root` only if there is one, else to all."""
        counts = padded([room_for(each) for each in found])
        equal, here = len(set(counts)) == 1, root is None or root == self.rank
        with announced(self.scope.channel):
            memory = np.empty(sum(counts), np.uint8) if here else None
            sent = self._sent(payload, memory, counts)
        if root is not None and equal:
            self.plain("gather", sent, memory, root=root)
        elif root is not None:
            self.run("gatherv", sent, None if memory is None else [memory, counts], root=root)
        elif equal:
            self.plain("allgather", sent, memory)
        else:
            self.run("allgatherv", sent, [memory, counts])
        return [] if memory is None else taken(found, memory, counts)

    def _sent(self, payload: Payload, memory: np.ndarray | None, counts: Sequence[int]) -> Any:
        """Return what this rank sends to a gather: its part of the result where that is long."""
        own, begin = counts[self.rank], sum(counts[: self.rank])
        in_place = memory is not None and own > OWN_MEMORY_NBYTES
        sent = memory[begin : begin + own] if in_place and memory is not None else to_send(own)
        if records.is_long(payload):
            payload.write(sent.data)
        return MPI.IN_PLACE if in_place else sent

    def bcast_long(self, payload: Payload | None, found: Description, root: int) -> Any:
        """Return the root's object, which is long."""
        last = found.in_place_nbytes
        first = rounded(found.nbytes) if last == 0 else found.nbytes - last
        with announced(self.scope.channel):
            memory = np.empty(first + last, np.uint8)
            if payload is not None:
                payload.write(memory[: found.nbytes - last].data)
        if first:  # some of the last buffer may be sent, too: a call of a new length takes longer once
            self.plain("bcast", None, memory[: rounded(first)], root=root)
        if last:
            self._bcast_in_place(payload, memory[first:], root)
        return restored(found, memory)

    def _bcast_in_place(self, payload: Payload | None, memory: np.ndarray, root: int) -> None:
        """Broadcast the last buffer of an object from where it lies; the root makes its copy, meanwhile if long."""
        sent, node = memory if payload is None else np.frombuffer(payload.parts[-1], np.uint8), self.scope.channel.node
        request = None
        if sent.size >= _OVERLAPPED_NBYTES and node is not None and not node.oversubscribed:
            request = start(self.scope, "bcast", None, sent, MPI.SUM, root, None)
        else:
            self.plain("bcast", None, sent, root=root)
        if payload is not None:
            np.copyto(memory, sent)
        if request is not None:
            request.wait()

    def scatter_long(self, payloads: Sequence[Payload], found: Description, root: int) -> Any:
        """Return this rank's object from the root, where some are long."""
        each = found.room
        if not each and self._blocks.makes("scatter"):
            with announced(self.scope.channel):
                sent, own = swapped_objects.parts(payloads, self.size), swapped_objects.memory_for(found)
            self._blocks.exchange_memory("scatter", sent, [own if rank == root else EMPTY for rank in range(self.size)])
            return restored(found, own)
        with announced(self.scope.channel):
            own = np.empty(each or room_for(found), np.uint8)
            memory, counts = packed(payloads, each) if payloads else (None, [])
        if each:
            self.plain("scatter", memory, own, root=root)
        else:
            self.run("scatterv", [memory, counts] if payloads else None, own, root=root)
        return restored(found, own)

    def swap_long(self, payloads: Sequence[Payload], found: Sequence[Description]) -> list[Any]:
        """Return this rank's objects from all ranks, where some are long."""
        large = any(each.flags & LONG_SOMEWHERE and not each.room for each in found)
        if large and self._blocks.makes("alltoall"):
            with announced(self.scope.channel):
                lent, received = swapped_objects.parts(payloads, self.size), [*map(swapped_objects.memory_for, found)]
            self._blocks.exchange_memory("alltoall", lent, received)
            return [restored(other, part) for other, part in zip(found, received, strict=True)]
        each = 0 if large else max(each.room for each in found)
        counts = [each or room_for(other) for other in found]
        with announced(self.scope.channel):
            (sent, sent_counts), memory = packed(payloads, each), np.empty(sum(counts), np.uint8)
        if each:
            self.plain("alltoall", sent, memory)
        else:
            self.run("alltoallv", [sent, sent_counts], [memory, counts])
        return taken(found, memory, counts)


def remote_error(rank: int, call_word: int, found: Description) -> RemoteError:
    """Return the exception for a record that has an error in place of an object."""
    text = (found.data or b"").decode("utf-8", "replace")
    return RemoteError(f"{records.describe(call_word, OP_NAMES)}: rank {rank} could not take part: {text}")
