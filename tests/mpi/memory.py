"""Where buffers may lie, and by which way a call went: for tests of collectives on shared memory."""

from __future__ import annotations

import os

import numpy as np

from mpicoll import Intracomm

KINDS = ("private", "shared", "slice")
HERE = os.environ.get("MPICOLL_NODE") != "off"
"""Whether the ranks of these tests share memory; then a communicator that does not is a failure."""
SEGMENTS = HERE and os.environ.get("MPICOLL_SEGMENTS") != "off"
_CANARY = 0x5B


def place(comm: Intracomm, kind: str, values: np.ndarray) -> np.ndarray:
    """Return a copy of `values` in memory of this kind; a slice has neighbours, see :func:`neighbours_are_intact`."""
    if kind == "private":
        return values.copy()
    if kind == "shared":
        data = comm.empty(values.shape, values.dtype)
        data[...] = values
        return data
    around = comm.empty(values.size + 6, values.dtype)
    around.view(np.uint8)[:] = _CANARY
    inside = around[3:-3]
    inside[:] = values
    return inside


def neighbours_are_intact(data: np.ndarray) -> bool:
    """Say whether nothing was written beside a slice that :func:`place` made; True for other arrays."""
    around = data.base
    if not isinstance(around, np.ndarray) or around.size != data.size + 6:
        return True
    return bool((around[:3].view(np.uint8) == _CANARY).all() and (around[-3:].view(np.uint8) == _CANARY).all())


class Kinds:
    """Goes through the kinds of memory for a send and a receive buffer, sometimes others on each rank."""

    def __init__(self, rank: int) -> None:
        self._rank, self._turn = rank, 0

    def next(self) -> tuple[str, str]:
        """Return the next pair: all pairs alike on all ranks, then all pairs, with another one on each rank."""
        number = self._turn % 9
        if self._turn % 18 >= 9:
            number = (number + 4 * self._rank) % 9
        self._turn += 1
        return KINDS[number // 3], KINDS[number % 3]


def algorithm_for(comm: Intracomm, wanted: str | None, nbytes: int) -> str | None:
    """Return `wanted`, or None where a communicator cannot do ``"shared"`` for so long a vector."""
    channel = comm._scope.channel
    assert (channel.node is not None) == (HERE and comm.size > 1), "the ranks do not share memory"
    return None if wanted == "shared" and nbytes > channel.shared_nbytes else wanted


def went_the_short_way(comm: Intracomm) -> bool:
    """Say whether the last call on `comm` was made, or begun, in one step."""
    front = comm._scope.channel.dispatch
    return front.recall(front.number) is not None
