"""Communicators of process groups: the MPI ranks that the ranks of ``torch.distributed`` are, and groups of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.errors import CollectiveTimeout, MpicollError
from mpicoll.torch.rendezvous import exchange_records


def communicator_of(
    store: Any, rank: int, size: int, name: str, global_ranks: Sequence[int], timeout: timedelta
) -> MPI.Intracomm:
    """Make the communicator of a process group, in which this process has the rank that it has in the group.

    Collective over the group, and only over it. The default group may be of another backend.

    Parameters
    ----------
    store
        The store of the group.
    rank, size
        This process' rank in the group, and the group's size.
    name
        The name of the group, equal on its ranks.
    global_ranks
        The ranks of the default group that form this one; empty for the default group itself.

    Raises
    ------
    RuntimeError
        If MPI has fewer ranks than the group, or two ranks of the group are one rank of MPI.
    CollectiveTimeout
        If a rank does not come in time; the message names the ranks.
    """
    world = MPI.COMM_WORLD
    if size > world.size:
        raise RuntimeError(
            f"process group: it has {size} ranks, but MPI {world.size}; start the program with mpirun or srun"
        )
    if size == world.size and not global_ranks:
        members = _members_of_all(rank, size, timeout)
    else:
        members = _members(store, rank, size, timeout)
    if len(set(members)) < size:
        raise RuntimeError(f"process group: ranks 0 to {size - 1} are the ranks {members} of MPI, which must differ")
    group = world.Get_group()
    part = group.Incl(members)
    largest = int(world.Get_attr(MPI.TAG_UB) or 32767)
    made = world.Create_group(part, zlib.crc32(f"{name} {members}".encode()) % largest)
    part.Free()
    group.Free()
    return made


def free_together(comm: Intracomm, seconds: float) -> None:
    """Free a communicator when all its ranks have come: its memory may be in use by a call of another rank.

    Collective. It is kept if a rank does not come within `seconds`, or a call on it has failed before.
    """
    try:
        Intracomm(comm, timeout=seconds).Barrier()
    except (MpicollError, MPI.Exception):
        return
    comm.Free()


def _members_of_all(rank: int, size: int, timeout: timedelta) -> list[int]:
    """Return the MPI ranks of the ranks of a group of all; collective over MPI.COMM_WORLD."""
    ranks = [int(each) for each in exchange_records(MPI.COMM_WORLD, str(rank), timeout.total_seconds())]
    places = {torch_rank: mpi_rank for mpi_rank, torch_rank in enumerate(ranks)}
    if sorted(places) != list(range(size)):
        raise RuntimeError(f"process group: the ranks of MPI have the ranks {ranks}, not 0 to {size - 1}, each once")
    return [places[each] for each in range(size)]


def _members(store: Any, rank: int, size: int, timeout: timedelta) -> list[int]:
    """Return the MPI ranks of the ranks of a group, which each tells the others through the store."""
    store.set(f"mpi_rank/{rank}", str(MPI.COMM_WORLD.rank))
    keys = [f"mpi_rank/{each}" for each in range(size)]
    _await(store, keys, timeout)
    return [int(store.get(key)) for key in keys]


def _await(store: Any, keys: Sequence[str], timeout: timedelta) -> None:
    try:
        store.wait(list(keys), timeout)
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        text = f"process group: ranks {missing} have not come after {timeout.total_seconds():g} s"
        raise CollectiveTimeout(text, missing) from error
