"""State of a parameter server after the death of ranks, from those that hold copies of its shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from mpi4py import MPI

from mpicoll.errors import RemoteError
from mpicoll.parameter_server.partition import Partition, Settings
from mpicoll.parameter_server.server_state import state_nbytes, unpacked
from mpicoll.parameter_server.shard_parameters import ShardParameters

_NONE = -1


def rescued(
    comm: MPI.Intracomm, held: Mapping[int, ShardParameters], layout: Partition, settings: Settings
) -> dict[str, np.ndarray]:
    """Return the whole state on all ranks, of each shard the copy that includes most pushes. Collective over `comm`.

    Parameters
    ----------
    held
        Copies of shards on this rank, by the number of the shard.
    layout
        Roles that the ranks, and those that have died, had.

    Raises
    ------
    RemoteError
        On every rank: no rank holds one of the shards.
    """
    settings = dataclasses.replace(settings, pull_compressor=None)
    parts = []
    for shard, root in enumerate(_roots(comm, held, layout)):
        start, stop = layout.bounds(shard)
        if comm.Get_rank() == root:
            message = held[shard].packed(None)
        else:
            message = np.empty(state_nbytes(settings, stop - start), np.uint8)
        comm.Bcast(message, root)
        parts.append(unpacked(message, settings))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _roots(comm: MPI.Intracomm, held: Mapping[int, ShardParameters], layout: Partition) -> list[int]:
    """Return the rank with the newest copy of each shard, the lowest one of several."""
    known = np.array([held[shard].version if shard in held else _NONE for shard in range(layout.servers)], np.int64)
    table = np.empty((comm.Get_size(), layout.servers), np.int64)
    comm.Allgather(known, table)
    for shard in np.flatnonzero(table.max(axis=0) == _NONE).tolist():
        (start, stop), rank = layout.bounds(shard), layout.server_rank(shard)
        others = ", ".join(map(str, layout.replica_ranks(shard)))
        copies = f"rank {others} with the replicas" if others else "there was no replica"
        raise RemoteError(f"parameters {start} to {stop - 1} are lost: rank {rank}, their server, died, and {copies}")
    found: list[int] = table.argmax(axis=0).tolist()
    return found
