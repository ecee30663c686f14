"""Selection of the algorithm that ``"auto"`` takes.

The tables were measured with MPICH on one node (``python -m bench.allreduce``) and on emulated hosts with links of
1 Gbit/s (``make bench-cluster``). All ranks select the same row, since the criteria (bytes, number of ranks, their
placement, whether the operation commutes) are equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll.errors import UnknownAlgorithm
from mpicoll.schedules import ALGORITHMS, Algorithm

if TYPE_CHECKING:  # predictions choose as calls do, but without MPI
    from mpicoll.communicator.channel import Channel
    from mpicoll.shared_memory.method_times import Ratios

SEGMENT_NBYTES = 256 << 10
"""A segment in flight and the part of the vector that it is added to stay in a core's own cache."""
MAX_SEGMENTS = 64
_CLEARLY = 1.33
"""Ratio of times from which on measurements at the start of runs are believed rather than a tuning table."""
NATIVE = "native"
SHARED = "shared"
"""Loads and stores in memory that all ranks share, see :mod:`mpicoll.plans.shared_memory_plans`."""
SINGLE_COPY = "single_copy"
"""As SHARED, but the system copies private memory between processes, without stages."""
ON_NODE = (SHARED, SINGLE_COPY)
HIERARCHY = "hierarchy"
"""Shared memory inside nodes, messages between them, see :mod:`mpicoll.collectives.hierarchy`."""
HIERARCHICAL = ("allreduce", "reduce", "bcast", "barrier")
BY_PARTS = ("reduce_scatter", "allgather")
"""Collectives that are hierarchical if all nodes have equally many ranks: rank i of a node owns its i-th part."""
_OF_PARTS = {"reduce_scatter_block": "reduce_scatter", "allgatherv": "allgather", "alltoallv": "alltoall",
             "gatherv": "gather", "scatterv": "scatter"}  # fmt: skip
DIRECT = {"gather": "linear", "scatter": "linear", "alltoall": "pairwise"}
"""Algorithms that send each part directly from its source to its destination, which alone need its length."""
TWO_SHOT = "two_shot"
"""Compressed reduce_scatter and allgather, see :mod:`mpicoll.collectives.two_shot`."""
SUMMED = "summed"
"""Aggregatable payloads, summed by the algorithm that suits, see :mod:`mpicoll.collectives.aggregated_rounds`."""
SPARSE = "sparse"
"""Sparse vectors: :mod:`mpicoll.collectives.sparse_allreduce`, :mod:`mpicoll.collectives.ok_topk`."""
AUTO = "auto"


class Rule(NamedTuple):
    """Select `name` for vectors of fewer than `below` bytes on at least `min_size` ranks."""

    below: float
    name: str
    min_size: int = 1
    power_of_two: bool = False

    def holds(self, nbytes: int, size: int) -> bool:
        """Return whether this row applies to a vector of `nbytes` bytes on `size` ranks."""
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
    "gather": (Rule(64 * _KB, "tree"), Rule(_ALWAYS, "linear")),
    "scatter": (Rule(64 * _KB, "tree"), Rule(_ALWAYS, "linear")),
    "alltoall": (Rule(64 * _KB, "linear"), Rule(_ALWAYS, "pairwise")),
    "scan": (Rule(512 * _KB, "recursive_doubling"), Rule(_ALWAYS, "chain")),
    "exscan": (Rule(512 * _KB, "recursive_doubling"), Rule(_ALWAYS, "chain")),
}
"""The first row that applies is selected; collectives without rows use the algorithm registered first."""
APART: dict[str, tuple[Rule, ...]] = {
    "allreduce": (
        Rule(32 * _KB, "recursive_doubling"),
        Rule(2 * _MB, "halving_doubling", power_of_two=True),
        Rule(_ALWAYS, "ring"),
    ),
    "reduce": (Rule(128 * _KB, "tree"), Rule(8 * _MB, "double_tree", min_size=4), Rule(_ALWAYS, "ring")),
    "bcast": (Rule(32 * _KB, "tree"), Rule(_ALWAYS, "double_tree", min_size=4), Rule(_ALWAYS, "tree")),
}
"""Rows in place of RULES if every rank is on a node of its own: there bytes cost more than steps."""
ORDERED: dict[str, tuple[Rule, ...]] = {
    "allreduce": (Rule(64 * _KB, "recursive_doubling"), Rule(_ALWAYS, "halving_doubling")),
    "reduce": (Rule(_ALWAYS, "tree"),),
    "reduce_scatter": (Rule(_ALWAYS, "tree"),),
}
"""Rows for operations that do not commute."""


