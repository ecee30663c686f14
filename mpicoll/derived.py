"""Communicators made from a communicator are of its kind."""

# mypy: disable-error-code="override"
# mpi4py's stubs promise plain communicators.

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from mpi4py import MPI


class Derived(MPI.Intracomm):
    """A communicator that passes its kind and settings on to those that are made from it."""

    @abstractmethod
    def _wrap(self, comm: MPI.Comm) -> Any:
        """Return a plain communicator, or MPI.COMM_NULL, as one of this kind."""

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Split as mpi4py does; the parts are mpicoll communicators with the same settings."""
        return self._wrap(MPI.Intracomm(self).Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """Split by kind as mpi4py does; see :meth:`Split`."""
        return self._wrap(MPI.Intracomm(self).Split_type(split_type, key, info))

    def Dup(self, info: MPI.Info | None = None) -> Any:
        """Duplicate; see :meth:`Split`."""
        return self._wrap(MPI.Intracomm(self).Dup(info))

    def Dup_with_info(self, info: MPI.Info) -> Any:
        """Duplicate with hints; see :meth:`Split`."""
        return self._wrap(MPI.Intracomm(self).Dup_with_info(info))

    def Idup(self, info: MPI.Info | None = None) -> Any:
        """Start to duplicate; the duplicate is a plain mpi4py communicator until it is wrapped."""
        return MPI.Intracomm(self).Idup(info)

    def Idup_with_info(self, info: MPI.Info) -> Any:
        """Start to duplicate with hints; see :meth:`Idup`."""
        return MPI.Intracomm(self).Idup_with_info(info)

    def Clone(self) -> Any:
        """Duplicate; see :meth:`Split`."""
        return self._wrap(MPI.Intracomm(self).Clone())

    def Create(self, group: MPI.Group) -> Any:
        """Make a communicator of a group; see :meth:`Split`."""
        return self._wrap(MPI.Intracomm(self).Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Make a communicator of a group, collective over the group only; see :meth:`Split`."""
        return self._wrap(MPI.Intracomm(self).Create_group(group, tag))

    def Free(self) -> None:
        """Free the communicator and everything that was cached on it; collective."""
        super().Free()
