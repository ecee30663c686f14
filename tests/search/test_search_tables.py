"""Tables of a search on rank 0: a progress bar below them on terminals alone."""

from __future__ import annotations

import sys

import pytest

from mpicoll.search.coordinator import TrialRecord
from mpicoll.search.population_report import PopulationTable
from mpicoll.search.population_settings import TRAINED, MemberRecord
from mpicoll.search.search_options import parse_search
from mpicoll.search.study_report import TrialTable


def trials() -> None:
    table = TrialTable(parse_search(["--space", "lr=1,2", "--trials", "2"]), 2)
    table.add(TrialRecord(0, "complete", 0.5, {"lr": 1.0}, "", 0.1, 0))
    table.close()


def generations() -> None:
    table = PopulationTable(parse_search(["--space", "lr=log:1e-3..1", "--population", "2"]), 2)
    table.add([MemberRecord(0, number, 0.5, {"lr": 1.0}, TRAINED, number, "") for number in range(2)])
    table.close()


@pytest.mark.parametrize("fill", [trials, generations])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_a_terminal_alone(
    fill, terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    fill()
    told = capsys.readouterr()
    assert "lr=1" in told.out
    assert bool(told.err) == terminal
