"""Runs of a study and their outcomes, kept in a file of JSON lines, so that a finished run is not repeated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

TASK = "clouds, 16384 training samples, 10000 test samples, version 1"
"""Name of the task of :mod:`bench.studies.study_task`; another version makes all runs new ones."""
TRAIN, TEST = 16384, 10000
"""Samples: one of the test part is 0.01 percentage points."""
CHANCE = 0.1
"""Accuracy without training."""


class StudyError(RuntimeError):
    """A study cannot go on; the message says why."""


@dataclass(frozen=True)
class StudyRun:
    """One training run of a study.

    Attributes
    ----------
    variant
        Row of the study's tables.
    group
        Column, such as the batch; empty where there is one.
    seed
        Seed of initial weights and of the order of samples.
    ranks
        Number of ranks; of hosts with one rank each if there is a `gbit`.
    options
        Fields of :class:`~mpicoll.train.config.TrainConfig`.
    gbit
        10^9 bits per second of the emulated links; None for this machine as it is.
    """

    variant: str
    group: str
    seed: int
    ranks: int
    options: Mapping[str, Any]
    gbit: float | None = None

    @property
    def key(self) -> str:
        """Text that is equal for equal runs of the same task."""
        return json.dumps({"task": TASK, **asdict(self)}, sort_keys=True)


@dataclass(frozen=True)
class StudyOutcome:
    """Outcome of a run.

    Attributes
    ----------
    run
        The run.
    accuracy
        Accuracy of the final model on the test samples, 0 to 1; `CHANCE` if the run diverged.
    diverged
        Message of the error; empty if the loss stayed finite.
    steps, seconds, samples_per_second
        Steps, seconds of training with evaluations, and training samples of all ranks a second of steps.
    sent_nbytes
        Bytes that a rank sends in a step.
    curve
        Steps, seconds and test accuracy after each epoch.
    distances
        Steps, and root of the mean square distance of the replicas to their mean.
    replicas
        Test accuracy of each rank's replica after the last step.
    late
        Mean number of updates by which gradients were late; None in synchronous training.
    validation
        Accuracy on validation samples, by which settings are chosen; None where none are.
    parameters
        Number of the model's parameters; 0 where it is not of interest.
    """

    run: StudyRun
    accuracy: float = CHANCE
    diverged: str = ""
    steps: int = 0
    seconds: float = 0.0
    samples_per_second: float = 0.0
    sent_nbytes: float = 0.0
    curve: list[list[float]] = field(default_factory=list)
    distances: list[list[float]] = field(default_factory=list)
    replicas: list[float] = field(default_factory=list)
    late: float | None = None
    validation: float | None = None
    parameters: int = 0


def write_runs(path: Path, runs: Iterable[StudyRun]) -> None:
    """Write runs for :func:`read_runs`."""
    path.write_text(json.dumps([asdict(run) for run in runs]))


def read_runs(path: Path) -> list[StudyRun]:
    """Return the runs of a file."""
    return [StudyRun(**_plain(each)) for each in json.loads(path.read_text())]


def append(path: Path, outcome: StudyOutcome) -> None:
    """Add the outcome of a run to a file of results."""
    with path.open("a") as stream:
        stream.write(json.dumps({"task": TASK, **asdict(outcome)}, allow_nan=False) + "\n")


def load(path: Path) -> dict[str, StudyOutcome]:
    """Return the outcomes of a file by the key of their run; none if there is no file.

    A last line that was not written to its end is removed from the file; runs of another version of the task are
    ignored.

    Raises
    ------
    StudyError
        If another line is damaged, or is not an outcome.
    """
    if not path.exists():
        return {}
    content = path.read_text(encoding="utf-8")
    whole = content[: content.rfind("\n") + 1]
    if len(whole) < len(content):
        path.write_text(whole, encoding="utf-8")
    found = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            if record.pop("task") != TASK:
                continue
            outcome = _outcome(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StudyError(f"{path}, line {number}: not the outcome of a run: {error}") from None
        found[outcome.run.key] = outcome
    return found


def _outcome(record: dict[str, Any]) -> StudyOutcome:
    unknown = set(record) - {each.name for each in fields(StudyOutcome)}
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}")
    outcome = StudyOutcome(**{**record, "run": StudyRun(**_plain(record["run"]))})
    numbers = (outcome.accuracy, outcome.seconds, outcome.sent_nbytes)
    if not all(isinstance(each, int | float) and math.isfinite(each) for each in numbers):
        raise ValueError("a number is missing or not finite")
    if not 0 <= outcome.accuracy <= 1:
        raise ValueError(f"accuracy {outcome.accuracy} is not in 0..1")
    return outcome


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Return a run's record with tuples in its options, as the trainer's options have them."""
    options = {name: _tuples(value) for name, value in record["options"].items()}
    return {**record, "options": options}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
