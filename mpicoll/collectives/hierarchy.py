"""Collectives over several nodes: shared memory inside them, messages between them, in one plan.

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
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.collectives import compressed, select
from mpicoll.collectives.aggregated_rounds import operation_numbers
from mpicoll.collectives.binding import Allocate
from mpicoll.collectives.checked_arguments import CheckedArguments, VectorPart
from mpicoll.collectives.composed_plan import ComposedPlan, MessagePart, PlanPart, SharedPart
from mpicoll.collectives.hierarchy_parts import BoundArguments, NodeParts, Segment, cut, segments_of, shares
from mpicoll.collectives.node_jobs import node_job, nonblocking_lane
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.communicator.channel import Channel
from mpicoll.kernels.dispatch_table import STAGED_NBYTES
from mpicoll.messages.lowering import KernelCall
from mpicoll.messages.p2p import Plan

_SEGMENT_NUMBERS = 16
"""Numbers of random choices for the segments of one operation."""


@dataclass
class HierarchicalOperation(CheckedOperation):
    """A collective over several nodes, whose plan consists of collectives inside the node and along the lane.

    Attributes
    ----------
    timeout
        Seconds that ranks of a node may take to agree on memory for a persistent operation.
    """

    timeout: float = 60.0

    @classmethod
    def of(cls, operation: CheckedOperation, timeout: float) -> HierarchicalOperation:
        """Return the operation for checked arguments."""
        given = {each.name: getattr(operation, each.name) for each in fields(CheckedArguments)}
        return cls(**given, timeout=timeout)

    def plan(self, tag_slot: int, allocate: Allocate) -> Plan:
        """Return a plan; its parts use the tag slot on the communicators of the node and of the lane."""
        return _Composition(self, tag_slot, allocate).plan()

    def memory(self) -> tuple[Any, ...]:
        """Return the addresses of the parts of the vector that the plan reads and writes."""
        return tuple(None if part is None else part.address(self.carrier) for part in (self.given, self.result))

    def resources(self, tag_slot: int) -> tuple[tuple[dict[int, Any], int], ...]:
        """Return the tag slot, and the operation lane on the node's shared memory."""
        assert self.channel.cluster is not None
        lanes = self.channel.cluster.node.occupants
        return (*super().resources(tag_slot), (lanes, nonblocking_lane(tag_slot)))

    def variant(self) -> str:
        """Return the variants of the parts along the lane, whose compression has a state of its own."""
        if self.compression is None:
            return ""
        assert self.given is not None
        assert self.result is not None
        lane, segments = _Lane(self), segments_of(self, self.given.buffer, self.result.buffer)
        return " ".join(compressed.variant(lane.compression(each)) for each in segments)


class _Lane:
    """Shares of vectors among the lanes."""

    def __init__(self, task: CheckedOperation) -> None:
        assert task.channel.cluster is not None
        self._cluster, self._itemsize = task.channel.cluster, task.dtype.itemsize

    def _bounds(self, count: int) -> list[int]:
        """Return the element offsets of the local ranks' shares; ranks without a lane have none."""
        bounds, last = shares(count, self._itemsize, self._cluster.lanes), self._cluster.lanes
        return [bounds[min(rank, last)] for rank in range(self._cluster.node.size + 1)]

    def counts(self, count: int) -> tuple[int, ...]:
        """Return the element counts of the local ranks' shares."""
        return tuple(stop - start for start, stop in itertools.pairwise(self._bounds(count)))

    def share(self, count: int) -> tuple[int, int]:
        """Return the first element of this rank's share, and the one after its last."""
        local = self._cluster.node.rank
        begin, end = self._bounds(count)[local : local + 2]
        return begin, end

    def compression(self, segment: Segment) -> compressed.Compression | None:
        """Return the compression of this rank's share of a segment."""
        return compressed.cut(segment.compression, *self.share(segment.count), segment.count)


