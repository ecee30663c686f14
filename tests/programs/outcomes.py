"""How tests ended on every rank, and the comparison between plain mpi4py and mpicoll."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

Test = tuple[int, str]
"""Rank and name of a test."""


@dataclass
class Run:
    """One run of a program's tests.

    Attributes
    ----------
    outcomes
        ``"passed"``, ``"skipped"`` or ``"failed"`` of each test on each rank.
    texts
        What pytest reports of those that failed.
    seconds
        From the start of rank 0 to the end of its last test.
    trouble
        What ended the run before its end, or nothing.
    """

    outcomes: dict[Test, str] = field(default_factory=dict)
    texts: dict[Test, str] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str = ""

    def counts(self) -> Counter[str]:
        return Counter(self.outcomes.values())


def read(folder: Path, ranks: int, package: str) -> Run:
    """Read what `ranks` ranks have written; the class of ``MPI.COMM_WORLD`` must be of `package` on all of them."""
    run, troubles = Run(), []
    for rank in range(ranks):
        path = folder / f"rank-{rank}.json"
        if not path.exists():
            troubles.append(f"rank {rank} did not come to the end of its tests")
            continue
        content = json.loads(path.read_text())
        if content["world"].partition(".")[0] != package:
            troubles.append(f"rank {rank}: MPI.COMM_WORLD is of {content['world'] or 'nothing'}, not of {package}")
        run.outcomes.update({(rank, name): outcome for name, outcome in content["outcomes"].items()})
        run.texts.update({(rank, name): text for name, text in content["texts"].items()})
        run.seconds = run.seconds or content["seconds"]
    if not troubles and not any(outcome == "passed" for outcome in run.outcomes.values()):
        troubles.append("no test passed")
    run.trouble = "\n".join(troubles)
    return run


@dataclass
class Comparison:
    """Tests that end otherwise with mpicoll.

    Attributes
    ----------
    worse
        Those that passed, or were skipped, in every plain run, and did not in some run with mpicoll: the outcome there
        and what pytest reports.
    failed_plain
        Those that failed in some plain run.
    troubles
        What ended runs before their end.
    """

    worse: dict[Test, str] = field(default_factory=dict)
    failed_plain: set[Test] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.worse and not self.troubles


def compare(plain: Sequence[Run], ours: Sequence[Run]) -> Comparison:
    """Compare runs of the same tests; one that fails under plain mpi4py may end as it likes."""
    found = Comparison(troubles=[f"plain mpi4py: {run.trouble}" for run in plain if run.trouble])
    found.troubles += [f"mpicoll: {run.trouble}" for run in ours if run.trouble]
    for test in sorted({test for run in plain for test in run.outcomes}):
        expected = {run.outcomes.get(test, "not run") for run in plain}
        if "failed" in expected:
            found.failed_plain.add(test)
            continue
        for run in ours:
            outcome = run.outcomes.get(test, "not run")
            if outcome not in expected:
                found.worse[test] = f"{outcome} instead of {' or '.join(sorted(expected))}\n{run.texts.get(test, '')}"
    return found
