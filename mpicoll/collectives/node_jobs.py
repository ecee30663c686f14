"""Jobs for the parts of a composed plan that run on the shared memory of a node."""

from __future__ import annotations

import numpy as np

from mpicoll.collectives.composed_plan import ComposedPlan
from mpicoll.collectives.on_shared_memory import find_free_lane
from mpicoll.communicator.channel import Channel
from mpicoll.shared_memory.domain import NONBLOCKING_LANES, SharedMemoryDomain


def node_job(channel: Channel, plan: ComposedPlan, tag_slot: int, timeout: float | None) -> np.ndarray | None:
    """Return the job for a plan's parts on shared memory, None if these go by messages, as on all ranks of the node.

    Parameters
    ----------
    channel
        The channel of the node's ranks.
    tag_slot
        The tag slot of the operation; 0 for blocking calls.
    timeout
        For a persistent operation, the seconds that ranks may take to agree on memory; None for others.
    """
    node = channel.node
    if node is None:
        return None
    if timeout is not None:
        return _persistent_job(channel, node, plan, timeout)
    return node.nonblocking_job(nonblocking_lane(tag_slot)) if tag_slot else node.blocking


def _persistent_job(
    channel: Channel, node: SharedMemoryDomain, plan: ComposedPlan, timeout: float
) -> np.ndarray | None:
    lane = find_free_lane(channel, True, timeout).number
    if lane < 0:
        return None
    job = node.take_lane(lane, False)
    plan.when_freed(lambda: node.return_lane(lane, job))
    return job


def nonblocking_lane(tag_slot: int) -> int:
    """Return the number of the operation lane of a nonblocking operation; one operation at a time may use it."""
    return tag_slot % NONBLOCKING_LANES
