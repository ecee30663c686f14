"""Division of a vector among lanes, segments and nodes, for :mod:`mpicoll.collectives.hierarchy`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.collectives import compressed, select
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.communicator.channel import Topology
from mpicoll.schedules import chunk_bounds
from mpicoll.shared_memory import numpy_allocator

_SHARE_NBYTES = 4 << 10
"""In bytes. A shorter share is not worth a message of its own."""


def cut_into_segments(task: CheckedOperation) -> list[CheckedOperation]:
    """Return an allreduce for each segment of the vector."""
    given, result = task.given, task.result
    number = select.hierarchy_segments(task.nbytes)
    if number < 2 or given is None or result is None:
        return [task]
    tasks = []
    for start, stop in itertools.pairwise(chunk_bounds(task.count, number)):
        target = cut(result.buffer, start, stop)
        source = target if given.buffer is result.buffer else cut(given.buffer, start, stop)
        parts = [VectorPart(buffer, 0, stop - start) for buffer in (source, target)]
        part = replace(task, count=stop - start, given=parts[0], result=parts[1], source=None, target=None)
        part.compression = compressed.cut(task.compression, start, stop, task.count)
        tasks.append(part)
    return tasks


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
        Shared memory for this lane's parts, in the order of the nodes.
    """

    def __init__(self, task: CheckedOperation, cluster: Topology) -> None:
        assert task.counts is not None
        self._local, lanes = cluster.node.rank, cluster.lanes
        self.by_node = [task.counts[first : first + lanes] for first in range(0, len(task.counts), lanes)]
        self.lane = tuple(counts[self._local] for counts in self.by_node)
        memory = numpy_allocator.empty(sum(self.lane), task.carrier)
        self.room = Buffer(memory, memory.ctypes.data, memory.size, task.dtype)

    def block(self, whole: Buffer, node: int) -> Buffer:
        """Return the part of the whole vector that a node's ranks own."""
        begin = sum(map(sum, self.by_node[:node]))
        return cut(whole, begin, begin + sum(self.by_node[node]))

    def own(self, node: int) -> VectorPart:
        """Return this lane's part among those of a node's ranks; it lies in `room`."""
        begin = sum(self.by_node[node][: self._local])
        return VectorPart(self.room, begin, begin + self.lane[node], sum(self.lane[:node]))


def shares(task: CheckedOperation, lanes: int) -> list[int]:
    """Return the element offsets of the lanes' shares; the last ones are empty if the vector is short."""
    unit = max(1, _SHARE_NBYTES // task.dtype.itemsize)
    per_lane = -(-task.count // (lanes * unit)) * unit
    return [min(lane * per_lane, task.count) for lane in range(lanes + 1)]


def room(task: CheckedOperation) -> Buffer:
    """Return memory for the whole vector."""
    memory = np.empty(task.count, task.carrier)
    return Buffer(memory, memory.ctypes.data, task.count, task.dtype)
