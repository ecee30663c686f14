"""Collectives over several nodes: shared memory inside them, messages between them, in one plan.

The order of a collective's parts is data, see :mod:`mpicoll.schedules.node_composition`; here they get their memory. An
allreduce on two nodes with three and two ranks has two lanes, and the vector a share for each lane::

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
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.collectives import compressed, select
from mpicoll.collectives.aggregated_rounds import Keys, operation_keys
from mpicoll.collectives.binding import Allocate
from mpicoll.collectives.checked_arguments import CheckedArguments, VectorPart
from mpicoll.collectives.composed_plan import ComposedPlan, MessagePart, PlanPart, SharedPart
from mpicoll.collectives.hierarchy_parts import BoundArguments, NodeParts, Segment, cut, segments_of, shares
from mpicoll.collectives.node_jobs import node_job, nonblocking_lane, persistent_node_job
from mpicoll.collectives.operation import CheckedOperation, fresh_memory
from mpicoll.collectives.plan_feedback import feedback_of
from mpicoll.communicator.channel import Channel
from mpicoll.communicator.random_choices import own_counter
from mpicoll.compression import Key
from mpicoll.kernels.dispatch_table import STAGED_NBYTES
from mpicoll.messages.call_agreement import free_lane
from mpicoll.messages.calls import KernelCall
from mpicoll.messages.p2p import Plan
from mpicoll.progress.call_signature import Signature
from mpicoll.schedules.node_composition import Nodes, Part, Row, compose
from mpicoll.shared_memory.domain_memory import PLAN_LANES

_MOST_KEPT_NBYTES = 8 << 20
"""In bytes. Plans for longer vectors are not kept if they need memory of their own."""
_SEGMENT_KEYS = 16
"""Keys of random choices for the segments of one operation."""


@dataclass
class HierarchicalOperation(CheckedOperation):
    """A collective over several nodes, whose plan consists of collectives inside the node and along the lane.

    Attributes
    ----------
    node_lane
        For a persistent operation, an operation lane that is free on the nodes of all ranks; None if there is none.
    """

    node_lane: int | None = None

    @classmethod
    def of(cls, operation: CheckedOperation) -> HierarchicalOperation:
        """Return the operation for checked arguments."""
        return cls(**{each.name: getattr(operation, each.name) for each in fields(CheckedArguments)})

    def plan(self, tag_slot: int, allocate: Allocate) -> Plan:
        """Return a plan; its parts use the tag slot on the communicators of the node and of the lane."""
        composition = _Composition(self, tag_slot, allocate)
        try:
            return composition.bind()
        except BaseException:
            composition.plan.give_back()
            raise

    def agree_on_memory(self, signature: Signature, number: int, timeout: float) -> None:
        """Agree with the other ranks on the operation lane on the nodes' shared memory."""
        assert self.channel.cluster is not None
        node = self.channel.cluster.node.node
        busy = 0 if node is None else node.busy_lanes
        self.node_lane = free_lane(self.channel, busy, PLAN_LANES, signature, number, timeout)

    def run(self, timeout: float) -> Plan | None:
        """Execute the operation and return its plan; None if it is freed, since it holds much memory."""
        if not self._needs_much_memory:
            return super().run(timeout)
        plan = self.plan_or_refusal(lambda: self.plan(0, fresh_memory), timeout)
        try:
            self.begin(plan, timeout).finish(timeout, self)
        finally:
            if self.channel.broken is None:  # else messages may still be under way
                plan.free()
        self.unload(plan)
        return None

    @property
    def _needs_much_memory(self) -> bool:
        """True if a plan for a long vector holds memory beside the caller's: for parts, or for results aside."""
        given, result = self.given, self.result
        apart = given is not None and result is not None and given.buffer is not result.buffer
        frugal = self.collective in ("bcast", "barrier") or (self.collective == "allreduce" and apart)
        return self.nbytes > _MOST_KEPT_NBYTES and not frugal

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
        from mpicoll.collectives import compressed_phases

        assert self.given is not None
        assert self.result is not None
        lane, segments = _Lane(self), segments_of(self, self.given.buffer, self.result.buffer)
        return " ".join(compressed_phases.variant(lane.compression(each)) for each in segments)


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
    """Composition of one operation's plan: the rows of :func:`compose`, bound to memory."""

    def __init__(self, task: HierarchicalOperation, tag_slot: int, allocate: Allocate) -> None:
        assert task.channel.cluster is not None
        self._task, self._slot, self._allocate = task, tag_slot, allocate
        self._cluster, self._lane = task.channel.cluster, _Lane(task)
        self.plan = ComposedPlan(task.channel, task.signature())
        node = self._cluster.node.node
        self._job = node_job(node, tag_slot)
        if task.persistent:
            self._job = persistent_node_job(node, self.plan, task.node_lane)
        self._memory = BoundArguments(task, not task.persistent and task.nbytes <= STAGED_NBYTES, allocate)
        # Ranks may start persistent operations in any order, and parts of nonblocking ones start at any time.
        self._next_key = operation_keys(task.channel, apart=tag_slot != 0)
        self._parts: dict[Part, PlanPart] = {}
        self._node_parts = NodeParts(task, self._room) if task.collective in select.BY_PARTS else None
        self._segments = [] if self._node_parts or task.collective == "barrier" else self._cut()

    def _cut(self) -> list[Segment]:
        """Return the segments of a vector that all ranks have; their results are memory for the whole vector."""
        given, result, count = self._memory.given, self._memory.result, self._task.count
        if self._task.collective == "bcast":
            given = result = given or result
        whole = self._room(count) if result is None else result.buffer
        assert given is not None
        if self._task.collective == "allreduce":
            return list(segments_of(self._task, given.buffer, whole))
        return [Segment(0, count, given.buffer, whole)]

    def bind(self) -> ComposedPlan:
        """Add the rows and return the plan."""
        nodes = len(set(self._cluster.node_of))
        feedback = feedback_of(self._task.compression)
        if feedback is not None:  # on all ranks; only those with a share of the vector use their residual
            self.plan.call(KernelCall(feedback.open, (self._task.count,)))
        for row in compose(self._task.collective, segments=len(self._segments) or 1, nodes=nodes):
            if not self._takes(row.part):
                continue
            if row.starts:
                self._start(row.part)
            elif row.part in self._parts:
                self._finish(row)
        if feedback is not None:
            self.plan.call(KernelCall(feedback.end, ()))
        self.plan.close(self._memory.inbox, self._memory.outbox)
        return self.plan

    def _takes(self, part: Part) -> bool:
        """Return whether this rank takes a part."""
        cluster = self._cluster
        if not part.inside:
            return cluster.lane is not None and (part.collective != "barrier" or cluster.node.rank == 0)
        at_root = cluster.node_of[self._task.root] == cluster.my_node
        return part.nodes is Nodes.ALL or at_root == (part.nodes is Nodes.ROOT)

    def _start(self, part: Part) -> None:
        """Add the start of a part; a rank without a share of the vector has none along the lane."""
        operation = self._inside(part) if part.inside else self._on_lane(part)
        if operation is None:
            return
        if operation.algorithm in select.ON_NODE and self._job is not None:
            fallback = self._algorithm(operation.channel, part, operation.nbytes, by_messages=True), self._slot
            made: PlanPart = SharedPart(self.plan, self._job, operation, str(part), self._allocate, fallback)
        else:
            operation.is_part = True
            made = MessagePart(operation, operation.plan(self._slot, self._allocate), str(part))
            operation.compression = None  # a plan that is kept does not keep an ErrorFeedback
        self._parts[part] = made
        self.plan.start(made)

    def _finish(self, row: Row) -> None:
        part = self._parts[row.part]
        self.plan.finish(part, None if row.aside is None else self._parts.get(row.aside))
        for call in part.calls_after():
            self.plan.call(call)

    # Parts as operations ----------------------------------------------------------------------------------------------

    def _inside(self, part: Part) -> CheckedOperation:
        """Return the operation of the node's ranks."""
        if self._node_parts is not None:
            return self._block_inside(self._node_parts, part)
        if part.collective == "barrier":
            return self._operation(part, 0, None, None)
        vector = self._segments[part.piece]
        count, (begin, end) = vector.count, self._lane.share(vector.count)
        share, everything = VectorPart(vector.result, begin, end, begin), VectorPart(vector.result, 0, count)
        if part.collective == "bcast":
            root = self._cluster.local_of[self._task.root]
            ends = (everything, None) if self._cluster.node.rank == root else (None, everything)
            return self._operation(part, count, *ends, target=vector.result, root=root)
        counts = self._lane.counts(count)
        if part.collective == "allgather":
            return self._operation(part, count, share, everything, target=vector.result, counts=counts)
        given = VectorPart(vector.given, 0, count)
        return self._operation(part, count, given, share, source=vector.given, counts=counts)

    def _block_inside(self, parts: NodeParts, part: Part) -> CheckedOperation:
        """Return the operation on the block of the vector that one node's ranks own."""
        whole = self._memory.result if part.collective == "allgather" else self._memory.given
        assert whole is not None
        block, own, counts = parts.block(whole.buffer, part.piece), parts.own(part.piece), parts.by_node[part.piece]
        everything = VectorPart(block, 0, block.count)
        if part.collective == "allgather":
            return self._operation(part, block.count, own, everything, target=block, counts=counts)
        return self._operation(part, block.count, everything, own, source=block, counts=counts)

    def _on_lane(self, part: Part) -> CheckedOperation | None:
        """Return the operation of the lane's ranks, None if this rank has no share of the vector."""
        if self._node_parts is not None:
            return self._block_on_lane(self._node_parts, part)
        if part.collective == "barrier":
            return self._operation(part, 0, None, None)
        vector, lane = self._segments[part.piece], self._cluster.lane
        begin, end = self._lane.share(vector.count)
        if lane is None or begin == end:
            return None
        root = self._cluster.node_of[self._task.root]
        share, at_root = cut(vector.result, begin, end), lane.rank == root
        own = VectorPart(share, 0, end - begin)
        given = own if part.collective != "bcast" or at_root else None
        result = own if part.collective == "allreduce" or at_root == (part.collective == "reduce") else None
        facts: dict[str, Any] = {"source": share} if part.collective == "reduce" and not at_root else {"target": share}
        if vector.compression is not None:
            facts.update(compression=self._lane.compression(vector), keys=self._keys_of(vector))
            if self._task.counter is not None:  # each segment takes a number, as it does in blocking calls
                facts.update(counter=own_counter(lane))
        return self._operation(part, end - begin, given, result, root=root, **facts)

    def _block_on_lane(self, parts: NodeParts, part: Part) -> CheckedOperation:
        """Return the operation on the parts of the vector that the lane's ranks own."""
        caller = self._memory.given if part.collective == "allgather" else self._memory.result
        assert caller is not None
        own, everything = parts.on_lane(caller), VectorPart(parts.room, 0, parts.room.count)
        if part.collective == "allgather":
            return self._operation(part, parts.room.count, own, everything, target=parts.room, counts=parts.lane)
        return self._operation(part, parts.room.count, everything, own, source=parts.room, counts=parts.lane)

    def _keys_of(self, segment: Segment) -> Keys:
        """Return the function that makes the keys of a segment."""
        whole_key, number = self._next_key, segment.number  # and not this object, which has the caller's ErrorFeedback

        def next_key() -> Key:
            key = whole_key()
            return key._replace(step=_SEGMENT_KEYS * key.step + number)

        return next_key

    def _operation(
        self, part: Part, count: int, given: VectorPart | None, result: VectorPart | None, **facts: Any
    ) -> CheckedOperation:
        """Return the operation of a part, with the algorithm that suits the node or the lane."""
        task, collective = self._task, part.collective
        channel = self._cluster.node if part.inside else self._cluster.lane
        assert channel is not None
        by_messages = not part.inside or self._job is None
        name = self._algorithm(channel, part, count * task.dtype.itemsize, by_messages=by_messages)
        if collective in select.ORDERED:
            facts.update(op_name=task.op_name, reducer=task.reducer)
        if facts.get("compression") is not None:
            name = compressed.algorithms(facts["compression"])[0]
        if part.inside:  # the parts do not tell of the compression, and ranks without a share are in no others
            facts.update(whole=self.plan.signature)
        title = f"{task.title}, step {collective}"
        return CheckedOperation(channel, collective, title, name, count, task.dtype, given, result, **facts)

    def _algorithm(self, channel: Channel, part: Part, nbytes: int, *, by_messages: bool) -> str:
        """Return the algorithm that suits the node or the lane."""
        means = select.means_of(channel)
        means = means.without_memory() if by_messages else means
        return select.choose(part.collective, nbytes, means, commutative=not self._task.ordered)

    def _room(self, count: int) -> Buffer:
        """Return memory for `count` elements."""
        memory = self._allocate(count, self._task.carrier)
        return Buffer(memory, memory.ctypes.data, count, self._task.dtype)
