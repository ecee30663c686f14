"""Several requests at once, some of mpicoll and some of mpi4py: wait for, or test, any, some or all of them.

Both kinds are polled. Ours progress meanwhile, and have their deadlines; plain ones have none, as everywhere in MPI.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.progress import progress_engine
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS, wait_until

NAMES = tuple(
    way + which
    for way, which in itertools.product(
        ("Wait", "Test", "Get_status_", "wait", "test", "get_status_"), ("any", "some", "all")
    )
)
"""mpi4py's methods for several requests."""

_TESTING = {"Wait": "Test", "wait": "test"}
"""Ways to wait, with the way to do so without waiting."""

Tester = Callable[..., Any]
Outcome = tuple[Any, Any]
"""Indices, or an index, or True; and messages of mpi4py's own pickles. MPI.UNDEFINED and None: nothing is active."""


class _Mixture:
    """Requests of both kinds.

    Parameters
    ----------
    test
        mpi4py's method for the plain ones, which waits for nothing.
    way
        How that is named: its results differ.
    waits
        Whether the program waits: then what is complete may be completed before the rest.
    """

    def __init__(
        self, requests: Sequence[Any], is_own: Callable[[Any], bool], test: Tester, way: str, *, waits: bool
    ) -> None:
        self.requests, self._test, self._way = requests, test, way
        self._keeps, self._waits = way.lower() == "get_status_", waits
        self.own = [place for place, request in enumerate(requests) if is_own(request)]
        self.places = [place for place, request in enumerate(requests) if not is_own(request)]
        self.plain = [requests[place] for place in self.places]
        self._plain_statuses = [MPI.Status() for _ in self.plain]
        self._messages: list[Any] | None = None

    def any(self, status: MPI.Status | None) -> Outcome | None:
        """Return the index of one that is complete, None if none is."""
        progress_engine.progress()
        place = next((place for place in self._active() if self.requests[place].has_ended), None)
        if place is not None:
            self._end(place, status)
            return place, None
        index, flag, *message = self._test(self.plain, status)
        if not flag or (index == MPI.UNDEFINED and self._active()):
            return None
        found = self.places[index] if index != MPI.UNDEFINED else index
        return found, message[0] if message else None

    def some(self, statuses: Sequence[MPI.Status] | None) -> Outcome | None:
        """Return the indices of all that are complete, None if none is; the indices are None if none is active."""
        progress_engine.progress()
        result = self._test(self.plain, self._plain_statuses)
        indices, messages = result if self._way == "test" else (result, None)
        active = self._active()
        if indices is None and not active:
            return None, None
        found = {self.places[index]: number for number, index in enumerate(indices or ())}
        ended = [place for place in active if self.requests[place].has_ended]
        together = sorted([*found, *ended])
        if not together:
            return None
        made = _padded(statuses, len(together))
        for place, status in zip(together, made, strict=False):
            if place in found:
                _copy(self._plain_statuses[found[place]], status)
        for place in ended:
            number = together.index(place)
            self._end(place, made[number] if number < len(made) else None)
        return together, [messages[found[place]] if place in found and messages else None for place in together]

    def all(self, statuses: Sequence[MPI.Status] | None) -> Outcome | None:
        """Return messages if all are complete, else None; then none of them is completed."""
        progress_engine.progress()
        ended = all(self.requests[place].has_ended for place in self.own)
        if not ended and not self._waits:
            MPI.COMM_SELF.Iprobe()  # plain ones move on in calls of the MPI library only
            return None
        if self._messages is None and self.plain:
            result = self._test(self.plain, self._plain_statuses)
            flag, messages = result if self._way == "test" else (result, None)
            if not flag:
                return None
            self._messages = messages or [None] * len(self.plain)
        if not ended:
            return None
        return True, self._end_all(_padded(statuses, len(self.requests)))

    def _end_all(self, statuses: Sequence[MPI.Status]) -> list[Any]:
        messages: list[Any] = [None] * len(self.requests)
        given = dict(enumerate(statuses))
        for place, status, message in zip(self.places, self._plain_statuses, self._messages or (), strict=False):
            messages[place] = message
            if place in given:
                _copy(status, given[place])
        for place in self.own:
            self._end(place, given.get(place))
        return messages

    def _active(self) -> list[int]:
        return [place for place in self.own if self.requests[place].active]

    def _end(self, place: int, status: MPI.Status | None) -> None:
        """Complete one of ours that has ended; raise what has ended it."""
        if self._keeps:
            self.requests[place].Get_status(status)
        else:
            self.requests[place].Wait(status)

    def until(self, look: Callable[[], Outcome | None]) -> Outcome:
        """Call `look` until it returns something.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            If one of ours cannot complete.
        """
        found: list[Outcome] = []

        def done() -> bool:
            outcome = look()
            if outcome is not None:
                found.append(outcome)
            return outcome is not None

        polls = min(self.requests[place].polls for place in self.own)
        wait_until(done, polls, self._watch())
        return found[0]

    def _watch(self) -> Callable[[float], float]:
        """Return what looks after a long wait for those of ours that are on their way."""
        own = [self.requests[place] for place in self.own if not self.requests[place].has_ended]
        watches = [(request, request.watch()) for request in own]

        def watch(waited: float) -> float:
            again = waited + LOOK_AFTER_SECONDS
            for request, look in watches:
                if request.has_ended:
                    continue
                try:
                    again = min(again, look(waited))
                except BaseException as error:
                    request.give_up(error)
                    raise
            return again

        return watch


