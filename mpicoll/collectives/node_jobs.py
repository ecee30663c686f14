"""Jobs for the parts of a composed plan that run on the shared memory of a node."""

from __future__ import annotations

import numpy as np

from mpicoll.collectives.composed_plan import ComposedPlan
from mpicoll.collectives.on_shared_memory import find_free_lane
from mpicoll.communicator.channel import Channel
from mpicoll.messages.lowering import KernelCall
from mpicoll.shared_memory.domain import SharedMemoryDomain


class _NodeTurn:
    """Use of a nonblocking operation lane by one plan."""

    has_ended = False

    def end(self) -> None:
        """Note that the lane may be used by the next operation."""
        self.has_ended = True


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
    return _turn(node, plan) if tag_slot else node.blocking


def _persistent_job(
    channel: Channel, node: SharedMemoryDomain, plan: ComposedPlan, timeout: float
) -> np.ndarray | None:
    lane = find_free_lane(channel, True, timeout).number
    if lane < 0:
        return None
    job = node.take_lane(lane, False)
    plan.when_freed(lambda: node.return_lane(lane, job))
    return job


def _turn(node: SharedMemoryDomain, plan: ComposedPlan) -> np.ndarray:
    """Return the job of the next nonblocking lane; the plan waits until the operation before has ended there."""
    turn, use = node.take_turn(), _NodeTurn()
    last = turn.last
    if last is not None and not last.has_ended:
        plan.call(KernelCall(lambda: last.has_ended, ()))
    node.end_turn(turn, use)
    plan.when_freed(use.end)
    return turn.job
