"""Report of a study on rank 0: a line for each trial, a progress bar, the best trial, plots, and a file of results."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicoll.errors import UsageError
from mpicoll.search.search_options import SearchOptions
from mpicoll.train.run_report import bar_below_table, check_writable, complain, say, write_json

if TYPE_CHECKING:
    import optuna

    from mpicoll.search.coordinator import TrialRecord
    from mpicoll.search.study_run import StudyResult

Facts = Mapping[str, Any]
_HEAD = f"{'trial':>5} {'state':<11} {'value':>9} {'seconds':>8} {'group':>5}  parameters"
PLOTS = {
    "history": "plot_optimization_history",
    "importance": "plot_param_importances",
    "parallel": "plot_parallel_coordinate",
}
"""Functions of optuna.visualization.matplotlib by the name of the file."""


class TrialTable:
    """Table that grows by a line for each finished trial, above a progress bar on a terminal where tqdm is installed.

    Parameters
    ----------
    total
        Number of trials; None if it is not known.
    """

    def __init__(self, options: SearchOptions, total: int | None) -> None:
        self._options, self._best = options, math.nan
        self._bar: Any = None
        self._larger = options.metric == "test_accuracy"
        self._total, self._begun = total, False

    def begin(self, finished: int) -> None:
        """Print the head; `finished` trials are there already."""
        if self._options.quiet or self._begun:
            return
        self._begun = True
        say(_HEAD)
        if self._options.progress:
            self._bar = bar_below_table(self._total, finished, "trial")

    def add(self, record: TrialRecord) -> None:
        """Print a finished trial."""
        if self._options.quiet:
            return
        self.begin(0)
        if self._bar is not None:
            self._bar.clear()
        say(line_of(record))
        if record.state == "complete" and record.value is not None:
            better = max if self._larger else min
            self._best = record.value if math.isnan(self._best) else better(self._best, record.value)
        if self._bar is not None:
            self._bar.set_postfix_str(f"best {self._options.metric} {self._best:.4f}", refresh=False)
            self._bar.update(record.state != "interrupted")

    def close(self) -> None:
        """Leave the bar's last state on the screen."""
        if self._bar is not None:
            self._bar.close()


def line_of(record: TrialRecord) -> str:
    """Return the line of a trial."""
    value = "" if record.value is None else f"{record.value:.5g}"
    chosen = " ".join(f"{name}={_short(value)}" for name, value in record.params.items())
    reason = f"  ({record.reason})" if record.reason and record.state == "failed" else ""
    head = f"{record.number:>5} {record.state:<11} {value:>9} {record.seconds:>8.2f} {record.group:>5}"
    return f"{head}  {chosen}{reason}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summary_of(result: StudyResult, metric: str) -> str:
    """Return the lines at the end of a study."""
    counts = ", ".join(f"{count} {state}" for state, count in result.counts.items() if count)
    text = f"trials: {counts or 'none'}"
    if result.new_trials:
        text += f"; {result.new_trials} in {result.seconds:.1f} s, groups were busy for {result.busy:.0%} of the time"
    if result.best_number is None:
        return f"{text}\nno trial is complete"
    return f"{text}\nbest: trial {result.best_number}, {metric} {result.best_value:.6g}"


def check_outputs(options: SearchOptions, plots: Iterable[str]) -> None:
    """Refuse outputs that could not be written, before hours of training.

    Parameters
    ----------
    plots
        Names of the plots' files, for `options.plot`.

    Raises
    ------
    UsageError
        If a folder cannot be made or written, or matplotlib is missing.
    """
    check_writable({"--json": options.json})
    if options.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib: pip install "mpicoll[search,plot]"')
    try:
        Path(options.plot).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--plot {options.plot}: {error.strerror}") from None
    for name in plots:
        check_writable({"--plot": str(Path(options.plot, name))})


def draw(study: optuna.Study, folder: str) -> None:
    """Draw a study by Optuna's functions; what it cannot draw, such as the importance of one parameter, is told."""
    import matplotlib as mpl

    mpl.use("Agg")
    import optuna
    from matplotlib import pyplot

    for name, function in PLOTS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                axes = getattr(optuna.visualization.matplotlib, function)(study)
                axes.figure.savefig(Path(folder, f"{name}.png").expanduser(), dpi=120, bbox_inches="tight")
        except (ValueError, RuntimeError, ImportError) as error:
            complain(f"--plot: {name} cannot be drawn: {error}")
        finally:
            pyplot.close("all")


def write_results(path: str, result: StudyResult, command: str, trials: Sequence[tuple[TrialRecord, Facts]]) -> None:
    """Write all trials, each with the facts noted about it, and the best one as JSON."""
    best: Facts | None = None
    if result.best_number is not None:
        best = {
            "number": result.best_number,
            "value": result.best_value,
            "params": result.best_params,
            "command": command,
            "attributes": result.best_attributes,
        }
    facts = {"counts": result.counts, "busy": result.busy, "seconds": result.seconds, "new_trials": result.new_trials}
    rows = [{**record._asdict(), "attributes": attributes} for record, attributes in trials]
    write_json(path, {"best": best, **facts, "trials": rows})
