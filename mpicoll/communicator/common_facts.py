"""Facts on which the ranks of a channel have agreed, and which hold for later channels of some of these ranks.

The ranks of a program's own communicator meet for the first time when mpicoll serves it: they compare settings, find
out who shares memory with whom, and measure how fast it is. Communicators that are made of it inherit the facts. So do
others of processes that have met, which :func:`find` knows, since nothing of it depends on the communicator::

    a = mpicoll.Intracomm(MPI.COMM_WORLD)              # all ranks meet
    b = mpicoll.Intracomm(MPI.COMM_WORLD.Split(0))     # one agreement shows that all ranks know of that meeting
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.predefined import WORLD
from mpicoll.environment import core_numbers
from mpicoll.progress.driver_thread import driver
from mpicoll.shared_memory import domain as node

_MASK = (1 << 61) - 1
_MOST = 8
"""Number of meetings that are remembered."""


class CommonFacts(NamedTuple):
    """Facts that hold for all ranks of a channel, and for any of them; `polls` for those of this node.

    Attributes
    ----------
    check, polls, tables
        See :class:`~mpicoll.communicator.channel.Channel`.
    is_alone
        True if nothing is known of memory that the ranks share: they are on several nodes, or have only just met.
    domain
        Facts of their domain, None if they share no memory.
    """

    check: str
    polls: int
    tables: Any = None
    is_alone: bool = True
    domain: node.Facts | None = None


class Inheritance(NamedTuple):
    """Facts for a new channel; the other fields as in :class:`node.Known`."""

    facts: CommonFacts
    ranks: np.ndarray
    memory: Any = None
    places: np.ndarray | None = None


class Meeting(NamedTuple):
    """A first meeting of ranks.

    Attributes
    ----------
    channel
        The channel that was made then; it may have been freed.
    session
        Its number, the same on all ranks.
    environment
        What :func:`_environment` returned then.
    places
        By rank in MPI.COMM_WORLD: the rank in that channel.
    node_ids
        See :class:`~mpicoll.communicator.channel.Channel`.
    facts
        The facts on which the ranks agreed.
    """

    channel: weakref.ref[Any]
    session: int
    environment: tuple[Any, ...]
    places: dict[int, int]
    node_ids: np.ndarray
    facts: CommonFacts


class KnownFacts(NamedTuple):
    """Facts of a meeting in which all ranks of a communicator took part, as far as this rank knows.

    Attributes
    ----------
    offer
        A number that is equal on ranks that know the same; more than 0.
    facts, ranks, node_ids
        The facts, the ranks there, and the numbers of their nodes.
    """

    offer: int
    facts: CommonFacts
    ranks: np.ndarray
    node_ids: np.ndarray


_meetings: list[Meeting] = []
"""The last meetings of this process, the latest first."""


def note(channel: Any) -> None:
    """Remember the meeting in which a channel was made, unless later ones may find memory that it had no room for."""
    if not channel.is_alone and (channel.node is None or not channel.node.segments):
        return
    places = {world: rank for rank, world in enumerate(_ranks_in_world(channel.comm))}
    if min(places) < 0 or len(places) < channel.size:  # processes of another program
        return
    made = Meeting(weakref.ref(channel), channel.session, _environment(), places, channel.node_ids, channel.facts)
    others = [each for each in tuple(_meetings) if (each.places, each.environment) != (places, made.environment)]
    _meetings[:] = [made, *others][:_MOST]


def find(comm: MPI.Intracomm) -> KnownFacts | None:
    """Return the last meeting of all ranks of a communicator, None if there was none, or settings have changed."""
    if not _meetings:
        return None
    world, environment = _ranks_in_world(comm), _environment()
    for meeting in tuple(_meetings):  # threads may make communicators at the same time
        if meeting.environment == environment and all(rank in meeting.places for rank in world):
            channel, ranks = meeting.channel(), np.array([meeting.places[rank] for rank in world])
            facts = meeting.facts._replace(tables=None if channel is None else channel.tables)
            offer = 1 + (hash((meeting.session, facts.tables is None)) & _MASK)
            return KnownFacts(offer, facts, ranks, meeting.node_ids[ranks])
    return None


def forget_all() -> None:
    """Let the ranks of the next communicators meet anew."""
    _meetings.clear()


def _ranks_in_world(comm: MPI.Intracomm) -> list[int]:
    """Return the rank of each process of a communicator in MPI.COMM_WORLD, negative for those that are not there."""
    group, world = comm.Get_group(), WORLD.Get_group()
    ranks = MPI.Group.Translate_ranks(group, range(comm.size), world)
    group.Free()
    world.Free()
    return list(ranks)


def _environment() -> tuple[Any, ...]:
    """Return what facts depend on and a program may change: settings, cores, and that there is a driver thread."""
    settings = sorted(each for each in os.environ.items() if each[0].startswith(("MPICOLL_", "OMP_NUM_THREADS")))
    return tuple(settings), tuple(core_numbers()), driver() is not None
