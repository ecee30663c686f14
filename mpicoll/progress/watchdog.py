"""Watchdog of long waits: it finds mismatched calls, missing ranks and failures of other ranks.

It costs nothing while messages arrive in time. A rank that has waited for 0.2 s sends the others the number and the
signature of the collective that it is in, and reads their messages. Collectives are numbered equally on all ranks of a
communicator, so

* different signatures with the same number mean that the program is wrong: :class:`MismatchError` on all ranks;
* a rank that has sent no message before the deadline is named in :class:`CollectiveTimeout`;
* a rank that has died is named in :class:`RankFailed` where the MPI library lets the others go on;
* a rank that refuses its own arguments tells the others at once: :class:`RemoteError` on the ranks that made the call.
  These tell it that their communicators are broken. It can use the communicator again if all ranks have refused.

Several threads may wait on one communicator, so messages that one of them reads are kept for all.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout, CorruptPayload, MismatchError, MpicollError, RemoteError, described
from mpicoll.progress import progress_engine, wait_reports
from mpicoll.progress.call_signature import ANY_CODE, Signature, Waiting
from mpicoll.progress.control_messages import Mailbox
from mpicoll.progress.failed_ranks import raise_if_failed
from mpicoll.progress.message_drain import Drain
from mpicoll.progress.running_clock import RunningClock
from mpicoll.progress.wait_reports import Absence, Report, absence
from mpicoll.shared_memory.announcements import Announcements

_HISTORY = 1024
REFUSAL_SECONDS = 60.0
"""How long a rank that frees a communicator waits for the others to refuse a call that it has refused."""
_GATHER_SECONDS, _LOOK_AGAIN_SECONDS = 0.5, 0.02
_EVERYBODY = 64
"""Up to this size a waiting rank reports to all others; beyond, to those at distance 1, 2, 4, ... and its peers."""
_Error = Callable[[], MpicollError]
"""Makes an exception, a new one for each wait that ends with it."""


class Watchdog:
    """One rank's view of what the ranks of a communicator are doing.

    Parameters
    ----------
    recall
        Returns the signature of a collective that was not passed to :meth:`record`, or None.
    session
        A number that identifies this communicator on all its ranks.

    Attributes
    ----------
    refused
        Numbers of collectives that this rank has refused or abandoned.
    compared
        Numbers of the last collectives that the ranks have compared before any data moved, or are comparing.
    elsewhere
        For the communicator of a node or lane, the watchdog of the communicator that it belongs to; else None.
    numbers
        By rank, its number in the user's communicator, for messages to the user.
    """

    def __init__(
        self, comm: MPI.Intracomm, session: int, recall: Callable[[int], Signature | None] = lambda number: None
    ) -> None:
        self._comm = comm
        self._recall = recall
        self.elsewhere: Watchdog | None = None
        self.numbers: Sequence[int] = range(comm.size)
        self._mailbox = Mailbox(comm, session)
        self._lock = threading.RLock()
        self._history: list[tuple[int, Signature | None]] = [(-1, None)] * _HISTORY
        self._reports: dict[int, Report] = {}
        self.refused: set[int] = set()
        self.compared: deque[int] = deque(maxlen=_HISTORY)
        self._refusals: dict[int, dict[int, str]] = {}
        """By number and rank: why ranks refused, that have not said that their communicator is broken."""
        self._failures: dict[int, _Error] = {}
        """By number: what has broken the communicator for other ranks, or for this one."""
        self._alarm: _Error | None = None
        self._newest = 0
        self._announced: tuple[int, float] = (-1, 0.0)
        self._tell_after = wait_reports.FIRST_REPORT_SECONDS

    def record(self, number: int, signature: Signature) -> None:
        """Record that this rank calls collective `number` now."""
        if self._history[number % _HISTORY][0] <= number:  # persistent operations keep the number of their set-up
            self._history[number % _HISTORY] = (number, signature)
        self._newest = max(self._newest, number)

    def called(self, number: int) -> Signature | None:
        """Return the signature of this rank's collective `number`, None if it is too long ago."""
        noted, signature = self._history[number % _HISTORY]
        return signature if noted == number else self._recall(number)

    def refuse(self, number: int, error: BaseException) -> None:
        """Tell all others that this rank does not take part in collective `number` because of `error`."""
        reason = "refused its arguments" if isinstance(error, Exception) else "was interrupted"
        with self._lock:
            self.refused.add(number)
            self._newest = max(self._newest, number)
            self._mailbox.tell_all({"kind": "refused", "number": number, "text": f"{reason}: {described(error)}"})

    def all_refused(self, number: int) -> bool:
        """Return whether all other ranks are known to have refused collective `number` too; it is then forgotten.

        Raises
        ------
        MpicollError
            If one of them has not.
        """
        with self._lock:
            self.read_news()
            self._raise_failure()
            if len(self._refusals.get(number, ())) < self._comm.size - 1:
                return False
            self._refusals = {later: reasons for later, reasons in self._refusals.items() if later > number}
            self.refused.discard(number)
            return True

    def await_refusals(self, number: int) -> bool:
        """Wait, a minute at most, until all other ranks have refused collective `number`; False if one does not."""
        clock = RunningClock()
        with contextlib.suppress(MpicollError):
            while not self._mailbox.somebody_left and clock.read() < REFUSAL_SECONDS:
                if self.all_refused(number):
                    return True
                progress_engine.progress()  # another rank may wait for an operation elsewhere before it refuses
                time.sleep(1e-4)
        return False

    def not_refused(self, number: int) -> tuple[int, ...]:
        """Return the other ranks that are not known to have refused collective `number`."""
        known = {self._comm.rank, *self._refusals.get(number, ())}
        return tuple(rank for rank in range(self._comm.size) if rank not in known)

    def give_up(self, number: int, error: BaseException) -> None:
        """Tell all others that this rank has abandoned collective `number` because of `error`."""
        self._fail(number, f"gave up: {described(error)}", isinstance(error, CorruptPayload))

    def _fail(self, number: int, text: str, damaged: bool = False) -> None:
        with self._lock:
            self.refused.add(number)
            self._mailbox.tell_all({"kind": "failed", "number": number, "text": text, "damaged": damaged})

    def look(self, waiting: Waiting, waited: float, timeout: float) -> float:
        """Exchange control messages; return the number of seconds of waiting at which to call this again.

        Raises
        ------
        MismatchError, RemoteError, CorruptPayload, CollectiveTimeout
            If the collective cannot complete.
        RankFailed
            If a rank has died and the MPI library goes on without it.
        """
        self._raise_if_failed()
        try:
            return self._look(waiting, waited, timeout)
        except MPI.Exception:
            self._raise_if_failed()
            raise

    def _raise_if_failed(self) -> None:
        for watchdog in (self, self.elsewhere):
            if watchdog is not None:
                raise_if_failed(watchdog._comm)

    def _look(self, waiting: Waiting, waited: float, timeout: float) -> float:
        for watchdog in (self, self.elsewhere):
            if watchdog is not None:
                watchdog.read_news()
                watchdog._raise_failure()
        with self._lock:
            self._announce(waiting, waited)
            wrong = self._find_mismatch(waiting)
            if wrong is not None:
                self._raise_mismatch(wrong, waiting)
            if waited >= timeout:
                self._raise_timeout(waiting, timeout)
            if waited >= self._tell_after:
                self._tell_user(waiting, waited)
        return min(waited + _LOOK_AGAIN_SECONDS, timeout)

    def read_news(self) -> None:
        """Read all control messages that have arrived; raise MismatchError or CollectiveTimeout if one reports it."""
        with self._lock:
            for source, news in self._mailbox.read():
                self._take_in(source, news)
            if self._alarm is not None:
                raise self._alarm()

    @property
    def is_untroubled(self) -> bool:
        """True if this rank knows of no call that was refused or has failed."""
        return not (self.refused or self._refusals or self._failures or self._alarm)

    def drain(self, broken: bool, willing: bool, announcements: Announcements | None = None) -> Drain:
        """Begin to receive all control messages that were sent to this rank."""
        with self._lock:
            return Drain(self._mailbox, broken or self._is_refused(), willing, self._is_refused, announcements)

    def _is_refused(self, *message: Any) -> bool:
        """Return whether another rank has refused a call that this one has not, also by a `message` that has come."""
        if message:
            self._take_in(*message)
        return any(number not in self.refused for number in self._refusals)

    def _take_in(self, source: int, news: dict[str, Any]) -> None:
        number, text = int(news["number"]), str(news["text"])
        if news["kind"] == "waiting":
            self._reports[source] = Report.of(news)
        elif news["kind"] == "refused":
            self._refusals.setdefault(number, {})[source] = f"{self._named([source])} {text}"
        elif news["kind"] == "failed":
            kind = CorruptPayload if news["damaged"] else RemoteError
            self._failures[number] = partial(kind, f"collective {number}: {self._named([source])} {text}")
        elif news["kind"] == "mismatch":
            self._alarm = partial(MismatchError, text)
        elif news["kind"] == "timeout":
            self._alarm = partial(CollectiveTimeout, f"(reported by {self._named([source])}) {text}", news["missing"])

    def _raise_failure(self) -> None:
        """Raise if another rank refused or abandoned a collective that this rank has called."""
        with self._lock:
            for number, reasons in self._refusals.items():
                if number <= self._newest and number not in self.refused:
                    reason = reasons[min(reasons)]
                    self._failures[number] = partial(RemoteError, f"collective {number}: {reason}")
                    self._fail(number, f"gave up because {reason}")
            for number, error in self._failures.items():
                if number <= self._newest:
                    raise error()

    def _announce(self, waiting: Waiting, waited: float) -> None:
        """Report this rank's wait to the others, at first and each time the wait has doubled."""
        number, said_at = self._announced
        if number == waiting.number and said_at <= waited < 2 * said_at + 0.2:
            return
        self._announced = waiting.number, waited
        for peer in self._audience(waiting.peers):
            self._mailbox.tell(peer, Report.news(waiting))

    def _audience(self, waited_for: tuple[int, ...]) -> list[int]:
        size, rank = self._comm.size, self._comm.rank
        if size <= _EVERYBODY:
            return [peer for peer in range(size) if peer != rank]
        distances = [1 << k for k in range((size - 1).bit_length())]
        near = {(rank + sign * distance) % size for distance in distances for sign in (1, -1)}
        return sorted((near | set(waited_for)) - {rank})

    def _find_mismatch(self, waiting: Waiting) -> int | None:
        for report in self._reports.values():
            if report.is_agreement and report.number in self.compared:
                continue  # both ranks learn there whether their calls differ
            if report.number == waiting.number and report.is_nonblocking != waiting.is_nonblocking:
                return report.number
            own = self.called(report.number)
            if own is not None and own.code != report.code and ANY_CODE not in (own.code, report.code):
                return report.number
        return None

    def _raise_mismatch(self, number: int, waiting: Waiting) -> NoReturn:
        """Wait up to 0.5 s for the others' reports, then tell all ranks and raise MismatchError."""
        self._gather(number)
        own = waiting if number == waiting.number else self.called(number)
        calls: dict[str, list[int]] = {own.text if own else "?": [self._comm.rank]}
        for rank, report in self._reports.items():
            if report.number == number:
                calls.setdefault(report.text, []).append(rank)
        self.raise_difference(number, calls)

    def raise_mismatch(self, waiting: Waiting, calls: dict[str, list[int]]) -> NoReturn:
        """Raise MismatchError, and tell all ranks, for a collective of which all ranks in it know that calls differ.

        Parameters
        ----------
        calls
            The ranks of each call as far as they are known, for the message, if ranks do not report theirs in 0.5 s.
        """
        with self._lock:
            self._announced = (-1, 0.0)
            self._announce(waiting, 0.0)
            self._gather(waiting.number)
            wrong = self._find_mismatch(waiting)
            if wrong is not None:
                self._raise_mismatch(wrong, waiting)
            self.raise_difference(waiting.number, calls)

    def raise_difference(self, number: int, calls: dict[str, list[int]]) -> NoReturn:
        """Raise MismatchError with the ranks of each of the different `calls`, and tell all ranks."""
        parts = [f"{self._named(ranks)} called {text}" for text, ranks in sorted(calls.items(), key=lambda c: c[1])]
        text = f"collective {number} of this communicator differs between ranks: " + "; ".join(parts)
        self._raise_alarm({"kind": "mismatch", "number": number, "text": text}, partial(MismatchError, text))

    def raise_departure(self, number: int, ranks: list[int]) -> NoReturn:
        """Raise the reason why `ranks` abandoned this call, or RemoteError without it if none arrives within 0.5 s."""
        until = time.monotonic() + _GATHER_SECONDS
        while time.monotonic() < until:
            self.read_news()
            self._raise_failure()
            time.sleep(_LOOK_AGAIN_SECONDS)
        raise RemoteError(f"collective {number}: {self._named(ranks)} gave up waiting for the others")

    def _named(self, ranks: Iterable[int]) -> str:
        """Return the ranks as messages to the user name them."""
        numbers = sorted(self.numbers[rank] for rank in ranks)
        return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))

    def _gather(self, number: int) -> None:
        until = time.monotonic() + _GATHER_SECONDS
        while time.monotonic() < until:
            self.read_news()
            heard = [report for report in self._reports.values() if report.number >= number]
            if len(heard) == self._comm.size - 1:
                return
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _absence(self, waiting: Waiting, seconds: float) -> Absence:
        """Return for whom this rank has waited so many seconds."""
        others = [peer for peer in range(self._comm.size) if peer != self._comm.rank]
        all_report = self._comm.size <= _EVERYBODY
        return absence(waiting, seconds, others, self._comm.rank, all_report, self._reports, self._named)

    def _tell_user(self, waiting: Waiting, waited: float) -> None:
        """Tell the user of a long wait, by the first of the ranks that wait."""
        self._tell_after = 2 * waited
        found = self._absence(waiting, round(waited))
        if self._comm.rank < min(found.here, default=self._comm.size):
            wait_reports.tell_user(found)

    def _raise_timeout(self, waiting: Waiting, timeout: float) -> NoReturn:
        missing, _, text = self._absence(waiting, timeout)
        named = [self.numbers[peer] for peer in missing]
        news = {"kind": "timeout", "number": waiting.number, "text": text, "missing": named}
        self._raise_alarm(news, partial(CollectiveTimeout, text, named))

    def _raise_alarm(self, news: dict[str, Any], error: _Error) -> NoReturn:
        """Tell all ranks, and every other wait of this rank, then raise."""
        with self._lock:
            self._alarm = error
            self._mailbox.tell_all(news)
            self._mailbox.flush()
        raise error()
