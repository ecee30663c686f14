"""Ring algorithms: every rank sends to the next rank and receives from the one before.

The vector is divided into one chunk for each rank. In the first half each chunk goes round the ring, and every rank
adds its own; in the second half the complete chunks go round once more. Four ranks A..D, allreduce; ``c+`` is the
partial sum of chunk c, in steps 4 to 6 the chunks are complete::

                A              B              C              D
    step 1   sends 0 to B   1 to C         2 to D         3 to A          every rank adds what it receives
    step 2   sends 3+       0+             1+             2+
    step 3   sends 2+       3+             0+             1+              A holds 1 complete, B 2, C 3, D 0
    step 4   sends 1        2              3              0               now only copies
    step 5   sends 0        1              2              3
    step 6   sends 3        0              1              2

Bytes sent per rank: 2 (P-1)/P n, the least possible. Each chunk is summed by the ranks in a fixed order that starts
at another rank for each chunk: same bits everywhere, but not rank order.

The pipelined form divides every chunk into segments and treats all messages as one stream with two of them in flight,
so that one is added while the next is transferred. A segment that arrives in message i is sent on in message
i + segments: with at least two segments a chunk, and two messages in flight, it has been added by then.

Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009),
section 3.
"""

from __future__ import annotations

from mpicoll.schedules.algorithms import register
from mpicoll.schedules.all_ranks import Irregular, Part, Rotation
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step


def _rotation(size: int, rank: int, first: int, segments: int, reduce: Reduce) -> tuple[Step, ...]:
    """Send size - 1 chunks to the next rank: chunk `first`, then each chunk that was received in the round before."""
    right, left = (rank + 1) % size, (rank - 1) % size
    steps = []
    for turn in range(size - 1):
        outgoing, incoming = (first - turn) % size, (first - turn - 1) % size
        for segment in range(segments):
            out, into = outgoing * segments + segment, incoming * segments + segment
            steps.append(Step((Send(right, out, out + 1),), (Recv(left, into, into + 1, reduce),)))
    return tuple(steps)


def ring_reduce_scatter_steps(size: int, rank: int, segments: int = 1) -> tuple[Step, ...]:
    """Leave the sum of chunk ``rank`` on each rank."""
    return _rotation(size, rank, rank - 1, segments, Reduce.RECEIVED_FIRST)


def ring_allgather_steps(size: int, rank: int, segments: int = 1) -> tuple[Step, ...]:
    """Spread chunk ``rank`` of each rank to all."""
    return _rotation(size, rank, rank, segments, Reduce.COPY)


def _allreduce_steps(size: int, rank: int, segments: int) -> tuple[Step, ...]:
    # Rank r sends chunk r first and so ends with chunk r + 1 complete, which it then sends on.
    summed = _rotation(size, rank, rank, segments, Reduce.RECEIVED_FIRST)
    return summed + _rotation(size, rank, rank + 1, segments, Reduce.COPY)


@register("allreduce", "ring", rotates=True)
def ring_allreduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Ring: reduce_scatter, then allgather; fewest bytes, 2 (P-1) steps."""
    return Schedule("allreduce", "ring", size, rank, size, _allreduce_steps(size, rank, 1))


@register("allreduce", "pipelined_ring", segmented=True, min_segments=2, rotates=True)
def pipelined_ring_allreduce(size: int, rank: int, *, root: int = 0, segments: int = 2) -> Schedule:
    """Ring with every chunk cut into segments, two of them in flight."""
    steps = _allreduce_steps(size, rank, segments)
    return Schedule("allreduce", "pipelined_ring", size, rank, size * segments, steps, window=2)


@register("reduce_scatter", "ring", rotates=True)
def ring_reduce_scatter(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Ring: partial sums go round once and end at their owner."""
    return Schedule("reduce_scatter", "ring", size, rank, size, ring_reduce_scatter_steps(size, rank))


@register("reduce_scatter", "pipelined_ring", segmented=True, min_segments=2, rotates=True)
def pipelined_ring_reduce_scatter(size: int, rank: int, *, root: int = 0, segments: int = 2) -> Schedule:
    """Ring with every chunk cut into segments, two of them in flight."""
    steps = ring_reduce_scatter_steps(size, rank, segments)
    return Schedule("reduce_scatter", "pipelined_ring", size, rank, size * segments, steps, window=2)


@register("allgather", "ring", rotates=True)
def ring_allgather(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Ring: every chunk goes round once."""
    return Schedule("allgather", "ring", size, rank, size, ring_allgather_steps(size, rank))


@register("allgather", "pipelined_ring", segmented=True, min_segments=2, rotates=True)
def pipelined_ring_allgather(size: int, rank: int, *, root: int = 0, segments: int = 2) -> Schedule:
    """Ring with every chunk cut into segments, two of them in flight."""
    steps = ring_allgather_steps(size, rank, segments)
    return Schedule("allgather", "pipelined_ring", size, rank, size * segments, steps, window=2)


def _hand_over(size: int, rank: int, root: int) -> tuple[Step, ...]:
    """Send every rank's sum to the root."""
    if size == 1:
        return ()
    if rank == root:
        return (Step(recvs=tuple(Recv(peer, peer, peer + 1) for peer in range(size) if peer != root)),)
    return (Step(sends=(Send(root, rank, rank + 1),)),)


def _reduce_parts(size: int, root: int) -> tuple[Part, ...]:
    last = tuple(_hand_over(size, rank, root) for rank in range(size))
    return (Rotation(ring_reduce_scatter_steps(size, 0)), Irregular(last))


@register("reduce", "ring", parts=_reduce_parts)
def ring_reduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Ring reduce_scatter, then every rank sends its sum to the root."""
    steps = ring_reduce_scatter_steps(size, rank) + _hand_over(size, rank, root)
    return Schedule("reduce", "ring", size, rank, size, steps, root=root)
