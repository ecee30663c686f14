"""Exchange algorithms on 2^k ranks: recursive doubling, recursive halving and doubling, Swing.

In step s every rank exchanges with one partner. Recursive doubling exchanges whole vectors: four ranks, ``ab`` is the
sum of a and b::

               A      B      C      D
    step 1     ab     ab     cd     cd        A-B, C-D
    step 2     abcd   abcd   abcd   abcd      A-C, B-D

Halving and doubling exchanges halves: in step 1 A keeps the lower half and sends the upper one to B, and so on. After
k steps every rank owns one complete chunk; exchanges with the same partners in reverse order gather the chunks::

               A          B          C          D
    step 1     ab on 01   ab on 23   cd on 01   cd on 23
    step 2     sum of 0   sum of 2   sum of 1   sum of 3
    step 3     0 1        2 3        0 1        2 3
    step 4     all

Nearest partners come first, so that long messages travel short distances and sums are formed in rank order. Swing
replaces the partner r XOR 2^s by one alternately to the right and to the left at distance 1, 1, 3, 5, 11, ...: paths on
rings and tori are shorter; on a single switch it has no advantage.

If the size is not a power of two, each even one of the first 2 (P - 2^k) ranks first sends its vector to its odd
neighbour and gets the result from it at the end.

Sources: Thakur, Rabenseifner, Gropp, IJHPCA 19 (2005), sections 4.4 and 4.5; De Sensi, Bonato, Saam, Hoefler, "Swing:
short-cutting rings for higher bandwidth allreduce", NSDI 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mpicoll.schedules.algorithms import register
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step

Partner = Callable[[int, int, int], int]
"""(place, step, number of places) -> the other place; its own inverse."""


def xor_partner(place: int, step: int, places: int) -> int:
    """Return the partner at distance 2^step."""
    return place ^ (1 << step)


def swing_partner(place: int, step: int, places: int) -> int:
    """Return the partner at the signed distance (1 - (-2)^(step+1)) / 3, mirrored for odd places."""
    distance = (1 - (-2) ** (step + 1)) // 3
    return (place + distance if place % 2 == 0 else place - distance) % places


def _exchange(place: int, other: int, peer: int, sent: tuple[int, int], received: tuple[int, int]) -> Step:
    """Exchange ranges and reduce: the lower place's operand comes first, so that both sides compute the same bits."""
    reduce = Reduce.OWN_FIRST if place < other else Reduce.RECEIVED_FIRST
    return Step((Send(peer, *sent),), (Recv(peer, *received, reduce),))


class _Fold:
    """The 2^k places and the ranks at them; the other ranks are represented by their odd neighbours."""

    def __init__(self, size: int) -> None:
        self.places = 1 << (size.bit_length() - 1)
        self.extra = size - self.places

    def rank_of(self, place: int) -> int:
        return 2 * place + 1 if place < self.extra else place + self.extra

    def place_of(self, rank: int) -> int | None:
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 else None

    def wrap(self, rank: int, chunks: int, inner: Callable[[int], list[Step]]) -> tuple[Step, ...]:
        """Return the steps of a rank: those of its place, with the exchanges between neighbours before and after."""
        place = self.place_of(rank)
        if place is None:
            give, take = Step(sends=(Send(rank + 1, 0, chunks),)), Step(recvs=(Recv(rank + 1, 0, chunks),))
            return (give, take)
        steps = inner(place)
        if rank < 2 * self.extra:
            steps.insert(0, Step(recvs=(Recv(rank - 1, 0, chunks, Reduce.RECEIVED_FIRST),)))
            steps.append(Step(sends=(Send(rank - 1, 0, chunks),)))
        return tuple(steps)


@lru_cache(maxsize=256)
def _keeps_lower(places: int, partner: Partner) -> tuple[tuple[bool, ...], ...]:
    """Return for each step and place whether it keeps the lower half of the range that it shares with its partner.

    The chunks that a place is responsible for after step s form a set. The sets of two partners are disjoint, and their
    union is the set before the step. The set with the smaller least element is the lower half, so that partners agree.
    """
    least = list(range(places))
    table = []
    for step in reversed(range(places.bit_length() - 1)):
        others = [partner(place, step, places) for place in range(places)]
        table.append(tuple(least[place] < least[other] for place, other in enumerate(others)))
        least = [min(least[place], least[other]) for place, other in enumerate(others)]
    return tuple(reversed(table))


def _halving_doubling(places: int, place: int, partner: Partner, rank_of: Callable[[int], int]) -> list[Step]:
    start, stop, halving, doubling = 0, places, [], []
    for step, keeps_lower in enumerate(_keeps_lower(places, partner)):
        other, middle = partner(place, step, places), (start + stop) // 2
        lower, upper = (start, middle), (middle, stop)
        kept, sent = (lower, upper) if keeps_lower[place] else (upper, lower)
        peer = rank_of(other)
        halving.append(_exchange(place, other, peer, sent, kept))
        doubling.append(Step((Send(peer, *kept),), (Recv(peer, *sent),)))
        start, stop = kept
    return halving + doubling[::-1]


@register("allreduce", "recursive_doubling", ordered=True)
def recursive_doubling_allreduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Exchange of whole vectors at distance 1, 2, 4, ...; fewest steps, for short messages."""
    fold = _Fold(size)

    def inner(place: int) -> list[Step]:
        others = [xor_partner(place, step, fold.places) for step in range(fold.places.bit_length() - 1)]
        return [_exchange(place, other, fold.rank_of(other), (0, 1), (0, 1)) for other in others]

    return Schedule("allreduce", "recursive_doubling", size, rank, 1, fold.wrap(rank, 1, inner))


def _butterfly_allreduce(name: str, size: int, rank: int, partner: Partner) -> Schedule:
    fold = _Fold(size)
    steps = fold.wrap(rank, fold.places, lambda place: _halving_doubling(fold.places, place, partner, fold.rank_of))
    return Schedule("allreduce", name, size, rank, fold.places, steps)


@register("allreduce", "halving_doubling", ordered=True)
def halving_doubling_allreduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Recursive halving, then recursive doubling; fewest bytes in 2 log2 P steps when P is a power of two."""
    return _butterfly_allreduce("halving_doubling", size, rank, xor_partner)


@register("allreduce", "swing")
def swing_allreduce(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Halving and doubling with partners that alternate right and left; for rings and tori."""
    return _butterfly_allreduce("swing", size, rank, swing_partner)
