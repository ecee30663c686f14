"""Search spaces and command lines of a search, without Optuna or MPI."""

from __future__ import annotations

import random

import pytest

from mpicoll.errors import UsageError
from mpicoll.search.search_options import parse_search
from mpicoll.search.search_space import Choice, Range, applies, grid, parse_space
from mpicoll.train.options import HelpRequested


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("lr=log:1e-4..1e-1", Range("lr", 1e-4, 1e-1, log=True)),
        ("momentum=0..0.99", Range("momentum", 0, 0.99)),
        ("momentum=0.5..0.9:0.2", Range("momentum", 0.5, 0.9, step=0.2)),
        ("hidden=int:16..256", Range("hidden", 16, 256, integer=True)),
        ("hidden=int:16..256:16", Range("hidden", 16, 256, integer=True, step=16)),
        ("hidden=logint:16..256", Range("hidden", 16, 256, log=True, integer=True)),
        ("weight-decay=-1.5..2", Range("weight_decay", -1.5, 2)),
        ("--batch=32,64", Choice("batch", (32, 64))),
        ("hidden=64;128,64", Choice("hidden", (64, "128,64"))),
        ("nesterov=true,false", Choice("nesterov", (True, False))),
        ("clip=none,0.5", Choice("clip", (None, 0.5))),
        ("compression=none,int4:block=128", Choice("compression", (None, "int4:block=128"))),
        ("model=mlp", Choice("model", ("mlp",))),
    ],
)
def test_a_parameter_is_read(text: str, wanted: Range | Choice) -> None:
    assert parse_space([text]) == (wanted,)


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (["lr"], "lr: not of the form"),
        (["lr="], "lr=: not of the form"),
        (["=1"], "=1: not of the form"),
        (["lr=exp:1..2"], "'exp' is not one of log, int, logint"),
        (["lr=2..1"], "the range is empty"),
        (["lr=1..1"], "the range is empty"),
        (["lr=1..nan"], "not a range of numbers"),
        (["lr=1..inf"], "not a range of numbers"),
        (["lr=1..x"], "not a range of numbers"),
        (["batch=int:1..2.5"], "not a range of whole numbers"),
        (["lr=log:0..1"], "logarithmic scale begins above 0"),
        (["lr=log:1..2:0.5"], "logarithmic scale begins above 0 and has no step"),
        (["lr=1..2:3"], "the range is empty"),
        (["batch=32,32"], "values that differ"),
        (["batch=,"], "values that differ"),
        (["lr=1,2", "lr=3,4"], "lr: given twice"),
    ],
)
def test_wrong_spaces(items: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_space(items)


def test_what_others_depend_on_comes_first() -> None:
    space = parse_space(["hidden=int:1..4", "lr=0..1", "model=mlp,conv", "optimizer=sgd,adam"])
    assert [parameter.name for parameter in space] == ["model", "optimizer", "hidden", "lr"]


def test_points_of_a_range() -> None:
    assert Range("x", 1, 1000, log=True).points(4) == pytest.approx([1, 10, 100, 1000])
    assert Range("x", 1, 4).points(4) == pytest.approx([1, 2, 3, 4])
    assert Range("x", 1, 3, integer=True).points(8) == [1, 2, 3]
    assert Range("x", 0.1, 0.7, step=0.2).points(2) == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert Range("x", 2, 10, step=3, integer=True).points(2) == [2, 5, 8]
    for _ in range(100):
        low = random.uniform(0.01, 1)
        points = Range("x", low, 3 * low, log=True).points(random.randint(1, 9))
        assert points[0] == low
        assert all(low <= each <= 3 * low for each in points)  # type: ignore[operator]


def test_a_grid_has_no_options_without_a_meaning() -> None:
    space = parse_space(["hidden=8,16", "model=mlp,conv,logistic", "filters=2,4", "momentum=0,0.9"])
    points = list(grid(space, {"model": "mlp", "optimizer": "momentum"}, 3))
    assert len(points) == len({tuple(sorted(point.items())) for point in points}) == 2 * (2 + 2 + 1)
    assert {"model": "conv", "filters": 4, "momentum": 0.9} in points
    assert all(("hidden" in point) == (point["model"] == "mlp") for point in points)
    assert all("momentum" not in point for point in grid(space, {"model": "mlp", "optimizer": "adam"}, 3))
    assert applies("lr", {})


def test_options_after_two_dashes_and_unknown_ones_are_the_trainers() -> None:
    words = "--space lr=0..1 batch=1,2 --epochs 3 --group 2 --quiet -- --seed 4 --quiet --space"
    options = parse_search(words.split())
    assert [parameter.name for parameter in options.space] == ["lr", "batch"]
    assert options.trainer == ("--epochs", "3", "--seed", "4", "--quiet", "--space")
    assert (options.group, options.trials, options.quiet) == (2, 32, True)
    assert parse_search(["--space", "lr=1,2", "--sampler", "grid"]).trials is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "nothing to search for"),
        ("--space", "expected at least one argument"),
        ("--space lr=1,2 --group 0", "'0' is not a whole number of at least 1"),
        ("--space lr=1,2 --sampler x", "--sampler"),
        ("--space lr=1,2 --reduction 1", "at least 2"),
    ],
)
def test_wrong_command_lines(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_search(words.split())


def test_help_shows_the_forms_of_a_space() -> None:
    with pytest.raises(HelpRequested) as text:
        parse_search(["--help"])
    assert "lr=log:1e-4..1e-1" in str(text.value)
    assert "--storage" in str(text.value)
