"""Tables of results, for the terminal or for a document."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bench import intervals, text_tables
from bench.intervals import ComparisonKey
from bench.result_files import (
    ASIDE,
    COPY,
    ERROR,
    NATIVE,
    NUMPY,
    PAYLOAD,
    PLAN,
    SINGLE,
    Case,
    Result,
    ResultSet,
    baseline,
)
from mpicoll.collectives.select import HIERARCHY, ON_NODE
from mpicoll.schedules import ALGORITHMS
from mpicoll.schedules.cost import bus_factor

SHARES = ("of_copy", "of_read")
"""Details that the long table shows: bytes touched a second over those of a copy, and a reading pass over the time."""
Contenders = Mapping[str, Sequence[Result]]
_PERCENTILES = "50/90/99%"
_OWN = {*ON_NODE, HIERARCHY, *(name for algorithms in ALGORITHMS.values() for name in algorithms)}


class Title(NamedTuple):
    """Facts that the rows of a table share."""

    library: str
    thread_level: str
    setting: str
    benchmark: str
    dtype: str
    size: int
    variant: str
    manner: str = ""


def format_size(nbytes: int) -> str:
    """Return a length as people write it."""
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def geometric_mean(values: Sequence[float]) -> float:
    """Return it; ratios are averaged so, since 2 and 1/2 cancel."""
    return math.exp(sum(map(math.log, values)) / len(values))


_LEGEND = (
    "ratios are the time of the baseline, in the second column, over that of the contender: above 1 is faster\n"
    "busbw is that of auto, or of the baseline where auto is not measured"
)


def describe(case: Case) -> str:
    """Return a case in a few words."""
    manner = f"({case.manner})" if case.manner else ""
    return " ".join(filter(None, [case.benchmark, format_size(case.nbytes), case.variant, manner]))


def group(runs: Iterable[ResultSet]) -> dict[Title, dict[int, dict[str, list[Result]]]]:
    """Sort launches into tables, rows by length, and contenders."""
    tables: dict[Title, dict[int, dict[str, list[Result]]]] = {}
    for key, results in intervals.collect(runs).items():
        rows = tables.setdefault(_title(key), {})
        rows.setdefault(key.case.nbytes, {})[key.contender] = results
    return tables


def _title(key: ComparisonKey) -> Title:
    case = key.case
    where = key.library, key.thread_level, key.setting
    return Title(*where, case.benchmark, case.dtype, case.size, case.variant, case.manner)


def show(runs: Sequence[ResultSet], *, markdown: bool = False, long: bool = False) -> None:
    """Print all tables, and what speaks against them."""
    cores = {run.metadata.get("cores", 0) for run in runs}
    for title, rows in group(runs).items():
        head = f"{heading(title)}, {max(cores)} cores"
        lines = (
            text_tables.markdown(cells(rows, long=long, brief=True))
            if markdown
            else text_tables.plain(cells(rows, long=long))
        )
        sys.stdout.write("\n".join(["", head, "", *lines, ""]))
    if not long:
        sys.stdout.write(f"\n{_LEGEND}\n")
    notes = dict.fromkeys(str(note) for run in runs for note in run.metadata.get("warnings", ()))
    sys.stdout.write("\n".join(f"note: {note}" for note in notes) + "\n" * bool(notes))
    sys.stdout.flush()


def heading(title: Title) -> str:
    """Return in one line what the rows of a table have in common."""
    ranks = f"{title.size} rank{'s' if title.size > 1 else ''}"
    parts = [title.benchmark, title.library, f"threads: {title.thread_level}", ranks, title.setting]
    return ", ".join(filter(None, [*parts, title.dtype, title.variant, title.manner]))


def cells(rows: Mapping[int, Contenders], *, long: bool = False, brief: bool = False) -> list[list[str]]:
    """Return a table's cells, the header first: a line for each length, or for each contender.

    Parameters
    ----------
    brief
        A line for each length even where contenders have more to tell than a ratio.
    """
    if long:
        return list(_long(rows))
    lossy = not brief and any(ERROR in results[0].detail for row in rows.values() for results in row.values())
    return list(_with_errors(rows)) if lossy else _ratios(rows)


def _ratios(rows: Mapping[int, Contenders]) -> list[list[str]]:
    """Return a line for each length: the baseline in microseconds, the others as its time over theirs."""
    base = baseline(next(iter(rows.values())))
    if base is None:
        return list(_long(rows))
    names = list(dict.fromkeys(name for row in rows.values() for name in row if _competes(row, name, base)))
    extra = _extra_columns(base, rows)
    header = ["size", f"{base} us", *map(_label, names), *extra, "wrong"]
    lines = []
    for nbytes, row in sorted(rows.items()):
        ratios = [_with_interval(intervals.ratio(row[base], row[name])) if name in row else "" for name in names]
        more = [show(row) for show in extra.values()]
        time = f"{intervals.median(row[base]) * 1e6:.1f}"
        lines.append([format_size(nbytes), time, *ratios, *more, str(_wrong([row]))])
    every = [[_ratio(row, base, name) for row in rows.values() if name in row] for name in names]
    means = [f"{geometric_mean(values):.2f}" for values in every]
    least = [f"{min(values):.2f}" for values in every]
    blank = [""] * len(extra)
    lines.append(["geometric mean", "", *means, *blank, str(_wrong(rows.values()))])
    return [header, *lines, ["least", "", *least, *blank, ""]]


def _with_errors(rows: Mapping[int, Contenders]) -> Iterator[list[str]]:
    """Yield a line for each contender of a length: what it gains, and what it loses."""
    yield ["size", "contender", "us", "ratio", PAYLOAD, ERROR, "wrong"]
    for nbytes, row in sorted(rows.items()):
        base = baseline(row)
        for name, results in row.items():
            ratio = _with_interval(intervals.ratio(row[base], results)) if base and name != base else ""
            payload = f"{results[0].detail[PAYLOAD]:.1f}x" if PAYLOAD in results[0].detail else ""
            error = f"{max(result.detail.get(ERROR, 0.0) for result in results):.1e}"
            time = f"{intervals.median(results) * 1e6:.1f}"
            yield [format_size(nbytes), name, time, ratio, payload, error, str(_wrong([{name: results}]))]


def _extra_columns(base: str, rows: Mapping[int, Contenders]) -> dict[str, Callable[[Contenders], str]]:
    """Return the columns beside the ratios that these rows have something for."""

    def bound(row: Contenders) -> str:
        if COPY not in row or PLAN not in row:
            return ""
        return f"{intervals.median(row[COPY]) / intervals.median(row[PLAN]):.0%}"

    def busbw(row: Contenders) -> str:
        results = row.get("auto", row[base])
        case = results[0].case
        return f"{case.nbytes * bus_factor(case.benchmark, case.size) / intervals.median(results) / 1e9:.2f}"

    def copied(row: Contenders) -> str:
        return f"{intervals.median(row[COPY]) / intervals.median(row[base]):.2f}" if COPY in row else ""

    def overlap(row: Contenders) -> str:
        shares = [results[0].detail["overlap"] for results in row.values() if "overlap" in results[0].detail]
        return ", ".join(f"{share:.0%}" for share in shares)

    def choice(row: Contenders) -> str:
        return next((str(results[0].detail["choice"]) for results in row.values() if "choice" in results[0].detail), "")

    columns = {"bound": bound, "busbw GB/s": busbw, "overlap": overlap, "auto takes": choice}
    columns["auto over fastest"] = partial(_over_fastest, base)
    columns |= {f"{name} us {_PERCENTILES}": partial(_percentiles, name) for name in (base, "auto", PLAN)}
    if base == NUMPY:
        columns = {"copy": copied}
    return {name: show for name, show in columns.items() if any(show(row) for row in rows.values())}


def _over_fastest(base: str, row: Contenders) -> str:
    """Return the time of ``auto`` over that of the fastest of our algorithms, and its name."""
    names = [name for name in row if name in _OWN]
    if "auto" not in row or len(names) < 2:
        return ""
    fastest = min(names, key=lambda name: intervals.median(row[name]))
    return f"{_ratio(row, 'auto', fastest):.2f} {_label(fastest)}"


def _percentiles(name: str, row: Contenders) -> str:
    """Return the 50th, 90th and 99th percentile of single calls in microseconds, means over launches."""
    results = row.get(name, ())
    if not results or results[0].case.pace != SINGLE:
        return ""
    summaries = [result.summary() for result in results]
    means = [sum(summary[column] for summary in summaries) / len(summaries) for column in ("median", "p90", "p99")]
    return " / ".join(f"{1e6 * mean:.1f}" for mean in means)


def _label(name: str) -> str:
    return name if name.startswith(NATIVE) else name.replace("_", " ")


def _competes(row: Contenders, name: str, base: str) -> bool:
    return name not in (base, COPY) and not row[name][0].detail.get(ASIDE)


def _with_interval(ratio: intervals.Interval) -> str:
    return f"{ratio.value:.2f} ±{min(999, 100 * math.expm1(ratio.half)):.0f}%"


def _ratio(row: Contenders, base: str, name: str) -> float:
    return intervals.median(row[base]) / intervals.median(row[name])


def _wrong(rows: Iterable[Contenders]) -> int:
    return sum(result.wrong for row in rows for results in row.values() for result in results)


def _long(rows: Mapping[int, Contenders]) -> Iterator[list[str]]:
    """Yield a line for each contender: percentiles over all launches, bandwidths, and the ratio with its bounds."""
    shares = [
        name for name in SHARES if any(name in r.detail for row in rows.values() for rs in row.values() for r in rs)
    ]
    columns = ["size", "contender", "median us", "p5", "p90", "p99", "algbw GB/s", "busbw GB/s", "ratio", "wrong"]
    yield columns + [share.replace("_", " ") for share in shares]
    for nbytes, row in sorted(rows.items()):
        base = baseline(row)
        for name, results in row.items():
            summaries = [result.summary() for result in results]
            mean = {column: sum(s[column] for s in summaries) / len(summaries) for column in ("p5", "p90", "p99")}
            seconds = intervals.median(results)
            algbw = nbytes / seconds / 1e9
            busbw = algbw * bus_factor(results[0].case.benchmark, results[0].case.size)
            ratio = f"{intervals.ratio(row[base], results)}" if base and name != base else ""
            times = [f"{value * 1e6:.2f}" for value in (seconds, *mean.values())]
            yield [
                format_size(nbytes),
                name,
                *times,
                f"{algbw:.3f}",
                f"{busbw:.3f}",
                ratio,
                str(_wrong([{name: results}])),
                *(f"{results[0].detail[share]:.0%}" if share in results[0].detail else "" for share in shares),
            ]
