"""Private duplicates of communicators for programs of JAX, cached on the communicators and freed with them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable
from typing import Any

from mpi4py import MPI

from mpicoll.buffers.reduction_ops import UserOperation
from mpicoll.comm import Intracomm


class Group:
    """The ranks of a communicator, and the duplicate that carries their collectives in programs of JAX.

    Attributes
    ----------
    comm
        The duplicate; None after the communicator was freed.
    size
        The number of ranks.
    collectives
        Descriptions of collectives made so far, by their contents.
    """

    def __init__(self, comm: Intracomm) -> None:
        self.comm: Intracomm | None = comm
        self.size = comm.size
        self.collectives: dict[Hashable, Collective] = {}

    def collective(
        self, kind: str, op: MPI.Op | UserOperation = MPI.SUM, root: int = 0, compression: Any = None
    ) -> Collective:
        """Return the description of a collective; equal ones are one object."""
        key = kind, op.handle if isinstance(op, MPI.Op) else op, root, compression
        if key not in self.collectives:
            self.collectives[key] = Collective(self, kind, op, root, compression)
        return self.collectives[key]


class Collective:
    """A collective of a group, without its buffers; objects are compared by identity.

    Attributes
    ----------
    group
        The ranks.
    kind
        A name in lower case, such as ``"allreduce"``.
    op, root, compression
        As in the methods of :class:`mpicoll.Intracomm`, where the collective has them.
    """

    def __init__(self, group: Group, kind: str, op: MPI.Op | UserOperation, root: int, compression: Any) -> None:
        self.group, self.kind, self.op, self.root, self.compression = group, kind, op, root, compression

    def other(self, kind: str) -> Collective:
        """Return the description of a collective of another kind with the same op and root, without compression."""
        return self.group.collective(kind, self.op, self.root)

    def __repr__(self) -> str:
        return f"{self.kind} of {self.group.size} ranks"


class _Duplicate:
    """The duplicate as MPI made it, with one group for each pair of settings."""

    def __init__(self, plain: MPI.Intracomm) -> None:
        self.plain = plain
        self.groups: dict[tuple[str, float], Group] = {}

    def group(self, algorithm: str, timeout: float) -> Group:
        if (algorithm, timeout) not in self.groups:
            made = Intracomm(self.plain, algorithm=algorithm, timeout=timeout)
            self.groups[algorithm, timeout] = Group(made)
        return self.groups[algorithm, timeout]


def group_of(comm: MPI.Intracomm | None) -> Group:
    """Return the group of a communicator; the first call for it makes the duplicate and is collective.

    Parameters
    ----------
    comm
        An intracommunicator of mpi4py or mpicoll, whose algorithm and timeout hold; None for ``MPI.COMM_WORLD``.

    Raises
    ------
    TypeError, ValueError
        If it is no intracommunicator, or ``MPI.COMM_NULL``.
    RuntimeError
        If the MPI library does not serve several threads.
    CollectiveTimeout
        If a rank does not come to make the duplicate.
    """
    ours = _ours(comm)
    duplicate = ours.Get_attr(_keyval())
    if not isinstance(duplicate, _Duplicate):
        _check_threads()
        ours.Barrier()  # with a deadline, which Dup has not
        duplicate = _Duplicate(MPI.Intracomm(ours).Dup())
        ours.Set_attr(_keyval(), duplicate)
    return duplicate.group(ours.algorithm, ours.timeout)


def _ours(comm: MPI.Intracomm | None) -> Intracomm:
    if comm is None:
        comm = MPI.COMM_WORLD
    return comm if isinstance(comm, Intracomm) and comm != MPI.COMM_NULL else Intracomm(comm)


def _check_threads() -> None:
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "mpicoll.jax: JAX makes calls from threads of its own, for which MPI must be initialised with "
            "MPI_THREAD_MULTIPLE; mpi4py asks for it unless mpi4py.rc.thread_level says otherwise"
        )


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_on_free)


def _on_free(comm: MPI.Comm, keyval: int, duplicate: _Duplicate) -> None:
    for group in duplicate.groups.values():
        group.comm = None
    if not (sys.is_finalizing() or MPI.Is_finalized()):
        duplicate.plain.Free()