class Capabilities(NamedTuple):
    """Capabilities of a communicator that decide between algorithms.

    Attributes
    ----------
    shared_nbytes
        The longest vector, in bytes, for which ``"shared"`` is possible; -1 if it is not possible.
    in_memory
        The collectives for which ``"shared"`` is possible.
    copies
        Times of collectives by copies between processes relative to those through stages; None if not both are
        possible.
    exchanges
        Whether Alltoallv is an exchange of blocks in shared memory.
    hierarchy
        Whether there are several nodes, not all of them with a single rank.
    blocked, even
        Whether ranks are numbered node by node; whether all nodes have equally many.
    apart
        Whether every rank is on a node of its own.
    rules
        Rows of ``python -m mpicoll tune``, which precede the shipped ones.
    """

    size: int
    shared_nbytes: float = -1
    hierarchy: bool = False
    blocked: bool = False
    even: bool = False
    apart: bool = False
    rules: Mapping[str, Sequence[Rule]] = MappingProxyType({})
    in_memory: tuple[str, ...] = ()
    copies: Ratios | None = None
    exchanges: bool = False

    def without_memory(self) -> Capabilities:
        """Return the capabilities for messages only, without shared memory and hierarchy."""
        return self._replace(shared_nbytes=-1, copies=None, hierarchy=False)

    def allow(self, collective: str, name: str, nbytes: int, commutative: bool) -> bool:
        """Return whether algorithm `name` is possible for a call."""
        if name == NATIVE:
            return True
        if name == SHARED:
            return collective in self.in_memory and nbytes <= self.shared_nbytes
        if name == SINGLE_COPY:
            return collective in self.in_memory and collective != "barrier" and self.copies is not None
        in_order = commutative or collective not in ORDERED
        if name == HIERARCHY:
            if collective in BY_PARTS:
                return self.hierarchy and self.blocked and self.even
            return self.hierarchy and collective in HIERARCHICAL and (in_order or self.blocked)
        row = ALGORITHMS[collective].get(name)
        return row is not None and (in_order or row.ordered)


def means_of(channel: Channel) -> Capabilities:
    """Return the capabilities of a communicator."""
    from mpicoll.kernels.operation_words import COLLECTIVES

    cluster = channel.cluster
    copies = channel.node.copies if channel.node is not None else None
    exchanges = channel.node is not None and channel.node.segments
    means = Capabilities(
        channel.size,
        channel.shared_nbytes,
        apart=channel.apart,
        in_memory=COLLECTIVES,
        copies=copies,
        exchanges=exchanges,
    )
    if cluster is None:
        return means
    return means._replace(hierarchy=True, blocked=cluster.blocked, even=cluster.even)


def row_of(collective: str) -> str:
    """Return the collective whose algorithms another one has: that of equal parts for parts of different lengths.

    Raises
    ------
    UnknownAlgorithm
        If there is no such collective.
    """
    row = _OF_PARTS.get(collective, collective)
    if row not in ALGORITHMS:
        raise UnknownAlgorithm(f"collective: {collective!r} is not one of {', '.join((*ALGORITHMS, *_OF_PARTS))}")
    return row


def names(collective: str, means: Capabilities) -> tuple[str, ...]:
    """Return the names that ``algorithm=`` takes for a collective, besides ``"auto"``.

    Raises
    ------
    UnknownAlgorithm
        If there is no such collective.
    """
    only = of_own_counts(collective, means)
    if only is not None:
        return (*only, NATIVE)
    collective = row_of(collective)
    special = [name for name in (*ON_NODE, HIERARCHY) if means.allow(collective, name, 0, True)]
    return (*special, *ALGORITHMS[collective], NATIVE)


def of_own_counts(collective: str, means: Capabilities) -> tuple[str, ...] | None:
    """Return the algorithms of a collective whose ranks know only their own counts; None if they know all or are told.

    The first is that of ``"auto"``.
    """
    row = _OF_PARTS.get(collective, "")
    if row not in DIRECT or (collective != "alltoallv" and means.shared_nbytes >= 0):
        return None
    return (SHARED, DIRECT[row]) if collective == "alltoallv" and means.exchanges else (DIRECT[row],)


def choice(collective: str, nbytes: int, means: Capabilities, *, commutative: bool = True) -> str:
    """Return what :func:`choose` does, also for collectives of parts of different lengths.

    Raises
    ------
    UnknownAlgorithm
        If there is no such collective.
    """
    only = of_own_counts(collective, means)
    return only[0] if only is not None else choose(row_of(collective), nbytes, means, commutative=commutative)


