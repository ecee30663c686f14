"""Jobs for the parts of a composed plan that run on the shared memory of a node."""

from __future__ import annotations

import numpy as np

from mpicoll.collectives.composed_plan import ComposedPlan
from mpicoll.shared_memory.domain import SharedMemoryDomain
from mpicoll.shared_memory.domain_memory import NONBLOCKING_LANES


def node_job(node: SharedMemoryDomain | None, tag_slot: int) -> np.ndarray | None:
    """Return the job for a plan's parts on shared memory, None if these go by messages, as on all ranks of the node.

    Parameters
    ----------
    tag_slot
        The tag slot of the operation; 0 for blocking calls.
    """
    if node is None:
        return None
    return node.nonblocking_job(nonblocking_lane(tag_slot)) if tag_slot else node.blocking


def persistent_node_job(node: SharedMemoryDomain | None, plan: ComposedPlan, lane: int | None) -> np.ndarray | None:
    """Return the job for the parts of a persistent operation's plan, see :func:`node_job`.

    Parameters
    ----------
    lane
        An operation lane that is free on all ranks; None if there is none.
    """
    if node is None or lane is None:
        return None
    job = node.take_lane(lane)
    plan.when_freed(lambda: node.return_lane(lane, job))
    return job


def nonblocking_lane(tag_slot: int) -> int:
    """Return the number of the operation lane of a nonblocking operation; one operation at a time may use it."""
    return tag_slot % NONBLOCKING_LANES
