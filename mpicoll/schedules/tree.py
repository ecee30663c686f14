"""Binomial trees: reduce, broadcast, gather, scatter, and their combinations.

Broadcast from rank 0 to eight ranks; in each step every rank that has the data sends it on, farthest first::

    step 1   0 -> 4
    step 2   0 -> 2   4 -> 6
    step 3   0 -> 1   2 -> 3   4 -> 5   6 -> 7

Reduce uses the same edges in the opposite direction. It keeps rank order for every root: the ranks from the root
upwards form one tree with the root at its lower end; the ranks below the root form another, whose sum is sent to the
root last and put in front.

Sources: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19
(2005), sections 4.1 and 4.2; van de Geijn, "On global combine operations", JPDC 22 (1994), for scatter-allgather.
"""

from __future__ import annotations

from mpicoll.schedules.algorithms import register
from mpicoll.schedules.all_ranks import Irregular, Part, Rotation
from mpicoll.schedules.direct import run_of_ranks
from mpicoll.schedules.ring import ring_allgather_steps
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step


def _send(peer: int, start: int, stop: int) -> Step:
    return Step(sends=(Send(peer, start, stop),))


def _recv(peer: int, start: int, stop: int, reduce: Reduce = Reduce.COPY) -> Step:
    return Step(recvs=(Recv(peer, start, stop, reduce),))


def _reduce_onto_first(first: int, stop: int, rank: int, chunks: int) -> list[Step]:
    """Reduce ranks first..stop-1 onto `first` in rank order; nothing for ranks outside."""
    steps: list[Step] = []
    if not first <= rank < stop:
        return steps
    place, mask = rank - first, 1
    while mask < stop - first:
        if place & mask:
            steps.append(_send(rank - mask, 0, chunks))
            break
        if rank + mask < stop:
            steps.append(_recv(rank + mask, 0, chunks, Reduce.OWN_FIRST))
        mask <<= 1
    return steps


def reduce_steps(size: int, rank: int, root: int, chunks: int = 1) -> tuple[Step, ...]:
    """Reduce the whole vector onto `root` in rank order."""
    steps = _reduce_onto_first(root, size, rank, chunks) + _reduce_onto_first(0, root, rank, chunks)
    if root > 0 and rank == 0:
        steps.append(_send(root, 0, chunks))
    if root > 0 and rank == root:
        steps.append(_recv(0, 0, chunks, Reduce.RECEIVED_FIRST))
    return tuple(steps)


def _distribute(size: int, rank: int, root: int, scatter: bool) -> tuple[Step, ...]:
    """Walk the binomial tree from the root down; `scatter` sends each subtree only its own chunks."""
    place, steps, mask = (rank - root) % size, [], 1
    while mask < size and not place & mask:
        mask <<= 1
    # The subtree of `place` holds the places place..place + mask - 1, as far as they exist.
    if place:
        stop = min(place + mask, size) if scatter else 1
        steps.append(_recv((rank - mask) % size, place if scatter else 0, stop))
    while mask > 1:
        mask >>= 1
        child = place + mask
        if child < size:
            stop = min(child + mask, size) if scatter else 1
            steps.append(_send((rank + mask) % size, child if scatter else 0, stop))
    return tuple(steps)


def bcast_steps(size: int, rank: int, root: int) -> tuple[Step, ...]:
    """Spread the root's whole vector."""
    return _distribute(size, rank, root, scatter=False)


def scatter_steps(size: int, rank: int, root: int) -> tuple[Step, ...]:
    """Give chunk ``(rank - root) % size`` of the root's vector to each rank."""
    return _distribute(size, rank, root, scatter=True)


@register("reduce", "tree", ordered=True)
def tree_reduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Binomial tree in rank order, whole vectors; for short messages."""
    return Schedule("reduce", "tree", size, rank, 1, reduce_steps(size, rank, root), root=root)


@register("bcast", "tree")
def tree_bcast(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Binomial tree, whole vectors; for short messages."""
    return Schedule("bcast", "tree", size, rank, 1, bcast_steps(size, rank, root), root=root)


@register("allreduce", "tree", ordered=True)
def tree_allreduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Binomial reduce to rank 0, then binomial bcast."""
    steps = reduce_steps(size, rank, 0) + bcast_steps(size, rank, 0)
    return Schedule("allreduce", "tree", size, rank, 1, steps)


@register("reduce_scatter", "tree", ordered=True)
def tree_reduce_scatter(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Binomial reduce to rank 0 in rank order, then binomial scatter; for operations that do not commute."""
    steps = reduce_steps(size, rank, 0, chunks=size) + scatter_steps(size, rank, 0)
    return Schedule("reduce_scatter", "tree", size, rank, size, steps)


def _scatter_allgather_parts(size: int, root: int) -> tuple[Part, ...]:
    scatter = tuple(scatter_steps(size, rank, root) for rank in range(size))
    return (Irregular(scatter), Rotation(ring_allgather_steps(size, 0), first=root))


@register("bcast", "scatter_allgather", parts=_scatter_allgather_parts)
def scatter_allgather_bcast(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Binomial scatter from the root, then ring allgather; for long messages."""
    place = (rank - root) % size
    around = tuple(
        Step(
            tuple(Send((s.peer + root) % size, s.start, s.stop) for s in step.sends),
            tuple(Recv((r.peer + root) % size, r.start, r.stop, r.reduce) for r in step.recvs),
        )
        for step in ring_allgather_steps(size, place)
    )
    return Schedule("bcast", "scatter_allgather", size, rank, size, scatter_steps(size, rank, root) + around, root=root)


def _subtree(size: int, rank: int, root: int) -> list[tuple[int, int]]:
    """Return the ranks below `rank` in the binomial tree, itself included: a run of places from its own on."""
    place, mask = (rank - root) % size, 1
    while mask < size and not place & mask:
        mask <<= 1
    return run_of_ranks(size, rank, min(mask, size - place))


def _parent(size: int, rank: int, root: int) -> int:
    place = (rank - root) % size
    return (rank - (place & -place)) % size


def _children(size: int, rank: int, root: int) -> list[int]:
    """Return the children, those with the smallest subtrees first."""
    place, mask, found = (rank - root) % size, 1, []
    while mask < size and not place & mask:
        if place + mask < size:
            found.append((rank + mask) % size)
        mask <<= 1
    return found


@register("gather", "tree")
def tree_gather(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Binomial tree: each rank sends the parts of its subtree to its parent; for short messages."""
    steps = [
        Step(recvs=tuple(Recv(child, *run) for run in _subtree(size, child, root)))
        for child in _children(size, rank, root)
    ]
    if rank != root:
        steps.append(Step(tuple(Send(_parent(size, rank, root), *run) for run in _subtree(size, rank, root))))
    return Schedule("gather", "tree", size, rank, size, tuple(steps), root=root)


@register("scatter", "tree")
def tree_scatter(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Binomial tree: each rank sends its children the parts of their subtrees, largest first; for short messages."""
    steps = []
    if rank != root:
        steps.append(Step(recvs=tuple(Recv(_parent(size, rank, root), *run) for run in _subtree(size, rank, root))))
    for child in reversed(_children(size, rank, root)):
        steps.append(Step(tuple(Send(child, *run) for run in _subtree(size, child, root))))
    return Schedule("scatter", "tree", size, rank, size, tuple(steps), root=root)
