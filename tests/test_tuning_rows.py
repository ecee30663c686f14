"""Sizes that ``tune`` measures, and the rules that follow."""

from __future__ import annotations

import pytest

from mpicoll.collectives import tuning_rows
from mpicoll.collectives.tuning_rows import Row

FIRST, MOST = 8, 16 << 20


def seconds(nbytes: float, change: float, steepness: float) -> dict[str, float]:
    """Return times of two algorithms that are equal at `change`; ``"late"`` is the better one above it."""
    return {"shared": 1.0, "late": (change / nbytes) ** steepness, "native": 3.0}


@pytest.mark.parametrize("change", [16, 1000, 5 << 20, 7.9 * (1 << 20), 12 << 20])
@pytest.mark.parametrize("steepness", [0.2, 1.0, 4.0])
def test_a_change_is_found_between_two_powers_of_two(change: float, steepness: float) -> None:
    asked = []

    def measure(nbytes: int) -> Row:
        asked.append(nbytes)
        return Row(nbytes, "shared", seconds(nbytes, change, steepness), False)

    rows = tuning_rows.measured(measure, tuning_rows.sizes(FIRST, MOST))
    rules = tuning_rows.rules_of(rows)
    assert len(asked) == len(set(asked)) == len(rows) <= len(tuning_rows.sizes(FIRST, MOST)) + 1
    assert all(nbytes & (nbytes - 1) == 0 for nbytes in asked)
    for nbytes in (FIRST << step for step in range(22)):
        name = next(rule.name for rule in rules if rule.holds(nbytes, 2))
        times = seconds(nbytes, change, steepness)
        assert times[name] <= 1.0501 * min(times.values()), (nbytes, rules)


def test_the_longest_vector_is_measured() -> None:
    assert tuning_rows.sizes(8, 16 << 20)[-2:] == [8 << 20, 16 << 20]
    assert tuning_rows.sizes(8, 8 << 20)[-2:] == [2 << 20, 8 << 20]
    assert tuning_rows.sizes(8, 0) == [8]
    assert tuning_rows.sizes(8, 3 << 20)[-1] == 2 << 20


def test_equal_algorithms_are_not_measured_again() -> None:
    def measure(nbytes: int) -> Row:
        times = {"shared": 2.0, "ring": 1.04 if nbytes < 1000 else 0.98, "tree": 1.01, "native": 2.0}
        return Row(nbytes, "shared", times, False)

    lengths = tuning_rows.sizes(FIRST, MOST)
    rows = tuning_rows.measured(measure, lengths)
    assert [row.nbytes for row in rows] == lengths
    assert [rule.name for rule in tuning_rows.rules_of(rows)] == ["tree", "ring"]


def test_an_algorithm_that_is_impossible_at_the_other_size_is_a_loss() -> None:
    def measure(nbytes: int) -> Row:
        possible = {"shared": 0.999} if nbytes <= 5000 else {}
        return Row(nbytes, "ring", {"ring": 1.1, "native": 2.0, **possible}, False)

    rules = tuning_rows.rules_of(tuning_rows.measured(measure, tuning_rows.sizes(FIRST, MOST)))
    assert [rule.name for rule in rules] == ["shared", "ring"]
    assert rules[0].below == 8192  # all of 4096 to 8191 bytes have one rule
