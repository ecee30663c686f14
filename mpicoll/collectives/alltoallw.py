"""Alltoallw, and Alltoallv on a node: blocks of any length for each pair of ranks.

On a node blocks are copied between the layouts of sender and receiver (:mod:`mpicoll.kernels.block_exchange`): straight
from a memory segment, from other memory through stages or between the processes, as the faster way turns out to be
(:mod:`mpicoll.kernels.exchange_methods`). Elsewhere they are packed and travel as bytes by Alltoallv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.block_pairs import common_type, is_same_memory, ranges_meet
from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.held_memory import held
from mpicoll.buffers.typed_blocks import Descriptions, TypedBlocks
from mpicoll.collectives import select
from mpicoll.collectives.block_agreement import compare_blocks
from mpicoll.collectives.block_layouts import copy_own, layouts_of, rows_of
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.exchange_memory import memory_of
from mpicoll.collectives.execute import go_on, run
from mpicoll.collectives.library_alltoallw import copied_by_library, run_by_library
from mpicoll.collectives.packed_alltoallw import by_messages
from mpicoll.errors import CommunicatorBusy, MismatchError, MpicollError
from mpicoll.kernels import exchange_words as words
from mpicoll.kernels.block_exchange import take, take_round
from mpicoll.kernels.block_offers import offer_round
from mpicoll.kernels.dispatch import call
from mpicoll.kernels.exchange_calls import ENDING, NOT_READ, TAKEN, exchange, exchange_vectors
from mpicoll.kernels.exchange_methods import begin_exchange, end_exchange
from mpicoll.kernels.operation_words import ALLREDUCE, BARRIER, DONE, OTHER
from mpicoll.kernels.typed_specs import exchange_typed
from mpicoll.messages.call_agreement import refuse, settle
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS

_IN_MEMORY = (select.AUTO, *select.ON_NODE)
_MARKS = {"Alltoallw": words.ALLTOALLW, "Alltoallv": words.ALLTOALLV}


class _OutOfReach(MismatchError):
    """Error for a block that the system does not copy between processes."""


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

    def makes(self, title: str) -> bool:
        """Return whether blocks are exchanged in shared memory by default; collective when it is first asked."""
        return self.takes(None) and self._is_ready(title)

    def exchange_memory(self, title: str, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> None:
        """Copy contiguous memory of each rank to that of each other one, as long, where blocks are exchanged so.

        Parameters
        ----------
        title
            Name of the collective, for errors.
        sent, received
            One for each rank, uint8.
        """
        self._alone(self._exchange_rows, title, rows_of(sent, received))

    def _exchange_rows(self, title: str, rows: np.ndarray) -> None:
        """Exchange blocks with these layouts."""
        memory = self._memory.words
        memory[words.SENDS], memory[words.RECVS] = rows[0].ctypes.data, rows[1].ctypes.data
        memory[words.SEND_BASE] = memory[words.RECV_BASE] = memory[words.TYPE] = 0
        memory[words.MAY_DIRECT], memory[words.MARK] = 1, words.ALLTOALLV
        memory[words.ASKED] = self._asked(None)
        self._begin(title)

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
            memory.error[0] = memory.is_shared(channel.node)
            self._plain(ALLREDUCE, "allreduce", MPI.IN_PLACE, memory.error, MPI.MIN)
            memory.on_node, memory.ready = bool(memory.error[0]), True
        return memory.on_node

    def alltoallw(self, sendbuf: Any, recvbuf: Any, algorithm: str | None) -> None:
        """Give each rank its block from every rank; see :meth:`mpicoll.Intracomm.Alltoallw`."""
        if self._memory.ready and self._table and algorithm is None and self._exchange_known(sendbuf, recvbuf):
            return
        scope = self._scope
        if scope.channel.size == 1 and algorithm is None and copied_by_library(scope, sendbuf, recvbuf):
            return
        if scope.channel.refusal is not None:
            settle(scope.channel, scope.timeout)
        try:
            shared = algorithm is None and self.on_node and self._table
            name = select.SHARED if shared else select.resolve("alltoall", algorithm, scope.algorithm, 0, scope.means)
            if name == select.NATIVE:
                run_by_library(scope, sendbuf, recvbuf)
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
            self._memory.specs.note(recvbuf, recv.description)
            if send is not recv:
                self._memory.specs.note(sendbuf, send.description)
            self._alone(self._exchange, "Alltoallw", algorithm, source, recv)
        else:
            by_messages(scope, source, recv, None if name in select.ON_NODE else algorithm)

    def alltoallv(self, sendbuf: Any, recvbuf: Any, algorithm: str | None) -> None:
        """Give each rank its block from every rank, on a node; see :meth:`mpicoll.Intracomm.Alltoallv`."""
        if self._memory.ready and self._table and algorithm is None and self._exchange_quickly(sendbuf, recvbuf):
            return
        scope = self._scope
        if scope.channel.refusal is not None:
            settle(scope.channel, scope.timeout)
        try:
            recv = self._descriptions.blocks_of_elements(recvbuf, "recvbuf", writable=True)
            send = recv
            if not in_place(sendbuf):
                send = self._descriptions.blocks_of_elements(sendbuf, "sendbuf", writable=False)
            dtype = common_type(send, recv)
            self._check_own(send, recv)
        except Exception as error:
            refuse(scope.channel, "alltoallv", error, scope.timeout)
        if not self._is_ready("alltoallv"):
            run(scope, "alltoallv", sendbuf, recvbuf, MPI.SUM, 0, None)
            return
        self._alone(self._exchange, "Alltoallv", algorithm, send, recv, dtype)
        if recv.buffer is not None:
            recv.buffer.give_back()

    def _check_own(self, send: TypedBlocks, recv: TypedBlocks) -> None:
        rank = self._scope.channel.rank
        sent, expected = send.description.nbytes[rank], recv.description.nbytes[rank]
        if sent != expected:
            raise ValueError(f"sendbuf has {sent} bytes for the own rank, but recvbuf {expected}")

    # On a node --------------------------------------------------------------------------------------------------------

    def _alone(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function that exchanges blocks, with the memory for exchanges.

        Raises
        ------
        CommunicatorBusy
            If another thread is exchanging blocks on this communicator.
        """
        if self._memory.alone.locked():
            raise CommunicatorBusy
        with self._memory.alone:  # an interrupt cannot leave it held, as it could after a call of `acquire`
            try:
                function(*arguments)
            except BaseException as error:
                self._abandon(error)
                raise

    def _abandon(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that ends an exchange in which they may wait for this one."""
        memory, channel = self._memory.words, self._scope.channel
        # Of errors of ours they know; one of a wait is told by what abandons the collective that was waited for.
        is_told = isinstance(error, MpicollError) or channel.refusal is not None or channel.dispatch.is_at_work
        if memory[words.IS_OPEN] and not is_told:
            channel.refuse(error)
        memory[words.IS_OPEN] = 0

    def _asked(self, algorithm: str | None) -> int:
        """Return METHOD + 1 where somebody has asked for it, else 0."""
        name = self._scope.algorithm if algorithm is None else algorithm
        return 1 + select.ON_NODE.index(name) if name in select.ON_NODE else 0

    def _exchange_quickly(self, sendbuf: Any, recvbuf: Any) -> bool:
        """Make an Alltoallv whose specifications compiled code reads; False if nothing has happened."""
        return self._in_one_call("Alltoallv", exchange_vectors.run, sendbuf, recvbuf)

    def _exchange_known(self, sendbuf: Any, recvbuf: Any) -> bool:
        """Make an Alltoallw whose specifications are known; False if nothing has happened."""
        specs = self._memory.specs
        done = self._in_one_call("Alltoallw", exchange_typed.run, sendbuf, recvbuf, specs.address)
        if done:
            specs.used()
        return done

    def _in_one_call(self, title: str, kernel: Callable[..., int], *specs: Any) -> bool:
        memory = self._memory  # not by `_alone`: one more Python call takes a tenth of a short exchange
        if memory.alone.locked():
            raise CommunicatorBusy
        with memory.alone:
            try:
                status = kernel(memory.address, self._table, *specs)
                if status not in (TAKEN, NOT_READ):
                    self._go_on(title, status, *map(held, specs))
                return status != NOT_READ
            except BaseException as error:
                self._abandon(error)
                raise

    def _exchange(
        self, title: str, algorithm: str | None, send: TypedBlocks, recv: TypedBlocks, dtype: np.dtype | None = None
    ) -> None:
        """Exchange blocks; `dtype` is the type of all elements if they have one."""
        compare_blocks(self._scope, title, send, recv, dtype)
        memory, inside = self._memory.words, send is recv
        memory[words.ASKED], memory[words.MARK] = self._asked(algorithm), _MARKS[title]
        try:
            target, unpacked = layouts_of(recv)
            source, packed = (target, unpacked) if inside else layouts_of(send)
            for rank, block in packed.items():
                send.entries(rank, block).pack()
        except Exception as error:
            refuse(self._scope.channel, title.lower(), error, self._scope.timeout)
        memory[words.SENDS], memory[words.SEND_BASE] = source.address, send.address
        memory[words.RECVS], memory[words.RECV_BASE] = target.address, recv.address
        memory[words.MAY_DIRECT] = not inside and not ranges_meet(send, recv)
        memory[words.TYPE] = 0 if dtype is None else 1 + DTYPE_NUMBERS.get(dtype, len(DTYPE_NUMBERS))
        self._begin(title)
        for rank, block in unpacked.items():
            recv.entries(rank, block).unpack()

    def _begin(self, title: str) -> None:
        """Make the exchange that the words describe."""
        if self._table:
            status = exchange.run(self._memory.address, self._table)
        else:
            begin_exchange.run(self._memory.address)
            status = OTHER
        if status != TAKEN:
            self._go_on(title, status)

    def _go_on(self, title: str, status: int, *kept: Any) -> None:
        """Do what a compiled exchange, which has returned `status`, has left to Python; `kept` lives until the end."""
        memory = self._memory
        if status <= ENDING:
            memory.words[words.IS_OPEN] = 0
            if ENDING - status != DONE:
                self._finish(ENDING - status, "allreduce", memory.in_place, memory.error, memory.maximum)
            self._conclude(title, None)
            return
        if status < TAKEN - 1:
            self._finish(status, "alltoall", memory.offers, memory.arrived)
        rounds = status - TAKEN if status >= TAKEN - 1 else int(take.run(memory.address))
        if rounds:
            self._take_rounds(title, rounds)

    def _finish(self, status: int, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Go on with a plain call that compiled code has begun."""
        go_on(self._scope, self._table, status, None, collective, sendbuf, recvbuf, op)

    def _take_rounds(self, title: str, rounds: int) -> None:
        """Take what is left of long blocks, and wait until all ranks have theirs; see :func:`block_exchange.take`."""
        memory, wrong = self._memory, None
        if rounds < 0:
            wrong, rounds = self._found_wrong(title), memory.words[words.ROUNDS]
            if rounds <= 0:
                self._scope.channel.refuse(wrong)  # the others hear of it in their next call
                raise wrong
        memory.error[0] = 0 if wrong is None else self._number_of(wrong)
        for number in range(1, rounds):
            memory.words[words.ROUND] = number
            offer_round.run(memory.address)
            self._plain(BARRIER, "barrier", None, None)
            if take_round.run(memory.address) < 0 and wrong is None:
                wrong = self._found_wrong(title)
                memory.error[0] = self._number_of(wrong)
        memory.words[words.IS_OPEN] = 0
        self._plain(ALLREDUCE, "allreduce", memory.in_place, memory.error, memory.maximum)
        self._conclude(title, wrong)

    def _conclude(self, title: str, wrong: MismatchError | None) -> None:
        """Raise the error of this rank, or the one that another has found, and repeat what can be done otherwise."""
        memory = self._memory
        if memory.error[0] > self._scope.channel.size:
            self._repeat(title)
        elif wrong is not None:
            raise wrong
        elif memory.error[0]:
            rank = int(memory.error[0]) - 1
            raise MismatchError(f"{title}: rank {rank} got a block of another length, or type, than it expects")
        else:
            end_exchange.run(memory.address)

    def _number_of(self, wrong: MismatchError) -> int:
        """Return by which number all ranks hear of an error; the greatest is for memory that is out of reach."""
        channel = self._scope.channel
        return 1 + (channel.size if isinstance(wrong, _OutOfReach) else channel.rank)

    def _repeat(self, title: str) -> None:
        """Exchange the blocks through stages, now and from now on: the system did not copy some between processes."""
        self._memory.words[words.TRIALS] = 0
        self._begin(title)

    def _found_wrong(self, title: str) -> MismatchError:
        """Return the error for a block that cannot be used here."""
        memory = self._memory.words
        rank, nbytes = memory[words.WRONG_RANK], memory[words.WRONG_NBYTES]
        if memory[words.ROUNDS] < 0:
            return MismatchError(f"this call differs between ranks: rank {rank} did not call {title}")
        if nbytes == words.OF_ANOTHER_TYPE:
            return MismatchError(f"{title}: rank {rank} sends elements of another type than this rank expects")
        if nbytes == words.DAMAGED:
            return MismatchError(f"{title}: the record of rank {rank} is damaged")
        if nbytes == words.OUT_OF_REACH:
            return _OutOfReach(f"{title}: the memory of rank {rank} cannot be read from here")
        expected = memory[words.EXPECTED_NBYTES]
        return MismatchError(f"{title}: rank {rank} sends {nbytes} bytes, but this rank expects {expected} from it")

    def _plain(self, number: int, collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Make a collective on whole arrays, in one compiled call if it can."""
        status = OTHER
        if self._table:
            status = call.run(self._table, number, sendbuf, recvbuf, op, 0)
        if status != DONE:
            self._finish(status, collective, sendbuf, recvbuf, op)
