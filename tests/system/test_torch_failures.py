"""DistributedDataParallel on mpicoll where a rank is stopped, is killed, or calls something else: an error in time."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.mpirun import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

PROGRAMS = Path(__file__).with_name("programs")
PROGRAM = str(PROGRAMS / "torch_failures.py")
TIMEOUT = 2.0


def met(how: str) -> list[dict]:
    """Return what each rank met; all must have ended by themselves."""
    outcome = run(3, [PROGRAM, how], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    entries = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert len(entries) == 3, outcome.text
    return sorted(entries, key=lambda entry: entry["rank"])


@pytest.mark.parametrize("how", ["other call", "compressed"])
def test_a_rank_that_calls_something_else(how: str) -> None:
    for entry in met(how):
        assert "rank 1 called Bcast(count=90" in entry["error"], entry
        assert entry["seconds"] < TIMEOUT, entry


def test_a_rank_that_is_stopped() -> None:
    first, stopped, last = met("stopped")
    for entry in (first, last):
        assert "rank 1 did not arrive within 2 s" in entry["error"], entry
        assert TIMEOUT - 0.5 < entry["seconds"] < TIMEOUT + 2, entry
    assert stopped["error"] is not None


def test_the_launch_ends_where_a_rank_is_killed() -> None:
    outcome = run(3, [PROGRAM, "killed"], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode != 0
    assert outcome.seconds < 30


def test_a_program_may_end_without_destroying_its_groups() -> None:
    for entry in met("all well"):
        assert entry["error"] is None


def test_groups_beside_a_default_group_of_gloo() -> None:
    outcome = run(3, [str(PROGRAMS / "torch_beside_gloo.py")], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode == 0, outcome.text
    assert sorted(outcome.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(3)]
