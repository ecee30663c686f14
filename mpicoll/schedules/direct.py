"""Algorithms by direct exchange between pairs of ranks: linear, pairwise exchange, Bruck, dissemination.

Sources: Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005), section 4.3 (pairwise); Bruck, Ho, Kipnis, Upfal, Weathersby,
"Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 8 (1997),
section 4; Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", IJPP 17 (1988).
"""

from __future__ import annotations

from mpicoll.schedules.algorithms import register
from mpicoll.schedules.all_ranks import Part, Rotation
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step


@register("reduce_scatter", "pairwise", rotates=True)
def pairwise_reduce_scatter(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Every rank sends each other rank the chunk that it owns, at distance 1, 2, ..., P-1.

    Only original data travels: what rank r receives in step t is rank (r - t)'s own chunk r.
    """
    steps = []
    for distance in range(1, size):
        dest, source = (rank + distance) % size, (rank - distance) % size
        recv = Recv(source, rank, rank + 1, Reduce.RECEIVED_FIRST)
        steps.append(Step((Send(dest, dest, dest + 1),), (recv,)))
    return Schedule("reduce_scatter", "pairwise", size, rank, size, tuple(steps))


def run_of_ranks(size: int, first: int, length: int) -> list[tuple[int, int]]:
    """Cut `length` ranks, or their chunks, from `first` on in a circle into at most two plain ranges."""
    end = first + length
    return [(first, end)] if end <= size else [(first, size), (0, end - size)]


@register("allgather", "bruck")
def bruck_allgather(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Each rank doubles what it holds per step: ceil(log2 P) steps for any P; for short messages.

    Before the step at distance d rank r holds chunks r..r+d-1 (cyclic); it receives the next d from rank r + d.
    Runs that pass the end of the vector go as two messages, so that nothing has to be rotated at the end.
    """
    steps, distance = [], 1
    while distance < size:
        length = min(distance, size - distance)
        dest, source = (rank - distance) % size, (rank + distance) % size
        sends = tuple(Send(dest, *run) for run in run_of_ranks(size, rank, length))
        recvs = tuple(Recv(source, *run) for run in run_of_ranks(size, source, length))
        steps.append(Step(sends, recvs))
        distance *= 2
    return Schedule("allgather", "bruck", size, rank, size, tuple(steps))


@register("barrier", "dissemination")
def dissemination_barrier(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """In step k every rank signals the rank 2^k further on: ceil(log2 P) steps of empty messages."""
    steps, distance = [], 1
    while distance < size:
        steps.append(Step((Send((rank + distance) % size, 0, 0),), (Recv((rank - distance) % size, 0, 0),)))
        distance *= 2
    return Schedule("barrier", "dissemination", size, rank, 1, tuple(steps))


def _alltoall_steps(size: int, rank: int) -> tuple[Step, ...]:
    """Exchange chunk ``s * size + d``, which rank s has for rank d, at distance 1, 2, ..., P-1."""
    steps = []
    for distance in range(1, size):
        dest, source = (rank + distance) % size, (rank - distance) % size
        out, into = rank * size + dest, source * size + rank
        steps.append(Step((Send(dest, out, out + 1),), (Recv(source, into, into + 1),)))
    return tuple(steps)


def _rotating_exchange(size: int, window: int) -> tuple[Part, ...]:
    """Return the exchange of all ranks, with the chunks of a rank for others treated as one chunk."""
    steps = (Step((Send(t, 0, 1),), (Recv(size - t, size - t, size - t + 1),)) for t in range(1, size))
    return (Rotation(tuple(steps), window=window),)


@register("alltoall", "pairwise", parts=lambda size, root: _rotating_exchange(size, 1))
def pairwise_alltoall(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """In step t every rank sends to the rank t above and receives from the rank t below."""
    return Schedule("alltoall", "pairwise", size, rank, size * size, _alltoall_steps(size, rank))


@register("alltoall", "linear", parts=lambda size, root: _rotating_exchange(size, max(1, size - 1)))
def linear_alltoall(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """The steps of pairwise, all at once; for short messages."""
    return Schedule("alltoall", "linear", size, rank, size * size, _alltoall_steps(size, rank), max(1, size - 1))


def _others(size: int, root: int) -> list[int]:
    return [(root + distance) % size for distance in range(1, size)]


@register("gather", "linear")
def linear_gather(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Every rank sends its part to the root; for long messages."""
    if rank != root:
        step = Step((Send(root, rank, rank + 1),))
    else:
        step = Step(recvs=tuple(Recv(peer, peer, peer + 1) for peer in _others(size, root)))
    return Schedule("gather", "linear", size, rank, size, (step,), root=root)


@register("scatter", "linear")
def linear_scatter(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """The root sends every rank its part; for long messages."""
    if rank != root:
        step = Step(recvs=(Recv(root, rank, rank + 1),))
    else:
        step = Step(tuple(Send(peer, peer, peer + 1) for peer in _others(size, root)))
    return Schedule("scatter", "linear", size, rank, size, (step,), root=root)
