"""Accuracies of several seeds, as tables of trained models show them: means with 95 % intervals.

An interval says how far the mean of as many other seeds may lie, for the same held-out samples.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench import intervals

SEEDS = 5
"""As many as are trained unless something else is asked for."""


def cell(by_seed: Mapping[int, float]) -> str:
    """Return the mean of accuracies between 0 and 1, in percent."""
    mean, half = intervals.of_mean(list(by_seed.values()))
    return f"{mean:.2%}{_margin(half, len(by_seed))}"


def difference(by_seed: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Return by how much they are better than others of the same seeds, in percent; empty if none is the same.

    What a seed does to both cancels, so that the interval may be narrower than that of either.
    """
    pairs = [(by_seed[seed], base[seed]) for seed in by_seed if seed in base]
    if not pairs:
        return ""
    mean, half = intervals.of_mean([one - other for one, other in pairs])
    return f"{100 * mean:+.2f}{_margin(half, len(pairs))}"


def _margin(half: float, count: int) -> str:
    return f" ±{100 * half:.2f}" if count > 1 else ""
