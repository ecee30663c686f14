"""Replay of all ranks' schedules in one process, on values of any type, with checks for errors.

The verifier replays symbols, the renderer numbers, the cost model times. Every send waits for its receive (rendezvous):
a schedule that deadlocks here can deadlock under MPI.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mpicoll.schedules.collective_table import COLLECTIVES, Where
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send


class ScheduleError(AssertionError):
    """The schedules of the ranks do not match, or compute a wrong result."""


class Posting(NamedTuple):
    """Place at which a message is posted: step number and place among the step's sends (or receives)."""

    step: int
    slot: int


class Event(NamedTuple):
    """A rank posts a step, or completes it."""

    posts: bool
    rank: int
    step: int


class Ensemble:
    """The schedules of all ranks, with every receive matched to its send."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.schedules = list(schedules)
        self.size = len(self.schedules)
        self.sender_of: list[dict[Posting, tuple[int, Posting]]] = [{} for _ in range(self.size)]
        """Per receiving rank: where the receive stands -> (sending rank, where its send stands)."""
        self._match()

    def _match(self) -> None:
        sends: dict[tuple[int, int], deque[tuple[Posting, Send]]] = {}
        for rank, schedule in enumerate(self.schedules):
            for number, step in enumerate(schedule.steps):
                for index, send in enumerate(step.sends):
                    sends.setdefault((rank, send.peer), deque()).append((Posting(number, index), send))
        for rank, schedule in enumerate(self.schedules):
            for number, step in enumerate(schedule.steps):
                for index, recv in enumerate(step.recvs):
                    self._pair(sends, rank, Posting(number, index), recv)
        for (rank, peer), left in sends.items():
            if left:
                raise ScheduleError(
                    f"rank {rank} step {left[0][0].step + 1}: the message to rank {peer} is never received"
                )

    def _pair(
        self, sends: dict[tuple[int, int], deque[tuple[Posting, Send]]], rank: int, place: Posting, recv: Recv
    ) -> None:
        if not isinstance(recv.reduce, Reduce):
            raise ScheduleError(f"rank {rank} step {place.step + 1}: {recv.reduce!r} of {recv} is not a Reduce")
        queue = sends.get((recv.peer, rank))
        if not queue:
            raise ScheduleError(f"rank {rank} step {place.step + 1}: rank {recv.peer} never sends this message")
        sent_at, send = queue.popleft()
        if (send.start, send.stop) != (recv.start, recv.stop):
            raise ScheduleError(
                f"rank {rank} step {place.step + 1} expects chunks {recv.start}..{recv.stop} from rank {recv.peer}, "
                f"which sends {send.start}..{send.stop}"
            )
        self.sender_of[rank][place] = (recv.peer, sent_at)

    def partners(self) -> list[list[list[tuple[int, int]]]]:
        """Return, per rank and step, the (rank, step) pairs that must be posted for it to complete."""
        needed: list[list[list[tuple[int, int]]]] = [[[] for _ in s.steps] for s in self.schedules]
        for rank, matches in enumerate(self.sender_of):
            for place, (peer, sent_at) in matches.items():
                needed[rank][place.step].append((peer, sent_at.step))
                needed[peer][sent_at.step].append((rank, place.step))
        return needed

    def events(self) -> Iterator[Event]:
        """Yield posts and completions in an order that is possible even if every send is a rendezvous.

        Raises
        ------
        ScheduleError
            If the ranks deadlock.
        """
        needed, size = self.partners(), self.size
        posted, completed = [0] * size, [0] * size
        ready = deque(range(size))
        while ready:
            rank = ready.popleft()
            schedule = self.schedules[rank]
            moved = True
            while moved:
                moved = False
                if posted[rank] < len(schedule.steps) and posted[rank] - completed[rank] < schedule.window:
                    step = posted[rank]
                    posted[rank] += 1
                    moved = True
                    yield Event(True, rank, step)
                    ready.extend(peer for peer, _ in needed[rank][step])
                step = completed[rank]
                if step < posted[rank] and all(number < posted[peer] for peer, number in needed[rank][step]):
                    completed[rank] += 1
                    moved = True
                    yield Event(False, rank, step)
        stuck = [rank for rank in range(size) if completed[rank] < len(self.schedules[rank].steps)]
        if stuck:
            raise ScheduleError(f"deadlock: ranks {stuck} wait in steps {[completed[rank] + 1 for rank in stuck]}")


class Replay:
    """The state of every rank's vector while the schedules run.

    Parameters
    ----------
    vectors
        Per rank a list of ``chunks`` values; None where the rank holds nothing yet. Changed in place.
    combine
        ``combine(left, right)`` is the reduction.
    """

    def __init__(
        self, schedules: Sequence[Schedule], vectors: list[list[Any]], combine: Callable[[Any, Any], Any]
    ) -> None:
        self.ensemble = Ensemble(schedules)
        self.vectors = vectors
        self.combine = combine
        self.heard_from = [1 << rank for rank in range(len(schedules))]
        """Per rank a bit set: whose start it can know of; a barrier needs all."""
        self._wire: dict[tuple[int, Posting], tuple[list[Any], int]] = {}
        self._reading: list[list[tuple[int, Send]]] = [[] for _ in schedules]
        self._writing: list[list[tuple[int, Recv]]] = [[] for _ in schedules]

    def run(self, watch: Callable[[Event], None] | None = None) -> list[list[Any]]:
        """Run to the end and return the vectors; `watch` sees every event after it took effect."""
        for event in self.ensemble.events():
            if event.posts:
                self._post(event.rank, event.step)
            else:
                self._complete(event.rank, event.step)
            if watch is not None:
                watch(event)
        return self.vectors

    def _post(self, rank: int, number: int) -> None:
        step = self.ensemble.schedules[rank].steps[number]
        reading, writing, vector = self._reading[rank], self._writing[rank], self.vectors[rank]
        for send in step.sends:
            values = vector[send.start : send.stop]
            if None in values:
                raise ScheduleError(f"rank {rank} step {number + 1}: sends chunks that it does not hold: {send}")
            for earlier, recv in writing:
                if _overlap(send, recv):
                    raise ScheduleError(
                        f"rank {rank} step {number + 1}: sends {send} while step {earlier + 1} changes it"
                    )
        reading.extend((number, send) for send in step.sends)
        for recv in step.recvs:
            self._check_target(rank, number, recv)
            writing.append((number, recv))
        for index, send in enumerate(step.sends):
            self._wire[rank, Posting(number, index)] = (vector[send.start : send.stop], self.heard_from[rank])

    def _check_target(self, rank: int, number: int, recv: Recv) -> None:
        """Raise if messages in flight overlap the range of a copy, which is written at once, unlike a reduction's."""
        lands_now = recv.reduce is Reduce.COPY
        for other, send in self._reading[rank]:
            if _overlap(send, recv) and lands_now:
                raise ScheduleError(
                    f"rank {rank} step {number + 1}: receives over {send}, in flight since step {other + 1}"
                )
        for _, earlier in self._writing[rank]:
            if _overlap(earlier, recv) and (lands_now or earlier.reduce is Reduce.COPY):
                raise ScheduleError(f"rank {rank} step {number + 1}: two receives in flight into {recv}, {earlier}")

    def _complete(self, rank: int, number: int) -> None:
        step = self.ensemble.schedules[rank].steps[number]
        self._reading[rank] = [entry for entry in self._reading[rank] if entry[0] != number]
        self._writing[rank] = [entry for entry in self._writing[rank] if entry[0] != number]
        for index, recv in enumerate(step.recvs):
            peer, sent_at = self.ensemble.sender_of[rank][Posting(number, index)]
            values, known = self._wire.pop((peer, sent_at))
            self.heard_from[rank] |= known
            for chunk, value in zip(range(recv.start, recv.stop), values, strict=True):
                self._land(rank, number, chunk, value, recv.reduce)

    def _land(self, rank: int, number: int, chunk: int, value: Any, reduce: Reduce) -> None:
        own = self.vectors[rank][chunk]
        if reduce in (Reduce.COPY, Reduce.REPLACE):
            self.vectors[rank][chunk] = value
        elif own is None:
            raise ScheduleError(f"rank {rank} step {number + 1}: reduces into chunk {chunk}, which it does not hold")
        else:
            try:
                operands = (value, own) if reduce is Reduce.RECEIVED_FIRST else (own, value)
                self.vectors[rank][chunk] = self.combine(*operands)
            except ScheduleError as error:
                raise ScheduleError(f"rank {rank} step {number + 1}: chunk {chunk}: {error}") from None


def _overlap(one: Send | Recv, other: Send | Recv) -> bool:
    return one.start < other.stop and other.start < one.stop


def initial_vectors(schedule: Schedule, value: Callable[[int, int], Any]) -> list[list[Any]]:
    """Return each rank's chunks before the collective: ``value(rank, chunk)``, or None for chunks that it lacks."""
    begins = COLLECTIVES[schedule.collective].begins

    def holds(rank: int, chunk: int) -> bool:
        if begins is Where.OWNER:
            return schedule.owner(chunk) == rank
        return begins is Where.EVERYWHERE or rank == schedule.root

    return [
        [value(rank, chunk) if holds(rank, chunk) else None for chunk in range(schedule.chunks)]
        for rank in range(schedule.size)
    ]
