"""A pytest plugin that writes how each test ended on this rank; it imports nothing of this repository.

``pytest -p rank_outcomes`` writes ``$PROGRAM_OUTCOMES/rank-N.json`` when the session ends. The name of the running test
goes to ``$MPICOLL_TEST_FOLDER/rank-N.test``, where tests.mpirun looks for tests that take too long.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LOADED = time.time()
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
RANK = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")

_outcomes: dict[str, str] = {}
_texts: dict[str, str] = {}
_WORSE = {"passed": 0, "skipped": 1, "failed": 2}


def process_started() -> float:
    """Return the time at which this process was started; where the system does not tell, when this was loaded."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return LOADED


def world_class() -> str:
    """Return the module of the class of ``MPI.COMM_WORLD``, empty if mpi4py was not imported."""
    module = sys.modules.get("mpi4py.MPI")
    return type(module.COMM_WORLD).__module__ if module is not None else ""


def note(nodeid: str, outcome: str, text: str) -> None:
    """Keep the worst outcome of a test's setup, call and teardown."""
    if _WORSE[outcome] >= _WORSE[_outcomes.get(nodeid, "passed")]:
        _outcomes[nodeid] = outcome
    if outcome == "failed":
        _texts[nodeid] = text


def _running(nodeid: str) -> None:
    folder = os.environ.get("MPICOLL_TEST_FOLDER")
    if folder:
        (Path(folder) / f"rank-{RANK}.test").write_text(nodeid)


def pytest_runtest_logstart(nodeid: str) -> None:
    _running(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _running("")


def pytest_runtest_logreport(report: Any) -> None:
    note(report.nodeid, report.outcome, report.longreprtext)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        note(f"{report.nodeid} (collection)", "failed", report.longreprtext)


def pytest_sessionfinish() -> None:
    content = {
        "seconds": time.time() - process_started(),
        "world": world_class(),
        "outcomes": _outcomes,
        "texts": _texts,
    }
    (Path(os.environ["PROGRAM_OUTCOMES"]) / f"rank-{RANK}.json").write_text(json.dumps(content))
