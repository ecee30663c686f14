"""Plot of predicted times over message sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicoll.errors import MpicollError
from mpicoll.predict.predictor import Prediction

FORMATS = (".svg", ".png")


def check_file(path: Path) -> None:
    """Refuse a file that cannot be written.

    Raises
    ------
    MpicollError
        If the file's name does not end in one of `FORMATS`, or its folder is missing.
    """
    if path.suffix not in FORMATS:
        raise MpicollError(f"--plot: {path} ends in none of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise MpicollError(f"--plot {path}: there is no folder {path.parent}")


def new_figure(path: Path, panels: int) -> Any:
    """Return an empty figure of matplotlib with room for some panels beside each other, to be written to `path`.

    Raises
    ------
    MpicollError
        If the file cannot be written, see :func:`check_file`, or matplotlib is missing.
    """
    check_file(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MpicollError('--plot needs matplotlib: pip install "mpicoll[plot]"') from None
    figure = Figure(figsize=(1 + 5 * panels, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(path: Path, panels: Sequence[tuple[str, Mapping[str, Sequence[Prediction]]]], title: str) -> None:
    """Write a plot to `path`: a panel for each (title, curves) pair, a curve for each algorithm.

    Raises
    ------
    MpicollError
        If the file's name does not end in one of `FORMATS`, or matplotlib is missing.
    """
    figure = new_figure(path, len(panels))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for place, (name, curves) in zip(axes, panels, strict=True):
        for algorithm, found in curves.items():
            lengths = [one.case.nbytes for one in found]
            place.plot(lengths, [one.seconds * 1e6 for one in found], marker=".", label=algorithm)
        place.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds, predicted", title=name)
        place.legend(fontsize="small")
        place.grid(alpha=0.3)
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise MpicollError(f"--plot {path}: {error.strerror}") from None
