"""Communicators with mpi4py's interface whose collectives are mpicoll's."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations and requests.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import index
from mpicoll.collectives import compressed, compression_tuning, select
from mpicoll.collectives.call_context import tried
from mpicoll.communicator.channel import Channel
from mpicoll.communicator.channel_cache import channel_of, known_channel, note_freeing_of, sit_out
from mpicoll.communicator.forked_children import refuse_if_forked
from mpicoll.communicator.mpi_exceptions import FreedCommunicator
from mpicoll.communicator.process_preparation import prepare_process
from mpicoll.communicator.settings import check_kind
from mpicoll.compression import Compressor
from mpicoll.interface.communicator_state import SET_UP, TABLES, SetUpAttribute, state_of
from mpicoll.interface.derived_communicators import Derived, Settings
from mpicoll.interface.neighborhood import NeighborhoodCollectives
from mpicoll.interface.object_collectives import ObjectCollectives
from mpicoll.shared_memory import numpy_allocator


class Intracomm(ObjectCollectives):
    """A communicator whose collectives are mpicoll's; everything else is inherited from mpi4py.

    The constructor is collective over `comm`. The first one for `comm` makes a private duplicate that carries
    mpicoll's messages; it is cached as an attribute of `comm` and freed with it. `comm` itself carries no message of
    mpicoll's.

    Parameters
    ----------
    comm
        An intracommunicator, with or without a topology.
    algorithm
        The default of every call's ``algorithm``: ``"auto"``, ``"native"`` (the MPI library), or the name of an
        algorithm, which is then used for the collectives that have it.
    timeout
        Seconds that a rank waits in a step of a collective before it raises
        :class:`~mpicoll.errors.CollectiveTimeout`. In the first call for a communicator it waits at least a minute.

    Raises
    ------
    TypeError, ValueError, UnknownAlgorithm
        If an argument is wrong; the message names the argument and its value. The other ranks raise
        :class:`~mpicoll.errors.RemoteError` in their first call.
    RuntimeError
        If the launcher belongs to another MPI library than the one that mpi4py has loaded.

    Notes
    -----
    Every rank must make the same calls in the same order, with the same count, dtype, op, root and algorithm. If the
    ranks disagree, all of them raise :class:`~mpicoll.errors.MismatchError`. The communicator cannot be used after
    that, unless ``MPICOLL_CHECK=full`` is set: then each call is compared before any data moves.
    """

    _kind: type[MPI.Intracomm] = MPI.Intracomm

    def __new__(cls, comm: MPI.Comm | None = None, **settings: Any) -> Intracomm:
        """Make a second handle of `comm`; without one, mpi4py makes an object that it fills later."""
        if comm is None:
            return MPI.Intracomm.__new__(cls)
        check_kind(comm, cls._kind)
        return MPI.Intracomm.__new__(cls, comm)

    def __init__(self, comm: MPI.Intracomm, *, algorithm: str = "auto", timeout: float = 60.0) -> None:
        check_kind(comm, self._kind)
        prepare_process()
        if comm.size == 1:
            select.check_settings(algorithm, timeout)
        self._set_up(Settings(algorithm, timeout))

    def _set_up(self, settings: Settings, parent: Channel | None = None, *, everybody: bool = False) -> None:
        """Find or make what is private to the communicator; collective. See :func:`channel_of`."""
        channel = channel_of(MPI.Intracomm(self), parent, settings, everybody=everybody, timeout=settings.timeout)
        if channel.state.get("_settings") == settings:  # a communicator that was freed has left it
            self.__dict__.update(channel.state)
        else:
            self.__dict__.update(state_of(channel, settings))
        if channel.origin is not None:
            channel.handles.add(self)
            channel.state = channel.state or {name: self.__dict__[name] for name in ("_settings", *SET_UP)}

    def forget_channel(self) -> None:
        """Forget what is private to the communicator, which has been freed; for mpicoll's own use."""
        for name in SET_UP:
            del self.__dict__[name]
        self.note_freed()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as mpi4py does: what wraps COMM_WORLD or COMM_SELF does so again, others raise ValueError."""
        for name in ("COMM_WORLD", "COMM_SELF"):
            predefined = getattr(MPI, name)
            if self is predefined:  # as `python -m mpicoll run` makes them
                return _predefined, (name,)
            if self == predefined:
                return _wrap_again, (predefined, *self._settings)
        raise ValueError(f"cannot serialize {type(self).__name__!r}: it wraps neither COMM_WORLD nor COMM_SELF")

    def _set_up_late(self, name: str) -> Any:
        """Set up what is private to a communicator that mpi4py has made, at its first collective call; collective."""
        if self._is_freed:
            raise FreedCommunicator
        if self == MPI.COMM_NULL:
            raise ValueError("comm: it is MPI.COMM_NULL")
        self._set_up(self._settings)
        return self.__dict__[name]

    @property
    def channel(self) -> Channel:
        """The private state of the communicator; for mpicoll's own tools."""
        channel = self._scope.channel
        channel.is_lent = True
        return channel

    @property
    def algorithm(self) -> str:
        """The default algorithm."""
        return self._settings.algorithm

    @property
    def timeout(self) -> float:
        """Seconds after which a waiting rank raises CollectiveTimeout."""
        return self._settings.timeout

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """Return the names that ``algorithm=`` takes here, besides ``"auto"``; local, but for what :meth:`Idup` says.

        Parameters
        ----------
        collective
            A collective in lower case, such as ``"allreduce"`` or ``"gatherv"``.

        Raises
        ------
        UnknownAlgorithm
            If there is no such collective.
        """
        return select.names(collective, self._scope.means)

    def choice(
        self, collective: str, nbytes: int, *, commutative: bool = True, compression: str | Compressor | None = None
    ) -> str:
        """Return the algorithm that ``"auto"`` takes for a vector of `nbytes` bytes; local as :meth:`algorithms` is.

        Parameters
        ----------
        collective
            A collective in lower case, such as ``"allreduce"``.
        nbytes
            The message size: the bytes of the whole vector, of all ranks' parts where ranks own parts.
        commutative
            Whether the operation commutes.
        compression
            As given to :meth:`Allreduce`, of float32. With ``"auto"`` the measurements made so far decide.

        Raises
        ------
        UnknownAlgorithm
            If there is no such collective.
        TypeError, ValueError, UnknownCompressor
            If `nbytes` is not a whole number from 0 on, there is no such compressor, or `compression` is given for
            another collective than allreduce.
        """
        means = self._scope.means
        select.row_of(collective)
        nbytes = index(nbytes, "nbytes", "the message size")
        if compression is not None and collective != "allreduce":
            raise ValueError(f"compression: {compression!r} is for allreduce, not {collective}")
        spec = compression_tuning.candidate(compression)
        if spec is not None:
            compression = spec if compression_tuning.known(self._scope, spec, nbytes) else None
        if compression is not None:
            facts = (np.dtype(np.float32), nbytes // 4, select.AUTO, self.size, self._scope.nodes)
            return compressed.choose(compression, MPI.SUM, *facts)[0]
        name = select.choice(collective, nbytes, means, commutative=commutative)
        if select.of_own_counts(collective, means) is not None:
            return name
        return tried(self.channel, select.row_of(collective), nbytes, name, False)

    def empty(self, shape: Any, dtype: Any = float) -> np.ndarray:
        """Return an uninitialised array in this process' memory segment, with arguments as :func:`numpy.empty`; local.

        Collectives among the ranks of a node read and write such arrays, and views of them, without a copy; no other
        rank accesses them otherwise. The array serves all communicators and is freed as any array. Where there are no
        memory segments it is an ordinary array.
        """
        return numpy_allocator.empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = float) -> np.ndarray:
        """Return an array of zeros in this process' memory segment; see :meth:`empty`."""
        return numpy_allocator.zeros(shape, dtype)

    @classmethod
    def Create_from_group(
        cls,
        group: MPI.Group,
        stringtag: str = "org.mpi4py",
        info: MPI.Info = MPI.INFO_NULL,
        errhandler: MPI.Errhandler | None = None,
    ) -> Any:
        """Make a communicator from a group, without a parent communicator; its settings are the defaults."""
        prepare_process()
        return wrap(MPI.Intracomm.Create_from_group(group, stringtag, info, errhandler), Settings())

    def _wrap(self, comm: MPI.Comm, *, everybody: bool = False) -> Any:
        return wrap(comm, self._settings, self._own_channel(), everybody=everybody)

    def _adopt(self, made: Any, *, complete: bool = True) -> Any:
        super()._adopt(made, complete=complete)
        if make_later is not None and make_later(made, self._settings) is not None:
            return made
        if complete:
            _set_up_new(made, self._settings, self._own_channel(), True)
        return made

    def _own_channel(self) -> Channel | None:
        """Return the channel, None on all ranks if no object of this communicator has made it yet; not collective."""
        return self._scope.channel if "_scope" in self.__dict__ else known_channel(MPI.Intracomm(self))


