"""Sharing of a benchmark's time among its launches."""

import pytest

from bench.__main__ import BenchStage, TimeBudget


def stage(title: str, cases: int, weight: float = 1.0) -> BenchStage:
    return BenchStage(title, "bench.collectives", [title], 2, cases, weight, "python")


def run(plan: list[BenchStage], seconds: float, beside: dict[str, float]) -> tuple[float, list[float]]:
    """Return what all launches take together, and the share of each."""
    budget, total, shares = TimeBudget(plan, seconds), 0.0, []
    for each in plan:
        shares.append(budget.next_share())
        taken = beside[each.title] + each.cases * shares[-1]
        budget.spent(taken, shares[-1])
        total += taken
    return total, shares


def test_launches_take_the_time_that_there_is():
    plan = [stage("long", 10), stage("short", 20, 0.5)] * 3
    total, shares = run(plan, 600.0, {"long": 80.0, "short": 5.0})
    assert total == pytest.approx(600)
    assert min(shares) > 0
    assert shares[-2] == pytest.approx(2 * shares[-1])


def test_a_launch_has_a_share_when_no_time_is_left():
    total, shares = run([stage("long", 10)] * 3, 100.0, {"long": 80.0})
    assert shares[1:] == [0.05, 0.05]
    assert total > 240
