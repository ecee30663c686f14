"""Statements about killed runs: each is found out when it does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kills.killed_run import INTERVAL, KilledRun, Undisturbed, judge
from tests.kills.step_log import read_log

KNOWN = Undisturbed((0.97,), frozenset({"ab"}))


def judged(folder: Path, *, mode: str = "sync", starts: tuple[tuple[int, int], ...] = ((0, 70), (60, 240)),
           seconds: float = 5.0, status: int = 0, **result: Any) -> KilledRun:  # fmt: skip
    """Return a run with one kill, judged by the files that it might have left."""
    log = folder / "log"
    log.mkdir()
    for number, (first, reached) in enumerate(starts):
        (log / f"start-{number:04d}").write_text(f"{first:11d}\n{reached:11d}\n")
    (folder / "report.json").write_text(json.dumps([{"seconds": seconds}] * len(starts)))
    (folder / "result.json").write_text(json.dumps({"test_accuracy": 0.97, "parameters_sha256": "ab"} | result))
    run = KilledRun(mode, 0, kills=[{"victim": "worker"}], status=status)
    judge(run, folder, KNOWN)
    return run


def test_a_run_that_keeps_everything_has_no_problems(tmp_path: Path) -> None:
    run = judged(tmp_path)
    assert (run.problems, run.lost, run.starts) == ([], [10], 2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"starts": ((0, 70), (60 - INTERVAL, 240))}, "30 steps were lost by one kill, which may cost 20"),
        ({"starts": ((0, 70), (60, 100), (100, 240))}, "3 starts after 1 kills"),
        ({"status": 3}, "status 3"),
        ({"seconds": 62.0}, "waiting for the dead one"),
        ({"test_accuracy": 0.9}, "the accuracy is 0.9000"),
        ({"test_accuracy": float("nan")}, "the accuracy is nan"),
        ({"parameters_sha256": "cd"}, "bit for bit"),
    ],
)
def test_what_does_not_hold_is_found(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    problems = judged(tmp_path, **changed).problems
    assert len(problems) == 1
    assert says in problems[0]


def test_bits_of_asynchronous_runs_are_not_compared(tmp_path: Path) -> None:
    assert judged(tmp_path, mode="ps", parameters_sha256="cd").problems == []


def test_a_start_that_was_killed_while_it_wrote_its_log_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "start-0000").write_text("")
    (tmp_path / "start-0001").write_text("          3\n          9\n")
    assert read_log(tmp_path) == [(3, 9)]
