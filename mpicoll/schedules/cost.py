"""Cost of a schedule in the alpha-beta-gamma model.

A message of m bytes takes ``alpha + m beta`` seconds, and reducing m bytes takes ``m gamma`` seconds. A rank sends and
receives at the same time, but messages of one step share its link. The cost is that of the longest chain of steps over
all ranks; it is given as a time and as the three coefficients along that chain, which for regular algorithms are the
textbook formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from mpicoll.schedules.replay import Ensemble
from mpicoll.schedules.types import Reduce, Schedule, Step

_TRAFFIC = {"allreduce": 2.0}
_SPLIT = ("allreduce", "reduce_scatter", "allgather", "gather", "scatter", "alltoall")


def bus_factor(collective: str, size: int) -> float:
    """Return busbw / algbw: bytes through a rank's link in the best algorithm over bytes of the vector."""
    return _TRAFFIC.get(collective, 1.0) * ((size - 1) / size if collective in _SPLIT else 1.0)


_MOVES = (Reduce.COPY, Reduce.REPLACE)


@dataclass(frozen=True)
class Machine:
    """Seconds per message, per byte sent and per byte reduced; the defaults are a 10 Gbit/s network."""

    alpha: float = 10e-6
    beta: float = 0.8e-9
    gamma: float = 0.1e-9

    def describe(self, nbytes: int) -> str:
        """Return the parameters and the message size as text."""
        return f"α = {self.alpha:g} s, β = {self.beta:g} s/B, γ = {self.gamma:g} s/B, n = {nbytes} B"


@dataclass(frozen=True)
class Cost:
    """Cost of a schedule.

    Attributes
    ----------
    steps
        Messages one after the other on the longest chain: the coefficient of alpha.
    sent, reduced
        Bytes sent and reduced along that chain as fractions of the vector: coefficients of n beta and n gamma.
    seconds
        ``steps alpha + sent n beta + reduced n gamma``.
    """

    steps: int
    sent: Fraction
    reduced: Fraction
    seconds: float

    def formula(self) -> str:
        """Return the coefficients as text, such as ``6 α + 3/2 n β + 3/4 n γ``."""
        return f"{self.steps} α + {self.sent} n β + {self.reduced} n γ"


@dataclass(frozen=True)
class Traffic:
    """Work of one rank: its steps, and bytes sent, received and reduced as fractions of the vector."""

    rank: int
    steps: int
    messages: int
    sent: Fraction
    received: Fraction
    reduced: Fraction


def _share(step: Step, chunks: int) -> tuple[Fraction, Fraction, Fraction]:
    """Return sent, received and reduced fractions of the vector in one step."""
    sent = sum(send.stop - send.start for send in step.sends)
    received = sum(recv.stop - recv.start for recv in step.recvs)
    reduced = sum(recv.stop - recv.start for recv in step.recvs if recv.reduce not in _MOVES)
    return Fraction(sent, chunks), Fraction(received, chunks), Fraction(reduced, chunks)


def traffic(schedule: Schedule) -> Traffic:
    """Return the steps, messages and bytes of one rank."""
    shares = [_share(step, schedule.chunks_per_vector) for step in schedule.steps]
    sent, received, reduced = (sum((share[i] for share in shares), Fraction(0)) for i in range(3))
    messages = sum(len(step.sends) for step in schedule.steps)
    return Traffic(schedule.rank, len(schedule.steps), messages, sent, received, reduced)


@dataclass(frozen=True)
class _Chain:
    """The longest chain up to some event: its length in seconds, and what it is made of."""

    seconds: float = 0.0
    steps: int = 0
    sent: Fraction = Fraction(0)
    reduced: Fraction = Fraction(0)

    def then(self, seconds: float, steps: int, sent: Fraction, reduced: Fraction) -> _Chain:
        return _Chain(self.seconds + seconds, self.steps + steps, self.sent + sent, self.reduced + reduced)


def price(schedules: Sequence[Schedule], nbytes: int, machine: Machine | None = None) -> Cost:
    """Return the cost of one collective on a vector of `nbytes` bytes."""
    machine = machine or Machine()
    ensemble = Ensemble(schedules)
    needed = ensemble.partners()
    posted: list[list[_Chain]] = [[_Chain() for _ in s.steps] for s in schedules]
    last = [_Chain() for _ in schedules]
    shares = [[_share(step, schedule.chunks_per_vector) for step in schedule.steps] for schedule in schedules]
    for event in ensemble.events():
        rank, number = event.rank, event.step
        if event.posts:
            posted[rank][number] = last[rank]
            continue
        own = schedules[rank].steps[number]
        if not own.sends and not own.recvs:  # of a rank whose turn has not come, or is over
            last[rank] = max(posted[rank][number], last[rank], key=lambda chain: chain.seconds)
            continue
        starts = [posted[rank][number], last[rank], *(posted[peer][step] for peer, step in needed[rank][number])]
        begin = max(starts, key=lambda chain: chain.seconds)
        loads = [shares[rank][number], *(shares[peer][step] for peer, step in needed[rank][number])]
        moved = max(max(sent, received) for sent, received, _ in loads)
        reduced = shares[rank][number][2]
        seconds = machine.alpha + float(moved) * nbytes * machine.beta + float(reduced) * nbytes * machine.gamma
        last[rank] = begin.then(seconds, 1, moved, reduced)
    longest = max(last, key=lambda chain: chain.seconds)
    return Cost(longest.steps, longest.sent, longest.reduced, longest.seconds)
