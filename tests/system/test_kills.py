"""A parameter server that is killed: the supervisor starts the job again, and nothing that was promised is broken."""

from __future__ import annotations

from pathlib import Path

from tests.kills.killed_run import Undisturbed, disturbed

ACCURACY = 0.97
"""About the accuracy of each run of this mode; the bits differ from run to run."""


def test_a_supervised_run_survives_its_server(tmp_path: Path) -> None:
    run = disturbed("ps", ["server"], tmp_path, 7, Undisturbed((ACCURACY,), frozenset()))
    assert run.problems == [], (tmp_path / "output").read_text()
    assert [kill["victim"] for kill in run.kills] == ["server"]
    assert run.kills[0]["at_step"] > 0
    assert run.starts == 2
