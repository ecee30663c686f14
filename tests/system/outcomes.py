"""What every rank of a program of cases met, case by case."""

from __future__ import annotations

import json
from functools import lru_cache

from tests.mpirun import run

MISSING_TIMEOUT = 2.0
"""Deadline in seconds of cases in which a rank does not come."""


@lru_cache(maxsize=16)
def outcomes_of(program: str, size: int, mode: str) -> dict[str, list[dict]]:
    """Run all cases in one launch with ``MPICOLL_CHECK=mode``; per case the outcome of every rank, in rank order."""
    outcome = run(size, [program], timeout=150, environment={"MPICOLL_CHECK": mode})
    assert outcome.returncode == 0, outcome.text
    cases: dict[str, list[dict]] = {}
    for line in outcome.stdout.splitlines():
        entry = json.loads(line)
        cases.setdefault(entry["case"], []).append(entry)
    assert all(len(entries) == size for entries in cases.values())
    return {case: sorted(entries, key=lambda entry: entry["rank"]) for case, entries in cases.items()}


def check_refused(entries: list[dict], mode: str) -> None:
    """Check that one rank's wrong argument is an error on all, at once, and in the rank's next call too."""
    for entry in entries:
        assert entry["error"] == ("ReadOnlyBuffer" if entry["rank"] == 1 else "RemoteError"), entry
        assert "read-only" in entry["text"]
        assert entry["seconds"] < 3
        assert entry["usable"] == (mode == "full")
        assert entry["seconds_to_find_out"] < 3, "the rank that refused waited for the others"


def check_no_data_of_a_refused_call(entries: list[dict]) -> None:
    """Check that nothing of the call that one rank refused is taken for the next."""
    for entry in entries:
        assert entry["error"] == "RemoteError", entry
        assert "rank 1 refused its arguments: ReadOnlyBuffer" in entry["text"], entry
        assert entry["seconds"] < 3, entry
        assert not entry["usable"], entry


def check_missing_rank(entries: list[dict]) -> None:
    """Check that rank 1, which does not come, is named when the time is up."""
    for entry in entries:
        if entry["rank"] != 1:
            assert entry["error"] == "CollectiveTimeout", entry
            assert entry["missing"] == [1], entry
            assert MISSING_TIMEOUT - 0.5 < entry["seconds"] < MISSING_TIMEOUT + 2, entry
            assert "rank 1 did not arrive" in entry["text"]
