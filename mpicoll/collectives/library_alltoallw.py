"""Alltoallw that the MPI library executes: chosen by the caller, nonblocking and persistent, and of a single rank."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.typed_blocks import Descriptions
from mpicoll.collectives import select
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.native_requests import NativeRequest, NonblockingNativeRequest
from mpicoll.collectives.operation import NativeOperation
from mpicoll.collectives.requests import PersistentRequest, Request
from mpicoll.messages.call_agreement import PairLengths, refuse, settle

_IS_MPICH = MPI.get_vendor()[0] == "MPICH"
"""Open MPI 5.0.11 leaves out the displacement of the only rank's block."""


def operation(scope: CallContext, sendbuf: Any, recvbuf: Any, *, chosen: bool) -> NativeOperation:
    """Return an Alltoallw for the MPI library; `chosen` as in :class:`NativeOperation`."""
    settle(scope.channel, scope.timeout)
    scope.channel.ensure_usable()
    sent = MPI.IN_PLACE if in_place(sendbuf) else sendbuf
    lengths = _lengths(scope, sent, recvbuf) if scope.channel.check == "full" else None
    return NativeOperation(scope.channel, "alltoallw", "Alltoallw", (sent, recvbuf), chosen, lengths=lengths)


def _lengths(scope: CallContext, sendbuf: Any, recvbuf: Any) -> PairLengths:
    """Return the lengths of blocks; if the arguments are wrong, the other ranks are told."""
    descriptions = Descriptions(scope.channel.size)
    try:
        into = descriptions.blocks(recvbuf, "recvbuf", writable=True).description
        out = into if in_place(sendbuf) else descriptions.blocks(sendbuf, "sendbuf", writable=False).description
    except Exception as error:
        refuse(scope.channel, "alltoallw", error, scope.timeout)
    return PairLengths(out.nbytes, into.nbytes)


def start(scope: CallContext, sendbuf: Any, recvbuf: Any) -> Request:
    """Begin a nonblocking Alltoallw, which the MPI library does."""

    def made() -> Request:
        return NonblockingNativeRequest(operation(scope, sendbuf, recvbuf, chosen=False), scope.timeout)

    return scope.channel.alone.call(made)


def keep(scope: CallContext, sendbuf: Any, recvbuf: Any) -> PersistentRequest:
    """Set up a persistent Alltoallw, which the MPI library does."""
    scope.channel.is_lent = True

    def made() -> PersistentRequest:
        return NativeRequest(operation(scope, sendbuf, recvbuf, chosen=False), scope.timeout)

    return scope.channel.alone.call(made)


def run_by_library(scope: CallContext, sendbuf: Any, recvbuf: Any) -> None:
    """Make a blocking Alltoallw, which the caller has chosen the MPI library for."""
    scope.channel.alone.call(lambda: operation(scope, sendbuf, recvbuf, chosen=True).run(scope.timeout))


def copied_by_library(scope: CallContext, sendbuf: Any, recvbuf: Any) -> bool:
    """Let MPICH copy the block of a single rank, which takes it a microsecond; False if it refuses."""
    if not _IS_MPICH or scope.algorithm != select.AUTO:
        return False
    scope.channel.ensure_usable()
    try:
        MPI.Intracomm.Alltoallw(scope.channel.comm, sendbuf, recvbuf)
    except Exception:  # wrong arguments, which get an error of ours, or the same memory twice
        return False
    return True
