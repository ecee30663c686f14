"""Random choices of compressors that belong to a step, whatever collectives a run has made before it."""

from __future__ import annotations

import numpy as np

from mpicoll.communicator.channel import Channel

_OPERATIONS = 32
"""Bits for the number of an operation; those above them tell steps from each other."""


def begin_anew(channel: Channel, number: int) -> None:
    """Let the next operations draw random numbers that belong to `number`, the same on all ranks; not collective.

    A program that calls this before each step makes the same choices in a step after it has continued from a
    checkpoint, and whether or not it makes other collectives between the steps.
    """
    parts = (channel.cluster.node, channel.cluster.lane) if channel.cluster is not None else ()
    for each in (channel, *parts):
        if each is not None:
            each.random_seed, each.compressed = number, number << _OPERATIONS
            each.numbered_from = each.dispatch.number


def own_counter(channel: Channel) -> np.ndarray:
    """Return a counter, int64 of shape (1,), whose next number no other operation of this rank takes; not collective.

    Operations that start when others have ended number themselves by it as the program made them, in every run.
    """
    channel.compressed += 1
    return np.array([channel.compressed - 1], np.int64)
