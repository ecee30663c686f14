"""Draw the plots of the benchmark pages from the tables on the same pages: ``python docs/plots.py``.

Each plot is an SVG for light and one for dark pages, with text as paths, so that it needs no fonts of the reader's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "benchmarks"
INK = {"light": "#222222", "dark": "#d8d8d8"}
COLORS = {"light": ("#1f6fb4", "#c2571a"), "dark": ("#6cb6ff", "#f0a35e")}
HATCHES = ("", "///")

Table = dict[str, list[str]]
"""The cells of each row by the text of the first; the head is under ``""``."""


def tables(page: Path) -> list[Table]:
    """Return the tables of a Markdown page, in order."""
    found: list[Table] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if not inside:
            found.append({"": cells})
        elif not re.fullmatch(r":?-+:?", first):
            found[-1][first] = cells
        inside = True
    return found


def ratio(cell: str) -> float:
    """Return the first number of ``2.04 (1.62)`` or ``18.18 ±18%``."""
    return float(cell.split()[0])


def table_of(page: Path, row: str, column: str, number: int = 0) -> Table:
    """Return the `number`-th table of a page that has a row and a column of these names; LookupError without it."""
    fitting = [table for table in tables(page) if row in table and column in table[""]]
    if len(fitting) <= number:
        raise LookupError(f"{page}: has no {number + 1} tables with a row {row!r} and a column {column!r}")
    return fitting[number]


def _bars(axes: Axes, labels: Sequence[str], groups: dict[str, Sequence[float]], theme: str) -> None:
    ink, width = INK[theme], 0.8 / len(groups)
    for number, (name, values) in enumerate(groups.items()):
        places = [place + (number - (len(groups) - 1) / 2) * width for place in range(len(labels))]
        bars = axes.bar(
            places, values, width * 0.92, label=name, color=COLORS[theme][number], hatch=HATCHES[number], edgecolor=ink,
            linewidth=0.6,
        )  # fmt: skip
        axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7, color=ink, padding=1)
    axes.axhline(1, color=ink, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(labels)), labels)
    axes.tick_params(colors=ink)
    for spine in axes.spines.values():
        spine.set_color(ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.label.set_color(ink)
    axes.xaxis.label.set_color(ink)
    axes.title.set_color(ink)
    axes.legend(frameon=False, labelcolor=ink, fontsize=8)


def _draw_allreduce(theme: str) -> None:
    table = table_of(FOLDER / "collectives.md", "allreduce", "16 ranks")
    pairs = [cell.split(";") for cell in table["allreduce"]]
    groups = {"auto": [ratio(auto) for auto, _ in pairs], "plan": [ratio(plan) for _, plan in pairs]}
    _, axes = pyplot.subplots(figsize=(6.6, 3.2), layout="constrained")
    _bars(axes, table[""], groups, theme)
    axes.set(ylabel="native's time / ours", title="allreduce on 16 cores, back to back, geometric mean of 6 lengths")
    axes.title.set_fontsize(10)
    _save(f"allreduce-{theme}.svg")


def _draw_compression(theme: str) -> None:
    page = FOLDER / "compression.md"
    hosts, node = (table_of(page, "4 MB", "int8", number) for number in (0, 2))
    names = [name for name in hosts[""] if "auto" not in name]
    shown = names[names.index("dense") : names.index("busbw GB/s")]
    groups = {
        "4 emulated hosts, links of 1 Gbit/s": [ratio(hosts["4 MB"][hosts[""].index(name)]) for name in shown],
        "one node, 2 ranks": [ratio(node["4 MB"][node[""].index(name)]) for name in shown],
    }
    _, axes = pyplot.subplots(figsize=(8.4, 3.6), layout="constrained")
    labels = [name.replace(" +EF", "\n+EF").replace(":", ":\n", 1) for name in shown]
    _bars(axes, labels, groups, theme)
    axes.set(yscale="log", ylabel="MPI_Allreduce's time / ours", title="compressed allreduce of 4 MB")
    axes.tick_params(axis="x", labelsize=8)
    axes.title.set_fontsize(10)
    _save(f"compression-{theme}.svg")


def _save(name: str) -> None:
    """Write without a date, so that an unchanged table gives an unchanged file."""
    pyplot.savefig(FOLDER / name, transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close()


def main() -> int:
    """Draw all plots."""
    mpl.rcParams.update({"svg.hashsalt": "mpicoll", "font.size": 9, "hatch.linewidth": 0.5})
    for theme in INK:
        _draw_allreduce(theme)
        _draw_compression(theme)
    return 0


if __name__ == "__main__":
    sys.exit(main())
