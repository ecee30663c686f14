"""Runs of a study on ranks that it starts itself, once and not again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.studies.run_scheduler import run_all
from bench.studies.study_runs import StudyRun, load

OPTIONS = {"hidden": (16,), "batch": 128, "epochs": 1, "steps": 80, "lr": 0.05, "warmup": 0}


def test_runs_are_taken_once_and_replicas_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = StudyRun("alone", "", 0, 2, {**OPTIONS, "mode": "local", "averaging": "final"})
    together = StudyRun("together", "", 0, 2, {**OPTIONS, "mode": "local", "sync_every": 4})
    lost = replace(together, variant="lost", options={**OPTIONS, "lr": 1e30})
    results = tmp_path / "r.jsonl"
    run_all([alone, together, lost], results)
    found = load(results)
    assert found[lost.key].diverged
    assert len(found[alone.key].replicas) == 2
    assert all(accuracy > 0.3 for accuracy in found[alone.key].replicas)
    ((steps, apart),) = found[alone.key].distances
    ((_, near),) = found[together.key].distances
    assert steps == 63
    assert apart > 2 * near > 0
    assert found[together.key].replicas == []
    before = results.read_text()
    capfd.readouterr()
    run_all([alone, together, lost], results)
    assert results.read_text() == before
    assert capfd.readouterr().out.strip() == "3 of 3 runs are finished"
