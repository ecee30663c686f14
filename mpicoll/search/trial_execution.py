"""Execution of one trial on a group: the objective's result or error, on which all its ranks agree."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import share
from mpicoll.errors import CommunicatorBroken, RemoteError, SearchError, TrainingError
from mpicoll.search.group_trial import Group, Trial, TrialPruned

Objective = Callable[[Trial, Intracomm], float]
"""Function of a trial and a communicator of the group's ranks that returns the value to optimise."""
COMPLETE, PRUNED, FAILED, INTERRUPTED, FATAL = range(5)
STATES = ("complete", "pruned", "failed", "interrupted")
_LONGEST_REASON = 1000


class Interrupted(Exception):
    """Raised by an objective that was asked to stop, on all ranks of its group; the study ends."""


_CAUSE, _EFFECT, _ALIKE = range(3)
"""Standing of an outcome among those of the other ranks."""


class Outcome(NamedTuple):
    """End of a trial on this rank: what came of it, the objective's value, and the reason of a failure.

    `standing`: `_ALIKE` if all ranks of the group end in this way, at the same place; `_EFFECT` if this rank failed
    since another one has, `_CAUSE` if it failed by itself.
    """

    kind: int
    value: float | None = None
    reason: str = ""
    standing: int = _ALIKE


class TrialExecutor:
    """Runs trials of a group, one after the other, each on a communicator that no failure has broken.

    Collective over the group: construction and every method.
    """

    def __init__(self, group: Group, timeout: float) -> None:
        self._group, self._timeout = group, timeout
        self._plain: MPI.Intracomm | None = None

    def run(self, objective: Objective, trial: Trial) -> Outcome:
        """Run the objective; return what came of it, the same on all ranks.

        Raises
        ------
        SearchError
            If the study cannot go on.
        """
        if self._plain is None:
            self._plain = self._group.comm.Dup()
        comm = Intracomm(self._plain, timeout=self._timeout)
        own = _call(objective, trial, comm)
        if own.standing == _CAUSE:
            comm.channel.refuse(RuntimeError(own.reason))  # others may be in a collective with this rank
        found, alike = self._agree(own, usable=comm.channel.broken is None)
        if not alike:
            self.close()
        if found.kind == FATAL:
            raise SearchError(found.reason)
        return found

    def _agree(self, own: Outcome, *, usable: bool) -> tuple[Outcome, bool]:
        """Return the outcome of all ranks, and whether they can go on with the same communicator."""
        control = self._group.control
        mine, table = np.array([own.kind, own.standing, usable], np.int64), np.empty((control.size, 3), np.int64)
        control.Allgather(mine, table)
        kinds, standings, usables = table.T
        rank = int(np.lexsort((standings, -kinds))[0])
        record = {"value": own.value, "reason": own.reason[:_LONGEST_REASON]} if rank == control.rank else None
        found = share(control, record, rank)
        alike = (kinds == kinds[0]).all() and (standings == _ALIKE).all() and usables.all()
        return Outcome(int(kinds[rank]), found["value"], found["reason"]), bool(alike)

    def close(self) -> None:
        """Free the communicator."""
        if self._plain is not None:
            self._plain.Free()
            self._plain = None


def _call(objective: Objective, trial: Trial, comm: Intracomm) -> Outcome:
    try:
        value = objective(trial, comm)
    except SearchError as error:
        return Outcome(FATAL, None, str(error), _CAUSE)
    except Interrupted:
        return Outcome(INTERRUPTED, None, "interrupted")
    except TrainingError as error:  # these are raised on all ranks alike
        return Outcome(FAILED, None, f"{type(error).__name__}: {error}")
    except Exception as error:
        if isinstance(error, (TrialPruned, *_prunings())):
            return Outcome(PRUNED)
        heard = isinstance(error, (RemoteError, CommunicatorBroken))
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(FAILED, None, f"rank {comm.Get_rank()} of the group: {text}", _EFFECT if heard else _CAUSE)
    return _checked(value)


def _checked(value: Any) -> Outcome:
    """Return the outcome for a value that the objective has returned."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Outcome(FAILED, None, f"the objective returned {value!r}, which is not a number")
    if not math.isfinite(number):
        return Outcome(FAILED, None, f"the objective returned {number}")
    return Outcome(COMPLETE, number)


def _prunings() -> tuple[type[BaseException], ...]:
    """Return Optuna's exception for pruned trials, if the program has imported Optuna."""
    found = getattr(sys.modules.get("optuna"), "TrialPruned", None)
    return () if found is None else (found,)
