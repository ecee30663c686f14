"""Random choices of compressors in a run that continues: others than those that the run has made before."""

from __future__ import annotations

from mpicoll.communicator.channel import Channel

_OPERATIONS = 32
"""Bits for the number of an operation; those above them tell runs that continue from each other."""


def begin_anew(channel: Channel, number: int) -> None:
    """Let the next operations draw random numbers that belong to `number`, the same on all ranks; not collective.

    Without this a program that continues from a checkpoint would repeat the choices of its first operations.
    """
    parts = (channel.cluster.node, channel.cluster.lane) if channel.cluster is not None else ()
    for each in (channel, *parts):
        if each is not None:
            each.random_seed, each.compressed = number, number << _OPERATIONS
