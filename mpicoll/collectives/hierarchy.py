"""Collectives over several nodes: shared memory inside them, messages between them.

An allreduce on two nodes with three and two ranks. There are two lanes, and the vector has a share for each lane::

    reduce_scatter inside    0 owns share A, 1 owns B, 2 nothing  |  3 owns A, 4 owns B
    allreduce along lanes    0 with 3 over A                         1 with 4 over B
    allgather inside         all ranks get A and B

If all nodes have equally many ranks, part i of each node's parts travels in lane i. An allgather or reduce_scatter is
then one collective along the lanes and, for the parts of each node, one inside the nodes::

    allgather of a b | c d      lanes: 0 and 2 have a c, 1 and 3 have b d    inside: 0 and 1 share a b, then c d

Every byte crosses the network as often as in the best allreduce between single ranks of the nodes, on as many
connections as there are lanes. A long vector is divided into segments: the nodes reduce or gather one segment while
another one is on the network::

    inside    reduce 0 | reduce 1 | gather 0, reduce 2 | gather 1 | gather 2
    lanes              | 0        | 1                  | 2

(Lanes: Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication", CLUSTER 2020.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.collectives import compressed, on_shared_memory, select
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.hierarchy_parts import NodeParts, cut, cut_into_segments, room, shares
from mpicoll.collectives.lane_operation import LaneOperation
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.communicator.channel import Channel
from mpicoll.errors import MpicollError
from mpicoll.messages.call_agreement import agree


def run(task: CheckedOperation, timeout: float) -> None:
    """Execute an operation over several nodes.

    Raises
    ------
    MismatchError, RemoteError, CollectiveTimeout
        The communicator is broken after them; all ranks are told.
    """
    channel, signature = task.channel, task.signature()
    number = channel.enter(signature)
    if channel.check == "full":
        agree(channel, signature, number, timeout)
    try:
        _Steps(task, timeout).run()
    except BaseException as error:
        channel.break_off(f"{type(error).__name__}: {error}", task)
        if not isinstance(error, MpicollError) or number not in channel.watchdog.refused:
            channel.watchdog.give_up(number, error)
        raise
    if task.result is not None:
        task.result.buffer.give_back()


class _Steps:
    """One operation and its steps; each step is an operation on the communicator of the node or of the lane."""

    def __init__(self, task: CheckedOperation, timeout: float) -> None:
        cluster = task.channel.cluster
        assert cluster is not None
        self.task, self.timeout, self.cluster = task, timeout, cluster
        self.bounds = shares(task, cluster.lanes)
        local = cluster.node.rank
        last = cluster.lanes
        self.begin, self.end = self.bounds[min(local, last)], self.bounds[min(local + 1, last)]
        offsets = [self.bounds[min(rank, last)] for rank in range(cluster.node.size + 1)]
        self.counts = tuple(stop - start for start, stop in itertools.pairwise(offsets))

    def run(self) -> None:
        """Execute all steps."""
        {
            "allreduce": self._allreduce,
            "reduce": self._reduce,
            "bcast": self._bcast,
            "barrier": self._barrier,
            "allgather": self._allgather,
            "reduce_scatter": self._reduce_scatter,
        }[self.task.collective]()

    def _allreduce(self) -> None:
        segments = [_Steps(task, self.timeout) for task in cut_into_segments(self.task)]
        under_way: LaneOperation | None = None
        try:
            for segment, before in zip(segments, [None, *segments], strict=False):
                segment._reduce_inside(segment._whole())
                if under_way is not None:
                    under_way.finish()
                under_way = segment._start_on_lane()
                if before is not None:
                    before._gather_inside(before._whole())
            if under_way is not None:
                under_way.finish()
        except BaseException as error:
            if under_way is not None:
                under_way.abandon(error)
            raise
        segments[-1]._gather_inside(segments[-1]._whole())

    def _whole(self) -> Buffer:
        assert self.task.result is not None
        return self.task.result.buffer

    def _start_on_lane(self) -> LaneOperation | None:
        """Start the allreduce of this rank's share; None if it has none."""
        count = self.end - self.begin
        if self.cluster.lane is None or count == 0:
            return None
        share = cut(self._whole(), self.begin, self.end)
        part = VectorPart(share, 0, count)
        make = self._maker(self.cluster.lane, "allreduce", count, part, part, target=share)
        return LaneOperation(make(select.means_of(self.cluster.lane).without_memory()), self.timeout)

    def _reduce(self) -> None:
        task, cluster = self.task, self.cluster
        root_node = cluster.node_of[task.root]
        at_root = task.channel.rank == task.root
        whole = task.result.buffer if at_root and task.result is not None else room(task)
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
            everything = VectorPart(whole, 0, task.count)
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

    def _allgather(self) -> None:
        given, result, cluster = self.task.given, self.task.result, self.cluster
        assert given is not None
        assert result is not None
        assert cluster.lane is not None
        parts = NodeParts(self.task, cluster)
        begin = sum(parts.lane[: cluster.my_node])
        own = VectorPart(given.buffer, begin, begin + parts.lane[cluster.my_node], given.displ)
        everything = VectorPart(parts.room, 0, parts.room.count)
        self._step(cluster.lane, "allgather", parts.room.count, own, everything, target=parts.room, counts=parts.lane)
        for node, counts in enumerate(parts.by_node):
            block = parts.block(result.buffer, node)
            whole = VectorPart(block, 0, block.count)
            self._step(cluster.node, "allgather", block.count, parts.own(node), whole, target=block, counts=counts)

    def _reduce_scatter(self) -> None:
        given, result, cluster = self.task.given, self.task.result, self.cluster
        assert given is not None
        assert result is not None
        assert cluster.lane is not None
        parts = NodeParts(self.task, cluster)
        for node, counts in enumerate(parts.by_node):
            block = parts.block(given.buffer, node)
            whole = VectorPart(block, 0, block.count)
            self._step(cluster.node, "reduce_scatter", block.count, whole, parts.own(node), source=block, counts=counts)
        begin = sum(parts.lane[: cluster.my_node])
        own = VectorPart(result.buffer, begin, begin + parts.lane[cluster.my_node], result.displ)
        everything = VectorPart(parts.room, 0, parts.room.count)
        self._step(
            cluster.lane, "reduce_scatter", parts.room.count, everything, own, source=parts.room, counts=parts.lane
        )

    def _reduce_inside(self, whole: Buffer) -> None:
        """Leave the sums of this node's vectors in its lanes' shares of `whole`."""
        given, result = self.task.given, VectorPart(whole, self.begin, self.end, self.begin)
        assert given is not None
        source = given.buffer
        self._step(
            self.cluster.node, "reduce_scatter", self.task.count, given, result, source=source, counts=self.counts
        )

    def _along_lane(self, collective: str, whole: Buffer, root: int = 0) -> None:
        lane, count = self.cluster.lane, self.end - self.begin
        if lane is None or count == 0:
            return
        share = cut(whole, self.begin, self.end)
        part = VectorPart(share, 0, count)
        at_root = lane.rank == root
        given = part if collective != "bcast" or at_root else None
        result = part if at_root == (collective == "reduce") else None
        target = share if result is not None or collective == "bcast" else None
        source = share if target is None else None
        self._step(lane, collective, count, given, result, source=source, target=target, root=root)

    def _gather_inside(self, whole: Buffer) -> None:
        given, result = VectorPart(whole, self.begin, self.end, self.begin), VectorPart(whole, 0, self.task.count)
        self._step(self.cluster.node, "allgather", self.task.count, given, result, target=whole, counts=self.counts)

    def _step(
        self,
        channel: Channel,
        collective: str,
        count: int,
        given: VectorPart | None,
        result: VectorPart | None,
        **facts: Any,
    ) -> None:
        make, means = self._maker(channel, collective, count, given, result, **facts), select.means_of(channel)
        step = make(means)
        if step.algorithm not in select.ON_NODE or not on_shared_memory.run(step, self.timeout):
            make(means.without_memory()).run(self.timeout)

    def _maker(
        self,
        channel: Channel,
        collective: str,
        count: int,
        given: VectorPart | None,
        result: VectorPart | None,
        **facts: Any,
    ) -> Callable[[select.Capabilities], CheckedOperation]:
        """Return a function that makes a step's operation for given capabilities."""
        task, reduces = self.task, collective in select.ORDERED
        if reduces:
            facts.update(op_name=task.op_name, reducer=task.reducer)
        nbytes = count * task.dtype.itemsize

        def make(possible: select.Capabilities) -> CheckedOperation:
            name = select.choose(collective, nbytes, possible, commutative=not task.ordered)
            title = f"{task.title}, step {collective}"
            if task.compression is not None and channel is self.cluster.lane:
                facts["compression"] = compressed.cut(task.compression, self.begin, self.end, task.count)
                name = compressed.algorithms(task.compression)[0]
            return CheckedOperation(channel, collective, title, name, count, task.dtype, given, result, **facts)

        return make
