r"""Pipelined double binary tree: two trees, each for half of the vector, so that all ranks have equal work.

Tree one numbers its nodes in order: odd ranks are leaves, rank 0 is the root with one child. Eight ranks::

            0                        tree two is the mirror image (r -> 7 - r), for odd sizes shifted by one:
              \                      a rank that forwards in one tree is, with the exception of rank 0 or P-1,
               4                     a leaf in the other, so the work is even.
            /     \
          2        6
         / \     /  \
        1   3   5    7

All messages follow one clock. In every tick a chunk moves one level up in each tree, and one level down: a rank at
depth d sends chunk j up in tick j + height - d and receives it finished in tick j + height + d - 1. While chunk j
comes down, chunk j + 1 goes up.

Source: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35 (2009), sections 2 and 3.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpicoll.schedules.algorithms import register
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step


def parent_of(place: int, size: int) -> int | None:
    """Return the parent in the in-order binary tree over 0..size-1, or None for the root, 0."""
    if place == 0:
        return None
    bit = place & -place
    up = (place ^ bit) | (bit << 1)
    return up if up < size else place ^ bit


class Tree(NamedTuple):
    """One of the two trees, in ranks: parents (None at the top), children in rank order, depths, and the height."""

    parent: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...]
    depth: tuple[int, ...]
    height: int


def _depths(parent: list[int | None]) -> list[int]:
    depths = []
    for node in range(len(parent)):
        depth, up = 0, parent[node]
        while up is not None:
            depth, up = depth + 1, parent[up]
        depths.append(depth)
    return depths


def _tree(order: list[int], size: int, root: int | None) -> Tree:
    """Put the ranks of `order` on the places of the in-order tree, and `root`, if it is not among them, on top."""
    parent: list[int | None] = [None] * size
    for place, rank in enumerate(order):
        up = parent_of(place, len(order))
        parent[rank] = root if up is None else order[up]
    below: list[list[int]] = [[] for _ in range(size)]
    for child, up in enumerate(parent):
        if up is not None:
            below[up].append(child)
    children = tuple(map(tuple, below))
    depth = tuple(_depths(parent))
    return Tree(tuple(parent), children, depth, max(depth))


@lru_cache(maxsize=256)
def trees(size: int, root: int | None) -> tuple[Tree, Tree]:
    """Build both trees; with a root, over the other ranks and with the root above both tops."""
    order = [rank for rank in range(size) if rank != root]
    other = order[::-1] if len(order) % 2 == 0 else order[1:] + order[:1]
    return _tree(order, size, root), _tree(other, size, root)


class _Clock:
    """Collects one rank's messages by tick."""

    def __init__(self) -> None:
        self._sends: dict[int, list[Send]] = {}
        self._recvs: dict[int, list[Recv]] = {}

    def send(self, tick: int, peer: int, chunk: int) -> None:
        self._sends.setdefault(tick, []).append(Send(peer, chunk, chunk + 1))

    def recv(self, tick: int, peer: int, chunk: int, reduce: Reduce) -> None:
        self._recvs.setdefault(tick, []).append(Recv(peer, chunk, chunk + 1, reduce))

    def steps(self) -> tuple[Step, ...]:
        ticks = sorted(self._sends.keys() | self._recvs.keys())
        return tuple(Step(tuple(self._sends.get(t, ())), tuple(self._recvs.get(t, ()))) for t in ticks)


def _up(clock: _Clock, tree: Tree, rank: int, chunk: int, tick: int) -> None:
    """Move `chunk`, which leaves the lowest level in `tick`, from the children to the parent."""
    depth = tree.depth[rank]
    for child in tree.children[rank]:
        order = Reduce.RECEIVED_FIRST if child < rank else Reduce.OWN_FIRST
        clock.recv(tick + tree.height - depth - 1, child, chunk, order)
    parent = tree.parent[rank]
    if parent is not None:
        clock.send(tick + tree.height - depth, parent, chunk)


def _down(clock: _Clock, tree: Tree, rank: int, chunk: int, tick: int) -> None:
    """Move `chunk`, which leaves the root in `tick`, from the parent to the children."""
    parent = tree.parent[rank]
    if parent is not None:
        clock.recv(tick + tree.depth[rank] - 1, parent, chunk, Reduce.COPY)
    for child in tree.children[rank]:
        clock.send(tick + tree.depth[rank], child, chunk)


def _double_tree(collective: str, size: int, rank: int, root: int | None, segments: int) -> Schedule:
    clock = _Clock()
    for half, tree in enumerate(trees(size, root)):
        for turn in range(segments):
            chunk = half * segments + turn
            if collective != "bcast":
                _up(clock, tree, rank, chunk, turn)
            if collective != "reduce":
                _down(clock, tree, rank, chunk, turn + (tree.height if collective == "allreduce" else 0))
    return Schedule(collective, "double_tree", size, rank, 2 * segments, clock.steps(), root=root or 0)


@register("allreduce", "double_tree", segmented=True)
def double_tree_allreduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Two binary trees, up and down at the same time, chunk by chunk; for many ranks and medium messages."""
    return _double_tree("allreduce", size, rank, None, segments)


@register("reduce", "double_tree", segmented=True)
def double_tree_reduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Two binary trees that meet at the root, chunk by chunk."""
    return _double_tree("reduce", size, rank, root, segments)


@register("bcast", "double_tree", segmented=True)
def double_tree_bcast(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Two binary trees from the root, chunk by chunk."""
    return _double_tree("bcast", size, rank, root, segments)
