"""Methods that make communicators from a communicator of mpicoll; the new ones are mpicoll's too.

The class follows mpi4py's: ``Create_cart`` returns a Cartcomm, ``Split`` of a Cartcomm an Intracomm, ``Dup`` the class
of the communicator itself. The new communicator has the settings of the old one.
"""

# mypy: disable-error-code="override"
# mpi4py's stubs promise plain communicators.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from mpicoll.communicator.channel_cache import free_channel
from mpicoll.communicator.forked_children import refuse_if_forked
from mpicoll.communicator.predefined import is_predefined
from mpicoll.progress.communicator_creation import meet_before_making

if TYPE_CHECKING:
    _Comm = MPI.Comm
else:
    _Comm = object  # of two of mpi4py's classes among its bases, a class could make no objects


class Settings(NamedTuple):
    """Settings of a communicator, inherited by those that are made from it; `timeout` in seconds."""

    algorithm: str = "auto"
    timeout: float = 60.0


class Derived(_Comm):
    """Base of intra- and intercommunicators whose methods return communicators of mpicoll with the same settings."""

    _settings = Settings()
    _is_freed = False

    def note_freed(self) -> None:
        """Note that the communicator has been freed; for mpicoll's own use."""
        self._is_freed = True

    @abstractmethod
    def _wrap(self, comm: MPI.Comm, *, everybody: bool = False) -> Any:
        """Return a plain communicator, or MPI.COMM_NULL, as one of ours, with these settings.

        `everybody`: all ranks of this communicator make the call.
        """

    def _adopt(self, made: Any, *, complete: bool = True) -> Any:
        """Give settings to a communicator of this class, made by mpi4py; `complete`: it can be used already."""
        made._settings = self._settings
        return made

    def _meet(self) -> None:
        """Prepare to make a communicator, collective over all ranks; CommunicatorBroken in a forked child."""
        refuse_if_forked()
        meet_before_making(self)

    def _make(self, method: Callable[..., MPI.Comm], *arguments: Any) -> Any:
        """Return what mpi4py's `method` makes as one of ours; collective over all ranks."""
        self._meet()
        return self._wrap(method(*arguments), everybody=True)

    def _copy(self, method: Callable[..., MPI.Comm], *arguments: Any) -> Any:
        """Return the duplicate that mpi4py's `method` makes, with the settings; collective over all ranks."""
        self._meet()
        return self._adopt(method(*arguments))

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Split as mpi4py does; the parts are mpicoll communicators with the same settings."""
        return self._make(super().Split, color, key)

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        """Split by a type such as ``MPI.COMM_TYPE_SHARED``, as mpi4py does; see :meth:`Split`."""
        return self._make(super().Split_type, split_type, key, info)

    def Create(self, group: MPI.Group) -> Any:
        """Make a communicator from a group of ranks; see :meth:`Split`."""
        return self._make(super().Create, group)

    def Shrink(self) -> Any:
        """Make a communicator without the processes that have failed; see :meth:`Split`."""
        refuse_if_forked()
        return self._wrap(super().Shrink())

    def Clone(self) -> Any:
        """Duplicate; see :meth:`Split`."""
        return self._copy(super().Clone)

    def Dup(self, info: MPI.Info | None = None) -> Any:
        """Duplicate; see :meth:`Split`."""
        return self._copy(super().Dup, info)

    def Dup_with_info(self, info: MPI.Info) -> Any:
        """Duplicate with hints; see :meth:`Split`."""
        return self._copy(super().Dup_with_info, info)

    def Idup(self, info: MPI.Info | None = None) -> Any:
        """Start to duplicate; return the duplicate, which may be used once the request is complete, and the request.

        The first collective call on the duplicate makes its private channel, which is collective over its ranks; so
        does the first call of :meth:`~mpicoll.Intracomm.algorithms` or :meth:`~mpicoll.Intracomm.choice`.
        """
        refuse_if_forked()
        made, request = super().Idup(info)
        return self._adopt(made, complete=False), request

    def Idup_with_info(self, info: MPI.Info) -> Any:
        """Start to duplicate with hints; see :meth:`Idup`."""
        refuse_if_forked()
        made, request = super().Idup_with_info(info)
        return self._adopt(made, complete=False), request


class DerivedIntracomm(Derived, MPI.Intracomm):
    """Methods of intracommunicators that make communicators."""

    def Free(self) -> None:
        """Free the communicator and the private channel that is cached on it; collective."""
        free_channel(self)
        super().Free()
        self.note_freed()

    def free(self) -> None:
        """Call :meth:`Free`, if this is neither COMM_NULL nor predefined, as mpi4py's objects of those do."""
        if not is_predefined(self):
            super().free()

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Any:
        """Make a communicator from a group of ranks, collective over that group only; see :meth:`Split`."""
        refuse_if_forked()
        return self._wrap(super().Create_group(group, tag))

    def Create_cart(self, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:
        """Make a Cartesian grid, an :class:`mpicoll.Cartcomm`; see :meth:`Split`."""
        return self._make(super().Create_cart, dims, periods, reorder)

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        """Make a graph that every rank knows, an :class:`mpicoll.Graphcomm`; see :meth:`Split`."""
        return self._make(super().Create_graph, index, edges, reorder)

    def Create_dist_graph_adjacent(
        self,
        sources: Any,
        destinations: Any,
        sourceweights: Any = None,
        destweights: Any = None,
        info: MPI.Info = MPI.INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Make a graph from each rank's own neighbours, an :class:`mpicoll.Distgraphcomm`; see :meth:`Split`."""
        return self._make(
            super().Create_dist_graph_adjacent, sources, destinations, sourceweights, destweights, info, reorder
        )

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Any = None,
        info: MPI.Info = MPI.INFO_NULL,
        reorder: bool = False,
    ) -> Any:
        """Make a graph from edges that any rank gives, an :class:`mpicoll.Distgraphcomm`; see :meth:`Split`."""
        return self._make(super().Create_dist_graph, sources, degrees, destinations, weights, info, reorder)

    def Create_intercomm(self, local_leader: int, peer_comm: MPI.Intracomm, remote_leader: int, tag: int = 0) -> Any:
        """Make an :class:`mpicoll.Intercomm`; the communicators of both groups must be mpicoll's."""
        refuse_if_forked()
        return self._wrap(super().Create_intercomm(local_leader, peer_comm, remote_leader, tag))