def choose(collective: str, nbytes: int, means: Capabilities, *, commutative: bool = True) -> str:
    """Return the algorithm that ``"auto"`` takes for a vector of `nbytes` bytes."""
    for rule in means.rules.get(collective, ()):
        if rule.holds(nbytes, means.size) and means.allow(collective, rule.name, nbytes, commutative):
            return rule.name if rule.name not in ON_NODE else _on_node(collective, nbytes, means, tuned=rule.name)
    if means.allow(collective, SHARED, nbytes, commutative):
        return _on_node(collective, nbytes, means)
    if means.allow(collective, HIERARCHY, nbytes, commutative):
        return HIERARCHY
    rules = RULES.get(collective, ())
    if means.apart:
        rules = APART.get(collective, rules)
    if not commutative:
        rules = ORDERED.get(collective, rules)
    first = next(iter(ALGORITHMS[collective]))
    return next((rule.name for rule in rules if rule.holds(nbytes, means.size)), first)


def _on_node(collective: str, nbytes: int, means: Capabilities, *, tuned: str = "") -> str:
    """Return the faster one of `ON_NODE` by what ranks measured when they started (`shared_memory/method_times.py`).

    What was `tuned` is taken unless that measurement, which is a short one, contradicts clearly: ranks may have had
    other cores then.
    """
    ratio = math.inf if means.copies is None else means.copies.at(collective, nbytes)
    if tuned == SINGLE_COPY:
        return SHARED if _CLEARLY < ratio < math.inf else SINGLE_COPY  # infinite: not measured for such vectors
    if tuned == SHARED:
        return SINGLE_COPY if ratio * _CLEARLY < 1 else SHARED
    return SINGLE_COPY if ratio < 1 else SHARED


def resolve(
    collective: str, wanted: str | None, default: str, nbytes: int, means: Capabilities, *, commutative: bool = True
) -> str:
    """Return the name of the algorithm to use.

    Parameters
    ----------
    wanted
        The call's own ``algorithm=``; None for the communicator's default, or ``"auto"`` if that is not possible.

    Raises
    ------
    UnknownAlgorithm
        If the collective has no such algorithm.
    ValueError
        If the algorithm is not possible here, or the operation does not commute and the algorithm needs that.
    """
    if wanted is None:
        wanted = default if means.allow(collective, default, nbytes, commutative) else AUTO
    if wanted == AUTO:
        return choose(collective, nbytes, means, commutative=commutative)
    if not isinstance(wanted, str) or wanted not in (*ALGORITHMS[collective], NATIVE, *ON_NODE, HIERARCHY):
        there = ", ".join((AUTO, *names(collective, means)))
        raise UnknownAlgorithm(f"algorithm: {wanted!r} is not one for {collective}; there are {there}")
    if means.allow(collective, wanted, nbytes, commutative):
        return wanted
    if means.allow(collective, wanted, nbytes, True):
        ordered = [name for name in names(collective, means) if means.allow(collective, name, nbytes, False)]
        raise ValueError(
            f"algorithm: {wanted!r} combines operands out of rank order, and the operation does not commute; "
            f"choose one of {', '.join(ordered)}"
        )
    raise ValueError(f"algorithm: {wanted!r} is not possible for {collective} here; python -m mpicoll doctor says why")


def check_default(name: str, collectives: Iterable[str] | None = None) -> str:
    """Return `name` if it may be the default of a communicator for some collectives, which are in lower case, or all.

    Raises
    ------
    UnknownAlgorithm
        If none of them has such an algorithm.
    """
    known = {
        AUTO,
        NATIVE,
        *ON_NODE,
        HIERARCHY,
        *(name for each in collectives or ALGORITHMS for name in ALGORITHMS[each]),
    }
    if not isinstance(name, str) or name not in known:
        raise UnknownAlgorithm(f"algorithm: {name!r} is not one of {', '.join(sorted(known))}")
    return name


def check_settings(algorithm: Any, timeout: Any) -> None:
    """Raise UnknownAlgorithm or ValueError if a setting of a communicator is wrong."""
    check_default(algorithm)
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout: {timeout!r} is not a positive number of seconds")


def segments(row: Algorithm, nbytes: int, size: int) -> int:
    """Return the number of segments of each rank's chunk in a pipelined algorithm; 1 in others."""
    if not row.segmented:
        return 1
    per_chunk = nbytes // max(size, 2)
    return max(row.min_segments, min(MAX_SEGMENTS, -(-per_chunk // SEGMENT_NBYTES)))
