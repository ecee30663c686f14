"""Intervals hold the truth about as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench import intervals, result_table
from bench.intervals import Interval
from bench.result_files import SINGLE, WRITTEN, Case, Result
from tests.bench import synthetic

CASE = Case("allreduce", 8, 2, "float32", 2)


def launches(seed: int, count: int, noise: float) -> tuple[list[Result], list[Result]]:
    random = np.random.default_rng(seed)
    native, ours = [], []
    for _ in range(count):
        moments = np.exp(random.normal(0, 0.5, 60))  # common to both
        own = np.exp(random.normal(0, 0.1, 60) + random.normal(0, noise))
        native.append(Result(CASE, "native", 2 * moments))
        ours.append(Result(CASE, "auto", moments * own))
    return native, ours


@pytest.mark.parametrize(("count", "noise"), [(1, 0.0), (3, 0.0), (3, 0.1), (5, 0.1)])
def test_the_truth_is_mostly_inside(count: int, noise: float) -> None:
    inside = 0
    for seed in range(200):
        low, high = intervals.ratio(*launches(seed, count, noise))[1:3]
        inside += low <= 2 <= high
    assert 0.9 <= inside / 200 <= 1.0


def test_what_hits_both_cancels() -> None:
    native, ours = launches(1, 1, 0.0)
    paired = intervals.ratio(native, ours)
    other = Result(CASE, "auto", ours[0].samples[:-1])  # as if measured in another launch
    assert paired.half < 0.1 < intervals.ratio(native, [other]).half


def test_one_launch_knows_less_than_three() -> None:
    one, three = (intervals.ratio(*launches(7, count, 0.2)) for count in (1, 3))
    assert (one.launches, three.launches) == (1, 3)
    assert one.half < three.half


@pytest.mark.parametrize(("count", "least"), [(5, 0.92), (6, 0.95), (9, 0.95), (20, 0.95)])
def test_the_median_is_mostly_inside(count: int, least: float) -> None:
    random = np.random.default_rng(count)
    found = [intervals.of_median(random.exponential(1.0, count).tolist()) for _ in range(2000)]
    inside = np.mean([one.low <= math.log(2) <= one.high for one in found])
    assert least - 0.01 <= inside <= 0.99
    assert intervals.of_median([3.0]) == Interval(3.0, 3.0, 3.0, 1)


def test_the_mean_is_mostly_inside() -> None:
    random = np.random.default_rng(1)
    found = [intervals.of_mean(random.normal(0.5, 0.1, 5).tolist()) for _ in range(2000)]
    inside = np.mean([abs(mean - 0.5) <= half for mean, half in found])
    assert 0.94 <= inside <= 0.96
    assert intervals.of_mean([0.25]) == (0.25, 0.0)


def test_an_interval_prints_its_bounds() -> None:
    assert f"{Interval(2, 1.5, 2.5)}" == "2.00 [1.50, 2.50]"


def test_tables_show_ratios_and_what_is_wrong() -> None:
    runs = [synthetic.run(seed) for seed in range(3)]
    ((title, rows),) = result_table.group(runs).items()
    assert (title.benchmark, title.size) == ("allreduce", 2)
    header, *lines = result_table.cells(rows)
    extra = ["busbw GB/s", "auto takes", "auto over fastest"]
    assert header == ["size", "native us", "auto", "plan", "ring", "tree", *extra, "wrong"]
    time, name = lines[0][-2].split()
    assert name == "tree"
    assert float(time) == pytest.approx(0.5 / 1.2, rel=0.1)
    assert len(lines) == len(synthetic.SIZES) + 2
    assert lines[0][0] == "8 B"
    assert lines[-2][0] == "geometric mean"
    assert float(lines[-2][2]) == pytest.approx(2, rel=0.1)
    assert float(lines[-2][3]) == pytest.approx(5, rel=0.1)
    long = result_table.cells(rows, long=True)
    assert len(long) == 1 + len(synthetic.SIZES) * len(synthetic.PACE)
    assert long[0][2:6] == ["median us", "p5", "p90", "p99"]


def test_single_calls_have_a_table_with_percentiles() -> None:
    pace = {"native": 1.0, "native Alloc_mem": 0.9, "auto": 0.5, "pipelined_ring": 2.0}
    single = synthetic.run(2, pace=pace, manner=(SINGLE, WRITTEN))
    tables = result_table.group([synthetic.run(1, pace=pace), single])
    assert [result_table.heading(title).rpartition("float32, ")[2] for title in tables] == [
        "back to back, send buffers written",
        "single calls, send buffers written",
    ]
    plain, found = (result_table.cells(rows) for rows in tables.values())
    assert not [name for name in plain[0] if "%" in name]
    names = ["native us 50/90/99%", "auto us 50/90/99%"]
    assert [name for name in found[0] if "%" in name] == names
    assert found[0][2:5] == ["native Alloc_mem", "auto", "pipelined ring"]
    samples = single.results[0].samples * 1e6
    expected = " / ".join(f"{np.percentile(samples, percent):.1f}" for percent in (50, 90, 99))
    assert found[1][found[0].index(names[0])] == expected
