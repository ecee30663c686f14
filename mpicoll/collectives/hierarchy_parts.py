"""Division of a vector among lanes, segments and nodes, for :mod:`mpicoll.collectives.hierarchy`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.collectives import compressed
from mpicoll.collectives.binding import Allocate
from mpicoll.collectives.checked_arguments import CheckedArguments, VectorPart
from mpicoll.schedules import chunk_bounds
from mpicoll.schedules.node_composition import segments_for

_SHARE_NBYTES = 4 << 10
"""In bytes. A shorter share is not worth a message of its own."""


class BoundArguments:
    """Memory of a composed plan for the caller's vectors.

    Attributes
    ----------
    given, result
        The parts of the vector that the plan reads and writes; None if there is none.
    inbox, outbox
        Memory to copy the caller's data to before a run, and the result from after it; None if the plan works on the
        caller's memory.
    """

    def __init__(self, task: CheckedArguments, staged: bool, allocate: Allocate) -> None:
        self.inbox: np.ndarray | None = None
        self.outbox: np.ndarray | None = None
        given, result = task.given, task.result
        if staged:
            self.inbox = None if given is None else allocate(given.stop - given.start, task.carrier)
            self.outbox = None if result is None else allocate(result.stop - result.start, task.carrier)
            self.given, self.result = _of(given, self.inbox), _of(result, self.outbox)
            return
        self.given, self.result = _unowned(given), _unowned(result)
        if given is not None and result is not None and given.buffer is result.buffer:
            assert self.given is not None
            self.result = VectorPart(self.given.buffer, result.start, result.stop, result.displ)


def _of(part: VectorPart | None, memory: np.ndarray | None) -> VectorPart | None:
    """Return the same part of the vector in other memory."""
    if part is None or memory is None:
        return None
    return VectorPart(Buffer(memory, memory.ctypes.data, memory.size, part.buffer.dtype), part.start, part.stop)


def _unowned(part: VectorPart | None) -> VectorPart | None:
    """Return the same part, not keeping its memory alive: a cached plan is not used again when that is freed."""
    if part is None:
        return None
    whole = part.buffer
    return VectorPart(Buffer(None, whole.address, whole.count, whole.dtype), part.start, part.stop, part.displ)


@dataclass(frozen=True)
class Segment:
    """A segment of a vector that is reduced, or the whole of a vector.

    Attributes
    ----------
    number, count
        Its number among the segments, and its number of elements.
    given, result
        This rank's input, and memory for the whole result; the same for a bcast.
    compression
        The compression of the segment.
    """

    number: int
    count: int
    given: Buffer
    result: Buffer
    compression: compressed.Compression | None = None


def segments_of(task: CheckedArguments, given: Buffer, result: Buffer) -> Iterator[Segment]:
    """Yield the segments of an allreduce."""
    number = segments_for(task.nbytes)
    if number < 2:
        yield Segment(0, task.count, given, result, task.compression)
        return
    for place, (start, stop) in enumerate(itertools.pairwise(chunk_bounds(task.count, number))):
        target = cut(result, start, stop)
        source = target if given is result else cut(given, start, stop)
        yield Segment(place, stop - start, source, target, compressed.cut(task.compression, start, stop, task.count))


def cut(whole: Buffer, start: int, stop: int) -> Buffer:
    """Return a buffer of elements ``start`` to ``stop - 1`` of a buffer."""
    return Buffer(whole, whole.address + start * whole.dtype.itemsize, stop - start, whole.dtype)


class NodeParts:
    """Division of a vector of which every rank owns a part, where all nodes have equally many ranks.

    Attributes
    ----------
    lane, by_node
        Element counts of this lane's parts, one of each node, and of all parts by node.
    room
        Memory for this lane's parts, in the order of the nodes.
    """

    def __init__(self, task: CheckedArguments, room: Callable[[int], Buffer]) -> None:
        cluster = task.channel.cluster
        assert cluster is not None
        assert task.counts is not None
        self._local, self._node, lanes = cluster.node.rank, cluster.my_node, cluster.lanes
        self.by_node = [task.counts[first : first + lanes] for first in range(0, len(task.counts), lanes)]
        self.lane = tuple(counts[self._local] for counts in self.by_node)
        self.room = room(sum(self.lane))

    def block(self, whole: Buffer, node: int) -> Buffer:
        """Return the part of the whole vector that a node's ranks own."""
        begin = sum(map(sum, self.by_node[:node]))
        return cut(whole, begin, begin + sum(self.by_node[node]))

    def own(self, node: int) -> VectorPart:
        """Return this lane's part among those of a node's ranks; it lies in `room`."""
        begin = sum(self.by_node[node][: self._local])
        return VectorPart(self.room, begin, begin + self.lane[node], sum(self.lane[:node]))

    def on_lane(self, part: VectorPart) -> VectorPart:
        """Return this rank's part of the vector as its part of the lane's."""
        begin = sum(self.lane[: self._node])
        return VectorPart(part.buffer, begin, begin + self.lane[self._node], part.displ)


def shares(count: int, itemsize: int, lanes: int) -> list[int]:
    """Return the element offsets of the lanes' shares; the last ones are empty if the vector is short."""
    unit = max(1, _SHARE_NBYTES // itemsize)
    per_lane = -(-count // (lanes * unit)) * unit
    return [min(lane * per_lane, count) for lane in range(lanes + 1)]
