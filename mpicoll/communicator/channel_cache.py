"""The channel of a communicator: made once, cached as an attribute of it, freed with it."""

from __future__ import annotations

import os
import sys
import zlib

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel import Channel
from mpicoll.communicator.settings import check_mode
from mpicoll.communicator.topology import NodeTopology, node_ids, pretended_node
from mpicoll.environment import core_limit
from mpicoll.errors import RemoteError

_TEXT_NBYTES = 512

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
    _check_environments(comm)
    ids = node_ids(comm)
    nodes = len(set(ids.tolist()))
    channel = Channel(comm, alone=nodes > 1, apart=1 < nodes == comm.size)
    if 1 < nodes < comm.size:
        channel.cluster = NodeTopology(channel, ids)
    return channel


def _check_environments(comm: MPI.Intracomm) -> None:
    """Raise on all ranks if the environment of one is wrong, or pretends nodes of which the others know nothing.

    What is right may differ otherwise: then ranks agree on what all can do, where that is decided.
    """
    wrong = _what_is_wrong()
    nodes = os.environ.get("MPICOLL_NODES", "")
    code = zlib.crc32(nodes.encode())
    first, lowest, highest = -(comm.rank if wrong else comm.size), -code, code
    agreed = np.array([first, lowest, highest], np.int64)
    comm.Allreduce(MPI.IN_PLACE, agreed, MPI.MAX)
    first, lowest, highest = agreed.tolist()
    if -first < comm.size:
        text = np.zeros(_TEXT_NBYTES, np.uint8)
        own = wrong.encode()[:_TEXT_NBYTES]
        text[: len(own)] = np.frombuffer(own, np.uint8)
        comm.Bcast(text, -first)
        if wrong:
            raise ValueError(wrong)
        raise RemoteError(f"rank {-first}: {text.tobytes().rstrip(bytes(1)).decode(errors='replace')}")
    if -lowest != highest:
        raise ValueError(f"MPICOLL_NODES: it is not the same on all ranks; here it is {nodes!r}")


def _what_is_wrong() -> str:
    """Return what is wrong with this rank's environment, "" if nothing is."""
    try:
        check_mode()
        core_limit()
        pretended_node()
    except ValueError as error:
        return str(error)
    return ""
