"""Search for hyper-parameters on groups of ranks: ``mpirun -n 8 python -m mpicoll.search``, and :func:`run`.

Importing this package imports nothing else before one of its names is used: the command line chooses the number of
threads before NumPy starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll.errors import SearchError
    from mpicoll.search.group_trial import Trial, TrialPruned
    from mpicoll.search.population_member import Member
    from mpicoll.search.population_run import run_population
    from mpicoll.search.population_settings import MemberRecord, PopulationResult
    from mpicoll.search.study_run import StudyResult, run

_MODULES = {
    "Member": "search.population_member",
    "MemberRecord": "search.population_settings",
    "PopulationResult": "search.population_settings",
    "SearchError": "errors",
    "StudyResult": "search.study_run",
    "Trial": "search.group_trial",
    "TrialPruned": "search.group_trial",
    "run": "search.study_run",
    "run_population": "search.population_run",
}
__all__ = ["Member", "MemberRecord", "PopulationResult", "SearchError", "StudyResult", "Trial", "TrialPruned", "run",
           "run_population"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mpicoll.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
