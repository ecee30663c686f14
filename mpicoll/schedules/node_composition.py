"""Collectives over several nodes as data: parts inside nodes and along lanes, in the order in which a rank takes them.

The ranks of a node share memory, and the ranks of equal local rank on all nodes form a lane. A collective over all
ranks is *composed* of collectives of the ranks of a node and of a lane. `mpicoll.collectives.hierarchy` binds the rows
of a composition to memory; :func:`verify` proves them on symbols. An allreduce in two segments::

    start, wait   reduce_scatter inside, segment 0
    start         allreduce along the lane, segment 0
    start, wait   reduce_scatter inside, segment 1       while segment 0 progresses along the lane
    wait          allreduce along the lane, segment 0
    ...

(Lanes: Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane communication", CLUSTER 2020.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from mpicoll.schedules.replay import ScheduleError


class Nodes(Enum):
    """Nodes whose ranks take a part."""

    ALL = "all nodes"
    ROOT = "the root's node"
    OTHERS = "the other nodes"


class Part(NamedTuple):
    """A collective of the ranks of a node, or of a lane.

    Attributes
    ----------
    inside
        True for the ranks of a node, False for those of a lane.
    piece
        The segment of the vector; where every rank owns a part of it, the node whose ranks own this piece. For a
        barrier, 0 before the lane's and 1 after it.
    nodes
        The nodes whose ranks take the part.
    """

    collective: str
    inside: bool
    piece: int = 0
    nodes: Nodes = Nodes.ALL

    def __str__(self) -> str:
        """Return the part in words."""
        return f"{self.collective} {'inside the node' if self.inside else 'along the lane'}"


class Row(NamedTuple):
    """Start of a part (`starts`), or the wait for its end, while the part `aside` progresses too if there is one."""

    part: Part
    starts: bool
    aside: Part | None = None


_SEGMENT_NBYTES, _MAX_SEGMENTS = 1 << 20, 8
COLLECTIVES = ("allreduce", "reduce", "bcast", "barrier", "allgather", "reduce_scatter")
"""Collectives that have compositions; the last two where all nodes have equally many ranks."""


def segments_for(nbytes: int) -> int:
    """Return the number of segments of an allreduce of `nbytes` bytes."""
    return max(1, min(_MAX_SEGMENTS, nbytes // _SEGMENT_NBYTES))


def compose(collective: str, *, segments: int = 1, nodes: int = 2) -> tuple[Row, ...]:
    """Return the rows of a collective over several nodes, the same on all ranks but for the nodes of each part.

    Parameters
    ----------
    segments
        Segments of the vector of an allreduce.
    nodes
        Number of nodes.
    """
    if collective == "allreduce":
        return tuple(_allreduce(segments))
    parts = {
        "reduce": [Part("reduce_scatter", True), Part("reduce", False), Part("allgather", True, 0, Nodes.ROOT)],
        "bcast": [
            Part("bcast", True, 0, Nodes.ROOT),
            Part("bcast", False),
            Part("allgather", True, 0, Nodes.OTHERS),
        ],
        "barrier": [Part("barrier", True, 0), Part("barrier", False), Part("barrier", True, 1)],
        "allgather": [Part("allgather", False), *(Part("allgather", True, node) for node in range(nodes))],
        "reduce_scatter": [
            *(Part("reduce_scatter", True, node) for node in range(nodes)),
            Part("reduce_scatter", False),
        ],
    }[collective]
    return tuple(Row(part, starts) for part in parts for starts in (True, False))


def _allreduce(segments: int) -> Iterator[Row]:
    on_lane: Part | None = None
    for segment in range(segments + 1):
        if segment < segments:
            yield from _inside("reduce_scatter", segment, on_lane)
        if on_lane is not None:
            yield Row(on_lane, False)
        before, on_lane = on_lane, Part("allreduce", False, segment) if segment < segments else None
        if on_lane is not None:
            yield Row(on_lane, True)
        if before is not None:
            yield from _inside("allgather", before.piece, on_lane)


def _inside(collective: str, piece: int, aside: Part | None) -> Iterator[Row]:
    part = Part(collective, True, piece)
    yield Row(part, True)
    yield Row(part, False, aside)


# Proof ----------------------------------------------------------------------------------------------------------------

_Sum = frozenset[int]
"""Contributing ranks."""


def verify(
    collective: str, node_sizes: Sequence[int], *, root: int = 0, segments: int = 1, rows: Sequence[Row] | None = None
) -> None:
    """Prove that the composition of a collective is correct, given that its parts are.

    Parts inside a node run one after the other, and so do those along a lane; every element ends where it belongs with
    each contributor exactly once, and no rank ends a barrier before all have entered it.

    Parameters
    ----------
    node_sizes
        Ranks of each node; ranks are numbered node by node.
    rows
        The rows to prove; those of :func:`compose` by default.

    Raises
    ------
    ScheduleError
        If it is not correct.
    """
    made = compose(collective, segments=segments, nodes=len(node_sizes)) if rows is None else tuple(rows)
    _check_order(made)
    proof = _Proof(collective, node_sizes, root, segments)
    for row in made:
        if not row.starts:
            proof.apply(row.part)
    proof.check()


def _check_order(rows: Sequence[Row]) -> None:
    """See that each part is started and waited for once, and that no two of a kind are under way together."""
    under_way: list[Part] = []
    for row in rows:
        if row.starts and any(part.inside == row.part.inside for part in under_way):
            raise ScheduleError(f"{row.part}, piece {row.part.piece}: started while another one is under way there")
        if not row.starts and row.part not in under_way:
            raise ScheduleError(f"{row.part}, piece {row.part.piece}: waited for before it is started")
        if row.aside is not None and row.aside not in under_way:
            raise ScheduleError(f"{row.aside}, piece {row.aside.piece}: is not under way")
        (under_way.append if row.starts else under_way.remove)(row.part)
    if under_way:
        raise ScheduleError(f"{under_way[0]}, piece {under_way[0].piece}: nobody waits for it")


class _Proof:
    """All ranks on symbols: who has contributed to what each rank holds, by piece and by lane."""

    def __init__(self, collective: str, node_sizes: Sequence[int], root: int, segments: int) -> None:
        self._collective, self._root, self._lanes = collective, root, min(node_sizes)
        bounds = [sum(node_sizes[:node]) for node in range(len(node_sizes) + 1)]
        self._nodes = [range(start, stop) for start, stop in pairwise(bounds)]
        self._size = bounds[-1]
        self._root_node = next(node for node, ranks in enumerate(self._nodes) if root in ranks)
        self._by_parts = collective in ("allgather", "reduce_scatter")
        self._pieces = len(node_sizes) if self._by_parts else segments
        self._held = [[self._given(rank, piece) for piece in range(self._pieces)] for rank in range(self._size)]
        self._heard: list[_Sum] = [frozenset([rank]) for rank in range(self._size)]

    def _given(self, rank: int, piece: int) -> list[_Sum | None]:
        """Return what a rank gives of each lane's share of a piece."""
        if self._collective == "bcast":
            return [frozenset([rank]) if rank == self._root else None] * self._lanes
        if self._collective == "allgather":
            return [frozenset([rank]) if rank == self._owner(piece, lane) else None for lane in range(self._lanes)]
        return [frozenset([rank])] * self._lanes

    def _owner(self, node: int, lane: int) -> int:
        return self._nodes[node][lane]

    def apply(self, part: Part) -> None:
        """Let all ranks take a part."""
        for node, ranks in enumerate(self._nodes):
            takes = part.nodes is Nodes.ALL or (part.nodes is Nodes.ROOT) == (node == self._root_node)
            if part.inside and takes:
                self._take_inside(part, ranks)
        if not part.inside:
            for lane in range(1 if part.collective == "barrier" else self._lanes):
                self._take_on_lane(part, lane)

    def _take_inside(self, part: Part, ranks: range) -> None:
        if part.collective == "barrier":
            self._meet(ranks)
            return
        for lane in range(self._lanes):
            held = [self._held[rank][part.piece][lane] for rank in ranks]
            if part.collective == "reduce_scatter":
                self._held[ranks[lane]][part.piece][lane] = _total(held)
            else:
                source = held[lane] if part.collective == "allgather" else held[self._root - ranks[0]]
                for rank in ranks:
                    self._held[rank][part.piece][lane] = source

    def _take_on_lane(self, part: Part, lane: int) -> None:
        ranks = [nodes[lane] for nodes in self._nodes]
        if part.collective == "barrier":
            self._meet(ranks)
        elif self._by_parts:
            self._exchange_parts(part, lane, ranks)
        else:
            held = [self._held[rank][part.piece][lane] for rank in ranks]
            result = held[self._root_node] if part.collective == "bcast" else _total(held)
            for node, rank in enumerate(ranks):
                if part.collective != "reduce" or node == self._root_node:
                    self._held[rank][part.piece][lane] = result

    def _exchange_parts(self, part: Part, lane: int, ranks: Sequence[int]) -> None:
        for node, owner in enumerate(ranks):
            held = [self._held[rank][node][lane] for rank in ranks]
            if part.collective == "reduce_scatter":
                self._held[owner][node][lane] = _total(held)
                continue
            for rank in ranks:
                self._held[rank][node][lane] = held[node]

    def _meet(self, ranks: Sequence[int]) -> None:
        together = frozenset().union(*(self._heard[rank] for rank in ranks))
        for rank in ranks:
            self._heard[rank] = together

    def check(self) -> None:
        """Compare what the ranks hold with what the collective promises."""
        everybody = frozenset(range(self._size))
        for rank in range(self._size):
            if self._collective == "barrier":
                self._expect(rank, "the ranks that it has heard of", self._heard[rank], everybody)
                continue
            if self._collective == "reduce" and rank != self._root:
                continue
            for piece in range(self._pieces):
                for lane in range(self._lanes):
                    wanted: _Sum = everybody
                    if self._collective == "bcast":
                        wanted = frozenset([self._root])
                    elif self._collective == "allgather":
                        wanted = frozenset([self._owner(piece, lane)])
                    elif self._by_parts and rank != self._owner(piece, lane):
                        continue
                    self._expect(rank, f"piece {piece}, share {lane}", self._held[rank][piece][lane], wanted)

    def _expect(self, rank: int, what: str, found: _Sum | None, wanted: _Sum) -> None:
        if found != wanted:
            raise ScheduleError(f"rank {rank}, {what}: of ranks {_listed(found)}, must be of {_listed(wanted)}")


def _total(held: Sequence[_Sum | None]) -> _Sum:
    """Return the contributors of a sum; each may contribute once."""
    found: set[int] = set()
    for each in held:
        if each is None:
            raise ScheduleError("a rank adds what it does not hold")
        if twice := found & each:
            raise ScheduleError(f"the contribution of rank {min(twice)} is counted twice")
        found |= each
    return frozenset(found)


def _listed(ranks: _Sum | None) -> str:
    return "nobody" if ranks is None else ", ".join(map(str, sorted(ranks)))
