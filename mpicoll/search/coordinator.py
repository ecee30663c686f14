"""Study on rank 0: hands out trials, suggests values, decides on pruning and takes down results. Needs Optuna."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState

from mpicoll.search.coordinator_messages import QUIET, Record
from mpicoll.search.study_storage import INTERRUPTED, REASON

GROUP, SECONDS = "group", "seconds"
"""Attributes of a finished trial: number of the group, and seconds that it took."""


class TrialRecord(NamedTuple):
    """Finished trial.

    Attributes
    ----------
    state
        ``"complete"``, ``"pruned"``, ``"failed"`` or ``"interrupted"``.
    value
        Value of the objective; of a pruned trial the last one reported, of others None.
    reason
        Reason of a failure, else "".
    seconds, group
        Seconds that the trial took, and the number of the group that ran it.
    """

    number: int
    state: str
    value: float | None
    params: dict[str, Any]
    reason: str
    seconds: float
    group: int


_STATES = {
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    INTERRUPTED: TrialState.FAIL,
}
_OF_OBJECTIVES = ("suggest", "reports")
"""Requests with arguments of the user's."""
Listener = Callable[[TrialRecord], None]


class StudyCoordinator:
    """Coordinator of a study by ask and tell.

    Parameters
    ----------
    study
        The study, whose trials count if they have finished, those of former runs included.
    trials
        Number of finished trials at which the study ends; None for as many as are enqueued.
    groups
        Leaders of the groups, by number of the group.
    told
        Called with each finished trial.
    together
        ``together(sync=...)`` returns a block in which the study's storage collects what it writes, see
        :class:`~mpicoll.search.study_storage.StudyJournal`; None for a storage that does not.
    is_grid
        True if the study ends when every enqueued trial has finished, also before there are `trials`.

    Attributes
    ----------
    failure
        Reason why the study cannot go on, or None.
    busy_seconds, began, ended
        Sum of the seconds of all trials of this run, and times of the first ask and the last end.
    """

    def __init__(
        self,
        study: optuna.Study,
        trials: int | None,
        groups: Sequence[int],
        told: Listener,
        together: Callable[..., contextlib.AbstractContextManager[None]] | None = None,
        *,
        is_grid: bool = False,
    ) -> None:
        self.study = study
        self._together = together or (lambda sync: contextlib.nullcontext())
        self._decides = not isinstance(study.pruner, optuna.pruners.NopPruner)
        self._limit, self._told = trials, told
        self._only_enqueued = is_grid or trials is None
        self._groups = {leader: number for number, leader in enumerate(groups)}
        self._running: dict[int, tuple[optuna.Trial, float]] = {}
        self._finished = len(finished(study))
        self._ended_trials, self._stopping = 0, False
        self._dismissed: set[int] = set()
        self.busy_seconds, self.began, self.ended = 0.0, 0.0, 0.0
        self.failure: str | None = None

    def handle(self, leader: int, request: Record) -> Record:
        """Return the reply to a request of a group's leader; never raises.

        The reply has ``"refused"`` if the request was wrong, and ``"failed"`` if the study cannot go on.
        """
        reply = self._reply(leader, request)
        if ("end" in reply or "failed" in reply) and QUIET not in request:
            self._dismissed.add(leader)
        return reply

    def _reply(self, leader: int, request: Record) -> Record:
        if self.failure is not None:
            return {"failed": self.failure}
        try:
            with warnings.catch_warnings(), self._together(sync=request["do"] == "end"):
                warnings.simplefilter("ignore")
                reply: Record = getattr(self, f"_{request['do']}")(leader, **request.get("with", {}))
            return reply
        except Exception as error:
            if request["do"] in _OF_OBJECTIVES and isinstance(error, (ValueError, TypeError)):
                return {"refused": f"{type(error).__name__}: {error}"}
            self.failure = f"the study failed on rank 0: {type(error).__name__}: {error}"
            return {"failed": self.failure}

    def all_dismissed(self) -> bool:
        """Return whether every group knows that the study has ended."""
        return len(self._dismissed) == len(self._groups)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _next(self, leader: int) -> Record:
        """Hand out a trial."""
        if not self._may_ask():
            return {"wait": True} if self._running else {"end": True}
        trial, now = self.study.ask(), time.monotonic()
        self._running[leader] = (trial, now)
        self.began = self.began or now
        return {"number": trial.number, "decides": self._decides}

    def _may_ask(self) -> bool:
        if self._stopping:
            return False
        if self._limit is not None and self._finished + len(self._running) >= self._limit:
            return False
        return not self._only_enqueued or bool(self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def _suggest(self, leader: int, kind: str, name: str, **distribution: Any) -> Record:
        """Suggest the value of a parameter."""
        trial, _ = self._running[leader]
        return {"value": getattr(trial, f"suggest_{kind}")(name, **distribution)}

    def _reports(self, leader: int, values: Sequence[tuple[float, int]]) -> Record:
        """Take down intermediate values with their steps, and decide on pruning."""
        trial, _ = self._running[leader]
        for value, step in values:
            trial.report(value, step)
        return {"prune": self._decides and bool(trial.should_prune())}

    def _end(
        self,
        leader: int,
        state: str,
        value: float | None,
        reason: str,
        attributes: Record,
        reports: Sequence[tuple[float, int]],
    ) -> Record:
        """Take down the end of a trial, and hand out the next one."""
        trial, began = self._running[leader]
        now, group = time.monotonic(), self._groups[leader]
        for reported in reports:
            trial.report(*reported)
        for name, attribute in {**attributes, GROUP: group, SECONDS: now - began}.items():
            trial.set_user_attr(name, attribute)
        if reason:
            trial.set_user_attr(REASON, reason)
        told = self.study.tell(trial, value if state == "complete" else None, state=_STATES[state])
        del self._running[leader]
        self.busy_seconds, self.ended = self.busy_seconds + now - began, now
        self._ended_trials += 1
        if state == INTERRUPTED:
            self._stopping = True
        else:
            self._finished += 1
        self._told(record_of(told))
        return self._next(leader)

    def facts(self) -> Record:
        """Return the fields of a :class:`~mpicoll.search.study_run.StudyResult`, or ``"failed"`` and the reason."""
        if self.failure is not None:
            return {"failed": self.failure}
        records = [record_of(trial) for trial in self.study.get_trials(deepcopy=False) if trial.state.is_finished()]
        complete = any(record.state == "complete" for record in records)
        best = self.study.best_trial if complete else None
        seconds = self.ended - self.began
        return {
            "best_number": None if best is None else best.number,
            "best_value": math.nan if best is None else best.value,
            "best_params": {} if best is None else best.params,
            "best_attributes": {} if best is None else best.user_attrs,
            "counts": {state: sum(each.state == state for each in records) for state in _STATES},
            "new_trials": self._ended_trials,
            "seconds": seconds,
            "busy": self.busy_seconds / (seconds * len(self._groups)) if seconds > 0 else 1.0,
        }


def record_of(trial: FrozenTrial) -> TrialRecord:
    """Return the record of a finished trial."""
    attributes = trial.user_attrs
    reason = str(attributes.get(REASON, ""))
    state = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned"}.get(trial.state, "failed")
    group, seconds = int(attributes.get(GROUP, -1)), float(attributes.get(SECONDS, 0.0))
    value = trial.value if state in ("complete", "pruned") else None
    shown = INTERRUPTED if reason == INTERRUPTED else state
    return TrialRecord(trial.number, shown, value, dict(trial.params), reason, seconds, group)


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that have finished, without those that were interrupted."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
    return [trial for trial in done if trial.user_attrs.get(REASON) != INTERRUPTED]
