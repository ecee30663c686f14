"""Texts about a rank that waits in a collective for others, and which ranks those are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mpicoll.progress.call_signature import Waiting

FIRST_REPORT_SECONDS = 600.0
"""After so long a wait, and each time it has doubled, the user is told whom the ranks wait for."""


class Report(NamedTuple):
    """The last report from a rank: the number, signature and progress of a collective in which it waits."""

    number: int
    code: int
    text: str
    progress: str
    is_nonblocking: bool
    is_agreement: bool

    @staticmethod
    def news(waiting: Waiting) -> dict[str, Any]:
        """Return the control message that reports a wait."""
        return {
            "kind": "waiting",
            "number": waiting.number,
            "code": waiting.signature.code,
            "text": waiting.text,
            "progress": waiting.progress,
            "nonblocking": waiting.is_nonblocking,
            "agreement": waiting.is_agreement,
        }

    @classmethod
    def of(cls, news: Mapping[str, Any]) -> Report:
        """Return the report in a control message."""
        flags = bool(news.get("nonblocking")), bool(news.get("agreement"))
        return cls(int(news["number"]), int(news["code"]), str(news["text"]), str(news["progress"]), *flags)


class Absence(NamedTuple):
    """Ranks of a collective that others wait for.

    Attributes
    ----------
    missing, here
        The ranks that are not known to have made the call, and those that wait in it.
    text
        The state of the call, for messages to the user.
    """

    missing: list[int]
    here: list[int]
    text: str


def absence(
    waiting: Waiting, seconds: float, others: list[int], rank: int, all_report: bool,
    reports: Mapping[int, Report], named: Callable[[Iterable[int]], str],
) -> Absence:  # fmt: skip
    """Return for whom a rank has waited so many seconds.

    Parameters
    ----------
    others, rank
        The other ranks, and this one.
    all_report
        Whether all ranks that wait report it to this one.
    reports
        Those that have come, by rank.
    named
        Returns ranks as messages to the user name them.
    """
    here = [peer for peer in others if peer in reports and reports[peer].number >= waiting.number]
    missing = waiting.missing([peer for peer in others if peer not in here], all_report=all_report)
    if waiting.only_peers_missing:
        here = [peer for peer in others if peer not in missing]
    text = f"{waiting.text}, collective {waiting.number} of this communicator, {waiting.progress}: "
    text += f"{named(missing)} did not arrive" if missing else "nothing more arrived"
    text += ", or had left already," if missing and waiting.only_peers else ""
    text += f" within {seconds:g} s"
    text += "".join(
        f"; {named([peer])} was last seen in {reports[peer].text}, collective {reports[peer].number}"
        for peer in missing
        if peer in reports
    )
    return Absence(missing, here, f"{text}; {named([*here, rank])} waited there")


def tell_user(found: Absence) -> None:
    """Write to standard error that ranks have waited long, and go on waiting."""
    sys.stderr.write(f"mpicoll: still waiting: {found.text}\n")
    sys.stderr.flush()
