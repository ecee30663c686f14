"""What every rank of a program of cases met, case by case."""

from __future__ import annotations

import json
from functools import lru_cache

from tests.mpirun import run


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
