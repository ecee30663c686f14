"""Numbers as options and texts."""

from __future__ import annotations

import argparse

import pytest

from mpicoll import tune
from mpicoll.quantities import (
    alternatives,
    counted,
    format_nbytes,
    parse_nbytes,
    parse_seconds,
    positive,
    positive_number,
    whole_number,
)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "1e999", "", "one"])
def test_what_is_no_positive_number_is_refused(text: str) -> None:
    for read in (positive, positive_number):
        with pytest.raises(argparse.ArgumentTypeError, match=repr(text)):
            read(text)


def test_positive_numbers() -> None:
    assert positive("12") == 12
    assert positive_number("0.5") == 0.5
    assert positive_number("1e-3") == 1e-3


@pytest.mark.parametrize("text", ["nan", "0", "-2"])
def test_tune_refuses_a_time_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.make_parser().parse_args([f"--seconds={text}"])
    assert "--seconds" in capsys.readouterr().err


def test_tune_says_that_sizes_are_whole_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.make_parser().parse_args(["--max-mb", "0.1"])
    reason = "--max-mb: '0.1' is not a whole number of MB (2^20 bytes); 0 measures 8 bytes alone\n"
    assert capsys.readouterr().err.endswith(reason)


@pytest.mark.parametrize("nbytes", [1, 96, 4096, 1 << 20, 3 << 30, 4097])
def test_numbers_of_bytes_are_read_as_they_are_written(nbytes: int) -> None:
    assert parse_nbytes(format_nbytes(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("5ms", 5e-3), ("200us", 2e-4), ("0.1s", 0.1), ("1.5 MS", 1.5e-3), ("0", 0.0), ("0us", 0.0)]
)
def test_times_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "-5ms", "ms", "5min", "1e3ms", "", "5msx", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text!r} is not a time"):
        parse_seconds(text)


def test_a_whole_number_may_be_0() -> None:
    assert [whole_number(text) for text in ("0", "7")] == [0, 7]
    for text in ("-1", "1.5", "", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            whole_number(text)


def test_one_of_a_kind_is_in_the_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(number, "class", "classes") for number in (1, 2)] == ["1 class", "2 classes"]


def test_words_to_choose_from_are_listed() -> None:
    words = ("adam", "adamw", "lamb")
    assert [alternatives(words[:count]) for count in (1, 2, 3)] == ["adam", "adam or adamw", "adam, adamw or lamb"]
