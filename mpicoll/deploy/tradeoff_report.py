"""Report of models: table and plot of accuracy against bytes and latency on an HTML page.

Matplotlib and Jinja2 are imported here only.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

import mpicoll
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.evaluation import BATCH, Evaluation
from mpicoll.errors import UsageError
from mpicoll.quantities import format_seconds
from mpicoll.train.run_report import Replacing


def check_reportable() -> None:
    """Refuse a page without the packages that it needs.

    Raises
    ------
    UsageError
    """
    missing = [name for name in ("matplotlib", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'--html needs {" and ".join(missing)}: pip install "mpicoll[plot,report]"')


def write_page(path: str, rows: Sequence[Evaluation], models: Sequence[DeployedModel], dataset: str) -> None:
    """Write the page; it refers to nothing outside itself.

    Parameters
    ----------
    rows, models
        Properties of the models, and the models, in the same order.
    dataset
        Name of the data set whose test samples were used.
    """
    from jinja2 import Environment, StrictUndefined

    text = files(__package__).joinpath("tradeoff_report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(text)
    shown = [
        {**row._asdict(), "share": row.nbytes / rows[0].nbytes, "speed": row.times[1] / rows[0].times[1],
         "seconds": format_seconds(row.times[0]), "history": model.history}
        for row, model in zip(rows, models, strict=True)
    ]  # fmt: skip
    plot = base64.b64encode(_plot(rows)).decode()
    html = page.render(rows=shown, plot=plot, dataset=dataset, batch=BATCH, version=mpicoll.__version__)
    with Replacing(path) as stream:
        stream.write(html)


def _plot(rows: Sequence[Evaluation]) -> bytes:
    """Return a PNG plot of accuracy against bytes and against latency."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _scatter(left, rows, lambda row: row.nbytes / 1000, "kilobytes of the stored tensors")
    _scatter(right, rows, lambda row: row.times[0] * 1e6, "microseconds for one sample")
    left.set_ylabel("accuracy over the test samples in %")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()


def _scatter(axes: Any, rows: Sequence[Evaluation], position: Callable[[Evaluation], float], label: str) -> None:
    for number, row in enumerate(rows):
        if row.accuracy is not None:
            axes.plot(position(row), 100 * row.accuracy, marker="o" if number else "s", linestyle="")
            axes.annotate(row.name, (position(row), 100 * row.accuracy), xytext=(5, 4), textcoords="offset points",
                          fontsize="small")  # fmt: skip
    axes.set(xscale="log", xlabel=label)
    axes.margins(x=0.15, y=0.15)
    axes.grid(alpha=0.3, which="both")
