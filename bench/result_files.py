"""Results of a benchmark with their samples and metadata, as JSON or CSV.

A file holds one :class:`ResultSet`, that is one launch of one program. Several launches of the same thing are put
together by :mod:`bench.intervals`, which needs them to say how much launches differ.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mpicoll.schedules.cost import bus_factor

FORMAT, VERSION = "mpicoll-bench", 2
_READABLE = (1, VERSION)
"""Version 1 knew one manner only: calls back to back, send buffers untouched."""
NATIVE, NUMPY, PLAN, COPY = "native", "numpy", "plan", "copy"
"""Contenders that tables know: the MPI library's own call, NumPy's, a persistent operation, a plain copy of memory."""
PERSISTENT, ALLOC_MEM = "persistent", "Alloc_mem"
"""After the name of native: the MPI library's own persistent operation, and its call on memory from MPI.Alloc_mem."""
BACK_TO_BACK, SINGLE = "back to back", "single"
"""Paces: calls one after another, or each by itself after a synchronised start."""
WRITTEN, UNTOUCHED = "written", "untouched"
"""What happens to a send buffer before each call: its owner writes it, or nothing."""
ASIDE = "aside"
"""A detail that is true for what is timed beside the contenders, such as a computation alone."""
PAYLOAD, ERROR = "payload", "rms error"
"""Details of compressed messages: how much shorter they are, and the relative error of the result."""
FEEDBACK = " +EF"
"""After the name of a compressor that is measured, or trained, with error feedback."""
_DIGITS = 5


class ResultsError(ValueError):
    """A file is not one of ours, or is damaged; the message names it."""


@dataclass(frozen=True)
class Case:
    """Facts of a measurement that all contenders share.

    Attributes
    ----------
    benchmark
        Name of the collective, kernel or program.
    nbytes, count, dtype
        Length of the whole vector in bytes and elements, and the element type.
    size
        Number of ranks.
    variant
        What else it depends on, such as ``"in place"``; may be empty.
    pace
        `BACK_TO_BACK` or `SINGLE`.
    buffers
        `WRITTEN` or `UNTOUCHED`.
    """

    benchmark: str
    nbytes: int
    count: int
    dtype: str
    size: int
    variant: str = ""
    pace: str = BACK_TO_BACK
    buffers: str = UNTOUCHED

    @property
    def manner(self) -> str:
        """Pace and buffers in words; empty for calls back to back with buffers untouched."""
        return "" if (self.pace, self.buffers) == (BACK_TO_BACK, UNTOUCHED) else manner(self.pace, self.buffers)


def manner(pace: str, buffers: str) -> str:
    """Return in words in which manner calls are made."""
    return f"{'single calls' if pace == SINGLE else pace}, send buffers {buffers}"


_FACTS = tuple(entry.name for entry in fields(Case))
_LATER = ("pace", "buffers")
"""Facts that files of version 1 lack; what they had is the default."""
_PERCENTILES = (5, 90, 95, 99)
_COLUMNS = (
    *(*_FACTS, "contender", "samples", "calls", "wrong", "median"),
    *(*(f"p{percent}" for percent in _PERCENTILES), "algbw", "busbw"),
)


