"""Plot of predicted training over numbers of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpicoll.predict.plot_predictions import new_figure
from mpicoll.train.prediction.training_prediction import PredictedHosts


def draw(path: Path, rows: Sequence[PredictedHosts], title: str) -> None:
    """Write a plot to `path`: samples a second, and the seconds of a step, with a curve for each compressor.

    Raises
    ------
    MpicollError
        If the file's name ends in another way than those of other predictions, or matplotlib is missing.
    """
    figure = new_figure(path, panels=2)
    pace, time = figure.subplots(1, 2)
    for spec in dict.fromkeys(row.compression for row in rows):
        own = [row for row in rows if row.compression == spec]
        hosts, name = [row.hosts for row in own], spec or "uncompressed"
        pace.plot(hosts, [row.samples_per_second for row in own], marker=".", label=name)
        (line,) = time.plot(hosts, [row.time.seconds * 1e3 for row in own], marker=".", label=f"step, {name}")
        waits = [row.time.waiting * 1e3 for row in own]
        time.plot(hosts, waits, marker=".", linestyle=":", color=line.get_color(), label=f"waiting, {name}")
    pace.set(xscale="log", yscale="log", xlabel="hosts", ylabel="samples a second, predicted")
    time.set(xscale="log", xlabel="hosts", ylabel="milliseconds, predicted", ylim=(0, None))
    for axes in (pace, time):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path)
