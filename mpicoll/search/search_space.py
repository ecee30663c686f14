"""Search space of a command line: ``lr=log:1e-4..1e-1 batch=32,64,128``. Needs neither Optuna nor MPI."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mpicoll.errors import UsageError
from mpicoll.quantities import alternatives

Value = float | int | str | bool | None
_KINDS = {"": (False, False), "log": (True, False), "int": (False, True), "logint": (True, True)}
"""Logarithmic, and integers only."""
_CONSTANTS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}
OWNERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "hidden": ("model", ("mlp",)),
    "filters": ("model", ("conv", "alexnet")),
    "layers": ("model", ("transformer",)),
    "heads": ("model", ("transformer",)),
    "width": ("model", ("transformer",)),
    "dropout": ("model", ("alexnet", "transformer")),
    "batch_norm": ("model", ("mlp", "alexnet")),
    "momentum": ("optimizer", ("momentum", "lars")),
    "trust": ("optimizer", ("lars",)),
    "nesterov": ("optimizer", ("momentum",)),
    "beta1": ("optimizer", ("adam", "adamw", "lamb")),
    "beta2": ("optimizer", ("adam", "adamw", "lamb")),
    "epsilon": ("optimizer", ("adagrad", "adam", "adamw", "lamb")),
}
"""Options of the trainer that have a meaning only with some values of another one: those with which it takes them."""


class Suggests(Protocol):
    """Source of values: a trial of Optuna or of :mod:`mpicoll.search`."""

    def suggest_float(self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False) -> Any:
        """Return a real number."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> Any:
        """Return a whole number."""

    def suggest_categorical(self, name: str, choices: Sequence[Value]) -> Any:
        """Return one of the choices."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; `step` is 0 for any number between them."""

    name: str
    low: float
    high: float
    log: bool = False
    integer: bool = False
    step: float = 0

    def suggest(self, trial: Suggests) -> Value:
        """Return the value that a trial takes."""
        if self.integer:
            step = int(self.step) or 1
            value: Value = trial.suggest_int(self.name, int(self.low), int(self.high), step=step, log=self.log)
        else:
            value = trial.suggest_float(self.name, self.low, self.high, step=self.step or None, log=self.log)
        return value

    def ends(self) -> list[Value]:
        """Return values that stand for all when options are checked."""
        return [int(self.low), int(self.high)] if self.integer else [self.low, self.high]

    def points(self, count: int) -> list[Value]:
        """Return at most `count` different values from `low` to `high`, evenly spaced; all of them if there is a step.

        On a logarithmic scale their quotients are equal, but for rounding of integers.
        """
        if self.step:
            number = int((self.high - self.low) / self.step * (1 + 1e-12)) + 1
            found = [self.low + self.step * place for place in range(number)]
        else:
            low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
            places = [low + (high - low) * place / max(1, count - 1) for place in range(count)]
            found = [math.exp(place) if self.log else place for place in places]
            found[0], found[-1] = self.low, self.high if count > 1 else self.low
        return list(dict.fromkeys(round(each) for each in found)) if self.integer else list(dict.fromkeys(found))


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    name: str
    values: tuple[Value, ...]

    def suggest(self, trial: Suggests) -> Value:
        """Return the value that a trial takes."""
        value: Value = trial.suggest_categorical(self.name, self.values)
        return value

    def ends(self) -> list[Value]:
        """Return all values."""
        return list(self.values)

    def points(self, count: int) -> list[Value]:
        """Return all values."""
        return list(self.values)


Parameter = Range | Choice


