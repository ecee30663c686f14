"""Collectives over several nodes: shared memory inside them, messages between them.

An allreduce on two nodes with three and two ranks, two lanes::

    reduce_scatter inside    0 owns share A, 1 owns B, 2 nothing  |  3 owns A, 4 owns B
    allreduce along lanes    0 with 3 over A                         1 with 4 over B
    allgather inside         everybody gets A and B

Every byte crosses the network as often as in the best allreduce between single ranks of the nodes, on as many
connections as there are lanes. (Lanes: Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane
communication", CLUSTER 2020.)
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from mpicoll.collectives import select, shared
from mpicoll.collectives.task import Part, Task
from mpicoll.errors import MpicollError
from mpicoll.runtime.agreement import agree
from mpicoll.runtime.buffers import Buffer
from mpicoll.runtime.channel import Channel

_SHARE_NBYTES = 4 << 10
"""Shorter shares are not worth a message of their own."""


def run(task: Task, timeout: float) -> None:
    """Do it and wait for the end.

    Raises
    ------
    MismatchError, RemoteError, CollectiveTimeout
        After which the communicator is broken; all ranks are told.
    """
    channel, signature = task.channel, task.signature()
    number = channel.enter(signature)
    if channel.check == "full":
        agree(channel, signature, number, timeout)
    try:
        _Steps(task, timeout).run()
    except BaseException as error:
        channel.break_off(f"{type(error).__name__}: {error}", task)
        if not isinstance(error, MpicollError) or number not in channel.supervisor.refused:
            channel.supervisor.refuse(number, f"gave up: {type(error).__name__}: {error}")
        raise
    if task.result is not None:
        task.result.buffer.give_back()


class _Steps:
    """One operation, step by step; a step is an operation on the node's or the lane's communicator."""

    def __init__(self, task: Task, timeout: float) -> None:
        cluster = task.channel.cluster
        assert cluster is not None
        self.task, self.timeout, self.cluster = task, timeout, cluster
        self.bounds = _shares(task, cluster.lanes)
        local = cluster.node.rank
        last = cluster.lanes
        self.begin, self.end = self.bounds[min(local, last)], self.bounds[min(local + 1, last)]
        offsets = [self.bounds[min(rank, last)] for rank in range(cluster.node.size + 1)]
        self.counts = tuple(stop - start for start, stop in itertools.pairwise(offsets))

    def run(self) -> None:
        """Do it."""
        {"allreduce": self._allreduce, "reduce": self._reduce, "bcast": self._bcast, "barrier": self._barrier}[
            self.task.collective
        ]()

    def _allreduce(self) -> None:
        assert self.task.result is not None
        whole = self.task.result.buffer
        self._reduce_inside(whole)
        self._along_lane("allreduce", whole)
        self._gather_inside(whole)

    def _reduce(self) -> None:
        task, cluster = self.task, self.cluster
        root_node = cluster.node_of[task.root]
        at_root = task.channel.rank == task.root
        whole = task.result.buffer if at_root and task.result is not None else _room(task)
        self._reduce_inside(whole)
        self._along_lane("reduce", whole, root=root_node)
        if cluster.my_node == root_node:
            self._gather_inside(whole)

    def _bcast(self) -> None:
        task, cluster = self.task, self.cluster
        part = task.given or task.result
        assert part is not None
        whole, root_node = part.buffer, cluster.node_of[task.root]
        if cluster.my_node == root_node:
            root = cluster.local_of[task.root]
            everything = Part(whole, 0, task.count)
            at_root = cluster.node.rank == root
            given, result = (everything, None) if at_root else (None, everything)
            self._step(cluster.node, "bcast", task.count, given, result, target=whole, root=root)
        self._along_lane("bcast", whole, root=root_node)
        if cluster.my_node != root_node:
            self._gather_inside(whole)

    def _barrier(self) -> None:
        self._step(self.cluster.node, "barrier", 0, None, None)
        if self.cluster.lane is not None and self.cluster.node.rank == 0:
            self._step(self.cluster.lane, "barrier", 0, None, None)
        self._step(self.cluster.node, "barrier", 0, None, None)

    def _reduce_inside(self, whole: Buffer) -> None:
        """Leave the sums of this node's vectors in its lanes' shares of `whole`."""
        given, result = self.task.given, Part(whole, self.begin, self.end, self.begin)
        assert given is not None
        source = given.buffer
        self._step(
            self.cluster.node, "reduce_scatter", self.task.count, given, result, source=source, counts=self.counts
        )

    def _along_lane(self, collective: str, whole: Buffer, root: int = 0) -> None:
        lane, count = self.cluster.lane, self.end - self.begin
        if lane is None or count == 0:
            return
        share = Buffer(whole, whole.address + self.begin * whole.dtype.itemsize, count, whole.dtype)
        part = Part(share, 0, count)
        at_root = lane.rank == root
        given = part if collective != "bcast" or at_root else None
        result = part if collective == "allreduce" or at_root == (collective == "reduce") else None
        target = share if result is not None or collective == "bcast" else None
        source = share if target is None else None
        self._step(lane, collective, count, given, result, source=source, target=target, root=root)

    def _gather_inside(self, whole: Buffer) -> None:
        given, result = Part(whole, self.begin, self.end, self.begin), Part(whole, 0, self.task.count)
        self._step(self.cluster.node, "allgather", self.task.count, given, result, target=whole, counts=self.counts)

    def _step(
        self, channel: Channel, collective: str, count: int, given: Part | None, result: Part | None, **facts: Any
    ) -> None:
        task, means = self.task, select.means_of(channel)
        reduces = collective in select.ORDERED
        if reduces:
            facts.update(op_name=task.op_name, reducer=task.reducer)
        nbytes = count * task.dtype.itemsize

        def make(possible: select.Means) -> Task:
            name = select.choose(collective, nbytes, possible, commutative=not task.ordered)
            title = f"{task.title}, step {collective}"
            return Task(channel, collective, title, name, count, task.dtype, given, result, **facts)

        step = make(means)
        if step.algorithm != select.SHARED or not shared.run(step, self.timeout):
            make(means.without_memory()).run(self.timeout)


def _shares(task: Task, lanes: int) -> list[int]:
    """Return the element offsets of the lanes' shares; the last ones are empty if the vector is short."""
    unit = max(1, _SHARE_NBYTES // task.dtype.itemsize)
    per_lane = -(-task.count // (lanes * unit)) * unit
    return [min(lane * per_lane, task.count) for lane in range(lanes + 1)]


def _room(task: Task) -> Buffer:
    """Return memory for the whole vector."""
    memory = np.empty(task.count, task.carrier)
    return Buffer(memory, memory.ctypes.data, task.count, task.dtype)
