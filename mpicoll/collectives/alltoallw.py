"""Alltoallw, and Alltoallv on a node: blocks of any length for each pair of ranks.

On a node blocks are copied between the layouts of sender and receiver, without packing where the sender's array lies in
a memory segment (:mod:`mpicoll.kernels.block_exchange`). Elsewhere they are packed and travel as bytes by Alltoallv.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.typed_blocks import (
    Descriptions,
    TypedBlocks,
    have_bytes_in_common,
    is_same_memory,
    ranges_meet,
)
from mpicoll.collectives import select
from mpicoll.collectives.block_layouts import copy_own, layouts_of, parts_of
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.exchange_memory import memory_of
from mpicoll.collectives.execute import go_on, run
from mpicoll.collectives.library_alltoallw import operation
from mpicoll.communicator.call_lock import BUSY
from mpicoll.errors import MismatchError
from mpicoll.kernels import block_exchange as kernels
from mpicoll.kernels.dispatch import call
from mpicoll.kernels.operation_words import ALLREDUCE, ALLTOALL, AT_ONCE_NBYTES, BARRIER, DONE, OTHER
from mpicoll.kernels.short_exchange import NOT_READ, TAKEN, exchange, exchange_vectors
from mpicoll.kernels.typed_specs import exchange_typed
from mpicoll.messages.call_agreement import refuse, settle
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS

_IN_MEMORY = (select.AUTO, *select.ON_NODE)
_IS_MPICH = MPI.get_vendor()[0] == "MPICH"
"""Open MPI 5.0.11 leaves out the displacement of the only rank's block."""
_MARKS = {"Alltoallw": kernels.ALLTOALLW, "Alltoallv": kernels.ALLTOALLV}


