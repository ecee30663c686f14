"""Settings of a study, as one frozen record. Needs neither Optuna nor MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StudySettings:
    """Settings of a study that rank 0 makes; for those that are not here see :func:`mpicoll.search.run`.

    Attributes
    ----------
    reduction, most_reports
        Settings of pruners, see :func:`~mpicoll.search.samplers.make_pruner`.
    name
        Name of the study in its storage, which may hold several.
    facts
        More that all trials of a study have in common, by name: a run that goes on with the study must have the same.
    """

    trials: int | None = None
    direction: str = "minimize"
    sampler: str = "tpe"
    pruner: str = "none"
    reduction: int = 3
    most_reports: int | None = None
    storage: str | None = None
    name: str = "study"
    seed: int = 0
    grid: Sequence[Mapping[str, Any]] | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
