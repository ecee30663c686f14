"""How ranks that wait too long find out why: who called what, who never came, who failed.

Nothing here costs anything while messages arrive in time. A rank that has waited for a fifth of a second tells the
others the number and the signature of the collective that it is in, and reads what they have told. Collectives are
numbered alike on all ranks of a communicator, so

* another signature under the same number proves that the program is wrong: :class:`MismatchError` everywhere;
* a rank from which nothing has come when the time is up is named in :class:`CollectiveTimeout`;
* a rank that refused its own arguments has said so at once: :class:`RemoteError` on the others.

The messages are short JSON texts on a tag of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout, CorruptPayload, MismatchError, MpicollError, RemoteError

CONTROL_TAG = 0
_MAX_NBYTES = 16384
_HISTORY = 1024
_GATHER_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.02
_DRAIN_SECONDS = 2.0
_EVERYBODY = 64
"""Up to this size a waiting rank tells all others; beyond, those at distance 1, 2, 4, ... and those it waits for."""


_ANY = 0
"""Goes with every code."""


class Signature(NamedTuple):
    """A call as all ranks must make it: its text for people, and a number for comparing."""

    text: str
    code: int

    @classmethod
    def of(cls, text: str) -> Signature:
        """Make the signature with this text."""
        return cls(text, zlib.crc32(text.encode()))

    @classmethod
    def refusing(cls, call: str) -> Signature:
        """Make that of a rank whose arguments are wrong: it differs from none, since the others will be told why."""
        return cls(f"{call}: refused", _ANY)


class Waiting(NamedTuple):
    """What a rank is waiting for."""

    number: int
    signature: Signature
    progress: str
    peers: tuple[int, ...]


class _Report(NamedTuple):
    """The last news from a rank."""

    number: int
    code: int
    text: str
    progress: str


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Supervisor:
    """One rank's view of what the ranks of a communicator are doing.

    Parameters
    ----------
    recall
        Returns calls that :meth:`record` was not told of.
    session
        A number that the ranks of this communicator share and no other has. News that nobody read before a
        communicator was freed may turn up on the next one, because MPI libraries use its context again.
    """

    def __init__(
        self, comm: MPI.Intracomm, session: int, recall: Callable[[int], Signature | None] = lambda number: None
    ) -> None:
        self._comm = comm
        self._recall = recall
        self.elsewhere: Supervisor | None = None
        self._session = session
        self._history: list[tuple[int, Signature | None]] = [(-1, None)] * _HISTORY
        self._reports: dict[int, _Report] = {}
        self.refused: set[int] = set()
        self._refusals: dict[int, RemoteError | CorruptPayload] = {}
        self._newest = 0
        self._announced: tuple[int, float] = (-1, 0.0)
        self._outbox: list[tuple[MPI.Request, bytes]] = []
        self._sent = np.zeros(comm.size, np.int64)
        self._received = 0

    def record(self, number: int, signature: Signature) -> None:
        """Note that this rank calls collective `number` now."""
        self._history[number % _HISTORY] = (number, signature)
        self._newest = number

    def called(self, number: int) -> Signature | None:
        """Return what this rank called under `number`, as far back as is remembered."""
        noted, signature = self._history[number % _HISTORY]
        return signature if noted == number else self._recall(number)

    def refuse(self, number: int, reason: str, *, damaged: bool = False) -> None:
        """Tell all others why this rank does not take part in collective `number`; `damaged` if data were."""
        self.refused.add(number)
        self._tell_all({"kind": "refused", "number": number, "text": reason, "damaged": damaged})

    def give_up(self, number: int, error: BaseException) -> None:
        """Tell all others what went wrong here in collective `number`."""
        damaged = isinstance(error, CorruptPayload)
        self.refuse(number, f"gave up: {type(error).__name__}: {error}", damaged=damaged)

    def look(self, waiting: Waiting, waited: float, timeout: float) -> float:
        """Exchange news; return after how many seconds of waiting to look again.

        Raises
        ------
        MismatchError, RemoteError, CorruptPayload, CollectiveTimeout
            If this wait cannot end well.
        """
        self.read_news()
        self._raise_refusal()
        if self.elsewhere is not None:  # this wait is part of an operation on another communicator
            self.elsewhere.read_news()
            self.elsewhere._raise_refusal()
        self._announce(waiting, waited)
        wrong = self._find_mismatch()
        if wrong is not None:
            self._raise_mismatch(wrong)
        if waited >= timeout:
            self._raise_timeout(waiting, timeout)
        return min(waited + _LOOK_AGAIN_SECONDS, timeout)

    def read_news(self) -> None:
        """Read all control messages that have come; raise what an alarm among them says."""
        self._outbox = [entry for entry in self._outbox if not entry[0].Test()]
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, CONTROL_TAG, status):
            self._read_one(status)

    def drain(self, broken: bool) -> bool:
        """Receive all news that were sent to this rank; collective.

        Return whether nothing is left in flight: False if some rank is `broken`, or if the others do not come soon.
        What arrives after a communicator was freed would be taken for a message on the next one with its context:
        Open MPI ends the job if that one is smaller.
        """
        given, coming = np.column_stack([self._sent, np.full(self._sent.size, broken)]), np.zeros(2, np.int64)
        request = self._comm.Ireduce_scatter_block(given, coming)
        until = time.monotonic() + _DRAIN_SECONDS
        counted = False
        while not counted or self._received < coming[0] or self._outbox:
            with contextlib.suppress(MpicollError):  # alarms no longer matter
                self.read_news()
            counted = counted or bool(request.Test())
            if time.monotonic() > until:
                return False
            os.sched_yield()
        return not coming[1]

    def _read_one(self, status: MPI.Status) -> None:
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        source = status.Get_source()
        self._comm.Recv([data, MPI.BYTE], source, CONTROL_TAG)
        self._received += 1
        news = json.loads(data.tobytes())
        if news["session"] != self._session:
            return
        number = int(news["number"])
        if news["kind"] == "waiting":
            report = _Report(number, int(news["code"]), str(news["text"]), str(news["progress"]))
            self._reports[source] = report
        elif news["kind"] == "refused":
            kind = CorruptPayload if news["damaged"] else RemoteError
            self._refusals[number] = kind(f"collective {number}: rank {source} {news['text']}")
        elif news["kind"] == "mismatch":
            raise MismatchError(str(news["text"]))
        elif news["kind"] == "timeout":
            raise CollectiveTimeout(f"(reported by rank {source}) {news['text']}", news["missing"])

    def _raise_refusal(self) -> None:
        """Raise if another rank has refused a collective that this rank is in; what comes later does not matter yet."""
        for number in [number for number in self._refusals if number <= self._newest]:
            error = self._refusals.pop(number)
            if number not in self.refused:
                raise error

    def _announce(self, waiting: Waiting, waited: float) -> None:
        """Tell the others what this rank waits for, once, and again each time the wait has doubled."""
        number, said_at = self._announced
        if number == waiting.number and said_at <= waited < 2 * said_at + 0.2:
            return
        self._announced = (waiting.number, waited)
        news = {
            "kind": "waiting",
            "number": waiting.number,
            "code": waiting.signature.code,
            "text": waiting.signature.text,
            "progress": waiting.progress,
        }
        for peer in self._audience(waiting.peers):
            self._tell(peer, news)

    def _audience(self, waited_for: tuple[int, ...]) -> list[int]:
        size, rank = self._comm.size, self._comm.rank
        if size <= _EVERYBODY:
            return [peer for peer in range(size) if peer != rank]
        distances = [1 << k for k in range((size - 1).bit_length())]
        near = {(rank + sign * distance) % size for distance in distances for sign in (1, -1)}
        return sorted((near | set(waited_for)) - {rank})

    def _tell(self, peer: int, news: dict[str, Any]) -> None:
        news = {"session": self._session, **news}
        text = json.dumps(news).encode()
        if len(text) > _MAX_NBYTES:
            text = json.dumps({**news, "text": str(news["text"])[: _MAX_NBYTES // 8] + " ..."}).encode()
        # A message that nobody reads must not hold up this rank: it is kept until it is gone.
        self._outbox.append((self._comm.Isend([text, MPI.BYTE], peer, CONTROL_TAG), text))
        self._sent[peer] += 1

    def _tell_all(self, news: dict[str, Any]) -> None:
        for peer in range(self._comm.size):
            if peer != self._comm.rank:
                self._tell(peer, news)

    def _find_mismatch(self) -> int | None:
        for report in self._reports.values():
            own = self.called(report.number)
            if own is not None and own.code != report.code and _ANY not in (own.code, report.code):
                return report.number
        return None

    def _raise_mismatch(self, number: int) -> NoReturn:
        """Wait a moment for the others' reports, then tell everybody and raise."""
        self._gather(number)
        own = self.called(number)
        calls: dict[str, list[int]] = {own.text if own else "?": [self._comm.rank]}
        for rank, report in self._reports.items():
            if report.number == number:
                calls.setdefault(report.text, []).append(rank)
        self.raise_difference(number, calls)

    def raise_difference(self, number: int, calls: dict[str, list[int]]) -> NoReturn:
        """Say which ranks called what under `number`, to everybody."""
        parts = [f"{_ranks(sorted(ranks))} called {text}" for text, ranks in sorted(calls.items(), key=lambda c: c[1])]
        text = f"collective {number} of this communicator differs between ranks: " + "; ".join(parts)
        self._tell_all({"kind": "mismatch", "number": number, "text": text})
        self._flush()
        raise MismatchError(text)

    def raise_departure(self, number: int, ranks: list[int]) -> NoReturn:
        """Raise what `ranks`, which made the same call but gave up, have told, or that they did."""
        until = time.monotonic() + _GATHER_SECONDS
        while time.monotonic() < until:
            self.read_news()
            self._raise_refusal()
            time.sleep(_LOOK_AGAIN_SECONDS)
        raise RemoteError(f"collective {number}: {_ranks(ranks)} gave up waiting for the others")

    def _gather(self, number: int) -> None:
        until = time.monotonic() + _GATHER_SECONDS
        while time.monotonic() < until:
            self.read_news()
            heard = [report for report in self._reports.values() if report.number >= number]
            if len(heard) == self._comm.size - 1:
                return
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _raise_timeout(self, waiting: Waiting, timeout: float) -> None:
        size, rank = self._comm.size, self._comm.rank
        others = [peer for peer in range(size) if peer != rank]
        here = [peer for peer in others if peer in self._reports and self._reports[peer].number >= waiting.number]
        missing = [peer for peer in others if peer not in here]
        if size > _EVERYBODY:
            missing = [peer for peer in missing if peer in waiting.peers]
        text = f"{waiting.signature.text}, collective {waiting.number} of this communicator, {waiting.progress}: "
        text += f"{_ranks(missing)} did not come" if missing else "nothing more arrived"
        text += f" within {timeout:g} s"
        text += "".join(
            f"; rank {peer} was last seen in {self._reports[peer].text}, collective {self._reports[peer].number}"
            for peer in missing
            if peer in self._reports
        )
        text += f"; {_ranks(sorted([*here, rank]))} waited there"
        self._tell_all({"kind": "timeout", "number": waiting.number, "text": text, "missing": missing})
        self._flush()
        raise CollectiveTimeout(text, missing)

    def _flush(self) -> None:
        """Give the alarms a moment to leave, since the program may end right after."""
        until = time.monotonic() + 0.1
        while self._outbox and time.monotonic() < until:
            self._outbox = [entry for entry in self._outbox if not entry[0].Test()]