class BlockExchange:
    """Alltoallw on one communicator.

    Parameters
    ----------
    table
        Address of the table for plain calls, 0 if they are made on the general path.
    """

    def __init__(self, scope: CallContext, table: int) -> None:
        self._scope, self._table = scope, table
        self._memory = memory_of(scope.channel.node)
        self._by_default = scope.algorithm in _IN_MEMORY
        self._descriptions = Descriptions(scope.channel.size)

    @property
    def on_node(self) -> bool:
        """True if blocks are exchanged in shared memory; the same on all ranks."""
        return self._memory.on_node

    def takes(self, algorithm: str | None) -> bool:
        """Return whether Alltoallv with this `algorithm` is an exchange in shared memory."""
        return self._memory.on_node and (self._by_default if algorithm is None else algorithm in _IN_MEMORY)

    def _is_ready(self, title: str) -> bool:
        """Return whether blocks are exchanged in shared memory; collective when it is first asked."""
        memory, channel = self._memory, self._scope.channel
        if memory.on_node and not memory.ready:
            assert channel.node is not None
            try:
                if not memory.address:
                    memory.make(channel.node)
            except Exception as error:
                refuse(channel, title, error, self._scope.timeout)
            memory.wrong[0] = memory.is_shared(channel.node)
            self._plain(ALLREDUCE, "allreduce", MPI.IN_PLACE, memory.wrong, MPI.MIN)
            memory.on_node, memory.ready = bool(memory.wrong[0]), True
        return memory.on_node

    def alltoallw(self, sendbuf: Any, recvbuf: Any, algorithm: str | None) -> None:
        """Give each rank its block from every rank; see :meth:`mpicoll.Intracomm.Alltoallw`."""
        if self._memory.ready and self._table and algorithm is None and self._exchange_known(sendbuf, recvbuf):
            return
        scope = self._scope
        if scope.channel.size == 1 and algorithm is None and self._by_library_alone(sendbuf, recvbuf):
            return
        if scope.channel.refusal is not None:
            settle(scope.channel, scope.timeout)
        try:
            shared = algorithm is None and self.on_node and self._table
            name = select.SHARED if shared else self._algorithm(algorithm)
            if name == select.NATIVE:
                self._native(sendbuf, recvbuf)
                return
            recv = self._descriptions.blocks(recvbuf, "recvbuf", writable=True)
            send = recv if in_place(sendbuf) else self._descriptions.blocks(sendbuf, "sendbuf", writable=False)
            self._check_own(send, recv)
        except Exception as error:
            refuse(scope.channel, "alltoallw", error, scope.timeout)
        source = recv if is_same_memory(send, recv) else send
        if scope.channel.size == 1:
            scope.channel.ensure_usable()
            copy_own(source, recv)
        elif name in select.ON_NODE and self._is_ready("alltoallw"):
            self._note(sendbuf, recvbuf, send, recv)
            self._on_shared_memory("Alltoallw", source, recv)
        else:
            self._by_messages(source, recv, None if name in select.ON_NODE else algorithm)

    def _by_library_alone(self, sendbuf: Any, recvbuf: Any) -> bool:
        """Let MPICH copy the block of a single rank, which takes it a microsecond; False if it refuses."""
        if not _IS_MPICH or self._scope.algorithm != select.AUTO:
            return False
        self._scope.channel.ensure_usable()
        try:
            MPI.Intracomm.Alltoallw(self._scope.channel.comm, sendbuf, recvbuf)
        except Exception:  # wrong arguments, which get an error of ours, or the same memory twice
            return False
        return True

    def alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Give each rank its block from every rank, on a node; see :meth:`mpicoll.Intracomm.Alltoallv`."""
        if self._memory.ready and self._table and self._exchange_quickly(sendbuf, recvbuf):
            return
        scope = self._scope
        if scope.channel.refusal is not None:
            settle(scope.channel, scope.timeout)
        try:
            recv = self._descriptions.blocks_of_elements(recvbuf, "recvbuf", writable=True)
            send = recv
            if not in_place(sendbuf):
                send = self._descriptions.blocks_of_elements(sendbuf, "sendbuf", writable=False)
            dtype = _common_type(send, recv)
            self._check_own(send, recv)
        except Exception as error:
            refuse(scope.channel, "alltoallv", error, scope.timeout)
        if not self._is_ready("alltoallv"):
            run(scope, "alltoallv", sendbuf, recvbuf, MPI.SUM, 0, None)
            return
        self._on_shared_memory("Alltoallv", send, recv, dtype)
        if recv.buffer is not None:
            recv.buffer.give_back()

    def _algorithm(self, algorithm: str | None) -> str:
        scope = self._scope
        return select.resolve("alltoall", algorithm, scope.algorithm, 0, scope.means)

    def _native(self, sendbuf: Any, recvbuf: Any) -> None:
        with self._scope.channel.alone:
            operation(self._scope, sendbuf, recvbuf, chosen=True).run(self._scope.timeout)

    def _check_own(self, send: TypedBlocks, recv: TypedBlocks) -> None:
        rank = self._scope.channel.rank
        sent, expected = send.description.nbytes[rank], recv.description.nbytes[rank]
        if sent != expected:
            raise ValueError(f"sendbuf has {sent} bytes for the own rank, but recvbuf {expected}")

    # On a node --------------------------------------------------------------------------------------------------------

    def _on_shared_memory(
        self, title: str, send: TypedBlocks, recv: TypedBlocks, dtype: np.dtype | None = None
    ) -> None:
        """Exchange blocks; `dtype` is the type of all elements if they have one.

        Raises
        ------
        RuntimeError
            If another thread is exchanging blocks on this communicator.
        """
        if not self._memory.alone.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            self._exchange(title, send, recv, dtype)
        finally:
            self._memory.alone.release()

    def _exchange_quickly(self, sendbuf: Any, recvbuf: Any) -> bool:
        """Make an Alltoallv of short blocks whose specifications compiled code reads; False if nothing has happened."""
        return self._in_one_call("Alltoallv", exchange_vectors.run, sendbuf, recvbuf)

    def _exchange_known(self, sendbuf: Any, recvbuf: Any) -> bool:
        """Make an Alltoallw of short blocks whose specifications are known; False if nothing has happened."""
        specs = self._memory.specs
        done = self._in_one_call("Alltoallw", exchange_typed.run, sendbuf, recvbuf, specs.address)
        if done:
            specs.used()
        return done

    def _in_one_call(self, title: str, kernel: Callable[..., int], *specs: Any) -> bool:
        memory = self._memory
        if not memory.alone.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            status = kernel(memory.address, self._table, *specs, memory.offers, memory.arrived)
            if status == NOT_READ:
                return False
            if status != TAKEN:
                rounds = self._taken(status)
                if rounds:
                    self._take_rounds(title, rounds)
            return True
        finally:
            memory.alone.release()

    def _note(self, sendbuf: Any, recvbuf: Any, send: TypedBlocks, recv: TypedBlocks) -> None:
        """Let compiled code know specifications, which may come again."""
        self._memory.specs.note(recvbuf, recv.description)
        if send is not recv:
            self._memory.specs.note(sendbuf, send.description)

    def _exchange(self, title: str, send: TypedBlocks, recv: TypedBlocks, dtype: np.dtype | None) -> None:
        words, inside = self._memory.words, send is recv
        try:
            target, unpacked = layouts_of(recv)
            source, packed = (target, unpacked) if inside else layouts_of(send)
            for rank, memory in packed.items():
                send.entries(rank, memory).pack()
        except Exception as error:
            refuse(self._scope.channel, title.lower(), error, self._scope.timeout)
        words[kernels.SENDS], words[kernels.SEND_BASE] = source.address, send.address
        words[kernels.RECVS], words[kernels.RECV_BASE] = target.address, recv.address
        words[kernels.MAY_DIRECT] = not inside and not ranges_meet(send, recv)
        words[kernels.MARK] = _MARKS[title]
        words[kernels.TYPE] = 0 if dtype is None else 1 + DTYPE_NUMBERS.get(dtype, len(DTYPE_NUMBERS))
        rounds = self._first_round(send)
        if rounds:
            self._take_rounds(title, rounds)
        for rank, memory in unpacked.items():
            recv.entries(rank, memory).unpack()

    def _first_round(self, send: TypedBlocks) -> int:
        """Offer own blocks and take those of the others; return what :func:`kernels.take` does."""
        memory = self._memory
        address, offers, arrived = memory.address, memory.offers, memory.arrived
        if self._table and sum(send.description.nbytes) <= AT_ONCE_NBYTES:
            return self._taken(exchange.run(address, self._table, offers, arrived))
        kernels.offer.run(address)
        status = call.run(self._table, ALLTOALL, offers, arrived, None, 0) if self._table else OTHER
        return self._taken(status)

    def _taken(self, status: int) -> int:
        """Return what :func:`kernels.take` does, after an exchange, or an Alltoall of the records, with this status."""
        if status >= TAKEN - 1:
            return status - TAKEN
        if status != DONE:
            go_on(self._scope, self._table, status, None, "alltoall", self._memory.offers, self._memory.arrived)
        return int(kernels.take.run(self._memory.address))

    def _take_rounds(self, title: str, rounds: int) -> None:
        """Take what is left of long blocks, and wait until all ranks have theirs; see :func:`kernels.take`."""
        memory, wrong = self._memory, None
        if rounds < 0:
            wrong, rounds = self._found_wrong(title), memory.words[kernels.ROUNDS]
            if rounds <= 0:
                self._scope.channel.refuse(wrong)  # the others hear of it in their next call
                raise wrong
        for number in range(1, rounds):
            memory.words[kernels.ROUND] = number
            kernels.offer_round.run(memory.address)
            self._plain(BARRIER, "barrier", None, None)
            if kernels.take_round.run(memory.address) < 0:
                wrong = wrong or self._found_wrong(title)
        memory.wrong[0] = 0 if wrong is None else 1 + self._scope.channel.rank
        self._plain(ALLREDUCE, "allreduce", MPI.IN_PLACE, memory.wrong, MPI.MAX)
        if wrong is not None:
            raise wrong
        if memory.wrong[0]:
            rank = int(memory.wrong[0]) - 1
            raise MismatchError(f"{title}: rank {rank} got a block of another length, or type, than it expects")

    def _found_wrong(self, title: str) -> MismatchError:
        """Return the error for a block that cannot be used here."""
        words = self._memory.words
        rank, nbytes = words[kernels.WRONG_RANK], words[kernels.WRONG_NBYTES]
        if words[kernels.ROUNDS] < 0:
            return MismatchError(f"this call differs between ranks: rank {rank} did not call {title}")
        if nbytes == kernels.OF_ANOTHER_TYPE:
            return MismatchError(f"{title}: rank {rank} sends elements of another type than this rank expects")
        if nbytes == kernels.DAMAGED:
            return MismatchError(f"{title}: the record of rank {rank} is damaged")
        expected = words[kernels.EXPECTED_NBYTES]
        return MismatchError(f"{title}: rank {rank} sends {nbytes} bytes, but this rank expects {expected} from it")

    def _plain(self, number: int, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Make a collective on whole arrays, in one compiled call if it can."""
        status = OTHER
        if self._table:
            status = call.run(self._table, number, sendbuf, recvbuf, op, 0)
        if status != DONE:
            go_on(self._scope, self._table, status, None, collective, sendbuf, recvbuf, op)

    # Elsewhere --------------------------------------------------------------------------------------------------------

    def _by_messages(self, send: TypedBlocks, recv: TypedBlocks, algorithm: str | None) -> None:
        """Pack blocks, send them as bytes by Alltoallv, and unpack them."""
        counts, expected = list(send.description.nbytes), list(recv.description.nbytes)
        try:
            out, into = np.empty(sum(counts), np.uint8), np.empty(sum(expected), np.uint8)
            for rank, memory in parts_of(out, counts):
                send.entries(rank, memory).pack()
        except Exception as error:
            refuse(self._scope.channel, "alltoallw", error, self._scope.timeout)
        run(self._scope, "alltoallv", [out, counts], [into, expected], MPI.SUM, 0, algorithm)
        for rank, memory in parts_of(into, expected):
            recv.entries(rank, memory).unpack()


def _common_type(send: TypedBlocks, recv: TypedBlocks) -> np.dtype:
    """Return the type of all elements.

    Raises
    ------
    ValueError
        If there are two, or if the buffers overlap.
    """
    sent, got = sum(send.description.nbytes), sum(recv.description.nbytes)
    if send is not recv and sent and got:
        if send.array.dtype != recv.array.dtype:
            raise ValueError(f"sendbuf has elements of {send.array.dtype}, but recvbuf of {recv.array.dtype}")
        if ranges_meet(send, recv) and have_bytes_in_common(send, recv):
            raise ValueError("sendbuf and recvbuf overlap in memory")
    return (recv if got else send).array.dtype