class _Composition:
    """Composition of one operation's plan."""

    def __init__(self, task: HierarchicalOperation, tag_slot: int, allocate: Allocate) -> None:
        assert task.channel.cluster is not None
        self._task, self._slot, self._allocate = task, tag_slot, allocate
        self._cluster, self._lane = task.channel.cluster, _Lane(task)
        self._plan = ComposedPlan(task.channel, task.signature())
        self._job = node_job(self._cluster.node, self._plan, tag_slot, task.timeout if task.persistent else None)
        self._memory = BoundArguments(task, not task.persistent and task.nbytes <= STAGED_NBYTES, allocate)
        # Ranks may start persistent operations in any order, and parts of nonblocking ones start at any time.
        self._numbers = operation_numbers(task.channel, tag_slot != 0)

    def plan(self) -> ComposedPlan:
        """Return the plan."""
        {
            "allreduce": self._allreduce,
            "reduce": self._reduce,
            "bcast": self._bcast,
            "barrier": self._barrier,
            "allgather": self._allgather,
            "reduce_scatter": self._reduce_scatter,
        }[self._task.collective]()
        self._plan.close(self._memory.inbox, self._memory.outbox)
        return self._plan

    # Collectives ------------------------------------------------------------------------------------------------------

    def _allreduce(self) -> None:
        given, result = self._memory.given, self._memory.result
        assert given is not None
        assert result is not None
        on_lane: PlanPart | None = None
        before: Segment | None = None
        for segment in segments_of(self._task, given.buffer, result.buffer):
            self._reduce_inside(segment, aside=on_lane)
            self._finish(on_lane)
            on_lane = self._start_on_lane("allreduce", segment)
            if before is not None:
                self._gather_inside(before, aside=on_lane)
            before = segment
        self._finish(on_lane)
        assert before is not None
        self._gather_inside(before)

    def _reduce(self) -> None:
        task, cluster, result = self._task, self._cluster, self._memory.result
        assert self._memory.given is not None
        root_node = cluster.node_of[task.root]
        whole = self._room(task.count) if result is None else result.buffer
        vector = Segment(0, task.count, self._memory.given.buffer, whole)
        self._reduce_inside(vector)
        self._finish(self._start_on_lane("reduce", vector, root=root_node))
        if cluster.my_node == root_node:
            self._gather_inside(vector)

    def _bcast(self) -> None:
        task, cluster = self._task, self._cluster
        part = self._memory.given or self._memory.result
        assert part is not None
        vector, root_node = Segment(0, task.count, None, part.buffer), cluster.node_of[task.root]
        if cluster.my_node == root_node:
            root = cluster.local_of[task.root]
            everything = VectorPart(part.buffer, 0, task.count)
            ends = (everything, None) if cluster.node.rank == root else (None, everything)
            self._inside("bcast", task.count, *ends, target=part.buffer, root=root)
        self._finish(self._start_on_lane("bcast", vector, root=root_node))
        if cluster.my_node != root_node:
            self._gather_inside(vector)

    def _barrier(self) -> None:
        self._inside("barrier", 0, None, None)
        if self._cluster.lane is not None and self._cluster.node.rank == 0:
            self._finish(self._start(self._cluster.lane, "barrier", 0, None, None))
        self._inside("barrier", 0, None, None)

    def _allgather(self) -> None:
        given, result, cluster = self._memory.given, self._memory.result, self._cluster
        assert given is not None
        assert result is not None
        assert cluster.lane is not None
        parts = NodeParts(self._task, self._room)
        everything = VectorPart(parts.room, 0, parts.room.count)
        own, facts = parts.on_lane(given), {"target": parts.room, "counts": parts.lane}
        self._finish(self._start(cluster.lane, "allgather", parts.room.count, own, everything, **facts))
        for node, counts in enumerate(parts.by_node):
            block = parts.block(result.buffer, node)
            whole = VectorPart(block, 0, block.count)
            self._inside("allgather", block.count, parts.own(node), whole, target=block, counts=counts)

    def _reduce_scatter(self) -> None:
        given, result, cluster = self._memory.given, self._memory.result, self._cluster
        assert given is not None
        assert result is not None
        assert cluster.lane is not None
        parts = NodeParts(self._task, self._room)
        for node, counts in enumerate(parts.by_node):
            block = parts.block(given.buffer, node)
            whole = VectorPart(block, 0, block.count)
            self._inside("reduce_scatter", block.count, whole, parts.own(node), source=block, counts=counts)
        everything = VectorPart(parts.room, 0, parts.room.count)
        own, facts = parts.on_lane(result), {"source": parts.room, "counts": parts.lane}
        self._finish(self._start(cluster.lane, "reduce_scatter", parts.room.count, everything, own, **facts))

    # Steps of collectives ---------------------------------------------------------------------------------------------

    def _reduce_inside(self, vector: Segment, aside: PlanPart | None = None) -> None:
        """Leave the sums of this node's vectors in its lanes' shares of the result."""
        begin, end = self._lane.share(vector.count)
        assert vector.given is not None
        given, result = VectorPart(vector.given, 0, vector.count), VectorPart(vector.result, begin, end, begin)
        counts = self._lane.counts(vector.count)
        self._inside("reduce_scatter", vector.count, given, result, aside=aside, source=vector.given, counts=counts)

    def _gather_inside(self, vector: Segment, aside: PlanPart | None = None) -> None:
        """Let all ranks of the node have the lanes' shares of the result."""
        begin, end = self._lane.share(vector.count)
        own, everything = VectorPart(vector.result, begin, end, begin), VectorPart(vector.result, 0, vector.count)
        counts = self._lane.counts(vector.count)
        self._inside("allgather", vector.count, own, everything, aside=aside, target=vector.result, counts=counts)

    def _start_on_lane(self, collective: str, vector: Segment, root: int = 0) -> PlanPart | None:
        """Start a collective of this rank's share, in place; return None if it has none."""
        lane, (begin, end) = self._cluster.lane, self._lane.share(vector.count)
        if lane is None or begin == end:
            return None
        share = cut(vector.result, begin, end)
        part, at_root = VectorPart(share, 0, end - begin), lane.rank == root
        given = part if collective != "bcast" or at_root else None
        result = part if collective == "allreduce" or at_root == (collective == "reduce") else None
        to_share = result is not None or collective == "bcast"
        facts: dict[str, Any] = {"target": share} if to_share else {"source": share}
        if vector.compression is not None:
            facts.update(compression=self._lane.compression(vector), numbers=self._numbers_of(vector))
        return self._start(lane, collective, end - begin, given, result, root=root, **facts)

    def _numbers_of(self, segment: Segment) -> Callable[[], int]:
        """Return the function that numbers random choices of a segment."""
        return lambda: _SEGMENT_NUMBERS * self._numbers() + segment.number

    def _inside(
        self,
        collective: str,
        count: int,
        given: VectorPart | None,
        result: VectorPart | None,
        aside: PlanPart | None = None,
        **facts: Any,
    ) -> None:
        """Add a collective of the ranks of the node; another part may progress meanwhile."""
        channel = self._cluster.node
        means = select.means_of(channel)._replace(may_block=self._slot == 0)
        means = means if self._job is not None else means.without_memory()
        operation = self._operation(channel, means, collective, count, given, result, **facts)
        if operation.algorithm not in select.ON_NODE or self._job is None:
            self._finish(self._start_messages(operation, "inside the node"), aside)
            return
        title = f"{collective} inside the node"
        part = SharedPart(self._plan, self._job, operation, title, self._allocate)
        self._plan.start(part)
        self._plan.finish(part, aside)
        if part.aside is not None and result is not None:
            self._plan.call(KernelCall(np.copyto, (result.view(self._task.carrier), part.aside)))

    def _start(
        self,
        channel: Channel,
        collective: str,
        count: int,
        given: VectorPart | None,
        result: VectorPart | None,
        **facts: Any,
    ) -> PlanPart:
        """Start a collective along the lane, by messages."""
        means = select.means_of(channel).without_memory()
        return self._start_messages(
            self._operation(channel, means, collective, count, given, result, **facts), "between nodes"
        )

    def _start_messages(self, operation: CheckedOperation, place: str) -> PlanPart:
        operation.is_part = True
        title = f"{operation.collective} {place}"
        part = MessagePart(operation, operation.plan(self._slot, self._allocate), title)
        self._plan.start(part)
        return part

    def _finish(self, part: PlanPart | None, aside: PlanPart | None = None) -> None:
        if part is not None:
            self._plan.finish(part, aside)

    def _operation(
        self,
        channel: Channel,
        means: select.Capabilities,
        collective: str,
        count: int,
        given: VectorPart | None,
        result: VectorPart | None,
        **facts: Any,
    ) -> CheckedOperation:
        task = self._task
        if collective in select.ORDERED:
            facts.update(op_name=task.op_name, reducer=task.reducer)
        name = select.choose(collective, count * task.dtype.itemsize, means, commutative=not task.ordered)
        if facts.get("compression") is not None:
            name = compressed.algorithms(facts["compression"])[0]
        title = f"{task.title}, step {collective}"
        return CheckedOperation(channel, collective, title, name, count, task.dtype, given, result, **facts)

    def _room(self, count: int) -> Buffer:
        """Return memory for `count` elements."""
        memory = self._allocate(count, self._task.carrier)
        return Buffer(memory, memory.ctypes.data, count, self._task.dtype)
