"""Nonblocking Gatherv, Scatterv and Alltoallv, in which ranks do not know each other's counts.

Each part is sent directly, whatever the counts are. The MPI library does so in less time than making a plan for one
call takes, so that ``"auto"`` takes its nonblocking functions, on all ranks. Arguments are checked before; those that
the MPI library does not take, such as strided arrays, are packed. Ranks whose elements are of different types, or whose
counts disagree, are noticed only where calls are compared (``MPICOLL_CHECK=full``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.datatypes import BYTE
from mpicoll.buffers.plain_specs import array_of, key_of, plain_blocks
from mpicoll.collectives import select, validate
from mpicoll.collectives.call_context import CallArguments, CallContext
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.execute import start
from mpicoll.collectives.interrupted_calls import refuse_if_running
from mpicoll.collectives.native_requests import NonblockingNativeRequest
from mpicoll.collectives.operation import CheckedOperation, NativeOperation
from mpicoll.collectives.requests import Request
from mpicoll.kernels.operation_words import ALLTOALL, GATHER, SCATTER
from mpicoll.kernels.reduce import DTYPES
from mpicoll.kernels.vector_checks import check_vectors, number_call
from mpicoll.messages.call_agreement import PairLengths, settle
from mpicoll.messages.native import NONBLOCKING, Arguments, NativeRun
from mpicoll.progress import progress_engine
from mpicoll.progress.call_signature import Signature
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS

_MAX_KNOWN = 256
_NUMBERS = {"gatherv": GATHER, "scatterv": SCATTER, "alltoallv": ALLTOALL}
_TRIES = 20
"""How often a wait polls its own operation only, before it advances all operations in flight."""


class _Extent(NamedTuple):
    """Blocks of a specification, in elements; `stop` is where the last one ends."""

    stop: int
    counts: tuple[int, ...]
    displs: tuple[int, ...]


class _LibraryRequest(Request):
    """The request of a call that the MPI library executes with the caller's arguments; not for mode ``full``."""

    def __init__(
        self, scope: CallContext, collective: str, arguments: Arguments, described: Signature, number: int
    ) -> None:
        super().__init__(scope.timeout)
        channel = scope.channel
        try:
            request = NONBLOCKING[collective](channel.comm, *arguments)
        except BaseException as error:  # also of a signal handler: the others wait for this call
            channel.refuse_entered(number, error)
            raise
        self._begin(NativeRun(channel, request, described, number))

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait until the operation is complete; see :meth:`Request.Wait`."""
        if self._flight is not None and progress_engine.pending() == 1:
            progress_engine.advance_alone(self, self._poll)
        if self._flight is None and self._error is None and status is None:
            self.active = False
            return True
        return super().Wait(status)

    def _poll(self) -> bool:
        """Poll this operation only; return whether it has ended. What the MPI library raises, `step` keeps."""
        return any(self.step() for _ in range(_TRIES))


class _Described(NamedTuple):
    """The signature of a call, and the number by which compiled code remembers it."""

    signature: Signature
    number: int


class NonblockingVectorCalls:
    """Nonblocking vector collectives on one communicator.

    Parameters
    ----------
    table
        Address of the table for plain calls, 0 if there is none or another algorithm than ``"auto"`` is asked for.
    """

    def __init__(self, scope: CallContext, table: int) -> None:
        self._size, self._rank = scope.channel.size, scope.channel.rank
        self._scope, self._table = scope, table if self._size > 1 else 0
        self._dispatch = scope.channel.dispatch
        self._quick: dict[tuple[str, int, int], _Described | None] = {}  # by collective, root and what was checked
        self._known: dict[tuple[Any, bool], _Extent | None] = {}  # by specification, and whether it is written
        self._described: dict[Any, Signature] = {}

    def start(
        self, collective: str, sendbuf: Any, recvbuf: Any, root: Any = 0, algorithm: str | None = None
    ) -> Request:
        """Start a call and return its request.

        Raises
        ------
        TypeError, ValueError
            If the arguments are wrong; the other ranks are told.
        """
        if self._table and algorithm is None and type(root) is int and 0 <= root < self._size:
            quick = self._start_quickly(collective, sendbuf, recvbuf, root)
            if quick is not None:
                return quick
        made = CallArguments(collective, sendbuf, recvbuf, root=root, algorithm=algorithm)
        scope = self._scope
        if self._size == 1 or (algorithm or scope.algorithm) != select.AUTO:
            return start(scope, *made)
        return scope.channel.alone.call(self._start_alone, made)

    def _start_alone(self, made: CallArguments) -> Request:
        channel, timeout = self._scope.channel, self._scope.timeout
        refuse_if_running(channel)
        settle(channel, timeout)
        channel.ensure_usable()
        return NonblockingNativeRequest(self._plain(made) or _packed(self._scope, made), timeout)

    def _start_quickly(self, collective: str, sendbuf: Any, recvbuf: Any, root: int) -> Request | None:
        """Start a call whose arguments compiled code finds to be right; None, having done nothing, for others."""
        code = check_vectors.run(self._table, _NUMBERS[collective], sendbuf, recvbuf, root)
        if code < 0:
            return None
        key = collective, root, code
        try:
            described = self._quick[key]
        except KeyError:
            described = self._quick[key] = self._describe(collective, root, code)
        if described is None:
            return None
        before, number = self._dispatch.number, 0
        try:
            number = number_call.run(self._table, described.number)
        except BaseException as error:  # of a signal handler, as soon as compiled code has numbered the call
            if self._dispatch.number > before:
                self._scope.channel.refuse_entered(before + 1, error)
            raise
        if number == 0:
            return None
        arguments = (sendbuf, recvbuf) if collective == "alltoallv" else (sendbuf, recvbuf, root)
        return _LibraryRequest(self._scope, collective, arguments, described.signature, number)

    def _describe(self, collective: str, root: int, code: int) -> _Described | None:
        """Return the signature of a call with these arguments; None if MPI has no such element type."""
        dtype, parts = DTYPES[code // 2], [] if collective == "alltoallv" else [f"root={root}"]
        if _datatype(dtype) is None:
            return None
        signature = self._signature(collective, dtype, bool(code % 2), *parts)
        return _Described(signature, self._scope.channel.dispatch.remember(signature))

    def _plain(self, made: CallArguments) -> NativeOperation | None:
        """Return the operation if the arguments are plain, contiguous arrays whose blocks fit; else None."""
        try:
            return self._plain_operation(made)
        except Exception:  # the general path raises it, and tells the other ranks
            return None

    def _plain_operation(self, made: CallArguments) -> NativeOperation | None:
        if made.collective == "alltoallv":
            return self._plain_alltoallv(made.sendbuf, made.recvbuf)
        if type(made.root) is not int or not 0 <= made.root < self._size:
            return None
        gathers = made.collective == "gatherv"
        part, whole = (made.sendbuf, made.recvbuf) if gathers else (made.recvbuf, made.sendbuf)
        part = array_of(part, sent=gathers)
        if type(part) is not np.ndarray or not _is_plain(part, written=not gathers):
            return None
        blocks = None
        if self._rank == made.root:
            array, extent = self._extent(whole, written=gathers)
            if extent is None or extent.counts[self._rank] != part.size:
                return None
            if array.dtype != part.dtype or _meet(part, array):
                return None
            blocks = _as_blocks(array, extent)
        own = [part, _datatype(part.dtype)]
        ends = (own, blocks) if gathers else (blocks, own)
        lengths = self._rooted_lengths(made, part, None if blocks is None else blocks[1][0])
        arguments = (*ends, made.root)
        return self._operation(made.collective, arguments, part.dtype, part.size > 0, lengths, f"root={made.root}")

    def _rooted_lengths(self, made: CallArguments, part: np.ndarray, counts: Sequence[int] | None) -> PairLengths:
        """Return the lengths of what is sent and expected; `counts` are the root's, None on other ranks."""
        own = [part.nbytes if peer == made.root else 0 for peer in range(self._size)]
        at_root = [count * part.itemsize for count in counts or [0] * self._size]
        return PairLengths(own, at_root) if made.collective == "gatherv" else PairLengths(at_root, own)

    def _plain_alltoallv(self, sendbuf: Any, recvbuf: Any) -> NativeOperation | None:
        target, into = self._extent(recvbuf, written=True)
        if into is None:
            return None
        if in_place(sendbuf):
            lengths, blocks = _lengths(into, into, target.itemsize), _as_blocks(target, into)
            return self._operation("alltoallv", (MPI.IN_PLACE, blocks), target.dtype, into.stop > 0, lengths)
        source, out = self._extent(sendbuf, written=False)
        if out is None or out.counts[self._rank] != into.counts[self._rank] or source.dtype != target.dtype:
            return None
        if _meet(source, target):
            return None
        known, lengths = into.stop > 0 or out.stop > 0, _lengths(out, into, target.itemsize)
        arguments = _as_blocks(source, out), _as_blocks(target, into)
        return self._operation("alltoallv", arguments, target.dtype, known, lengths)

    def _operation(
        self,
        collective: str,
        arguments: Arguments,
        dtype: np.dtype,
        known: bool,
        lengths: PairLengths,
        *parts: str,
    ) -> NativeOperation:
        """Return the operation; `known` if this rank has elements, and so knows the type of all ranks' elements."""
        described = self._signature(collective, dtype, known, *parts)
        title, channel = collective.capitalize(), self._scope.channel
        return NativeOperation(channel, collective, title, arguments, False, described=described, lengths=lengths)

    def _signature(self, collective: str, dtype: np.dtype, known: bool, *parts: str) -> Signature:
        """Return the signature of a call; see :meth:`_operation`."""
        title, rest = collective.capitalize(), ", ".join([*parts, "algorithm=native"])
        dtype = dtype if dtype in DTYPE_NUMBERS else BYTE  # as other paths describe what no kernel knows
        key = title, rest, dtype, known
        described = self._described.get(key)
        if described is None:
            described = self._described[key] = Signature.in_part(title, f"dtype={dtype}", rest, known=known)
        return described

    def _extent(self, spec: Any, *, written: bool) -> tuple[Any, _Extent | None]:
        """Return array and extent of blocks that lie in the array, apart from each other if they are written."""
        array, key = key_of(spec)
        if key is None:
            return array, None
        try:
            extent = self._known[key, written]
        except KeyError:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            extent = self._known[key, written] = _extent_of(spec, self._size, written)
        if extent is None or extent.stop > array.size or not _is_plain(array, written=written):
            return array, None
        return array, extent


