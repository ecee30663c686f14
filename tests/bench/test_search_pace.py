"""Table and options of bench.search_pace."""

from __future__ import annotations

import pytest

from bench import search_pace
from bench.search_pace import Round


def test_ratios_are_of_the_same_round() -> None:
    rounds = [Round(64, 50.0, 45.0, 40.0, 0.97, 0), Round(64, 100.0, 80.0, 75.0, 0.9, 1)]
    lines = search_pace.table(rounds)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert cells[0] == ["1", "76.8", "85.3", "96.0", "90.0%", "80.0%", "97.0%", "0"]
    assert cells[1] == ["2", "38.4", "48.0", "51.2", "80.0%", "75.0%", "90.0%", "1"]
    assert lines[4:] == ["ratio: 85.0% [80.0%, 90.0%]", "of training: 77.5% [75.0%, 80.0%]"]


@pytest.mark.parametrize(
    ("words", "says"), [("--ranks 8 --group 3", "--group 3: 8 ranks"), ("--trials 0", "--trials 0: is not at least 1")]
)
def test_options_that_are_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_pace, "is_launcher", lambda: True)
    with pytest.raises(SystemExit):
        search_pace.main(words.split())
    assert says in capsys.readouterr().err
