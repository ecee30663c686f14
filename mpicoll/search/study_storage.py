"""Studies of Optuna in a journal file that one job writes at a time, and what a killed job leaves there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState

from mpicoll.errors import UsageError
from mpicoll.search.samplers import make_pruner, make_sampler
from mpicoll.search.study_settings import StudySettings

INTERRUPTED, REASON = "interrupted", "reason"
"""Reason of a trial that was running when its job ended, and the attribute of a trial that holds its reason."""
_FACTS = "facts"
"""Attribute of a study: what all its trials have in common."""
_REPEATS = "repeats"
"""Attribute of a trial that takes the place of an interrupted one: the number of that."""


class _LockedFile(BaseJournalBackend):
    """Journal's lines in a file that this process has locked; reads go to a copy in memory.

    Optuna's own backend opens the file for each look at a study, and writes each fact with a system call and an fsync
    of its own, since other processes may write as well. Lines and their format are the same.

    Parameters
    ----------
    descriptor
        The open file, which holds whole lines.

    Raises
    ------
    ValueError
        If a line is not JSON.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            stream.seek(0)
            self._lines = [json.loads(line) for line in stream]
        self._held: list[bytes] | None = None

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Return the lines from a number on."""
        return self._lines[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add lines."""
        texts = [json.dumps(log, separators=(",", ":")) for log in logs]
        self._lines += map(json.loads, texts)
        data = "".join(f"{text}\n" for text in texts).encode()
        if self._held is None:
            self._write(data, sync=True)
        else:
            self._held.append(data)

    @contextlib.contextmanager
    def together(self, *, sync: bool) -> Iterator[None]:
        """Write the lines of the block at its end, and wait until they are on the disk if `sync` is true."""
        self._held = []
        try:
            yield
        finally:
            data, self._held = b"".join(self._held), None
            if data:
                self._write(data, sync=sync)

    def _write(self, data: bytes, *, sync: bool) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_END)
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        if sync:
            os.fsync(self._descriptor)


class StudyJournal(optuna.storages.JournalStorage):
    """Storage of Optuna's in a journal that this process has locked."""

    def __init__(self, file: _LockedFile) -> None:
        super().__init__(file)
        self._file = file

    def together(self, *, sync: bool) -> contextlib.AbstractContextManager[None]:
        """Return a block whose facts are written at its end; on the disk by then if `sync` is true.

        A process that is killed loses nothing that was written; without `sync`, a machine that fails may.
        """
        return self._file.together(sync=sync)


@contextlib.contextmanager
def journal(path: str) -> Iterator[StudyJournal]:
    """Open or make a journal, locked for this process until the block ends, or the process does.

    A line that a killed job has not written to its end is removed.

    Raises
    ------
    UsageError
        If the file cannot be written, is not a journal, or another job is writing it.
    """
    place = Path(path).expanduser()
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UsageError(f"--storage {path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--storage {path}: another job is working on this study") from None
        except OSError as error:
            raise UsageError(f"--storage {path}: cannot be locked: {error.strerror}") from None
        _remove_torn_line(path, descriptor)
        yield StudyJournal(_LockedFile(descriptor))
    finally:
        os.close(descriptor)


def _remove_torn_line(path: str, descriptor: int) -> None:
    """Cut off what follows the last end of a line; nothing of another kind of file is changed."""
    content = Path(path).expanduser().read_bytes()
    whole = content.rfind(b"\n") + 1
    first = content[:whole].split(b"\n", 1)[0]
    try:
        known = not content or (whole == 0 and content[:1] == b"{") or "op_code" in json.loads(first)
    except (ValueError, TypeError):
        known = False
    if not known:
        raise UsageError(f"--storage {path}: not a journal of Optuna")
    if whole < len(content):
        os.ftruncate(descriptor, whole)
        os.fsync(descriptor)


def take_over(study: optuna.Study) -> int:
    """Enqueue anew the trials that were running when a job ended, and return their number.

    They end as failed for the reason `INTERRUPTED`, and trials with new numbers take their parameters.
    """
    found = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for trial in found:
        study._storage.set_trial_user_attr(trial._trial_id, REASON, INTERRUPTED)
        study.tell(trial.number, state=TrialState.FAIL)
    again = interrupted(study)
    for trial in again:
        study.enqueue_trial(chosen(trial), user_attrs={_REPEATS: trial.number})
    return len(again)


def interrupted(study: optuna.Study) -> list[FrozenTrial]:
    """Return the trials that were interrupted and have not been enqueued anew."""
    trials = study.get_trials(deepcopy=False)
    repeated = {trial.user_attrs.get(_REPEATS) for trial in trials}
    return [each for each in trials if each.user_attrs.get(REASON) == INTERRUPTED and each.number not in repeated]


def chosen(trial: FrozenTrial) -> dict[str, Any]:
    """Return the parameters of a trial, those that were enqueued and have not been used yet included."""
    return {**trial.system_attrs.get("fixed_params", {}), **trial.params}


def enqueue(study: optuna.Study, points: Iterable[Mapping[str, Any]]) -> None:
    """Enqueue points of a grid, without those that the study has, in whatever state, already."""
    known = {_canonical(chosen(trial)) for trial in study.get_trials(deepcopy=False)}
    for point in points:
        if (text := _canonical(point)) not in known:
            known.add(text)
            study.enqueue_trial(dict(point))


def _canonical(point: Mapping[str, Any]) -> str:
    return json.dumps(dict(point), sort_keys=True)


def _check_facts(study: optuna.Study, settings: StudySettings) -> None:
    """Keep the facts of a new study; raise UsageError if one that was there has others."""
    there = study.user_attrs.get(_FACTS)
    if there is None:
        study.set_user_attr(_FACTS, dict(settings.facts))
        return
    odd = [name for name, value in settings.facts.items() if there.get(name, value) != value]
    if odd:
        told = "; ".join(f"{name} was {there[name]!r}, is {settings.facts[name]!r}" for name in odd)
        raise UsageError(
            f"--storage {settings.storage}: the study {settings.name!r} in it has other trials: {told}; "
            "--study NAME begins another study in this file"
        )


def open_study(storage: optuna.storages.BaseStorage | None, settings: StudySettings) -> optuna.Study:
    """Return a new study, or the one of this name that the storage holds.

    The sampler's seed depends on the number of trials that there are, so that a study which goes on does not draw what
    it has drawn before.

    Raises
    ------
    UsageError
        If the study that is there has another direction or other facts, or sampler or pruner are unknown.
    """
    direction = optuna.study.StudyDirection[settings.direction.upper()]
    study = optuna.create_study(storage=storage, study_name=settings.name, direction=direction, load_if_exists=True)
    _check_facts(study, settings)
    if study.direction != direction:
        found = study.direction.name.lower()
        raise UsageError(f"--storage {settings.storage}: the study {settings.name!r} in it is one to {found}")
    seed = settings.seed + len(study.get_trials(deepcopy=False)) * 1_000_003
    study.sampler = make_sampler(settings.sampler, seed % (1 << 32))
    study.pruner = make_pruner(settings.pruner, settings.most_reports, settings.reduction)
    return study
