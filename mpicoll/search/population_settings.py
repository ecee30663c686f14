"""Settings, records and result of population-based training. Needs neither Optuna nor MPI."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpicoll.errors import UsageError
from mpicoll.quantities import counted
from mpicoll.search.search_space import Parameter

TRAINED, COPIED, FAILED = "trained", "copied", "failed"
"""States of a member after a generation: it goes on, continues from another member, or has failed and does so."""


@dataclass(frozen=True)
class PopulationSettings:
    """Settings of a population; see :func:`mpicoll.search.run_population`."""

    space: tuple[Parameter, ...]
    members: int = 8
    generations: int = 10
    direction: str = "maximize"
    quantile: float = 0.25
    resample: float = 0.25
    seed: int = 0
    storage: str | None = None
    facts: str = ""
    """More that a population which goes on must have in common with the one in its storage."""

    def check(self, size: int, group: int) -> None:
        """Raise if a setting is out of range.

        Raises
        ------
        UsageError
            Naming the setting and its value.
        """
        if group < 1 or size % group:
            raise UsageError(f"--group {group}: {counted(size, 'rank')} cannot be divided into groups of {group}")
        if self.members < max(2, size // group):
            raise UsageError(
                f"--population {self.members}: is not at least 2, and one for each of the {size // group} groups"
            )
        if self.generations < 1:
            raise UsageError(f"generations={self.generations}: is not at least 1")
        if not 0 < self.quantile <= 0.5:
            raise UsageError(f"--quantile {self.quantile:g}: is not above 0 and at most 0.5")
        if not 0 <= self.resample <= 1:
            raise UsageError(f"resample={self.resample:g}: is not between 0 and 1")
        if self.direction not in ("minimize", "maximize"):
            raise UsageError(f"--direction {self.direction}: not one of minimize, maximize")
        if not self.space:
            raise UsageError("--space: there is nothing to search for")

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for a population to go on, as JSON has it."""
        space = [{"kind": type(each).__name__, **vars(each)} for each in self.space]
        found = {"space": space, "members": self.members, "direction": self.direction, "quantile": self.quantile,
                 "resample": self.resample, "seed": self.seed, "facts": self.facts}  # fmt: skip
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain


class MemberRecord(NamedTuple):
    """A member after a generation, the same on all ranks.

    Attributes
    ----------
    generation, member
        Numbers, from 0.
    score
        Score at the end of the generation; NaN if the member failed.
    params
        Hyper-parameters of the generation.
    state
        `TRAINED`, `COPIED` or `FAILED`.
    source
        Member from whose state it continues in the next generation: itself, or another one.
    reason
        Reason of a failure.
    """

    generation: int
    member: int
    score: float
    params: dict[str, Any]
    state: str
    source: int
    reason: str = ""


@dataclass(frozen=True)
class PopulationResult:
    """Result of population-based training, the same on all ranks but for `members`.

    Attributes
    ----------
    best_number, best_score
        Member with the best score after the last generation, and its score; None and NaN if all have failed.
    history : list of MemberRecord
        All members after each generation, those of earlier runs included.
    new_generations
        Number of generations of this run.
    seconds
        Seconds that these took.
    stopped
        True if the run ended early on request; the same command goes on.
    members
        The members that this rank holds, by number, as they are in the end.
    """

    best_number: int | None
    best_score: float
    history: list[MemberRecord]
    new_generations: int
    seconds: float
    stopped: bool
    members: dict[int, Any]

    def schedule(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters that led to the best member, one dict for each generation."""
        return lineage(self.history, self.best_number)


def lineage(history: Sequence[MemberRecord], number: int | None) -> list[dict[str, Any]]:
    """Return the hyper-parameters of a member and, before it was copied, of those that it continued from."""
    by_place = {(record.generation, record.member): record for record in history}
    last = max((record.generation for record in history), default=-1)
    found: list[dict[str, Any]] = []
    for generation in range(last, -1, -1):
        if number is None:
            break
        found.append(by_place[generation, number].params)
        if generation:
            number = by_place[generation - 1, number].source
    return found[::-1]


def as_json(record: MemberRecord) -> dict[str, Any]:
    """Return a record with None in place of NaN."""
    return {**record._asdict(), "score": None if math.isnan(record.score) else record.score}


def from_json(found: dict[str, Any]) -> MemberRecord:
    """Return a record that :func:`as_json` made.

    Raises
    ------
    TypeError, ValueError
        If it is not one.
    """
    score = found["score"]
    return MemberRecord(**{**found, "score": math.nan if score is None else float(score)})
