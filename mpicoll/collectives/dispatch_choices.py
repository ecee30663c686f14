"""Choices of ``"auto"`` in the dispatch table, from which compiled code takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.collectives.select import SHARED, SINGLE_COPY, Capabilities, choose
from mpicoll.communicator.channel import Channel
from mpicoll.kernels.dispatch_table import BUCKETS, TRIED
from mpicoll.kernels.method_trials import is_tried
from mpicoll.kernels.operation_words import COLLECTIVES, TRANSFER


def fill_dispatch(channel: Channel, means: Capabilities) -> int:
    """Enter calls on shared memory in the dispatch table; return the table's address, 0 if there is none."""
    node = channel.node
    if not channel.dispatch.usable:
        return 0
    if node is None:
        return channel.dispatch.address
    methods = {SHARED: node.method, SINGLE_COPY: TRANSFER}
    choices = _choices_by_length(means, BUCKETS)
    key = id(choices), node.method, node.trials is not None
    if key in _chosen:
        channel.dispatch.chosen = _chosen[key]
        return channel.dispatch.address
    for collective, bits, name in choices:
        if name in methods:
            tried = node.trials is not None and is_tried(COLLECTIVES.index(collective), bits)
            channel.dispatch.choose(collective, bits, methods[name] + TRIED * tried)
    _chosen[key] = channel.dispatch.chosen
    return channel.dispatch.address


_chosen: dict[tuple[int, int, bool], np.ndarray] = {}
"""The part of a dispatch table that has choices, by the identity of choices, which are never dropped."""


_choices: dict[tuple[Any, ...], tuple[tuple[str, int, str], ...]] = {}
"""By capabilities: a program that makes many communicators makes them of few kinds."""


def _choices_by_length(means: Capabilities, buckets: int) -> tuple[tuple[str, int, str], ...]:
    """Return (collective, bits, algorithm) where all vectors of ``2**(bits - 1)`` to ``2**bits - 1`` bytes take one."""
    rules = tuple((collective, tuple(rows)) for collective, rows in means.rules.items())
    key = (*(each for each in means if each is not means.rules), rules, buckets)
    if key not in _choices:
        ends = {bits: (1 << bits >> 1, (1 << bits) - 1) for bits in range(buckets)}
        both = (
            (collective, bits, choose(collective, first, means), choose(collective, last, means))
            for collective in means.in_memory
            for bits, (first, last) in ends.items()
        )
        _choices[key] = tuple((collective, bits, name) for collective, bits, name, other in both if name == other)
    return _choices[key]