@dataclass(frozen=True)
class Result:
    """One contender in one case, in one launch.

    Attributes
    ----------
    samples
        Seconds per call, each the maximum over ranks; sample ``i`` of every contender of a case was taken in the same
        round. Those of pace `SINGLE` are of one call each.
    calls
        Calls that were timed together for one sample.
    wrong
        Elements that differed from the exact result, over all ranks; checked outside the timing.
    detail
        More to show, such as the algorithm that ``"auto"`` took.
    """

    case: Case
    contender: str
    samples: np.ndarray
    calls: int = 1
    wrong: int = 0
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Seconds per call."""
        return float(np.median(self.samples))

    @property
    def spread(self) -> float:
        """Distance between the quartiles relative to the median."""
        low, high = np.percentile(self.samples, [25, 75])
        return float((high - low) / self.median)

    @property
    def algbw(self) -> float:
        """GB/s of the vector: its length over the time, as nccl-tests define it."""
        return self.case.nbytes / self.median / 1e9

    @property
    def busbw(self) -> float:
        """GB/s that a link of each rank carries in the best algorithm, as nccl-tests define it."""
        return self.algbw * bus_factor(self.case.benchmark, self.case.size)

    def summary(self) -> dict[str, Any]:
        """Return everything but the samples, by column name."""
        found = zip(_PERCENTILES, np.percentile(self.samples, _PERCENTILES), strict=True)
        times = {"median": self.median, **{f"p{percent}": float(value) for percent, value in found}}
        times |= {"algbw": self.algbw, "busbw": self.busbw}
        facts = {**asdict(self.case), "contender": self.contender, "calls": self.calls, "wrong": self.wrong}
        return {**facts, **{name: _short(value) for name, value in times.items()}, **self.detail}


@dataclass(frozen=True)
class ResultSet:
    """One launch of one program.

    Attributes
    ----------
    metadata
        What the numbers depend on, see :mod:`bench.metadata`.
    """

    program: str
    metadata: Mapping[str, Any]
    results: Sequence[Result]

    @property
    def wrong(self) -> int:
        """Wrong elements of all results."""
        return sum(result.wrong for result in self.results)


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def baseline(contenders: Iterable[str]) -> str | None:
    """Return the contender that the others of a case are compared with, None if there is none."""
    return next((name for name in contenders if name in (NATIVE, NUMPY)), None)


def save_in(folder: Path, run: ResultSet) -> Path:
    """Write a run to a new file of `folder`; return its name."""
    facts = run.metadata
    stem = "-".join([run.program.removeprefix("bench."), str(facts["ranks"]), str(facts["thread_level"])])
    number = 1
    while (path := folder / f"{stem}-{number}.json").exists():
        number += 1
    save_json(run, path)
    return path


def save_json(run: ResultSet, path: Path) -> None:
    """Write a run; `load` reads it back."""
    results = [{**result.summary(), "samples": [_short(s) for s in result.samples]} for result in run.results]
    content = {"format": FORMAT, "version": VERSION, "program": run.program, "metadata": dict(run.metadata)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, "results": results}, indent=1, allow_nan=False) + "\n")


def save_csv(runs: Sequence[ResultSet], stream: TextIO) -> None:
    """Write a line for each result, without the samples."""
    facts = ("library", "thread_level", "setting", "cores", "commit")
    rows = [
        {**{name: run.metadata.get(name, "") for name in facts}, **result.summary()}
        for run in runs
        for result in run.results
    ]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def load(path: Path) -> ResultSet:
    """Read a file that `save_json` wrote.

    Raises
    ------
    ResultsError
        If it is something else; the message names the file.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: cannot be read as results: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ResultsError(f"{path}: not a file of results")
    if content.get("version") not in _READABLE:
        known = " or ".join(map(str, _READABLE))
        raise ResultsError(f"{path}: version {content.get('version')!r} is not {known}, which this program reads")
    try:
        later = _LATER if content["version"] == 1 else ()
        return ResultSet(content["program"], content["metadata"], [_result(row, later) for row in content["results"]])
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path}: damaged: {error!r}") from error


def _result(row: dict[str, Any], missing: Sequence[str]) -> Result:
    case = Case(**{name: row[name] for name in _FACTS if name not in missing})
    samples = np.array(row["samples"], float)
    if not samples.size or not (samples > 0).all():
        raise ValueError(f"samples of {case.benchmark}, {row['contender']}, are not positive numbers")
    detail = {name: value for name, value in row.items() if name not in _COLUMNS}
    return Result(case, row["contender"], samples, int(row["calls"]), int(row["wrong"]), detail)


def load_all(paths: Iterable[Path]) -> list[ResultSet]:
    """Read files, and all files ``*.json`` of folders.

    Raises
    ------
    ResultsError
        If there is none, or one of them is not a file of results.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    if not files:
        raise ResultsError(f"{', '.join(map(str, paths)) or 'nothing'}: no results there")
    return [load(file) for file in files]
