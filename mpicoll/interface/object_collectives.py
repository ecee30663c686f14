"""Collectives of Python objects with mpi4py's names and arguments."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our operations nor what they return.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.buffers.reduction_ops import UserOperation
from mpicoll.interface.persistent import PersistentCollectives
from mpicoll.objects.reductions import Reductions

AnyObjectOp = MPI.Op | UserOperation | Callable[[Any, Any], Any]


class ObjectCollectives(PersistentCollectives):
    """Collectives of Python objects, with mpi4py's names, arguments and results.

    Numbers, ``bytes``, ``str``, None and NumPy arrays of plain element types travel as they are; other objects are
    pickled by mpi4py's pickler. Ranks may give objects of different types.
    """

    _objects: Reductions

    def barrier(self) -> None:
        """Wait until every rank has called it; the same as :meth:`Barrier`."""
        self.Barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the root's object on every rank.

        Raises
        ------
        RemoteError
            If the root has an object that cannot be pickled; the root raises the pickler's exception.
        """
        return self._objects.bcast(obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Return a list of the objects of all ranks on the root, None elsewhere; see :meth:`bcast` for errors."""
        return self._objects.gather(sendobj, root)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Return this rank's object from the root's sequence, which has one for each rank; see :meth:`bcast`."""
        return self._objects.scatter(sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return a list of the objects of all ranks; see :meth:`bcast` for errors."""
        return self._objects.allgather(sendobj)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return a list of the objects for this rank, one of each rank; `sendobj` has an object for each rank."""
        return self._objects.alltoall(sendobj)

    def reduce(self, sendobj: Any, op: AnyObjectOp = MPI.SUM, root: int = 0) -> Any | None:
        """Return the reduction of all objects on the root, None elsewhere; see :meth:`allreduce`."""
        return self._objects.reduce(sendobj, op, root)

    def allreduce(self, sendobj: Any, op: AnyObjectOp = MPI.SUM) -> Any:
        """Return the reduction of the objects of all ranks on every rank, in rank order.

        Parameters
        ----------
        op
            An operation of MPI, which applies the operator of Python to objects (``MPI.SUM`` is ``a + b``), or a
            function of two objects, which must not call collectives of this communicator.

        Raises
        ------
        RemoteError
            If another rank failed to pickle its object or to combine objects; that rank raises the exception itself.
        """
        return self._objects.allreduce(sendobj, op)

    def scan(self, sendobj: Any, op: AnyObjectOp = MPI.SUM) -> Any:
        """Return the reduction of the objects of ranks 0 to this one; see :meth:`allreduce`.

        Where built-in objects cannot be added, ranks that add none return theirs, and the others raise TypeError.
        """
        return self._objects.scan(sendobj, op)

    def exscan(self, sendobj: Any, op: AnyObjectOp = MPI.SUM) -> Any:
        """Return the reduction of the objects of the ranks before this one, None on rank 0; see :meth:`allreduce`."""
        return self._objects.exscan(sendobj, op)
