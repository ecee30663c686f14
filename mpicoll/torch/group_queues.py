"""Queue and communicator of any process group, also of one of another backend."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.torch.call_queue import CallQueue
from mpicoll.torch.process_group import ProcessGroup

_SECONDS = 1800.0
_made: weakref.WeakKeyDictionary[Any, tuple[CallQueue, Intracomm]] = weakref.WeakKeyDictionary()


def queue_of(group: Any = None) -> tuple[CallQueue, Intracomm]:
    """Return the queue and the communicator of a process group; None is the default group.

    The first call for a group of another backend makes them, and is collective over it.

    Raises
    ------
    TypeError
        If `group` is no process group.
    RuntimeError
        If ranks of the group are no ranks of MPI.
    """
    group = dist.group.WORLD if group is None else group
    if isinstance(group, ProcessGroup):
        return group.queue, group.comm
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"state: {group!r} is neither a process group nor None")
    if group not in _made:
        _made[group] = _make(group)
    return _made[group]


def _make(group: Any) -> tuple[CallQueue, Intracomm]:
    world = MPI.COMM_WORLD
    if group.size() > world.size:
        raise RuntimeError(
            f"process group: it has {group.size()} ranks, but MPI {world.size}; start the program with mpirun or srun"
        )
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(ranks, torch.tensor([world.rank]), group)
    members = [int(rank) for rank in ranks]
    part = world.Get_group().Incl(members)
    comm = world.Create_group(part, members[0])
    return CallQueue(f"mpicoll hooks of {len(members)}"), Intracomm(comm, timeout=_SECONDS)
