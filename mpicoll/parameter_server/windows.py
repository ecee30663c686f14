"""Windows and communicators of a parameter server, from set-up to release."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel import Channel
from mpicoll.communicator.topology import node_ids
from mpicoll.errors import CollectiveTimeout
from mpicoll.messages.call_agreement import agree
from mpicoll.parameter_server.connection import ShardConnection
from mpicoll.parameter_server.control import Control, State
from mpicoll.parameter_server.message_memory import MessageMemory
from mpicoll.parameter_server.partition import Partition, Settings, replica_offsets
from mpicoll.parameter_server.remote_memory import SHARED_MEMORY, Memory, Region, WindowMemory, free_nbytes
from mpicoll.parameter_server.serve import Server
from mpicoll.parameter_server.server_state import published_of
from mpicoll.parameter_server.shard_memory import Places, payload_nbytes
from mpicoll.parameter_server.worker import Worker
from mpicoll.progress.call_signature import Signature

_kept: list[Any] = []
"""Windows that are leaked on purpose, since other ranks may still use their memory."""


class ServerWindows:
    """The windows that the ranks share. The constructor is collective over `comm`.

    Attributes
    ----------
    layout
        Roles of the ranks.
    staleness, late
        The histogram of staleness, and the number of pushes that were left out, after all ranks have ended.
    missing
        The ranks that did not reach the end.
    """

    def __init__(self, comm: MPI.Intracomm, layout: Partition, settings: Settings, places: Sequence[Places]) -> None:
        self._memory = remote_memory(comm.Dup(), settings.transport, settings.timeout)
        self._comm, self.layout, self._settings, self._places = self._memory.comm, layout, settings, places
        self.rank = int(comm.rank)
        self.control = Control(self._memory, layout, settings.timeout, layout.server_rank(0))
        self._regions: list[Region] = [
            self._memory.region(layout.server_rank(shard), place.nbytes) for shard, place in enumerate(places)
        ]
        self.staleness: np.ndarray | None = None
        self.late: int | None = None
        self.missing: tuple[int, ...] = ()
        self._worker: Worker | None = None

    def server(self, initial: np.ndarray, state: dict[str, np.ndarray] | None) -> Server:
        """Return the server of this rank's part of `initial`."""
        shard = self.rank - self.layout.workers
        region, places = self._regions[shard], self._places[shard]
        server = Server(region, places, self.control, self.layout, self._settings, self.rank)
        server.begin(initial, state)
        return server

    def worker(self, initial: np.ndarray, state: dict[str, np.ndarray] | None) -> Worker:
        """Return the worker of this rank, whose parameters are those of `initial` or of a state."""
        start = published_of(initial, state)
        links = []
        for shard, (region, places) in enumerate(zip(self._regions, self._places, strict=True)):
            bounds = self.layout.bounds(shard)
            part = start[slice(*bounds)]
            links.append(ShardConnection(region, places, self.rank, bounds, self._settings, part))
        self._worker = Worker(links, self.control, self.layout, self._settings, self.rank)
        return self._worker

    def begin(self) -> None:
        """Wait until the memory of all servers is initialised."""
        self._memory.barrier()

    def close(self, quiet: bool) -> None:
        """Free the windows collectively if every rank arrives and no server has failed; otherwise leak them on purpose.

        Parameters
        ----------
        quiet
            Whether an exception is being handled that must not be replaced.

        Raises
        ------
        CollectiveTimeout
            If ranks did not arrive and have not been dropped; the message names them.
        """
        try:
            self._close(quiet)
        except BaseException:
            self.abandon()
            raise

    def _close(self, quiet: bool) -> None:
        self.control.enter(State.CLOSING)
        late = self._meet()
        self.missing = () if late is None else tuple(late.missing_ranks)
        self.control.look()
        # The traceback of a server that failed may show memory of its window: it has to stay where it is.
        free = self.control.all_free(late is None and self.control.failed_server() is None)
        if free or late is None or self._are_dropped(self.missing):
            self.staleness, self.late = self.control.counted()
        if late is None:  # other ranks may still ask what this one has read
            self._memory.settle()
        else:
            self._leave()
        if free:
            self._free()
            return
        self._memory.abandon()
        _kept.extend([self.control, self._regions, self._comm, self._worker])
        if late is not None and not quiet and not self._are_dropped(self.missing):
            raise late

    def abandon(self) -> None:
        """Take no more part in the session, since a rank has died. Local."""
        self._memory.abandon()
        _kept.append(self)

    def _meet(self) -> CollectiveTimeout | None:
        """Wait for all ranks to leave the block; return the exception to raise if some do not arrive."""
        control, everybody = self.control, self._comm.Ibarrier()

        def missing() -> list[int]:
            return np.flatnonzero(control.states & State.CLOSING == 0).tolist() or list(range(self._comm.size))

        try:
            control.wait(everybody.Test, missing, "all to leave the block", failures=False)
        except CollectiveTimeout as late:
            _kept.append(everybody)
            return late
        return None

    def _leave(self) -> None:
        """Tell that this rank reads nothing more; the owner of the control words answers until all have done so."""
        if self._settings.transport != "messages":
            return
        control = self.control
        control.enter(State.LEFT)

        def staying() -> list[int]:
            return np.flatnonzero((control.states & State.CLOSING != 0) & (control.states & State.LEFT == 0)).tolist()

        if self.rank == self.layout.server_rank(0):
            control.look()
            with contextlib.suppress(CollectiveTimeout):
                control.wait(lambda: not staying(), staying, "all to leave", failures=False)

    def _are_dropped(self, ranks: Sequence[int]) -> bool:
        return all(rank < self.layout.workers and self.control.dropped[rank] for rank in ranks)

    def _free(self) -> None:
        if self._worker is not None:
            self._worker.forget_answers()
        for region in self._regions:
            region.close()
        self.control.close()
        self._comm.Free()


