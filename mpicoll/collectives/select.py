"""Which algorithm ``"auto"`` takes.

A small table, measured with MPICH on one node (``python -m bench.allreduce``). Every rank reads the same row, since
the facts it is chosen by (bytes, number of ranks, whether the operation commutes) are the same on all ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from mpicoll.errors import UnknownAlgorithm
from mpicoll.kernels.calls import BUCKETS
from mpicoll.runtime.channel import Channel
from mpicoll.schedules import ALGORITHMS, Algorithm

SEGMENT_NBYTES = 256 << 10
"""A segment on its way and the part of the vector that it is added to stay in a core's own cache."""
MAX_SEGMENTS = 64
NATIVE = "native"
SHARED = "shared"
"""Loads and stores in memory that all ranks share, see :mod:`mpicoll.kernels.shared`."""
AUTO = "auto"


class Rule(NamedTuple):
    """Take `name` for vectors of fewer than `below` bytes, if the number of ranks suits it."""

    below: float
    name: str
    min_size: int = 1
    power_of_two: bool = False

    def holds(self, nbytes: int, size: int) -> bool:
        """Say whether this is the row for a vector of `nbytes` bytes on `size` ranks."""
        return nbytes < self.below and size >= self.min_size and not (self.power_of_two and size & (size - 1))


_KB, _MB, _ALWAYS = 1 << 10, 1 << 20, float("inf")
RULES: dict[str, tuple[Rule, ...]] = {
    "allreduce": (
        Rule(64 * _KB, "recursive_doubling"),
        Rule(8 * _MB, "halving_doubling", power_of_two=True),
        Rule(_ALWAYS, "ring"),
    ),
    "reduce": (Rule(_MB, "tree"), Rule(_ALWAYS, "ring")),
    "bcast": (Rule(_MB, "tree"), Rule(_ALWAYS, "double_tree", min_size=4), Rule(_ALWAYS, "tree")),
    "reduce_scatter": (Rule(_ALWAYS, "ring"),),
    "allgather": (Rule(2 * _MB, "bruck"), Rule(_ALWAYS, "ring")),
    "barrier": (Rule(_ALWAYS, "dissemination"),),
}
"""The first row that holds counts."""
ORDERED: dict[str, tuple[Rule, ...]] = {
    "allreduce": (Rule(64 * _KB, "recursive_doubling"), Rule(_ALWAYS, "halving_doubling")),
    "reduce": (Rule(_ALWAYS, "tree"),),
    "reduce_scatter": (Rule(_ALWAYS, "tree"),),
}
"""For operations that do not commute."""


def names(collective: str, *, shared: bool = False) -> tuple[str, ...]:
    """Return what ``algorithm=`` may be for this collective, besides ``"auto"``."""
    if collective not in ALGORITHMS:
        raise UnknownAlgorithm(f"collective: {collective!r} is not one of {', '.join(ALGORITHMS)}")
    return (*[SHARED] * shared, *ALGORITHMS[collective], NATIVE)


def choose(collective: str, nbytes: int, size: int, *, commutative: bool = True, shared_nbytes: float = -1) -> str:
    """Return the algorithm for a vector of `nbytes` bytes on `size` ranks.

    Parameters
    ----------
    shared_nbytes
        Up to which length ``"shared"`` is possible; -1 if it is not.
    """
    if nbytes <= shared_nbytes:
        return SHARED
    rules = RULES[collective] if commutative else ORDERED.get(collective, RULES[collective])
    return next(rule.name for rule in rules if rule.holds(nbytes, size))


def resolve(
    collective: str,
    wanted: str | None,
    default: str,
    nbytes: int,
    size: int,
    *,
    commutative: bool = True,
    shared_nbytes: float = -1,
) -> str:
    """Return the name of the algorithm to use.

    Parameters
    ----------
    wanted
        The call's own ``algorithm=``; None to use the communicator's default, which counts only where the collective
        has such an algorithm and the operation allows it.

    Raises
    ------
    UnknownAlgorithm
        If the collective has no such algorithm.
    ValueError
        If the algorithm needs an operation that commutes.
    """
    if wanted is None:
        usable = default in (NATIVE, SHARED) or _is_usable(collective, default, commutative)
        wanted = default if usable else AUTO
        if wanted == SHARED and nbytes > shared_nbytes:
            wanted = AUTO
    if wanted == AUTO:
        return choose(collective, nbytes, size, commutative=commutative, shared_nbytes=shared_nbytes)
    if wanted == NATIVE:
        return wanted
    if wanted == SHARED:
        if nbytes > shared_nbytes:
            raise ValueError(f"algorithm: {wanted!r} is not possible here; see python -m mpicoll doctor")
        return wanted
    if not isinstance(wanted, str) or wanted not in ALGORITHMS[collective]:
        raise UnknownAlgorithm(
            f"algorithm: {wanted!r} is not one for {collective}; there are {', '.join((AUTO, *names(collective)))}"
        )
    if not _is_usable(collective, wanted, commutative):
        ordered = [row.name for row in ALGORITHMS[collective].values() if row.ordered]
        raise ValueError(
            f"algorithm: {wanted!r} combines operands out of rank order, and the operation does not commute; "
            f"choose one of {', '.join(ordered)}"
        )
    return wanted


def _is_usable(collective: str, name: str, commutative: bool) -> bool:
    row = ALGORITHMS[collective].get(name)
    reduces = collective in ORDERED
    return row is not None and (commutative or row.ordered or not reduces)


def check_default(name: str) -> str:
    """Return `name` if it may be a communicator's default.

    Raises
    ------
    UnknownAlgorithm
        If no collective has such an algorithm.
    """
    known = {AUTO, NATIVE, SHARED, *(name for table in ALGORITHMS.values() for name in table)}
    if not isinstance(name, str) or name not in known:
        raise UnknownAlgorithm(f"algorithm: {name!r} is not one of {', '.join(sorted(known))}")
    return name


def segments(row: Algorithm, nbytes: int, size: int) -> int:
    """Return into how many segments a pipelined algorithm cuts each rank's chunk."""
    if not row.segmented:
        return 1
    per_chunk = nbytes // max(size, 2)
    return max(row.min_segments, min(MAX_SEGMENTS, -(-per_chunk // SEGMENT_NBYTES)))


def fill_front(channel: Channel) -> int:
    """Tell the communicator's front which calls are made on shared memory; return its address, 0 if none are."""
    if channel.node is None:
        return 0
    for collective in ALGORITHMS:
        for bits in range(BUCKETS):
            nbytes = 1 << bits >> 1
            name = choose(collective, nbytes, channel.size, shared_nbytes=channel.shared_nbytes)
            channel.front.choose(collective, bits, name == SHARED)
    return channel.front.address
