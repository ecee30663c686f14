"""Options of trials and members: chosen values win over fixed ones, and nothing that is chosen is without effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from mpicoll.errors import UsageError
from mpicoll.search.search_options import parse_search
from mpicoll.search.search_space import OWNERS, applies, grid, parse_space
from mpicoll.search.trainer_member import TrainerPopulation
from mpicoll.search.trainer_objective import TrainerObjective
from mpicoll.train.config import MODELS, OPTIMIZERS
from mpicoll.train.options import option_names, parse, written

VALUES = {"model": MODELS, "optimizer": OPTIMIZERS}
TEXTS = {"transformer": ("--dataset=synthetic_text",)}
"""Other options that a value of an owner needs."""


def objective(space: str, fixed: str) -> TrainerObjective:
    return TrainerObjective(fixed.split(), parse_space(space.split()), "test_accuracy")


# ---- options that some models or optimizers have --------------------------------------------------------------------


def is_refused(name: str, owner: str, value: str) -> bool:
    """Return whether the trainer refuses an option for a value of its owner, whatever the option's value."""
    for text in (True, 1, 0.5, "local"):
        words = [f"--{owner}={value}", *TEXTS.get(value, ()), *written(name, text)]
        try:
            parse(words)
        except UsageError as error:
            option = f"--{name.replace('_', '-')} "
            if str(error).startswith((f"{option}is for --{owner} ", f"{option}needs --{owner} ")):
                return True
    return False


def meanings(name: str) -> Iterator[tuple[str, str, bool]]:
    """Yield each owner with each of its values, and whether the trainer takes the option there."""
    for owner, values in VALUES.items():
        for value in values:
            yield owner, value, not is_refused(name, owner, value)


@pytest.mark.parametrize("name", sorted({*option_names()} - {*VALUES}))
def test_options_are_chosen_where_the_trainer_takes_them(name: str) -> None:
    for owner, value, is_taken in meanings(name):
        is_owned = name in OWNERS and OWNERS[name][0] == owner
        assert is_taken == (not is_owned or applies(name, {owner: value})), (owner, value)


def test_alexnet_has_filters() -> None:
    made = objective("filters=4,8", "--model alexnet")
    assert list(grid(parse_space(["filters=4,8"]), made.defaults, 4)) == [{"filters": 4}, {"filters": 8}]
    assert made.configured({"filters": 8}, 0).filters == 8
    points = grid(parse_space(["model=mlp,conv,alexnet", "filters=4,8", "dropout=0,0.5"]), {}, 4)
    assert [sorted({*point} - {"model"}) for point in points] == [
        [], *[["filters"]] * 2, *[["dropout", "filters"]] * 4
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("space", "fixed", "says"),
    [
        ("nesterov=maybe", "", "--space nesterov=maybe: true or false, an option that is given or not"),
        ("nesterov=true,3", "", "--space nesterov=3: true or false, an option that is given or not"),
        ("nesterov=0..1", "", "--space nesterov=0.0: true or false, an option that is given or not"),
        ("filters=4,8", "", "--space filters: is for --model conv or alexnet, not mlp"),
        ("batch-norm=none,local", "--model conv", "--space batch-norm: is for --model mlp or alexnet, not conv"),
        ("lr=abc", "", "--space lr=abc: 'abc' is not a number of at least 0"),
        ("lr=0.1,abc", "", "--space lr=abc: 'abc' is not a number of at least 0"),
        ("nesterov=true", "--momentum 0", "--space: --nesterov needs --optimizer momentum and a --momentum above 0"),
        ("trust=1e-4..1e-2 optimizer=sgd,adam", "", "--space trust: is for --optimizer lars, not sgd, adam"),
    ],
)
def test_what_no_trial_would_choose_is_refused(space: str, fixed: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        objective(space, fixed)
    assert str(caught.value) == says


def test_what_no_member_would_choose_is_refused() -> None:
    words = ["--population", "4", "--space", "trust=log:1e-4..1e-2", "--", "--dataset", "synthetic:80x4x2"]
    with pytest.raises(UsageError, match="--space trust: is for --optimizer lars, not momentum"):
        TrainerPopulation(parse_search(words))
    words[3] = "lr=abc"
    with pytest.raises(UsageError, match=r"^--space lr=abc: 'abc' is not a number of at least 0$"):
        TrainerPopulation(parse_search(words))


# ---- chosen and fixed values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "fixed"),
    [
        ("compression=none,int8", "--compression sign"),
        ("compression=none,int8", "--compression=sign"),
        ("nesterov=true,false", "--nesterov"),
        ("batch-norm=none,local", "--batch-norm synchronized"),
        ("clip=none,0.5", "--clip 3"),
        ("share-data=false,true", "--share-data"),
        ("lr=0.1,0.2", "--lr 0.3"),
    ],
)
def test_a_chosen_value_wins_over_a_fixed_one(space: str, fixed: str) -> None:
    around = "--dataset digits", "--epochs 3"
    made, plain = objective(space, f"{around[0]} {fixed} {around[1]}"), objective(space, " ".join(around))
    (parameter,) = parse_space([space])
    for value in parameter.ends():
        values: dict[str, Any] = {parameter.name: value}
        found = made.configured(values, 0)
        assert getattr(found, parameter.name) == ("none" if value is None and "norm" in space else value)
        assert found == plain.configured(values, 0)
        words = made.command(values, 0, 2).partition("mpicoll.train ")[2].split()
        assert asdict(parse(words)) == {**asdict(found), "quiet": False, "progress": True}
    assert made.configured({}, 0) != plain.configured({}, 0)  # trials that do not choose it have the fixed one


def test_a_value_of_a_member_wins_over_a_fixed_one() -> None:
    words = ["--population", "4", "--space", "clip=none,0.5", "--", "--clip", "3", "--epochs", "4"]
    population = TrainerPopulation(parse_search(words))
    assert [population.configured({"clip": value}).clip for value in (None, 0.5)] == [None, 0.5]
    assert population.config.clip == 3
