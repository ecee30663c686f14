"""Replicas of shards: a shard's server sends each update to the servers of its replicas, which apply the same ones.

Server A holds shard 0 and a replica of shard 1, server B the other way round::

    worker            A (shard 0)                  B (replica of shard 0)
       | push  ------>  |                             |
       |              applies it  -- update 7 ----->  |
       |                |                           applies it
       |                |  <------------- done 7 ---  |
       |  <-- pull ---  publishes version 8           |

A server publishes parameters, and frees the slots of mailboxes, only when all replicas have applied the updates in
them. So a replica has every update that a worker may have seen, and the same bits; what is lost with a server are the
pushes that its workers do not know to be applied. (Primary-backup replication: Alsberg and Day, ICSE 1976; Budhiraja et
al., "The primary-backup approach", 1993. Li et al., "Scaling distributed machine learning with the parameter server",
OSDI 2014, replicate after the gradients of several workers have been added, as synchronous steps do here.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from mpicoll.parameter_server.partition import Partition, Settings
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES, ShardHeader, bits_of, opened, payload_nbytes
from mpicoll.parameter_server.shard_parameters import ShardParameters

_UPDATE_TAG, _DONE_TAG = 3, 4


class UpdateLog:
    """Updates of a shard on their way to its replicas.

    Parameters
    ----------
    comm
        A communicator of the parameter server's own.
    replicas
        Ranks that hold a replica.
    """

    def __init__(self, comm: MPI.Intracomm, replicas: Sequence[int]) -> None:
        self._comm, self._replicas, self._number = comm, tuple(replicas), 0
        self._under_way: list[tuple[MPI.Request, np.ndarray]] = []

    def send(self, payload: np.ndarray, codec: int, rate: float, first: int, pushes: int) -> None:
        """Send an update to all replicas; `payload` may be changed afterwards.

        Parameters
        ----------
        codec
            Number of the payload's encoding.
        rate, first, pushes
            See :meth:`~mpicoll.parameter_server.shard_parameters.ShardParameters.apply`.
        """
        if not self._replicas:
            return
        number, self._number = self._number, self._number + 1
        header = ShardHeader(number, payload.size, number, pushes, codec, first, bits_of(rate)).sealed(payload)
        message = np.concatenate([header.words().view(np.uint8), payload])
        for rank in self._replicas:
            done = np.empty(1, np.int64)
            self._under_way.append((self._comm.Irecv(done, rank, _DONE_TAG), done))
            self._under_way.append((self._comm.Isend(message, rank, _UPDATE_TAG), message))

    def is_applied(self) -> bool:
        """Return whether all replicas have applied all updates."""
        if self._under_way:
            self._under_way = [each for each in self._under_way if not each[0].Test()]
        return not self._under_way


class ShardReplica:
    """Replica of another server's shard.

    Parameters
    ----------
    source
        Rank of the shard's server.
    initial, state
        See :class:`~mpicoll.parameter_server.shard_parameters.ShardParameters`.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        source: int,
        settings: Settings,
        bounds: tuple[int, int],
        initial: np.ndarray,
        state: Mapping[str, np.ndarray] | None,
    ) -> None:
        self._comm, self._source = comm, source
        self.shard, self._number = ShardParameters(settings, bounds, initial, state), 0
        self._sums = settings.staleness == 0  # an update is the sum of a step's gradients, as they are
        count, itemsize = bounds[1] - bounds[0], settings.dtype.itemsize
        self._most = payload_nbytes(None if self._sums else settings.compressor, count, itemsize)
        self._message = np.empty(HEADER_NBYTES + self._most, np.uint8)
        self._done: list[tuple[MPI.Request, np.ndarray]] = []
        self._expect()

    def _expect(self) -> None:
        self._arriving = self._comm.Irecv([self._message, MPI.BYTE], self._source, _UPDATE_TAG)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, optimizer and one update."""
        return self.shard.nbytes + self._message.nbytes

    def take(self) -> bool:
        """Apply updates that have arrived; return whether there were any.

        Raises
        ------
        CorruptPayload
            If an update is damaged, or not the next one.
        """
        found = False
        self._done = [each for each in self._done if not each[0].Test()]
        while self._arriving.Test():
            self._apply()
            found = True
        return found

    def _apply(self) -> None:
        shard = self.shard
        codec, itemsize = (0, shard.parameters.itemsize) if self._sums else (shard.codec, shard.part_itemsize)
        source = f"rank {self._source} for its replica"
        header, payload = opened(self._message, source, self._number, codec, self._most, itemsize)
        gradient = payload.view(shard.parameters.dtype) if self._sums else shard.decoded(payload)
        shard.apply(gradient, header.learning_rate, header.first, header.version)
        done = np.array([self._number], np.int64)
        self._number += 1
        self._expect()
        self._done.append((self._comm.Isend(done, self._source, _DONE_TAG), done))

    def stop(self) -> None:
        """Expect no more updates."""
        self._arriving.Cancel()
        self._arriving.Wait()


def replicas_on(
    rank: int, comm: MPI.Intracomm, layout: Partition, settings: Settings, initial: np.ndarray,
    state: Mapping[str, np.ndarray] | None,
) -> dict[int, ShardReplica]:  # fmt: skip
    """Return the replicas that a server holds, by the number of their shard."""
    return {
        shard: ShardReplica(comm, layout.server_rank(shard), settings, layout.bounds(shard), initial, state)
        for shard in range(layout.servers)
        if rank in layout.replica_ranks(shard)
    }
