"""Advice on adopting mpicoll for a program, from its profile and from calls repeated with the MPI library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpicoll.program.library_comparison import MAX_TARGETS, Comparison
from mpicoll.program.profile_analysis import Analysis

_LITTLE = 0.02
"""Fraction of the program's time below which a difference counts as none."""
_MOST_IS_WAITING = 0.6
_ENOUGH_COVERED = 0.5
_UNLIKE = 2.0
"""Ratio of the calls' time in the program to their time when repeated, above which the sentence mentions it."""
NATIVE = "native"


class Advice(NamedTuple):
    """Advice on one program, with the numbers that it rests on; seconds are averages over the ranks.

    Attributes
    ----------
    verdict
        "yes", "no" or "unknown".
    sentence
        The advice in words.
    share
        Fraction of the program's time spent in collectives.
    waiting_share
        Fraction of the program's time spent waiting for the slowest rank.
    gain_seconds
        The MPI library's time for all repeated calls less mpicoll's; None where too few were repeated.
    covered
        Fraction of the collectives' time, without waiting, whose calls were repeated.
    """

    verdict: str
    sentence: str
    share: float
    waiting_share: float
    gain_seconds: float | None
    covered: float


def totals(comparisons: Sequence[Comparison], ranks: int) -> tuple[float, float]:
    """Return the seconds that all repeated calls take with mpicoll and with the MPI library, as rank averages."""
    ours = library = 0.0
    for each in comparisons:
        if each.ours is not None and each.library is not None:
            calls = each.target.calls * len(each.target.members) / ranks
            ours, library = ours + calls * each.ours, library + calls * each.library
    return ours, library


def advise(analysis: Analysis, comparisons: Sequence[Comparison], facts: dict[str, Any]) -> Advice:
    """Return the advice on a profiled run.

    Parameters
    ----------
    analysis
        The profile's analysis.
    comparisons
        Calls that were repeated after the run.
    facts
        ``mode``, ``ranks``, ``wall_seconds`` (of the slowest rank), ``crowded``: more ranks than cores, and
        ``compare_seconds``: the time for repeating calls.
    """
    wall = max(facts["wall_seconds"], 1e-9)
    ranks = facts["ranks"]
    total, waiting = float(analysis.seconds.sum()) / ranks, float(analysis.waiting.sum()) / ranks
    transfer = sum(target.transfer for target in analysis.targets) / ranks
    measured = sum(each.target.transfer for each in comparisons if each.ratio is not None) / ranks
    covered = measured / transfer if transfer > 0 else 0.0
    ours, library = totals(comparisons, ranks)
    found = library - ours if covered >= _ENOUGH_COVERED else None
    left = len(comparisons) < min(len(analysis.targets), MAX_TARGETS)
    verdict, sentence = _sentence(total / wall, waiting, total, found, wall, {**facts, "left": left})
    again = library if facts["mode"] == NATIVE else ours
    if found is not None and measured > _LITTLE * wall and measured > _UNLIKE * again:
        sentence += (
            f" In the program the calls took {measured / again:.1f} times as long as when they were made again: "
            "a communicator's first calls set it up, or caches, cores or the network are busy with something else "
            "there, and this is uncertain."
        )
    return Advice(verdict, sentence, total / wall, waiting / wall, found, covered)


def _sentence(
    share: float, waiting: float, total: float, found: float | None, wall: float, facts: dict[str, Any]
) -> tuple[str, str]:
    if facts["ranks"] == 1:
        return "unknown", "One rank has nobody to communicate with: this says nothing about mpicoll."
    if share < _LITTLE:
        text = f"Collectives take {share:.1%} of the program's time: no library of collectives makes it faster."
        return "no", text
    if waiting > _MOST_IS_WAITING * total and (found is None or abs(found) < _LITTLE * wall):
        text = (
            f"Of the {share:.0%} of its time that the program is in collectives, it waits for the slowest rank during "
        )
        return (
            "no",
            text + f"{waiting / total:.0%}: balance the ranks' work; another library of collectives does not help.",
        )
    if found is None:
        return "unknown", _not_measured(facts["compare_seconds"], facts["left"])
    other = "with mpicoll" if facts["mode"] == NATIVE else "with the MPI library alone"
    # In native mode the wall time is the library's; otherwise mpicoll's.
    relative = found / wall
    if facts["crowded"]:
        text = "There are more ranks than cores here, so that times depend on the system's scheduler: this cannot tell "
        return "unknown", text + "whether mpicoll is faster on a core for each rank."
    if abs(relative) < _LITTLE:
        return "no", f"It makes no difference: {other} the program would take as long, within {_LITTLE:.0%}."
    if found > 0:
        change = f"{relative:.0%} less" if facts["mode"] == NATIVE else f"{relative:.0%} more"
        return "yes", f"Adopt mpicoll: {other} the program would take about {change} time, by the calls measured again."
    change = f"{-relative:.0%} more" if facts["mode"] == NATIVE else f"{-relative:.0%} less"
    return "no", f"Do not adopt mpicoll as it is: {other} the program would take about {change} time."


def _not_measured(seconds: float, left: bool) -> str:
    """Return why it is not known whether mpicoll is faster; `left`: there was no time for some of the calls."""
    if not seconds:
        return "Whether mpicoll is faster here was not measured (--compare 0)."
    if left:
        return (
            f"Too few of the calls could be measured again in {seconds:g} s to tell whether mpicoll is faster here: "
            "raise --compare."
        )
    return "Too few of the calls could be measured again to tell whether mpicoll is faster here."
