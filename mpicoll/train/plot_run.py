"""Plot of a run: loss, accuracy, throughput, and time by phase; matplotlib is imported here only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.errors import UsageError
from mpicoll.quantities import counted
from mpicoll.train.clock import PHASES
from mpicoll.train.metrics import StepRecord
from mpicoll.train.run_report import Replacing


def check_drawable(path: str) -> None:
    """Refuse a plot that could not be drawn.

    Raises
    ------
    UsageError
        If the name does not end in ``.png``, or matplotlib is missing.
    """
    if not path.endswith(".png"):
        raise UsageError(f"--plot {path}: the name must end in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib: pip install "mpicoll[plot]"')


def draw(path: str, result: dict[str, Any], records: Sequence[StepRecord]) -> None:
    """Write a PNG plot of a result of :func:`mpicoll.train.training_run.run` and the records of its steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    (loss, accuracy), (pace, time) = figure.subplots(2, 2)
    steps, epochs = [record.step + 1 for record in records], result["epochs"]
    has_accuracy = any(record.accuracy is not None for record in records)
    accuracy.set_visible(has_accuracy)
    for axes, name in ((loss, "loss"), (accuracy, "accuracy"))[: 1 + has_accuracy]:
        axes.plot(steps, [getattr(record, name) for record in records], linewidth=0.6, alpha=0.5, label="batch")
        _by_epoch(axes, epochs, f"train_{name}", "training")
        _by_epoch(axes, epochs, f"test_{name}", "test")
        axes.set(xlabel="step", ylabel=name)
        axes.legend(fontsize="small")
    _by_epoch(pace, epochs, "samples_per_second", "")
    pace.set(xlabel="step", ylabel="samples/s", ylim=(0, None))
    _phases(time, result["seconds_by_rank"])
    config = result["config"]
    figure.suptitle(f"{config['model']} on {config['dataset']}, {counted(result['ranks'], 'rank')}")
    with Replacing(path, "wb") as stream:
        figure.savefig(stream, format="png", dpi=110)


def _by_epoch(axes: Any, epochs: Sequence[dict[str, Any]], field: str, label: str) -> None:
    points = [(epoch["steps"], epoch[field]) for epoch in epochs if epoch[field] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    axes.grid(alpha=0.3)


def _phases(axes: Any, seconds: dict[str, list[float]]) -> None:
    """Draw a bar for each rank, start-up left out."""
    left = np.zeros(len(seconds["compute"]))
    for phase in PHASES[1:]:
        axes.barh(range(left.size), seconds[phase], left=left, label=phase)
        left += seconds[phase]
    axes.set(xlabel="seconds", ylabel="rank")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.invert_yaxis()
    axes.legend(fontsize="small")