def _is_plain(array: np.ndarray, *, written: bool) -> bool:
    return array.flags.c_contiguous and (array.flags.writeable or not written) and _datatype(array.dtype) is not None


@cache
def _datatype(dtype: np.dtype) -> MPI.Datatype | None:
    """Return the MPI datatype of elements; None if they are in another byte order or MPI has none."""
    if dtype.kind not in "biufc" or not dtype.isnative:
        return None
    try:
        return MPI.Datatype.fromcode(dtype.char)
    except ValueError:
        return None


def _lengths(out: _Extent, into: _Extent, itemsize: int) -> PairLengths:
    """Return the lengths of an Alltoallv's blocks."""
    return PairLengths([count * itemsize for count in out.counts], [count * itemsize for count in into.counts])


def _as_blocks(array: np.ndarray, extent: _Extent) -> list[Any]:
    return [array, (extent.counts, extent.displs), _datatype(array.dtype)]


def _extent_of(spec: Any, size: int, written: bool) -> _Extent | None:
    blocks = plain_blocks(spec, size)
    if blocks is None:
        return None
    places = sorted((displ, displ + count) for displ, count in zip(blocks.displs, blocks.counts, strict=True) if count)
    stops = list(accumulate((stop for _, stop in places), max))
    if written and any(begin < stop for (begin, _), stop in zip(places[1:], stops, strict=False)):
        return None
    return _Extent(stops[-1] if stops else 0, blocks.counts, blocks.displs)