def parse_space(items: Sequence[str]) -> tuple[Parameter, ...]:
    """Return the parameters of ``NAME=...`` texts, those that others depend on first.

    ======================  ===========================================
    ``LOW..HIGH``           real numbers
    ``log:LOW..HIGH``       real numbers on a logarithmic scale
    ``int:LOW..HIGH``       whole numbers
    ``logint:LOW..HIGH``    whole numbers on a logarithmic scale
    ``LOW..HIGH:STEP``      multiples of STEP from LOW on
    ``A,B,C``               one of these values
    ``A;B,C``               one of these values, which contain commas
    ======================  ===========================================

    Raises
    ------
    UsageError
        If a text has another form, a name comes twice, or a range is empty.
    """
    found = [_parse(item) for item in items]
    names = [parameter.name for parameter in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--space {twice}: given twice")
    owners = {owner for owner, _ in OWNERS.values()}
    return tuple(sorted(found, key=lambda parameter: parameter.name not in owners))


def _parse(item: str) -> Parameter:
    name, equals, text = item.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or not name or not text:
        raise UsageError(f"--space {item}: not of the form NAME=LOW..HIGH or NAME=A,B,C")
    kind, colon, rest = text.partition(":")
    if ".." in text:
        kind, rest = (kind, rest) if colon and ".." in rest else ("", text)
        if kind not in _KINDS:
            raise UsageError(f"--space {item}: {kind!r} is not one of log, int, logint")
        return _parse_range(item, name, rest, *_KINDS[kind])
    values = tuple(_constant(each.strip()) for each in text.split(";" if ";" in text else ",") if each.strip())
    if len(set(values)) < len(values) or not values:
        raise UsageError(f"--space {item}: needs values that differ")
    return Choice(name, values)


def _parse_range(item: str, name: str, text: str, log: bool, integer: bool) -> Range:
    match = re.fullmatch(r"([^.:]+(?:\.\d[^.:]*)?)\.\.([^:]+)(?::([^:]+))?", text)
    try:
        numbers = [float(each) for each in match.groups("0")] if match else []
    except ValueError:
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)) or (integer and any(each % 1 for each in numbers)):
        kind = "whole numbers" if integer else "numbers"
        raise UsageError(f"--space {item}: not a range of {kind} such as 1..8")
    low, high, step = numbers
    if not low < high or step < 0 or step > high - low:
        raise UsageError(f"--space {item}: the range is empty")
    if log and (low <= 0 or step):
        raise UsageError(f"--space {item}: a logarithmic scale begins above 0 and has no step")
    return Range(name, low, high, log, integer, step)


def _constant(text: str) -> Value:
    """Return a number, True, False or None for a text that stands for it; other texts as they are."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if math.isfinite(value):
            return value
    return text


def applies(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether an option has a meaning beside the options `values`."""
    if name not in OWNERS:
        return True
    owner, owned = OWNERS[name]
    return values.get(owner) in owned


def check_meaning(space: Sequence[Parameter], defaults: Mapping[str, Any]) -> None:
    """Refuse a parameter that no trial would choose, since its option has a meaning in none of them.

    Parameters
    ----------
    defaults
        Options that are the same in all trials.

    Raises
    ------
    UsageError
        Naming the parameter.
    """
    chosen = {parameter.name: parameter.ends() for parameter in space}
    for name in chosen:
        owner, owned = OWNERS.get(name, ("", ()))
        values = chosen.get(owner, [defaults.get(owner)])
        if not any(applies(name, {owner: value}) for value in values):
            option, said = name.replace("_", "-"), ", ".join(map(str, values))
            raise UsageError(f"--space {option}: is for --{owner} {alternatives(owned)}, not {said}")


def grid(space: Sequence[Parameter], defaults: Mapping[str, Any], count: int) -> Iterator[dict[str, Value]]:
    """Yield every combination of values, the last parameter changing fastest, without options that have no meaning.

    Parameters
    ----------
    defaults
        Options that are the same in all trials.
    count
        Values of a range that has no step.
    """
    yield from _combinations(space, dict(defaults), {}, count)


def _combinations(
    space: Sequence[Parameter], known: dict[str, Any], chosen: dict[str, Value], count: int
) -> Iterator[dict[str, Value]]:
    if not space:
        yield dict(chosen)
        return
    first, rest = space[0], space[1:]
    if not applies(first.name, known):
        yield from _combinations(rest, known, chosen, count)
        return
    for value in first.points(count):
        more = {first.name: value}
        yield from _combinations(rest, known | more, chosen | more, count)