def _padded(statuses: Sequence[MPI.Status] | None, length: int) -> Sequence[MPI.Status]:
    """Return statuses to be filled; a list grows as mpi4py's does."""
    if isinstance(statuses, list):
        statuses.extend(MPI.Status() for _ in range(len(statuses), length))
    return statuses or ()


def fill_empty(status: MPI.Status | None) -> None:
    """Make a status empty, as MPI does for requests that have received no message."""
    if status is not None:
        status.source, status.tag, status.error = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.SUCCESS
        status.Set_elements(MPI.BYTE, 0)
        status.Set_cancelled(False)


def look_later(waited: float) -> float:
    """Look at nothing, and again after some time."""
    return waited + LOOK_AFTER_SECONDS


def _copy(source: MPI.Status, target: MPI.Status) -> None:
    target.source, target.tag, target.error = source.source, source.tag, source.error
    target.Set_elements(MPI.BYTE, source.Get_elements(MPI.BYTE))
    target.Set_cancelled(source.Is_cancelled())


def _shaped(way: str, which: str, outcome: Outcome | None) -> Any:
    """Return what mpi4py's method returns."""
    plain = not way.startswith(("wait", "test"))
    indices, messages = outcome or ((MPI.UNDEFINED if which == "any" else []), [] if which == "some" else None)
    if which == "any":
        parts = [indices, *[outcome is not None] * (way.lower() != "wait"), *[messages] * (not plain)]
        return parts[0] if len(parts) == 1 else tuple(parts)
    if which == "some":
        return indices if plain else (indices, messages)
    if plain:
        return outcome is not None
    return messages if way == "wait" else (outcome is not None, messages)


def function(name: str, is_own: Callable[[Any], bool], plain: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return what does for mixtures as mpi4py's method with this name does.

    Parameters
    ----------
    is_own
        Tells whether a request is one of ours.
    plain
        mpi4py's method.
    """
    which = next(which for which in ("any", "some", "all") if name.endswith(which))
    way = name[: -len(which)]
    waits = way in _TESTING
    tested = _TESTING.get(way, way)
    test = getattr(MPI.Request, tested + which) if waits else plain

    def mixed(requests: Sequence[Any], statuses: Any) -> Any:
        mixture = _Mixture(requests, is_own, test, tested, waits=waits)
        look = getattr(mixture, which)
        outcome = mixture.until(lambda: look(statuses)) if waits else look(statuses)
        return _shaped(way, which, outcome)

    return mixed
