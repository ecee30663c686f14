"""Analysis of the ranks' records: time by call site, time spent waiting for the slowest rank, and its number.

A call waits from its begin (for a nonblocking call, the begin of its wait) until the last rank has begun, or until it
returns if that is earlier: a root that broadcasts does not wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpicoll.program.rank_records import CallStream, RankRecord

_AT_A_TIME = 1 << 16
_NOTICEABLE_SECONDS = 10e-6
"""Sum of the other ranks' waits above which a rank counts as the slowest of a call."""
SiteKey = tuple[str, int, str, str, int]


@dataclass
class Site:
    """A line of the program with a collective on communicators of one size; seconds are added up over all ranks.

    Attributes
    ----------
    ranks, present
        Size of COMM_WORLD, and the number of its ranks whose records there are.
    calls
        Calls made, by rank of COMM_WORLD; `seconds` and `waiting` likewise.
    slowest, blamed
        Number of calls (of all ranks) in which a rank was the slowest, and seconds that others waited for it; by rank.
    """

    key: SiteKey
    ranks: int
    present: int
    calls: np.ndarray = field(init=False)
    seconds: np.ndarray = field(init=False)
    waiting: np.ndarray = field(init=False)
    slowest: np.ndarray = field(init=False)
    blamed: np.ndarray = field(init=False)
    nbytes: list[int] = field(default_factory=list)
    dtypes: set[str] = field(default_factory=set)
    transports: set[str] = field(default_factory=set)
    median: float = 0.0

    def __post_init__(self) -> None:
        self.calls, self.slowest = (np.zeros(self.ranks, np.int64) for _ in range(2))
        self.seconds, self.waiting, self.blamed = (np.zeros(self.ranks) for _ in range(3))

    def as_dict(self) -> dict[str, Any]:
        """Return the site's entry in the profile; seconds are averages over the ranks whose records there are."""
        file, line, function, method, size = self.key
        here = max(1, int(np.count_nonzero(self.calls)))
        known = [each for each in self.nbytes if each >= 0]
        return {
            "file": file,
            "line": line,
            "function": function,
            "call": method,
            "size": size,
            "ranks": here,
            "calls": int(self.calls.max()),
            "nbytes": [min(known), max(known)] if known else None,
            "dtypes": sorted(self.dtypes - {""}),
            "transports": sorted(self.transports),
            "seconds": float(self.seconds.sum() / self.present),
            "median_seconds": self.median,
            "waiting_seconds": float(self.waiting.sum() / self.present),
            "slowest": self._slowest(),
        }

    def _slowest(self) -> list[dict[str, Any]]:
        """Return at most three ranks that others waited for, the longest wait first."""
        total = max(1, int(self.calls.sum()))
        order = [rank for rank in np.argsort(-self.blamed, kind="stable").tolist()[:3] if self.slowest[rank]]
        return [
            {
                "rank": rank,
                "share_of_calls": float(self.slowest[rank] / total),
                "waited_seconds": float(self.blamed[rank] / self.present),
            }
            for rank in order
        ]


@dataclass
class Target:
    """Group of equal calls on one communicator, to be repeated.

    Attributes
    ----------
    place
        Index of the first of these calls in its stream.
    calls
        Number of these calls.
    transfer
        Their seconds without waiting, summed over the ranks.
    """

    members: tuple[int, ...]
    number: tuple[int, int]
    place: int
    method: str
    nbytes: int
    dtype: str
    op: str
    root: int
    calls: int = 0
    transfer: float = 0.0


@dataclass
class Analysis:
    """Result of the analysis.

    Attributes
    ----------
    sites
        Call sites, the longest time first.
    targets
        Groups of equal calls, the longest transfer first.
    seconds, waiting : (ranks,) float64
        Seconds of each rank in collectives, and of these the ones spent waiting.
    """

    sites: list[Site]
    targets: list[Target]
    seconds: np.ndarray
    waiting: np.ndarray


