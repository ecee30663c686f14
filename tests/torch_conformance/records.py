"""Records of tests that run on the ranks of one launch: how each ended on each rank, and why."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mpi4py import MPI

from mpicoll.consensus import wait_politely

WORLD = MPI.COMM_WORLD
PASSED, SKIPPED, FAILED, BEGUN = "passed", "skipped", "failed", "begun"


def run_all(names: Iterable[str], run_one: Callable[[str], tuple[str, str]], folder: Path) -> None:
    """Run tests one after the other on all ranks; write two lines of JSON for each to a file of this rank.

    Parameters
    ----------
    names
        The names of the tests, equal on all ranks.
    run_one
        Runs the test of a name; returns PASSED, SKIPPED or FAILED and the reason.
    folder
        Where the files ``rank-R.jsonl`` go.
    """
    with (folder / f"rank-{WORLD.rank}.jsonl").open("w") as lines:
        for name in names:
            wait_politely(WORLD)
            began = time.monotonic()
            lines.write(json.dumps({"name": name}) + "\n")
            lines.flush()
            how, why = run_one(name)
            record = {"name": name, "how": how, "why": why, "seconds": round(time.monotonic() - began, 2)}
            lines.write(json.dumps(record) + "\n")
            lines.flush()
    wait_politely(WORLD)
