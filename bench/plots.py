"""The report's figures, as SVG text; matplotlib is imported here only."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench import intervals, result_files, result_table
from bench.result_files import ALLOC_MEM, ASIDE, COPY, PERSISTENT, Result
from bench.result_table import Title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Mapping[int, Mapping[str, Sequence[Result]]]

_FIXED = {"native": "black", "numpy": "black", "auto": "#0072b2", "plan": "#d55e00", "ours": "#0072b2"}
_OTHERS = ("#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#b5bd00", "#5f3dc4", "#f78da7")
_FORCED = "native "
"""Begins the names of other baselines than native as it is."""
_MARKERS = "osv^D<>Pd"
_IMPORTANT = ("native", "numpy", "auto", "plan", "ours")
_SERIAL = itertools.count()


def colour(name: str, names: Sequence[str]) -> str:
    """Return a contender's colour: the same in all figures that are made with the same `names`."""
    if name in _FIXED:
        return _FIXED[name]
    if name.startswith(_FORCED):
        return "#666666"
    ours = [n for n in names if n not in _FIXED and not n.startswith(_FORCED)]
    return _OTHERS[ours.index(name) % len(_OTHERS)]


def curves(title: Title, rows: Rows, names: Sequence[str]) -> str:
    """Draw latency, bandwidth and speed-up against message size, side by side."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    here = [name for name in names if any(name in row for row in rows.values())]
    for name in here:
        _latency(axes[0], rows, name, names)
        _bandwidth(axes[1], rows, name, names)
        _speedup(axes[2], rows, name, names)
    for axis, label in zip(axes, ("time, µs", "bus bandwidth, GB/s", "times as fast as the baseline"), strict=True):
        _sizes(axis, sorted(rows))
        axis.set_ylabel(label)
        axis.set_yscale("log")
        axis.grid(visible=True, which="major", alpha=0.25)
    axes[2].axhline(1, color="black", linewidth=1)
    axes[2].yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes[2].yaxis.set_minor_formatter(lambda value, _: "")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    return _svg(figure)


def _style(name: str, names: Sequence[str]) -> dict[str, Any]:
    important = name in _IMPORTANT
    shade = colour(name, names)
    if name.startswith(_FORCED):
        forced = [n for n in names if n.startswith(_FORCED)]
        marker = _MARKERS[forced.index(name) % len(_MARKERS)]
        return {"color": shade, "marker": marker, "label": name.replace("_", " "), "linestyle": ":", "markersize": 3}
    marker = "o" if important else _MARKERS[_OTHERS.index(shade) % len(_MARKERS)]
    width = {"linewidth": 2.2, "markersize": 4.5, "zorder": 3} if important else {"linewidth": 1, "markersize": 3}
    return {"color": shade, "marker": marker, "label": name.replace("_", " "), **width}


def _series(rows: Rows, name: str) -> list[tuple[int, Sequence[Result]]]:
    return [(nbytes, row[name]) for nbytes, row in sorted(rows.items()) if name in row]


def _latency(axis: Axes, rows: Rows, name: str, names: Sequence[str]) -> None:
    points = _series(rows, name)
    sizes = [nbytes for nbytes, _ in points]
    axis.plot(sizes, [intervals.median(results) * 1e6 for _, results in points], **_style(name, names))
    if name in _IMPORTANT:
        low, high = ([1e6 * _percentile(results, end) for _, results in points] for end in ("p5", "p95"))
        axis.fill_between(sizes, low, high, color=colour(name, names), alpha=0.12, linewidth=0)


def _percentile(results: Sequence[Result], name: str) -> float:
    return result_table.geometric_mean([result.summary()[name] for result in results])


def _bandwidth(axis: Axes, rows: Rows, name: str, names: Sequence[str]) -> None:
    points = _series(rows, name)
    factor = result_files.bus_factor(points[0][1][0].case.benchmark, points[0][1][0].case.size)
    values = [nbytes * factor / intervals.median(results) / 1e9 for nbytes, results in points]
    axis.plot([nbytes for nbytes, _ in points], values, **_style(name, names))


def _speedup(axis: Axes, rows: Rows, name: str, names: Sequence[str]) -> None:
    points = []
    for nbytes, row in sorted(rows.items()):
        base = result_files.baseline(row)
        if name in row and base is not None and base != name:
            points.append((nbytes, intervals.ratio(row[base], row[name])))
    sizes = [nbytes for nbytes, _ in points]
    axis.plot(sizes, [ratio.value for _, ratio in points], **_style(name, names))
    if name in _IMPORTANT:
        low, high = [ratio.low for _, ratio in points], [ratio.high for _, ratio in points]
        axis.fill_between(sizes, low, high, color=colour(name, names), alpha=0.15, linewidth=0)


def _sizes(axis: Axes, sizes: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    shown = sizes[:: max(1, -(-len(sizes) // 8))]
    axis.set_xticks(shown, [result_table.format_size(nbytes) for nbytes in shown], rotation=45, ha="right")
    axis.minorticks_off()
    axis.set_xlabel("length of the vector")


def crossover(tables: Mapping[Title, Rows], names: Sequence[str]) -> str:
    """Draw which contender is the fastest for each length, a line for each table."""
    plt = _pyplot()
    sizes = sorted({nbytes for rows in tables.values() for nbytes in rows})
    figure, axis = plt.subplots(figsize=(15, 0.6 + 0.55 * len(tables)), layout="constrained")
    for line, rows in enumerate(tables.values()):
        for column, nbytes in enumerate(sizes):
            candidates = {n: r for n, r in rows.get(nbytes, {}).items() if _competes(n, r)}
            if not candidates:
                continue
            best = min(candidates, key=lambda name: intervals.median(candidates[name]))
            shade = colour(best, names)
            axis.add_patch(plt.Rectangle((column, line), 0.96, 0.9, color=shade, alpha=0.3, linewidth=0))
            label = best.replace("native (", "").rstrip(")").replace("_", "\n")
            axis.text(column + 0.48, line + 0.45, label, ha="center", va="center", fontsize=8)
    axis.set_xlim(0, len(sizes))
    axis.set_ylim(len(tables), 0)
    axis.set_xticks([n + 0.48 for n in range(len(sizes))], [result_table.format_size(nbytes) for nbytes in sizes])
    axis.set_yticks([n + 0.45 for n in range(len(tables))], [_short(title) for title in tables])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return _svg(figure)


def _competes(name: str, results: Sequence[Result]) -> bool:
    special = name in (COPY, "plan") or name.endswith((f" {PERSISTENT}", f" {ALLOC_MEM}"))
    return not special and not results[0].detail.get(ASIDE)


def _short(title: Title) -> str:
    level = "" if title.thread_level == "multiple" else title.thread_level
    return ", ".join(
        filter(None, [title.library, f"{title.size} ranks", level, title.variant, title.manner, title.setting])
    )


def overlap(tables: Mapping[Title, Rows]) -> str:
    """Draw the hidden share of communication against message size."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for line, (title, rows) in zip(itertools.cycle(("-", "--", ":", "-.")), tables.items(), strict=False):
        for name in ("native", "auto", "plan"):
            points = [(n, [r.detail["overlap"] for r in row[name]]) for n, row in sorted(rows.items()) if name in row]
            shares = [100 * sum(values) / len(values) for _, values in points]
            label = f"{name}, {_short(title)}"
            axis.plot([n for n, _ in points], shares, line, color=_FIXED[name], marker="o", markersize=4, label=label)
    _sizes(axis, sorted({nbytes for rows in tables.values() for nbytes in rows}))
    axis.set_ylabel("communication hidden, %")
    axis.set_ylim(-3, 103)
    axis.grid(visible=True, alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure)


def kernels(tables: Mapping[Title, Rows]) -> str:
    """Draw the kernels' speed against NumPy's as bars."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(12, 4), layout="constrained")
    bars = [
        (f"{title.benchmark.removeprefix('kernel ')} {title.dtype}\n{result_table.format_size(nbytes)}", row)
        for title, rows in tables.items()
        for nbytes, row in sorted(rows.items())
        if "ours" in row
    ]
    for place, (_, row) in enumerate(bars):
        base = result_files.baseline(row)
        if base is not None:
            ratio = intervals.ratio(row[base], row["ours"])
            error = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
            axis.bar(place, ratio.value, yerr=error, color=_FIXED["ours"], alpha=0.75, ecolor="#333333")
    axis.axhline(1, color="black", linewidth=1)
    axis.set_ylabel("times as fast as NumPy")
    axis.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=7, rotation=60, ha="right")
    return _svg(figure)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    # Every figure stands in one page: names inside must differ, and text stays text.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": f"mpicoll-{next(_SERIAL)}", "font.size": 10})
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif"})
    return plt


def _svg(figure: Any) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    _pyplot().close(figure)
    text = stream.getvalue()
    return text[text.index("<svg") :]