class _Analyzer:
    """Tables that are filled in while the records are read."""

    def __init__(self, records: Sequence[RankRecord], ranks: int) -> None:
        self._records = {record.rank: record for record in records}
        self._ranks = ranks
        self._numbers: dict[SiteKey, int] = {}
        self._order: list[Site] = []
        self._targets: dict[tuple[Any, ...], Target] = {}
        self._site_of = {record.rank: self._number_sites(record) for record in records}
        self._durations: list[tuple[np.ndarray, np.ndarray]] = []

    def _number_sites(self, record: RankRecord) -> np.ndarray:
        """Return the index of the call site of each of a rank's kinds."""
        numbers = np.zeros(len(record.kinds), np.int64)
        for place, kind in enumerate(record.kinds):
            key = (kind["file"], kind["line"], kind["function"], kind["method"], kind["size"])
            number = numbers[place] = self._numbers.setdefault(key, len(self._order))
            if number == len(self._order):
                self._order.append(Site(key, self._ranks, len(self._records)))
            site = self._order[number]
            site.nbytes.append(kind["nbytes"])
            site.dtypes.add(kind["dtype"])
            site.transports.add(kind["transport"])
            site.calls[record.rank] += kind["more_calls"]
            site.seconds[record.rank] += kind["more_seconds"]
        return numbers

    def analyze(self) -> Analysis:
        together: dict[tuple[Any, ...], dict[int, CallStream]] = defaultdict(dict)
        for record in self._records.values():
            for stream in record.streams:
                together[stream.members, stream.number][record.rank] = stream
                self._count(record.rank, stream)
        for (members, _), streams in together.items():
            if all(rank in streams for rank in members):
                self._compare([streams[rank] for rank in members], members)
        self._medians()
        sites = sorted(self._order, key=lambda site: -float(site.seconds.sum()))
        totals = [
            sum((getattr(site, name) for site in sites), np.zeros(self._ranks)) for name in ("seconds", "waiting")
        ]
        targets = sorted(self._targets.values(), key=lambda target: -target.transfer)
        return Analysis(sites, targets, *totals)

    def _count(self, rank: int, stream: CallStream) -> None:
        sites = self._site_of[rank][stream.kinds]
        self._durations.append((sites, stream.spent))
        for number in np.unique(sites).tolist():
            here = sites == number
            self._order[number].calls[rank] += int(np.count_nonzero(here))
            self._order[number].seconds[rank] += float(stream.spent[here].sum())

    def _compare(self, streams: list[CallStream], members: tuple[int, ...]) -> None:
        """Compare the calls that all members have made, one by one."""
        count = self._common(streams, members)
        for start in range(0, count, _AT_A_TIME):
            part = slice(start, min(count, start + _AT_A_TIME))
            entered = np.stack([stream.entered[part] for stream in streams])
            slowest, last = entered.argmax(axis=0), entered.max(axis=0)
            waits = np.stack(
                [
                    np.clip(
                        np.minimum(stream.left[part], last) - np.maximum(stream.entered, stream.blocked)[part], 0, None
                    )
                    for stream in streams
                ]
            )
            noticed = waits.sum(axis=0) > _NOTICEABLE_SECONDS
            for place, rank in enumerate(members):
                self._blame(rank, streams[place].kinds[part], waits[place], np.array(members)[slowest], noticed)
            if len(members) > 1:
                self._collect_targets(streams, members, part, waits)

    def _common(self, streams: list[CallStream], members: tuple[int, ...]) -> int:
        """Return the number of leading calls in which all ranks made the same collective."""
        count = min(len(stream.kinds) for stream in streams)
        names = [
            np.array([kind["collective"] for kind in self._records[rank].kinds])[stream.kinds[:count]]
            for rank, stream in zip(members, streams, strict=True)
        ]
        differ = np.zeros(count, bool)
        for other in names[1:]:
            differ |= other != names[0]
        return int(np.argmax(differ)) if differ.any() else count

    def _blame(self, rank: int, kinds: np.ndarray, waits: np.ndarray, slowest: np.ndarray, noticed: np.ndarray) -> None:
        sites = self._site_of[rank][kinds]
        for number in np.unique(sites).tolist():
            here, site = sites == number, self._order[number]
            site.waiting[rank] += float(waits[here].sum())
            np.add.at(site.blamed, slowest[here], waits[here])
            np.add.at(site.slowest, slowest[here & noticed], 1)

    def _collect_targets(
        self, streams: list[CallStream], members: tuple[int, ...], part: slice, waits: np.ndarray
    ) -> None:
        kinds = np.stack([stream.kinds[part] for stream in streams])
        transfer = (np.stack([stream.spent[part] for stream in streams]) - waits).sum(axis=0)
        for first in np.unique(kinds[0]).tolist():
            here = np.flatnonzero(kinds[0] == first)
            described = self._records[members[0]].kinds[first]
            nbytes = max(
                self._records[rank].kinds[kinds[place, here[0]]]["nbytes"] for place, rank in enumerate(members)
            )
            known = (described["method"], nbytes, described["dtype"], described["op"], described["root"])
            target = self._targets.setdefault(
                (members, *known), Target(members, streams[0].number, part.start + int(here[0]), *known)
            )
            target.calls += len(here)
            target.transfer += float(transfer[here].sum())

    def _medians(self) -> None:
        if not self._durations:
            return
        sites = np.concatenate([each for each, _ in self._durations])
        seconds = np.concatenate([each for _, each in self._durations])
        order = np.argsort(sites, kind="stable")
        numbers, starts = np.unique(sites[order], return_index=True)
        for number, values in zip(numbers.tolist(), np.split(seconds[order], starts[1:]), strict=True):
            self._order[number].median = float(np.median(values))


def analyze(records: Sequence[RankRecord], ranks: int) -> Analysis:
    """Return the analysis of the records of all ranks, or of some; `ranks` is the size of COMM_WORLD."""
    return _Analyzer(records, ranks).analyze()