def remote_memory(comm: MPI.Intracomm, transport: str, timeout: float) -> Memory:
    """Return remote memory by ``"windows"`` or ``"messages"`` on a communicator that nothing else uses."""
    return MessageMemory(comm, timeout) if transport == "messages" else WindowMemory(comm)


def with_replicas(layout: Partition, comm: MPI.Intracomm, replicas: int) -> Partition:
    """Return the roles of the ranks with places of so many copies of each shard. Collective over `comm`."""
    if replicas == 1:
        return layout
    nodes = node_ids(comm)[layout.workers :].tolist()
    return dataclasses.replace(layout, offsets=replica_offsets(nodes, replicas))


def places_of(layout: Partition, settings: Settings, rank: int, nodes: np.ndarray | None) -> list[Places]:
    """Return the layout of each shard.

    Parameters
    ----------
    nodes
        By rank, a number of its node; None for one node.

    Raises
    ------
    ValueError
        On servers of a node with less free shared memory than its servers need together.
    """
    found = []
    for shard in range(layout.servers):
        start, stop = layout.bounds(shard)
        compressor = None if settings.compressor is None else settings.compressor.part(start, stop)
        nbytes = payload_nbytes(compressor, stop - start, settings.dtype.itemsize)
        slots = 0 if settings.direct else settings.slots
        pulls = None if settings.pull_compressor is None else settings.pull_compressor.part(start, stop)
        deltas = 0 if pulls is None else pulls.wire_nbytes(stop - start)
        found.append(Places(layout.workers, stop - start, settings.dtype.itemsize, slots, nbytes, deltas))
    if rank >= layout.workers and settings.transport == "windows":
        here = [server for server in range(layout.servers) if _share_node(nodes, rank, layout.workers + server)]
        needed, free = sum(found[server].nbytes for server in here), free_nbytes()
        if free is not None and needed > free:
            who = f"rank {rank} needs" if len(here) == 1 else f"the {len(here)} servers on the node of rank {rank} need"
            raise ValueError(
                f"initial: {who} {needed} bytes of {SHARED_MEMORY} and {free} are free; "
                f"take servers on more nodes, fewer slots, compression or a larger {SHARED_MEMORY}"
            )
    return found


def _share_node(nodes: np.ndarray | None, rank: int, other: int) -> bool:
    return nodes is None or bool(nodes[rank] == nodes[other])


def agree_on(channel: Channel, text: str, seconds: float, problem: Exception | None) -> None:
    """Raise on all ranks if one has a problem, or their texts differ."""
    signature = Signature.of(text) if problem is None else Signature.refusing("ParameterServer")
    channel.alone.call(lambda: agree(channel, signature, channel.enter(signature), seconds, problem))
