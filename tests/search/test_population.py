"""Decisions of population-based training, its settings, options and report; no ranks."""

from __future__ import annotations

import math
import random

import pytest

from mpicoll.errors import UsageError
from mpicoll.search.population_report import line_of_member, ranked
from mpicoll.search.population_selection import draw, first_params, perturb, replacements
from mpicoll.search.population_settings import (
    COPIED,
    FAILED,
    TRAINED,
    MemberRecord,
    PopulationSettings,
    as_json,
    from_json,
    lineage,
)
from mpicoll.search.search_options import parse_search
from mpicoll.search.search_space import parse_space

SPACE = parse_space(["lr=log:1e-3..1", "n=int:1..40", "k=0..1:0.25", "batch=32,64,128", "kind=a,b"])
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def fits(name, value):
    return {
        "lr": lambda: 1e-3 <= value <= 1,
        "n": lambda: isinstance(value, int) and 1 <= value <= 40,
        "k": lambda: value in GRID,
        "batch": lambda: value in (32, 64, 128),
        "kind": lambda: value in ("a", "b"),
    }[name]()


def test_draws_and_perturbed_values_are_in_the_space():
    generator = random.Random(1)
    for parameter in SPACE:
        for _ in range(300):
            value = draw(parameter, generator)
            assert fits(parameter.name, value)
            assert fits(parameter.name, perturb(parameter, value, generator))


def test_first_params_depend_on_the_seed_and_the_member():
    first = first_params(SPACE, 6, 3)
    assert first == first_params(SPACE, 6, 3)
    assert first[:4] == first_params(SPACE, 4, 3)
    assert first != first_params(SPACE, 6, 4)
    assert len({each["lr"] for each in first}) == 6


def test_numbers_change_by_a_fifth_and_choices_by_one_place():
    by_name = {each.name: each for each in SPACE}
    generator = random.Random(0)
    assert {round(perturb(by_name["lr"], 0.1, generator), 9) for _ in range(40)} == {0.08, 0.12}
    assert {perturb(by_name["n"], 2, generator) for _ in range(40)} == {1, 3}  # 1.6 and 2.4 are 2 again
    assert {perturb(by_name["n"], 20, generator) for _ in range(40)} == {16, 24}
    assert {perturb(by_name["k"], 0.5, generator) for _ in range(40)} == {0.25, 0.75}
    assert {perturb(by_name["batch"], 64, generator) for _ in range(40)} == {32, 128}
    assert {perturb(by_name["batch"], 128, generator) for _ in range(40)} == {64, 128}
    assert perturb(by_name["lr"], 1e-3, generator) >= 1e-3


def decide(scores, quantile=0.25, maximize=True, resample=0.0, seed=0):
    params = [{"lr": 0.01 * (1 + number)} for number in range(len(scores))]
    generator = random.Random(seed)
    return replacements(scores, params, SPACE[:1] if SPACE[0].name == "lr" else parse_space(["lr=log:1e-3..1"]),
                        generator, maximize=maximize, quantile=quantile, resample=resample)  # fmt: skip


def test_the_worst_continue_from_the_best():
    scores = [0.5, 0.9, 0.1, 0.8, 0.2, 0.7, 0.6, 0.4]
    found = decide(scores)
    assert [each.target for each in found] == [2, 4]
    assert {each.source for each in found} <= {1, 3}
    for each in found:
        assert each.params["lr"] / (0.01 * (1 + each.source)) == pytest.approx(0.8) or each.params["lr"] / (
            0.01 * (1 + each.source)
        ) == pytest.approx(1.2)
    assert [each.target for each in decide(scores, maximize=False)] == [1, 3]
    assert decide(scores, seed=1) == decide(scores, seed=1)


