"""Cache of channels as attributes of their communicators, with which they are freed."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator import closing, common_facts
from mpicoll.communicator.channel import Channel
from mpicoll.communicator.common_facts import CommonFacts, Inheritance
from mpicoll.communicator.environment_agreement import agree, what_is_wrong
from mpicoll.communicator.forked_children import refuse_if_forked
from mpicoll.communicator.one_rank_channels import ChannelsOfOneRank
from mpicoll.communicator.predefined import is_predefined
from mpicoll.communicator.settings import check_mode
from mpicoll.communicator.spare_agreement import Family, meet
from mpicoll.communicator.spare_channels import Origin, retire
from mpicoll.communicator.topology import NodeTopology, meet_on_nodes, pretended_node
from mpicoll.kernels import dispatch, executor
from mpicoll.kernels.decorators import DISABLED
from mpicoll.progress import progress_engine
from mpicoll.progress.communicator_creation import private_duplicate
from mpicoll.progress.failed_ranks import revoked_after_failure
from mpicoll.shared_memory.domain_memory import memory_for


class Attached:
    """Attribute of a communicator: what belongs to mpicoll and is freed with it.

    There is one for each communicator. MPICH frees a communicator's attributes one by one, and mpi4py, when it calls a
    function of ours for one of them, asks for the communicator's grid, which is an attribute too: of two functions the
    second one read what had been freed with the first attribute.

    Attributes
    ----------
    channel
        The channel, None before it is made.
    communicator
        Weak reference to an object that has to know when the communicator is freed without it, or None.
    """

    __slots__ = ("channel", "communicator")

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.communicator: weakref.ref[Any] | None = None

    def end(self) -> None:
        """Free the channel, if there is one; collective."""
        channel, self.channel = self.channel, None
        communicator = None if self.communicator is None else self.communicator()
        if communicator is not None:
            communicator.note_freed()
        if channel is not None:
            _live.discard(self)
            try:
                progress_engine.complete_on(channel)
                retire(channel)
            except BaseException:  # others may still write to its memory
                if not closing.has(channel):
                    channel.break_off("Free ended with an exception", channel.comm, channel.watchdog)
                raise
            closing.go_on()


_live: set[Attached] = set()
"""Attributes with channels: those of this process's communicators that have not been freed."""


def live_channels() -> int:
    """Return the number of this process's communicators that have channels, and have not been freed; local."""
    return len(_live)


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_on_free)


def _on_free(comm: MPI.Comm, keyval: int, attached: Attached) -> None:
    # MPI deletes those of MPI.COMM_WORLD while it is finalised, where other ranks may come late, or have come already.
    if not (sys.is_finalizing() or MPI.Is_finalized() or is_predefined(comm)):
        attached.end()


def _attached(comm: MPI.Intracomm) -> Attached:
    attached = comm.Get_attr(_keyval())
    if not isinstance(attached, Attached):
        attached = Attached()
        comm.Set_attr(_keyval(), attached)
    return attached


def note_freeing_of(communicator: Any) -> None:
    """Call ``communicator.note_freed()`` when the communicator is freed, by this object or another one; local.

    A channel would do so. Without one the next communicator might have the same handle, and the object would use that.
    """
    _attached(communicator).communicator = weakref.ref(communicator)


def channel_of(
    comm: MPI.Intracomm,
    parent: Channel | None = None,
    settings: Hashable = None,
    *,
    everybody: bool = False,
    timeout: Any = 0.0,
) -> Channel:
    """Return the channel of a communicator; the first call for it makes the channel and is collective.

    Parameters
    ----------
    parent
        For a new communicator, channel of one with all its ranks, equally given on all of them. What its ranks have
        agreed on holds for the new one too: nodes, check mode, how processes reach each other's memory.
    everybody
        Whether all ranks of the parent make this call; those that get no communicator call :func:`sit_out`.
    settings
        Settings of the new communicator: a spare channel of one with the same settings may serve it, if there is a
        `parent`, or one rank.
    timeout
        Seconds after which a rank no longer waits for the others to make this call, see :func:`largest_of_all`.

    Raises
    ------
    CollectiveTimeout
        If the others have not made it by then.
    ValueError, RemoteError
        If an environment variable is wrong, here or on another rank.
    """
    refuse_if_forked()
    channel = known_channel(comm) if parent is None else None
    if channel is None:
        closing.go_on()  # before all, so that spares are known to all ranks of the communicator
        if comm.size == 1:
            channel = _of_one_rank(comm, settings)
        else:
            channel = _make(comm, timeout) if parent is None else _derive(comm, parent, settings, everybody)
        attached = _attached(comm)
        attached.channel = channel
        _live.add(attached)
    return channel


def sit_out(parent: Channel | None) -> None:
    """Take part in a call of all ranks of `parent` in which this rank gets no communicator; collective."""
    if parent is not None and parent.node is not None:
        meet(parent)