def _meet(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(one.size and other.size and np.may_share_memory(one, other))


def _packed(scope: CallContext, made: CallArguments) -> NativeOperation:
    """Check any other arguments, and return the operation with the memory that they are packed into."""
    scope = scope._replace(may_wait=False)  # the root tells nobody its counts
    task = validate.prepare(scope, made._replace(algorithm=select.DIRECT[made.collective.removesuffix("v")]))
    assert isinstance(task, CheckedOperation)
    given, result, counts = task.given, task.result, task.counts or ()
    sent = None if given is None else _as_argument(task, given, counts, whole=made.collective != "gatherv")
    received = None
    if result is not None:
        received = _as_argument(task, result, task.recvcounts or counts, whole=made.collective != "scatterv")
    if given is not None and result is not None and given.buffer is result.buffer:
        sent = MPI.IN_PLACE
    elif made.collective == "scatterv" and result is None:
        received = MPI.IN_PLACE
    arguments: Arguments = (sent, received) if made.collective == "alltoallv" else (sent, received, task.root)
    described = replace(task, algorithm=select.NATIVE).signature()
    return NativeOperation(
        scope.channel, made.collective, task.title, arguments, False, task, described, task.pair_lengths()
    )


def _as_argument(task: CheckedOperation, part: VectorPart, counts: Sequence[int], *, whole: bool) -> Any:
    """Return a part as an argument of the MPI library."""
    memory, times = part.view(task.carrier), 1
    if _datatype(task.carrier) is None:
        memory, times = memory.view(np.uint8), task.carrier.itemsize
    return [memory, [count * times for count in counts]] if whole else memory