@pytest.mark.parametrize("quantile", [0.25, 0.01])
def test_the_worst_member_is_replaced_however_few_there_are(quantile):
    for scores, pair in (([0.5, 0.9, 0.1], (2, 1)), ([0.5, 0.9], (0, 1)), ([0.5, 0.5], (1, 0))):
        assert [(each.target, each.source) for each in decide(scores, quantile)] == [pair]
    assert decide([0.5, math.nan, 0.9], quantile)[0].target == 1
    assert len(decide([0.5, math.nan, 0.9], quantile)) == 1


def test_members_without_a_score_are_replaced_whatever_the_quantile():
    nan = math.nan
    found = decide([nan, 0.5, nan, 0.7, nan, 0.6, 0.4, nan])
    assert [each.target for each in found] == [0, 2, 4, 7]
    assert {each.source for each in found} <= {3, 5}
    only = decide([nan, 0.5])
    assert [(each.target, each.source) for each in only] == [(0, 1)]
    assert decide([nan, nan]) == []
    one_failed = decide([nan, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert [each.target for each in one_failed] == [0, 1]


def test_resampled_values_are_drawn_from_the_whole_range():
    values = [decide([0.1, 0.9], 0.5, resample=1.0, seed=seed)[0].params["lr"] for seed in range(50)]
    assert min(values) < 0.005
    assert max(values) > 0.2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"members": 3}, "--population 3: is not at least 2, and one for each of the 4 groups"),
        ({"quantile": 0.6}, "--quantile 0.6"),
        ({"quantile": 0.0}, "--quantile 0"),
        ({"resample": 1.5}, "resample=1.5"),
        ({"generations": 0}, "generations=0"),
        ({"direction": "up"}, "--direction up"),
        ({"space": ()}, "--space"),
    ],
)
def test_settings_that_are_refused(change, says):
    with pytest.raises(UsageError) as caught:
        PopulationSettings(**{"space": SPACE, **change}).check(8, 2)
    assert says in str(caught.value)


def record(generation, member, score, source, lr):
    state = FAILED if math.isnan(score) else TRAINED if source == member else COPIED
    return MemberRecord(generation, member, score, {"lr": lr}, state, source, "why" if state == FAILED else "")


HISTORY = [
    record(0, 0, 0.2, 1, 0.5), record(0, 1, 0.4, 1, 0.1),
    record(1, 0, 0.5, 0, 0.12), record(1, 1, math.nan, 0, 0.1),
    record(2, 0, 0.6, 0, 0.12), record(2, 1, 0.7, 1, 0.14),
]  # fmt: skip


def test_the_schedule_follows_the_copies_back():
    assert [each["lr"] for each in lineage(HISTORY, 1)] == [0.1, 0.12, 0.14]
    assert [each["lr"] for each in lineage(HISTORY, 0)] == [0.1, 0.12, 0.12]
    assert lineage(HISTORY, None) == []


def test_records_survive_json():
    for each in HISTORY:
        again = from_json(as_json(each))
        assert as_json(again) == as_json(each)
        assert math.isnan(again.score) == math.isnan(each.score)


def test_lines_of_the_table():
    lines = [line_of_member(each) for each in ranked(HISTORY[2:4], "test_accuracy")]
    assert lines[0].split() == ["1", "0", "0.5", "lr=0.12"]
    assert lines[1].endswith("lr=0.1  failed: why; continues from 0")
    assert line_of_member(HISTORY[0]).endswith("lr=0.5  continues from 1")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--interval 2", "--interval has no meaning without --population"),
        ("--population 4 --trials 3", "--trials has no meaning with --population"),
        ("--population 4 --pruner asha", "--pruner has no meaning with --population"),
        ("--population 1", "--population: '1' is not a whole number of at least 2"),
        ("--population 4 --quantile 0.7", "'0.7' is not a fraction above 0 and at most 0.5"),
    ],
)
def test_options_that_are_refused(options, says):
    with pytest.raises(UsageError) as caught:
        parse_search(["--space", "lr=0..1", *options.split()])
    assert says in str(caught.value)
