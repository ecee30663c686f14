"""Studies from a program: :func:`run` calls an objective on groups of ranks until enough trials have finished."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import all_succeed, share
from mpicoll.errors import SearchError, UsageError
from mpicoll.quantities import counted
from mpicoll.search.coordinator_messages import Coordinator, LocalCoordinator, Record, RemoteCoordinator
from mpicoll.search.group_trial import Group, Trial
from mpicoll.search.study_settings import StudySettings
from mpicoll.search.trial_execution import STATES, Objective, Outcome, TrialExecutor

if TYPE_CHECKING:
    import optuna

    from mpicoll.search.coordinator import StudyCoordinator, TrialRecord

_WAIT_SECONDS = 0.05
"""Pause of a group without a trial before it asks again."""


@dataclass(frozen=True)
class StudyResult:
    """Result of a study, equal on all ranks but for `study`.

    Attributes
    ----------
    best_number, best_value, best_params, best_attributes
        Number, value, parameters and noted facts of the best complete trial; None, NaN and empty if there is none.
    counts
        Number of trials by state: ``"complete"``, ``"pruned"``, ``"failed"``, ``"interrupted"``; of the whole study.
    new_trials
        Number of trials that this run has ended.
    seconds, busy
        Seconds from the first trial of this run to its last, and the fraction of them that groups have run trials.
    study : optuna.Study
        The study on rank 0, None elsewhere.
    """

    best_number: int | None
    best_value: float
    best_params: dict[str, Any]
    best_attributes: dict[str, Any]
    counts: dict[str, int]
    new_trials: int
    seconds: float
    busy: float
    study: optuna.Study | None = None


def run(
    objective: Objective,
    study: optuna.Study | None = None,
    comm: MPI.Intracomm | None = None,
    *,
    trials: int | None = None,
    group: int = 1,
    direction: str = "minimize",
    sampler: str = "tpe",
    pruner: str = "none",
    storage: str | None = None,
    grid: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
    timeout: float = 60.0,
    told: Callable[[TrialRecord], None] | None = None,
) -> StudyResult:
    """Run trials of an objective, one at a time on each group of ranks, and return the best. Collective over `comm`.

    Rank 0 asks Optuna for all groups, beside its own trials. A trial whose objective raises an exception, on some or
    all of its ranks, or returns NaN or infinity, fails alone. After a job that was killed, another run with the same
    `storage` goes on; see the guide.

    Parameters
    ----------
    objective
        ``objective(trial, comm)``, called on all ranks of a group with a :class:`Trial` and an
        :class:`mpicoll.Intracomm` of these ranks. It returns the value to optimise, of which the first rank's counts.
    study
        On rank 0 a study of Optuna, in place of `direction`, `sampler`, `pruner`, `storage` and `seed`; else None.
    comm
        All ranks; ``MPI.COMM_WORLD`` by default.
    trials
        Number of finished trials at which the study ends, those of earlier runs included; may be None with `grid`.
    group
        Ranks of a trial, by which the number of ranks must be divisible.
    direction, sampler, pruner, seed
        ``"minimize"`` or ``"maximize"``; ``"random"``, ``"tpe"``, ``"cmaes"`` or ``"grid"``; ``"none"``, ``"asha"``,
        ``"hyperband"`` or ``"median"``; seed of the sampler.
    storage
        File that keeps the study, a journal of Optuna's; None for memory alone.
    grid
        Points, each a value by name of a parameter, that are run, each once, before others are sampled; with the
        sampler ``"grid"`` no others.
    timeout
        Seconds that a rank waits for an answer of rank 0, and collectives of the objective for a rank; at the end of a
        trial ranks wait twice as long for others of their group.
    told
        Called on rank 0 with each finished trial, perhaps by another thread.

    Raises
    ------
    mpicoll.errors.UsageError
        On every rank, if an argument is wrong, or the storage cannot be used.
    SearchError
        If the study cannot go on, for instance since its storage cannot be written.
    CollectiveTimeout
        If ranks of a group did not end a trial in time.
    """
    settings = StudySettings(trials, direction, sampler, pruner, storage=storage, seed=seed, grid=grid)
    return run_study(objective, study, settings, MPI.COMM_WORLD if comm is None else comm, group, timeout, told)


def run_study(
    objective: Objective,
    study: optuna.Study | None,
    settings: StudySettings,
    comm: MPI.Intracomm,
    group: int,
    timeout: float,
    told: Callable[[TrialRecord], None] | None = None,
) -> StudyResult:
    """Run a study as :func:`run` does, with all its settings in one record."""
    size, rank = comm.Get_size(), comm.Get_rank()
    _check(settings, size, group, timeout)
    meeting = Intracomm(comm, timeout=2 * timeout)
    with contextlib.ExitStack() as stack:
        leaders = range(0, size, group)
        hub = all_succeed(meeting, lambda: None if rank else _open(stack, study, settings, leaders, told))
        plain = MPI.Intracomm(comm)
        channel, part = plain.Dup(), MPI.Intracomm(plain.Split(rank // group, rank))
        coordinator = _coordinator(channel, hub, timeout) if rank in leaders else None
        members = Group(part, coordinator, timeout)
        _run_to_the_end(objective, members, timeout)
        result = _summary(meeting, hub)
        members.close()
        part.Free()
        channel.Free()
    return result


def _check(settings: StudySettings, size: int, group: int, timeout: float) -> None:
    if group < 1 or size % group:
        raise UsageError(f"--group {group}: {counted(size, 'rank')} cannot be divided into groups of {group}")
    if settings.trials is None and settings.grid is None:
        raise UsageError("--trials: is needed, unless there is a grid")
    if settings.trials is not None and settings.trials < 1:
        raise UsageError(f"--trials {settings.trials}: is not at least 1")
    if settings.direction not in ("minimize", "maximize"):
        raise UsageError(f"--direction {settings.direction}: not one of minimize, maximize")
    if not timeout > 0:
        raise UsageError(f"--timeout {timeout}: is not a positive number of seconds")


def _open(
    stack: contextlib.ExitStack,
    study: optuna.Study | None,
    settings: StudySettings,
    leaders: Sequence[int],
    told: Callable[[TrialRecord], None] | None,
) -> StudyCoordinator:
    """Return the coordinator of a study that was given, or that is made or found; on rank 0."""
    try:
        import optuna

        from mpicoll.search.coordinator import StudyCoordinator
        from mpicoll.search.study_storage import enqueue, journal, open_study, take_over
    except ImportError as error:
        raise UsageError(f'mpicoll.search needs Optuna: pip install "mpicoll[search]" ({error})') from None
    together = None
    try:
        if study is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            storage = None if settings.storage is None else stack.enter_context(journal(settings.storage))
            together = None if storage is None else storage.together
            study = open_study(storage, settings)
            take_over(study)
        if settings.grid is not None:
            with contextlib.nullcontext() if together is None else together(sync=True):
                enqueue(study, settings.grid)
    except UsageError:
        raise
    except Exception as error:  # of Optuna's; the other ranks wait for this one
        raise UsageError(f"--storage {settings.storage}: cannot be used: {type(error).__name__}: {error}") from error
    is_grid = settings.sampler == "grid" and settings.grid is not None  # whose sampler would repeat points
    return StudyCoordinator(study, settings.trials, leaders, told or (lambda record: None), together, is_grid=is_grid)


def _coordinator(channel: MPI.Intracomm, hub: StudyCoordinator | None, timeout: float) -> Coordinator:
    return RemoteCoordinator(channel, timeout) if hub is None else LocalCoordinator(channel, hub, timeout)


def _run_to_the_end(objective: Objective, group: Group, timeout: float) -> None:
    """Run trials; whatever happens, the others hear of it from rank 0."""
    failure: str | None = "rank 0 has ended"
    try:
        _run_trials(objective, group, timeout)
        failure = None
    except Exception as error:
        failure = f"rank 0 has failed: {type(error).__name__}: {error}"
        raise
    finally:
        if group.coordinator is not None:
            group.coordinator.close(failure)


def _run_trials(objective: Objective, group: Group, timeout: float) -> None:
    """Run trials on this group until there are none left; the groups end at about the same time."""
    executor = TrialExecutor(group, timeout)
    reply = _number(group, group.agree({"do": "next"}))
    while reply is not None:
        trial = Trial(group, reply["number"], decides=reply["decides"])
        outcome = executor.run(objective, trial)
        reply = _number(group, group.ask({"do": "end", "with": _end(outcome, trial)}))
    executor.close()


def _number(group: Group, reply: Record) -> Record | None:
    """Return a reply with the number of this group's next trial, after a wait if that is needed; None at the end."""
    while "number" not in reply:
        if "end" in reply:
            return None
        time.sleep(_WAIT_SECONDS)
        reply = group.agree({"do": "next"})
    return reply


def _end(outcome: Outcome, trial: Trial) -> dict[str, Any]:
    return {
        "state": STATES[outcome.kind],
        "value": outcome.value,
        "reason": outcome.reason,
        "attributes": trial.attributes,
        "reports": trial.unsent_reports(),
    }


def _summary(comm: MPI.Intracomm, hub: StudyCoordinator | None) -> StudyResult:
    """Return the result on all ranks."""
    facts = share(comm, None if hub is None else hub.facts())
    if "failed" in facts:
        raise SearchError(facts["failed"])
    return StudyResult(**facts, study=None if hub is None else hub.study)
