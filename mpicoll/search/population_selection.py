"""Decisions of population-based training: first hyper-parameters, replaced members, perturbed hyper-parameters."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpicoll.search.search_space import Choice, Parameter, Range, Value

FACTORS = (0.8, 1.2)
"""Factors by which a number changes (Jaderberg et al., 2017, appendix A)."""
Params = dict[str, Any]


class Replacement(NamedTuple):
    """Member `target` continues from the state of member `source`, with the hyper-parameters `params`."""

    target: int
    source: int
    params: Params


def first_params(space: Sequence[Parameter], members: int, seed: int) -> list[Params]:
    """Return the hyper-parameters of each member at the start, independent draws from the space."""
    return [
        {each.name: draw(each, random.Random(f"{seed} start {number} {each.name}")) for each in space}
        for number in range(members)
    ]


def draw(parameter: Parameter, generator: random.Random) -> Value:
    """Return a value of a parameter, uniform on its scale."""
    if isinstance(parameter, Choice):
        return generator.choice(parameter.values)
    if parameter.log:
        low, high = math.log(parameter.low), math.log(parameter.high)
        return _fitted(parameter, math.exp(low + (high - low) * generator.random()))
    return _fitted(parameter, parameter.low + (parameter.high - parameter.low) * generator.random())


def perturb(parameter: Parameter, value: Value, generator: random.Random) -> Value:
    """Return a value near another one: numbers of a range times one of `FACTORS`, choices one place up or down.

    A number that would not change by rounding moves by one step, and one that would leave the range goes to its end.
    Choices that are not all numbers are drawn anew.
    """
    if isinstance(parameter, Choice):
        if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in parameter.values):
            return generator.choice(parameter.values)
        ordered = sorted(parameter.values)  # type: ignore[type-var]
        place = ordered.index(value) + generator.choice((-1, 1))
        return ordered[min(max(place, 0), len(ordered) - 1)]
    assert isinstance(value, int | float)
    factor = generator.choice(FACTORS)
    moved = _fitted(parameter, value * factor)
    step = parameter.step or (1.0 if parameter.integer else 0.0)
    return _fitted(parameter, value + math.copysign(step, factor - 1)) if moved == value and step else moved


def _fitted(parameter: Range, value: float) -> Value:
    """Return the nearest value of a range."""
    if parameter.step:
        value = parameter.low + parameter.step * round((value - parameter.low) / parameter.step)
        if value > parameter.high * (1 + 1e-12):
            value -= parameter.step
    elif parameter.integer:
        value = round(value)
    value = min(max(value, parameter.low), parameter.high)
    return round(value) if parameter.integer else value


def replacements(
    scores: Sequence[float],
    params: Sequence[Mapping[str, Any]],
    space: Sequence[Parameter],
    generator: random.Random,
    *,
    maximize: bool,
    quantile: float,
    resample: float,
) -> list[Replacement]:
    """Return which members continue from which others: exploit by truncation selection, and explore.

    Every member among the worst `quantile`, which holds one at least, and every member without a score, continues from
    one of the best `quantile`, drawn for each of them. Each of its hyper-parameters is then drawn anew with probability
    `resample`, and perturbed otherwise. (Jaderberg et al., "Population based training of neural networks",
    arXiv:1711.09846, 2017, section 4.1.)

    Parameters
    ----------
    scores
        Score of each member; NaN for those that failed.
    maximize
        True if larger scores are better.

    Returns
    -------
    list of Replacement
        In the order of targets; no source is also a target. Empty if all members failed.
    """
    alive = [number for number, score in enumerate(scores) if not math.isnan(score)]
    # Ties are broken by number, so that all machines decide alike.
    ranked = sorted(alive, key=lambda number: (-scores[number] if maximize else scores[number], number))
    count = max(1, int(quantile * len(scores)))
    best = ranked[:count]
    failed = [number for number in range(len(scores)) if number not in set(alive)]
    worst = ranked[len(ranked) - max(0, count - len(failed)) :] if count > len(failed) else []
    targets = sorted({*failed, *worst} - set(best))
    if not best:
        return []
    found = []
    for target in targets:
        source = generator.choice(best)
        chosen = {each.name: _explored(each, params[source][each.name], generator, resample) for each in space}
        found.append(Replacement(target, source, chosen))
    return found


def _explored(parameter: Parameter, value: Value, generator: random.Random, resample: float) -> Value:
    if generator.random() < resample:
        return draw(parameter, generator)
    return perturb(parameter, value, generator)
