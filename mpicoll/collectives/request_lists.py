"""Wait and test functions for lists that mix requests of mpicoll with plain ones of mpi4py.

Both kinds are polled. Requests of mpicoll progress meanwhile and have their deadlines; plain ones have none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.progress import progress_engine
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS, let_library_progress, wait_until

NAMES = tuple(
    way + which
    for way, which in itertools.product(
        ("Wait", "Test", "Get_status_", "wait", "test", "get_status_"), ("any", "some", "all")
    )
)
"""Names of mpi4py's methods for several requests."""

_TESTING = {"Wait": "Test", "wait": "test"}
"""Prefixes of methods that wait, with those of the methods that test instead."""

Tester = Callable[..., Any]
Outcome = tuple[Any, Any]
"""An index, indices, or True (MPI.UNDEFINED or None if no request is active); and objects that mpi4py has received."""


class MixedRequests:
    """A list of requests of both kinds.

    Parameters
    ----------
    test
        mpi4py's method that tests the plain requests.
    way
        The prefix of its name, on which the form of its result depends.
    waits
        Whether the program waits for all requests: then some may be completed before the others have ended.
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
        self._seen_statuses = [MPI.Status() for _ in self.plain]
        self._failed: set[int] = set()
        self._messages: list[Any] | None = None
        self._ended = 0  # so many of the first plain requests have ended

    def any(self, status: MPI.Status | None) -> Outcome | None:
        """Complete a request that has ended and return its index; None if no request has ended."""
        self._progress()
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
        """Complete all requests that have ended and return their indices, which are None if no request is active.

        Return None if no request has ended.
        """
        self._progress()
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
        """Complete all requests if all have ended, and return the objects received; otherwise return None."""
        self._progress()
        if self.plain:
            self._raise_failure()
        ended = all(self.requests[place].has_ended for place in self.own)
        if not ended and not self._waits:
            let_library_progress()  # plain ones move on in calls of the MPI library only
            return None
        if self._messages is None and self.plain:
            try:
                flag, messages = self._test_plain()
            except MPI.Exception:
                self._give_plain(_padded(statuses, len(self.requests)))
                raise
            if not flag:
                return None
            self._messages = messages or [None] * len(self.plain)
        if not ended:
            return None
        return True, self._end_all(_padded(statuses, len(self.requests)))

    def _test_plain(self) -> tuple[bool, list[Any] | None]:
        """Complete the plain requests if all have ended; return whether they have, and the objects received."""
        if self._way == "test":
            return self._test(self.plain, self._plain_statuses)
        if not self._waits:
            return self._test(self.plain, self._plain_statuses), None
        # MPI_Testall of MPICH fails for partitioned requests, MPI_Waitall does not.
        while self._ended < len(self.plain) and self._has_ended(self._ended):
            self._ended += 1
        if self._ended < len(self.plain):
            return False, None
        try:
            MPI.Request.Waitall(self.plain, self._plain_statuses)
        finally:
            self._complete_statuses()
        if self._failed:
            raise MPI.Exception(MPI.ERR_IN_STATUS)
        return True, None

    def _has_ended(self, number: int) -> bool:
        """Return whether a plain request has ended; keep its status, which MPICH does not tell persistent ones again.

        One that has failed has ended: MPI_Waitall completes all requests, and says so in their statuses.
        """
        try:
            return bool(self.plain[number].Get_status(self._seen_statuses[number]))
        except MPI.Exception as error:
            self._failed.add(number)
            self._seen_statuses[number].error = error.Get_error_code()
            return True

    def _complete_statuses(self) -> None:
        """Add what MPI_Waitall does not tell: of persistent receives under MPICH, errors under Open MPI."""
        for number, request in enumerate(self.plain):
            seen, status = self._seen_statuses[number], self._plain_statuses[number]
            error = status.error or seen.error
            if isinstance(request, MPI.Prequest) or number in self._failed:
                _copy(seen, status)
                status.error = error

    def _give_plain(self, statuses: Sequence[MPI.Status]) -> None:
        """Fill the caller's statuses of the plain requests."""
        given = dict(enumerate(statuses))
        for place, status in zip(self.places, self._plain_statuses, strict=True):
            if place in given:
                _copy(status, given[place])

    def _progress(self) -> None:
        """Advance all operations; while the program tests, hear of failures of other ranks, as waits do."""
        progress_engine.progress()
        if not self._waits:
            for place in self.own:
                self.requests[place].look_on()

    def _raise_failure(self) -> None:
        """Raise the exception of a request of mpicoll that has failed: the plain ones may then wait for ever."""
        for place in self.own:
            if self.requests[place].has_failed:
                self._end(place, None)

    def _end_all(self, statuses: Sequence[MPI.Status]) -> list[Any]:
        messages: list[Any] = [None] * len(self.requests)
        self._give_plain(statuses)
        given = dict(enumerate(statuses))
        for place, message in zip(self.places, self._messages or (), strict=False):
            messages[place] = message
        for place in self.own:
            self._end(place, given.get(place))
        return messages

    def _active(self) -> list[int]:
        return [place for place in self.own if self.requests[place].active]

    def _end(self, place: int, status: MPI.Status | None) -> None:
        """Complete a request of mpicoll that has ended; raise its exception if it has failed."""
        if self._keeps:
            self.requests[place].Get_status(status)
        else:
            self.requests[place].Wait(status)

    def until(self, look: Callable[[], Outcome | None]) -> Outcome:
        """Call `look` until it returns an outcome, and return that.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            If a request of mpicoll cannot complete.
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
        """Return the watchdog of a long wait for the requests of mpicoll that are in flight."""
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
    """Return the statuses to be filled; a list that is too short is extended, as mpi4py does."""
    if isinstance(statuses, list):
        statuses.extend(MPI.Status() for _ in range(len(statuses), length))
    return statuses or ()


def fill_empty(status: MPI.Status | None) -> None:
    """Make a status empty, as MPI does for requests that have received no message.

    Raises
    ------
    TypeError
        If it is none.
    """
    if status is not None:
        if not isinstance(status, MPI.Status):
            raise TypeError(f"status: {status!r} is not a Status")
        status.source, status.tag, status.error = MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.SUCCESS
        status.Set_elements(MPI.BYTE, 0)
        status.Set_cancelled(False)


def look_later(waited: float) -> float:
    """Do nothing; the watchdog of a request that has ended."""
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
    """Return a function for mixed lists with the behaviour of mpi4py's method of this name.

    Parameters
    ----------
    is_own
        Whether a request is one of mpicoll.
    plain
        mpi4py's method.
    """
    which = next(which for which in ("any", "some", "all") if name.endswith(which))
    way = name[: -len(which)]
    waits = way in _TESTING
    tested = _TESTING.get(way, way)
    test = getattr(MPI.Request, tested + which) if waits else plain

    def mixed(requests: Sequence[Any], statuses: Any) -> Any:
        mixture = MixedRequests(requests, is_own, test, tested, waits=waits)
        look = getattr(mixture, which)
        outcome = mixture.until(lambda: look(statuses)) if waits else look(statuses)
        return _shaped(way, which, outcome)

    return mixed
