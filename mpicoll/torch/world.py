"""Ranks of MPI.COMM_WORLD for programs without ``torch.distributed``: their places, and the queue of their calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.torch.call_queue import CallQueue, QueuedWork
from mpicoll.torch.group_communicators import free_together
from mpicoll.torch.rendezvous import exchange_records
from mpicoll.torch.tensor_collectives import make_call
from mpicoll.torch.tensor_memory import waited_for

Pick = Callable[[list[torch.Tensor]], Any]
_TIMEOUT = timedelta(minutes=30)
_CLOSE_SECONDS = 5.0


class _World:
    """A communicator of all ranks, its queue, and where its ranks are."""

    def __init__(self, timeout: timedelta) -> None:
        exchange_records(MPI.COMM_WORLD, "", timeout.total_seconds())  # so that what follows cannot wait for ever
        self.comm = Intracomm(MPI.COMM_WORLD.Dup(), timeout=timeout.total_seconds())
        self.queue = CallQueue("mpicoll")
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.rank, node.size
        node.Free()
        everyone = np.empty((self.comm.size, 2), np.int64)
        self.comm.Allgather(np.array([self.local_rank, self.local_size], np.int64), everyone)
        alike = np.flatnonzero(everyone[:, 0] == self.local_rank)
        self.cross_rank, self.cross_size = int(np.searchsorted(alike, self.comm.rank)), len(alike)
        self.is_homogeneous = bool((everyone[:, 1] == self.local_size).all())

    def close(self) -> None:
        """Stop the queue, and free the communicator if all ranks do so."""
        self.queue.close(_CLOSE_SECONDS)
        if not MPI.Is_finalized() and self.queue.begin():  # else a call that has not ended uses it
            free_together(self.comm, _CLOSE_SECONDS)
            self.queue.end()


_world: _World | None = None


def init(timeout: timedelta = _TIMEOUT) -> None:
    """Prepare all ranks of MPI.COMM_WORLD, collectively; nothing happens the second time.

    Parameters
    ----------
    timeout
        Time that a rank waits for the others here, and in a step of a call, before it raises CollectiveTimeout.
    """
    global _world
    if _world is None:
        _world = _World(timeout)


def shutdown() -> None:
    """Stop the thread of asynchronous calls, and free the communicator of :func:`init`, which may follow.

    Collective, but no rank waits longer than 5 seconds for its calls to end, nor than 5 for the other ranks; the
    communicator is kept then, and where a call has failed before.
    """
    global _world
    here, _world = _world, None
    if here is not None:
        here.close()


def is_initialized() -> bool:
    """Return whether :func:`init` was called."""
    return _world is not None


def world() -> _World:
    """Return what :func:`init` has prepared; RuntimeError if it was not called."""
    if _world is None:
        raise RuntimeError("mpicoll.torch: call init() first")
    return _world


def rank() -> int:
    """Return the number of this process."""
    return int(world().comm.rank)


def size() -> int:
    """Return the number of processes."""
    return int(world().comm.size)


def local_rank() -> int:
    """Return the number of this process among those of its node."""
    return world().local_rank


def local_size() -> int:
    """Return the number of processes on this node."""
    return world().local_size


def cross_rank() -> int:
    """Return the number of this process's node among the nodes with a process of this :func:`local_rank`."""
    return world().cross_rank


def cross_size() -> int:
    """Return the number of nodes with a process of this :func:`local_rank`."""
    return world().cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of processes."""
    return world().is_homogeneous


def mpi_threads_supported() -> bool:
    """Return whether several threads may call the MPI library."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def mpi_built() -> bool:
    """Return True: tensors travel by MPI and by shared memory."""
    return True


def nccl_built() -> int:
    """Return 0: there are no collectives of GPUs."""
    return 0


def cuda_built() -> bool:
    """Return False: there are no collectives of GPUs, nor by Gloo, oneCCL or DDL."""
    return False


mpi_enabled = mpi_built
rocm_built = gloo_built = gloo_enabled = ccl_built = ddl_built = cuda_built


def start(
    what: str, outputs: Any, function: Callable[..., None], *arguments: Any, pick: Pick = operator.itemgetter(0)
) -> QueuedWork:
    """Put ``function(comm, *arguments)`` into the queue of calls.

    Parameters
    ----------
    what
        The call's name, for error messages.
    outputs
        The output tensor, or a list that holds the output tensors when the call has ended.
    pick
        Function that makes of the outputs what :func:`synchronize` returns; by default the first one.
    """
    here = world()
    work = here.queue.put(what, partial(make_call, here.comm, function, *map(waited_for, arguments)), outputs)
    work.pick = pick
    return work


def make(what: str, function: Callable[..., None], *arguments: Any) -> None:
    """Make the call ``function(comm, *arguments)`` after those in the queue."""
    here = world()
    here.queue.run(what, make_call, here.comm, function, *map(waited_for, arguments))


def synchronize(handle: QueuedWork) -> Any:
    """Wait until an asynchronous call has ended; return its output, or the list of outputs of a grouped call.

    Of ``alltoall_async`` it is a pair, see there.

    Raises
    ------
    MpicollError, TypeError, ValueError
        The error that ended the call.
    """
    handle.wait()
    return handle.pick(handle.result())


def poll(handle: QueuedWork) -> bool:
    """Return whether an asynchronous call has ended."""
    return handle.is_completed()


def barrier() -> None:
    """Wait until every rank has called it."""
    make("barrier", Intracomm.Barrier)