def known_channel(comm: MPI.Comm) -> Channel | None:
    """Return the channel of a communicator, None if there is none yet, which is so on all ranks; not collective."""
    attached = comm.Get_attr(_keyval())
    return attached.channel if isinstance(attached, Attached) else None


def free_channel(comm: MPI.Intracomm) -> None:
    """Free the channel of a communicator that is about to be freed, if it has one; collective.

    Else it is freed by MPI's call of :func:`_on_free`. Where this rank has messages under way on the communicator, that
    comes only when they are over in MPICH, and the other ranks would wait for this one. MPI.COMM_WORLD and
    MPI.COMM_SELF keep theirs, since MPI refuses to free them.
    """
    attached = comm.Get_attr(_keyval())
    if isinstance(attached, Attached) and not is_predefined(comm):
        attached.end()
        comm.Delete_attr(_keyval())


@functools.cache
def _load_kernels() -> None:
    """Load what every first collective needs, once a process.

    Where it has to be compiled, ranks wait for it here, asleep. In a collective of the MPI library they would poll, and
    take the cores from the rank that compiles.
    """
    if not DISABLED:
        for kernel in (dispatch.call, executor.begin, executor.advance, executor.await_others, executor.look):
            kernel.load()


def _make(comm: MPI.Intracomm, timeout: Any = 0.0) -> Channel:
    if comm.size > 1:
        _load_kernels()
    known = common_facts.find(comm)
    agreement = agree(comm, 0 if known is None else known.offer, timeout)
    if known is not None and agreement.is_common:
        inherited = Inheritance(known.facts._replace(check=agreement.check), known.ranks)
        return _on_nodes(comm, known.node_ids, inherited, agreement.session)
    meeting = meet_on_nodes(comm)
    facts = CommonFacts(agreement.check, meeting.polls)
    channel = _on_nodes(comm, meeting.node_ids, Inheritance(facts, np.arange(comm.size)), agreement.session)
    if comm.size > 1:
        common_facts.note(channel)
    return channel


_of_one = ChannelsOfOneRank()


def _of_one_rank(comm: MPI.Intracomm, settings: Hashable) -> Channel:
    wrong = what_is_wrong()
    if wrong:
        raise ValueError(wrong)
    key = settings, _kind_of(comm), check_mode(), pretended_node()
    spare: Channel | None = _of_one.take(key)
    if spare is not None:
        return spare
    channel = _make(comm)
    _keep_at(_of_one, channel, key)
    return channel


def _derive(comm: MPI.Intracomm, parent: Channel, settings: Hashable, everybody: bool) -> Channel:
    group, known = comm.Get_group(), parent.comm.Get_group()
    # MPICH counts ranks that have no place in a grid to its group.
    ranks = MPI.Group.Translate_ranks(group, range(comm.size), known)
    group.Free()
    known.Free()
    if parent.node_ids is None or min(ranks) < 0:
        return _make(comm)
    key = tuple(ranks), settings, _kind_of(comm)
    in_segments = parent.node is not None and parent.node.segments
    make = partial(memory_for, comm) if everybody and in_segments else None
    spare, session, places, memory = parent.spares.find(comm, key, Family(parent, ranks, everybody), make)
    if spare is not None:
        return spare
    inherited = Inheritance(parent.facts, np.array(ranks), memory, places)
    channel = _on_nodes(comm, parent.node_ids[ranks], inherited, session)
    _keep_at(parent, channel, key)
    return channel


def _keep_at(home: Any, channel: Channel, key: Hashable) -> None:
    """Let a channel become a spare at its home when its communicator is freed."""
    if channel.comm.Get_topology() in (MPI.UNDEFINED, MPI.CART):  # a graph has too many facts to compare
        channel.origin = Origin(weakref.ref(home), key)


def _kind_of(comm: MPI.Intracomm) -> Hashable:
    """Return the kind of topology, of a grid all of it, which the private duplicate has in common with `comm`."""
    kind = comm.Get_topology()
    return tuple(map(tuple, MPI.Cartcomm(comm).Get_topo())) if kind == MPI.CART else kind


def _on_nodes(comm: MPI.Intracomm, ids: np.ndarray, inherited: Inheritance, session: int) -> Channel:
    lowest: dict[int, int] = {}
    ids = np.array([lowest.setdefault(node, rank) for rank, node in enumerate(ids.tolist())])
    nodes, duplicate = len(lowest), private_duplicate(comm)
    with revoked_after_failure(duplicate):
        channel = Channel(duplicate, inherited, alone=nodes > 1, apart=1 < nodes == comm.size, session=session)
        channel.node_ids = ids
        if 1 < nodes < comm.size:
            channel.cluster = NodeTopology(channel, ids)
    return channel
