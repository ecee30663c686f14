"""Profile as a dictionary, and its JSON and HTML files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpicoll import __version__
from mpicoll.program.adoption_advice import advise
from mpicoll.program.library_comparison import Comparison
from mpicoll.program.profile_analysis import Analysis
from mpicoll.program.rank_records import RankRecord

VERSION = 1
"""Version of the JSON file's layout."""


def profile_of(
    records: Sequence[RankRecord],
    analysis: Analysis,
    comparisons: Sequence[Comparison],
    ranks: int,
    *,
    missing: bool = False,
) -> dict[str, Any]:
    """Return the profile as a dictionary for JSON; the guide "Run a program unmodified" lists its fields.

    Parameters
    ----------
    records
        One record for each rank that took part, in rank order.
    analysis
        Their analysis.
    comparisons
        Calls that were repeated after the run.
    ranks
        The size of COMM_WORLD.
    missing
        True if other ranks did not arrive to hand in their records.
    """
    facts = records[0].facts
    present = [record.rank for record in records]
    wall = [record.facts["wall_seconds"] for record in records]
    hosts = Counter(record.facts["system"] for record in records)
    crowded = any(count > records[0].facts["cores"] for count in hosts.values())
    of_run = {"mode": facts["mode"], "ranks": ranks, "wall_seconds": max(wall), "crowded": crowded}
    of_run["compare_seconds"] = facts["compare_seconds"]
    return {
        "version": VERSION,
        "mpicoll": __version__,
        "program": facts["program"],
        "mode": facts["mode"],
        "status": facts["status"],
        "ranks": ranks,
        "nodes": len(hosts),
        "crowded": crowded,
        "of_ranks": present,
        "missing": missing,
        "wall_seconds": wall,
        "startup_seconds": max(record.facts["startup_seconds"] for record in records),
        "collective_seconds": analysis.seconds[present].tolist(),
        "waiting_seconds": analysis.waiting[present].tolist(),
        "calls": [int(sum(site.calls[rank] for site in analysis.sites)) for rank in present],
        "overhead_seconds_per_call": float(
            np.median([record.facts["overhead_seconds_per_call"] for record in records])
        ),
        "sites": [site.as_dict() for site in analysis.sites],
        "compared": [_compared(each, len(records)) for each in comparisons],
        "advice": None if missing else advise(analysis, comparisons, of_run)._asdict(),
    }


def _compared(comparison: Comparison, ranks: int) -> dict[str, Any]:
    target = comparison.target
    return {
        "call": target.method,
        "size": len(target.members),
        "nbytes": target.nbytes,
        "dtype": target.dtype,
        "op": target.op,
        "calls": target.calls,
        "transfer_seconds": target.transfer / ranks,
        "transfer_seconds_per_call": target.transfer / (target.calls * len(target.members)),
        "mpicoll_seconds": comparison.ours,
        "library_seconds": comparison.library,
        "ratio": comparison.ratio,
    }


def own_file(path: Path | None, rank: int) -> Path | None:
    """Return the file for the profile of one rank only, such as ``profile.rank1.json``; None for None."""
    return None if path is None else path.with_stem(f"{path.stem}.rank{rank}")


def write_files(profile: dict[str, Any], json_file: Path | None, html_file: Path | None) -> None:
    """Write the profile to a JSON and an HTML file; None for a file that is not wanted."""
    if json_file is not None:
        json_file.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    if html_file is not None:
        from mpicoll.program.profile_page import as_html

        html_file.write_text(as_html(profile), encoding="utf-8")
