"""Topology of several nodes: the node of each rank, and the communicators inside nodes and along lanes.

The ranks of a node share memory. The i-th ranks of all nodes form *lane* i; lanes carry messages between nodes in
parallel. With 3 and 2 ranks on two nodes there are two lanes::

    node 0:  0   1   2        lane 0: 0 3
    node 1:  3   4            lane 1: 1 4        rank 2 has none
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel import Channel
from mpicoll.communicator.common_facts import Inheritance
from mpicoll.communicator.predefined import WORLD
from mpicoll.progress.communicator_creation import meet_before_making, node_communicator
from mpicoll.progress.failed_ranks import revoked_after_failure
from mpicoll.progress.waiting import polls_before_yield


class NodeTopology:
    """One rank's place among the nodes of a communicator.

    Attributes
    ----------
    node, lane
        Channels of the ranks of this node, and of this rank's lane (None if it has none).
    lanes
        Number of lanes: the number of ranks on the smallest node.
    node_of, local_of
        By rank of the communicator: the number of its node, and its local rank there.
    my_node
        The number of this rank's node.
    blocked
        Whether ranks are numbered node by node, so that reducing node by node keeps their order.
    even
        Whether all nodes have equally many ranks.
    """

    def __init__(self, parent: Channel, ids: np.ndarray) -> None:
        comm = parent.comm
        self.node_of = np.unique(ids, return_inverse=True)[1].tolist()
        self.local_of = [self.node_of[:rank].count(node) for rank, node in enumerate(self.node_of)]
        self.lanes = min(self.node_of.count(node) for node in set(self.node_of))
        self.blocked = self.node_of == sorted(self.node_of)
        self.even = len(self.node_of) == self.lanes * len(set(self.node_of))
        self.my_node, local = self.node_of[comm.rank], self.local_of[comm.rank]
        meet_before_making(comm)
        inside = comm.Split(self.my_node, comm.rank)
        meet_before_making(comm)
        across = comm.Split(local if local < self.lanes else MPI.UNDEFINED, self.my_node)
        ranks = range(comm.size)
        on_node = [rank for rank in ranks if self.node_of[rank] == self.my_node]
        on_lane = sorted((rank for rank in ranks if self.local_of[rank] == local), key=self.node_of.__getitem__)
        self.node = _channel(inside, parent, on_node)
        self.lane = _channel(across, parent, on_lane, alone=True, apart=True) if across != MPI.COMM_NULL else None

    def channels(self) -> list[Channel]:
        """Return the channels of this rank's node and of its lane, if it has one."""
        return [self.node] if self.lane is None else [self.node, self.lane]

    def close(self) -> None:
        """Free everything; collective."""
        for channel in self.channels():
            channel.close()


def _channel(comm: MPI.Comm, parent: Channel, ranks: list[int], **facts: bool) -> Channel:
    """Return the channel of some `ranks` of a parent, which has their settings, and whose numbers messages name.

    It takes over the communicator `comm` of these ranks, and frees it.
    """
    with revoked_after_failure(comm):
        channel = Channel(MPI.Intracomm(comm), Inheritance(parent.facts, np.array(ranks)), **facts)
    channel.watchdog.elsewhere, channel.watchdog.numbers = parent.watchdog, ranks
    return channel


class NodeMeeting(NamedTuple):
    """A number for the node of each rank, see :func:`node_ids`; number of polls before a wait yields the core."""

    node_ids: np.ndarray
    polls: int


def node_ids(comm: MPI.Intracomm) -> np.ndarray:
    """Return a number for each rank, the same for ranks of one node; collective.

    ``MPICOLL_NODES=3,5`` simulates nodes: the first three ranks of COMM_WORLD are on one node and the next five on
    another; ``MPICOLL_NODES=4`` makes nodes of four ranks.
    """
    own = pretended_node()
    if own is None:
        together = node_communicator(comm)
        own = _lowest(together, comm.rank)
        together.Free()
    return _told(comm, own)


def meet_on_nodes(comm: MPI.Intracomm) -> NodeMeeting:
    """Let the ranks of each node count its cores, and tell all others which node they are on; collective."""
    own, together = pretended_node(), node_communicator(comm)
    polls = polls_before_yield(together)
    own = _lowest(together, comm.rank) if own is None else own
    together.Free()
    return NodeMeeting(_told(comm, own), polls)


def _lowest(together: MPI.Comm, rank: int) -> int:
    lowest = np.array([rank], np.int64)
    together.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    return int(lowest[0])


def _told(comm: MPI.Intracomm, own: int) -> np.ndarray:
    ids = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([own], np.int64), ids)
    return ids


def pretended_node() -> int | None:
    """Return the node of this rank according to ``MPICOLL_NODES``, None if it is not set.

    Raises
    ------
    ValueError
        If it is not a list of positive numbers.
    """
    rank, text = WORLD.rank, os.environ.get("MPICOLL_NODES", "")
    if not text:
        return None
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"MPICOLL_NODES: {text!r} is not a list of positive numbers of ranks, such as 3,5")
    node, first = 0, 0
    while rank >= first + sizes[min(node, len(sizes) - 1)]:
        first += sizes[min(node, len(sizes) - 1)]
        node += 1
    return node