for _name in SET_UP:
    setattr(Intracomm, _name, 0 if _name in TABLES else SetUpAttribute(_name))


class Cartcomm(NeighborhoodCollectives, Intracomm, MPI.Cartcomm):
    """A Cartesian grid of ranks: an :class:`Intracomm`, and all that ``MPI.Cartcomm`` has."""

    _kind = MPI.Cartcomm

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the subgrid that this rank is in, along the dimensions to keep; it has the same settings."""
        self._meet()
        made = super().Sub(remain_dims)
        return self._wrap(made, everybody=made.size > 1)  # as large as the others: on all ranks or none


class Graphcomm(NeighborhoodCollectives, Intracomm, MPI.Graphcomm):
    """A graph of ranks, known to all of them: an :class:`Intracomm`, and all that ``MPI.Graphcomm`` has."""

    _kind = MPI.Graphcomm


class Distgraphcomm(NeighborhoodCollectives, Intracomm, MPI.Distgraphcomm):
    """A distributed graph: each rank knows its own neighbours. An :class:`Intracomm` and an ``MPI.Distgraphcomm``."""

    _kind = MPI.Distgraphcomm


class Intercomm(Derived, MPI.Intercomm):
    """An intercommunicator: its collectives are the MPI library's, and :meth:`Merge` returns an :class:`Intracomm`."""

    def _wrap(self, comm: MPI.Comm, *, everybody: bool = False) -> Any:
        return wrap(comm, self._settings)

    def Merge(self, high: bool = False) -> Any:
        """Merge both groups into an :class:`Intracomm`; all ranks of both groups must call this method of mpicoll's."""
        refuse_if_forked()
        return self._wrap(super().Merge(high))


