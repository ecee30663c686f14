"""Descriptions of commands, as a terminal shows them."""

from __future__ import annotations

import pytest

from mpicoll import tune
from mpicoll.explain_command import make_parser
from mpicoll.help_text import without_markup


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("``--library`` and :mod:`mpicoll.measure`", "--library and mpicoll.measure"),
        ("see :func:`~mpicoll.search.run`, :doc:`tuning <tune>`.", "see mpicoll.search.run, tuning."),
        ("10^9 bytes: `n` of them", "10^9 bytes: `n` of them"),
        (None, ""),
    ],
)
def test_markup_is_left_out(text: str | None, shown: str) -> None:
    assert without_markup(text) == shown


def test_help_has_no_markup() -> None:
    assert "`" not in tune.make_parser().format_help()


@pytest.mark.parametrize("cost", ["nan", "-1", "inf", "x"])
def test_costs_of_an_explanation_are_numbers_of_seconds(cost: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["explain", "ring", "--alpha", cost])
    assert f"argument --alpha: {cost!r} is not a number of seconds" in capsys.readouterr().err
