"""Base of process groups: names, store and timeout, and the way of a call to the queue of the group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicoll.buffers.flat_buffer import view_at
from mpicoll.comm import Intracomm
from mpicoll.torch.call_queue import CallQueue
from mpicoll.torch.group_backend import GroupBackend
from mpicoll.torch.group_communicators import free_together
from mpicoll.torch.group_work import EndedWork
from mpicoll.torch.reductions_of_tensors import PLAIN_OPS
from mpicoll.torch.tensor_collectives import make_call
from mpicoll.torch.tensor_memory import checked_dtype, waited_for

NAME = "mpicoll"
DONE = EndedWork()
"""The work of all blocking calls, which nobody gets to see."""
_CLOSE_SECONDS = 5.0
_UNSET = timedelta(milliseconds=-1)
"""Timeout of a call that has none of its own."""


class BaseGroup(dist.ProcessGroup):
    """A process group that has no collectives yet; see :class:`mpicoll.torch.ProcessGroup`."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        store: Any = None,
        timeout: timedelta = timedelta(minutes=30),
        *,
        owns_comm: bool = False,
    ) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._plain, self._owns_comm = comm, owns_comm
        self._store = store
        self._timeout = timeout
        self._comm = Intracomm(comm, timeout=timeout.total_seconds())
        self._queue = CallQueue(f"mpicoll group of {comm.Get_size()}")
        self._closed = ""
        self._group_name, self._group_desc = "", ""

    @property
    def comm(self) -> Intracomm:
        """The communicator of the group; calls on it must not be under way together with calls of the group."""
        return self._comm

    @property
    def queue(self) -> CallQueue:
        """The queue of calls on the communicator."""
        return self._queue

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    name = _get_backend_name = getBackendName

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> GroupBackend:
        """Return the backend for a device; RuntimeError, as PyTorch expects, if it is not the CPU."""
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"process group: the backend mpicoll has tensors of the CPU only, not of {device}")
        return GroupBackend(self)

    @property
    def group_name(self) -> str:
        """Name of the group, unique in the process."""
        return self._group_name

    @property
    def group_desc(self) -> str:
        """Description of the group."""
        return self._group_desc

    def getGroupName(self) -> str:
        """Return the name of the group, for compiled code."""
        return self._group_name

    def getGroupDesc(self) -> str:
        """Return the description of the group, for compiled code."""
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that a rank waits in a step of a call; equal on all ranks."""
        self._timeout = timeout
        self._comm = Intracomm(self._plain, timeout=timeout.total_seconds())

    def _call(self, what: str, outputs: Any, options: Any, function: Callable[..., None], *arguments: Any) -> Any:
        """Make a call now, or put it into the queue; return its work."""
        self._open(what)
        arguments = tuple(map(waited_for, arguments))
        comm = self._comm_for(options)
        if getattr(options, "asyncOp", True):
            return self._queue.put(what, partial(make_call, comm, function, *arguments), outputs)
        self._queue.run(what, make_call, comm, function, *arguments)
        return DONE

    def _open(self, what: str) -> MPI.Intracomm:
        """Return the communicator for messages.

        Raises
        ------
        RuntimeError
            If the group was shut down or aborted; names the call `what`.
        """
        if self._closed:
            raise RuntimeError(f"{what}: the process group {self._closed}")
        return self._plain

    def _comm_for(self, options: Any) -> Intracomm:
        """Return the communicator, with the timeout of the call if it has one."""
        timeout = options.timeout if options is not None else _UNSET
        if timeout == _UNSET or timeout <= timedelta(0) or timeout == self._timeout:
            return self._comm
        return Intracomm(self._plain, timeout=timeout.total_seconds())

    def reduce_now(self, tensors: Sequence[torch.Tensor], options: Any) -> bool:
        """Make the most common call in the shortest way; return False, having done nothing, for all others."""
        if getattr(options, "asyncOp", True) or options.timeout != _UNSET or self._closed:
            return False
        (tensor,) = tensors
        op = PLAIN_OPS.get((hash(options.reduceOp), tensor.dtype))
        if op is None:
            return False
        try:
            dtype = checked_dtype(tensor)
        except (TypeError, ValueError):  # it lies on another device, is not contiguous, ...
            return False
        array = view_at(tensor.data_ptr(), tensor.numel(), dtype)  # the caller keeps the tensor alive
        if not self._queue.begin():
            return False
        try:
            self._comm.Allreduce(MPI.IN_PLACE, array, op)
        finally:
            self._queue.end()
        return True

    def shutdown(self) -> None:
        """Stop the group's thread after the calls that wait, and free the communicator if the group owns it.

        Ranks wait for each other, for 5 seconds at most. The communicator is kept until the process ends if a rank does
        not come, or if a call has failed or has not ended.
        """
        closed, self._closed = self._closed, self._closed or "was shut down"
        self._queue.close(_CLOSE_SECONDS)
        if not closed and self._owns_comm:
            self._free()

    def _free(self) -> None:
        if MPI.Is_finalized() or not self._queue.begin():  # a call that has not ended uses the communicator
            return
        try:
            free_together(self._comm, _CLOSE_SECONDS)
        finally:
            self._queue.end()
        self._plain = self._comm

    def abort(self) -> None:
        """Refuse all further calls; those under way end by themselves, at the latest when their time is up."""
        self._closed = self._closed or "was aborted"