make_later: Callable[[Any, Settings], Any] | None = None
"""Maker of objects that become ours later, for new communicators; see :mod:`mpicoll.program.library_first`."""
CLASSES: dict[type, type[Intracomm]] = {
    MPI.Intracomm: Intracomm,
    MPI.Cartcomm: Cartcomm,
    MPI.Graphcomm: Graphcomm,
    MPI.Distgraphcomm: Distgraphcomm,
}
"""Classes of mpicoll's communicators of one group, by those of mpi4py's that they are as."""


def wrap(comm: MPI.Comm, settings: Settings, parent: Channel | None = None, *, everybody: bool = False) -> Any:
    """Return the communicator of mpicoll for a communicator of mpi4py, of the same kind; MPI.COMM_NULL as it is.

    Collective over `comm`. The other arguments are those of :func:`channel_of`.
    """
    if comm == MPI.COMM_NULL:
        if everybody and make_later is None:
            sit_out(parent)
        return comm
    if isinstance(comm, MPI.Intercomm):
        made = Intercomm(comm)
        made._settings = settings
        return made
    if make_later is not None:
        return make_later(comm, settings)
    ours: Any = MPI.Intracomm.__new__(class_for(comm), comm)  # without the checks of our own `__new__`
    _set_up_new(ours, settings, parent, everybody)
    return ours


def class_for(comm: MPI.Comm) -> type[Intracomm]:
    """Return the class of mpicoll's communicators that are as one of mpi4py."""
    return CLASSES[type(comm)]


def _set_up_new(made: Intracomm, settings: Settings, parent: Channel | None, everybody: bool) -> None:
    """Set up a new communicator, one of a single rank in its first collective call: many, as in a grid, see none."""
    if made.size > 1:
        made._set_up(settings, parent, everybody=everybody)
        return
    made._settings = settings
    note_freeing_of(made)
    if everybody:
        sit_out(parent)


def _predefined(name: str) -> MPI.Intracomm:
    comm: MPI.Intracomm = getattr(MPI, name)
    return comm


def _wrap_again(comm: MPI.Intracomm, algorithm: str, timeout: float) -> Intracomm:
    return Intracomm(comm, algorithm=algorithm, timeout=timeout)
