"""The channel of a communicator: made once, cached as an attribute of it, freed with it."""

from __future__ import annotations

import sys

from mpi4py import MPI

from mpicoll.runtime.channel import Channel
from mpicoll.runtime.cluster import Cluster, node_ids

_keyval: int | None = None


def _on_free(comm: MPI.Comm, keyval: int, channel: Channel) -> None:
    if not (sys.is_finalizing() or MPI.Is_finalized()):
        channel.close()


def channel_of(comm: MPI.Intracomm) -> Channel:
    """Return the channel of a communicator; collective when it is made."""
    global _keyval
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval(delete_fn=_on_free)
    channel = comm.Get_attr(_keyval)
    if not isinstance(channel, Channel):
        channel = _make(comm)
        comm.Set_attr(_keyval, channel)
    return channel


def _make(comm: MPI.Intracomm) -> Channel:
    ids = node_ids(comm)
    nodes = len(set(ids.tolist()))
    channel = Channel(comm, alone=nodes > 1, apart=1 < nodes == comm.size)
    if 1 < nodes < comm.size:
        channel.cluster = Cluster(channel, ids)
    return channel
