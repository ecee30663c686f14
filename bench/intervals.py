"""Confidence intervals for ratios of two times.

Two things move a median. Within a launch samples scatter, and neighbours scatter together, since a machine has busy
moments: blocks of consecutive rounds are drawn again and again (moving-block bootstrap; Künsch, "The jackknife and the
bootstrap for general stationary observations", Annals of Statistics 17, 1989). Between launches processes land on other
cores and arrays on other pages: that is seen only by launching several times, and counted with Student's t. An interval
is as wide as the larger of the two says. From a single launch it knows the first only.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bench.result_files import Case, Result, ResultSet

DRAWS = 400
CONFIDENCE = 0.95
_BLOCK = 5
_UPPER = (1 + CONFIDENCE) / 2


class ComparisonKey(NamedTuple):
    """Results with equal keys are launches of the same thing."""

    library: str
    thread_level: str
    setting: str
    case: Case
    contender: str


class Interval(NamedTuple):
    """A ratio and the bounds that it lies between with 95 % confidence."""

    value: float
    low: float
    high: float
    launches: int = 1

    @property
    def half(self) -> float:
        """Half its width on a logarithmic scale: 0.1 is about 10 % to either side."""
        return math.log(self.high / self.low) / 2

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec or '.2f'}} [{self.low:{spec or '.2f'}}, {self.high:{spec or '.2f'}}]"


def collect(runs: Iterable[ResultSet]) -> dict[ComparisonKey, list[Result]]:
    """Put launches of the same thing together, in the order in which they come."""
    together: dict[ComparisonKey, list[Result]] = {}
    for run in runs:
        library, level, setting = (str(run.metadata[name]) for name in ("library", "thread_level", "setting"))
        for result in run.results:
            together.setdefault(ComparisonKey(library, level, setting, result.case, result.contender), []).append(
                result
            )
    return together


def median(results: Sequence[Result]) -> float:
    """Return the geometric mean of the launches' medians, in seconds."""
    return math.exp(sum(math.log(result.median) for result in results) / len(results))


def of_median(values: Sequence[float]) -> Interval:
    """Return the median of independent values, and two of them that its true value lies between.

    Nothing is assumed of how they are distributed (order statistics). The confidence is at least 95 % from six values
    on; fewer give their range, five with 94 %.
    """
    ranked, count = sorted(values), len(values)
    skipped = max(0, _binomial(count) - 1)
    return Interval(statistics.median(ranked), ranked[skipped], ranked[count - 1 - skipped], count)


def of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent values and half its 95 % interval's width, by Student's t; 0 for one value."""
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return mean, 0.0
    return mean, _student(count - 1) * statistics.stdev(values) / math.sqrt(count)


# Ranks that measure import this module, and need no SciPy.


@functools.cache
def _student(degrees: int) -> float:
    """Return the upper point of Student's t."""
    from scipy import stats

    return float(stats.t.ppf(_UPPER, degrees))


@functools.cache
def _normal() -> float:
    """Return the upper point of the normal distribution."""
    from scipy import stats

    return float(stats.norm.ppf(_UPPER))


@functools.cache
def _binomial(count: int) -> int:
    """Return the lower point of how many of so many values are below the median."""
    from scipy import stats

    return int(stats.binom.ppf(1 - _UPPER, count, 0.5))


def ratio(above: Sequence[Result], below: Sequence[Result]) -> Interval:
    """Return how many times longer `above` takes than `below`.

    Parameters
    ----------
    above, below
        Launches of two contenders. Where they have the same number of samples in each launch, they were measured in
        turn in the same launches, and rounds are drawn together.
    """
    logs, errors = launches(above, below)
    if logs:
        return _interval(logs, errors)
    over, under = ([_alone(result.samples) for result in results] for results in (above, below))
    top, bottom = (_interval([v for v, _ in side], [e for _, e in side]) for side in (over, under))
    return _quotient(top, bottom)


def launches(above: Sequence[Result], below: Sequence[Result]) -> tuple[list[float], list[float]]:
    """Return the logarithm of the ratio in each launch, and its standard error within the launch.

    Empty if the two were not measured in the same launches.
    """
    paired = len(above) == len(below) and all(
        a.samples.size == b.samples.size for a, b in zip(above, below, strict=True)
    )
    if not paired:
        return [], []
    pairs = [_launch(a.samples, b.samples) for a, b in zip(above, below, strict=True)]
    return [value for value, _ in pairs], [error for _, error in pairs]


def _quotient(above: Interval, below: Interval) -> Interval:
    value, half = above.value / below.value, math.hypot(above.half, below.half)
    return Interval(value, value * math.exp(-half), value * math.exp(half), min(above.launches, below.launches))


def _interval(logs: Sequence[float], errors: Sequence[float]) -> Interval:
    count = len(logs)
    mean = sum(logs) / count
    within = _normal() * math.sqrt(sum(error**2 for error in errors)) / count
    between = 0.0
    if count > 1:
        deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / (count - 1))
        between = _student(count - 1) * deviation / math.sqrt(count)
    # What launches differ by holds what samples differ by, but a few launches may agree by luck.
    half = max(within, between)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), count)


def _launch(above: np.ndarray, below: np.ndarray) -> tuple[float, float]:
    """Return the logarithm of the ratio of medians in one launch, and its standard error."""
    rounds = _rounds(above.size)
    drawn = np.log(np.median(above[rounds], axis=1) / np.median(below[rounds], axis=1))
    return float(np.log(np.median(above) / np.median(below))), float(drawn.std())


def _alone(samples: np.ndarray) -> tuple[float, float]:
    return _launch(samples, np.ones_like(samples))


def _rounds(count: int) -> np.ndarray:
    """Return the numbers of the rounds of each draw: blocks of neighbours; the same draws every time."""
    block = min(_BLOCK, max(1, count // 4))
    random = np.random.default_rng(count)
    starts = random.integers(0, count - block + 1, (DRAWS, -(-count // block)))
    return (starts[:, :, None] + np.arange(block)).reshape(DRAWS, -1)[:, :count]
