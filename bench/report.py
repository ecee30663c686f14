"""One page that shows a set of results: ``python -m bench.report bench/results/<time>``.

``report.html`` needs nothing else: figures are inside, no script, no network. It begins with what speaks against the
numbers, then says how ours compare with the best that the MPI library can do; that is printed, too.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import headline, layout, plots, records, table
from bench.records import ResultsError, Run
from bench.table import Title

_STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); } h3 { margin-top: 2rem; }
figure { margin: 1rem 0; background: #fff; border-radius: 6px; padding: .5rem; overflow-x: auto; }
figure svg { max-width: 100%; min-width: 44rem; height: auto; display: block; }
figcaption { color: #333; font-size: .85rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
.scroll { overflow-x: auto; } summary { cursor: pointer; margin: .5rem 0; }
.note { border-left: 4px solid #e69f00; padding-left: .8rem; }
.wrong { background: #b00020; color: #fff; padding: .8rem; border-radius: 6px; }
.facts td { text-align: left; white-space: normal; word-break: break-word; }
"""
_NOTES = 4
_METHOD = """Calls are made back to back, or one at a time (single): then all ranks begin each call at the same moment,
as in a program that computes in between. Send buffers are written by their owners before each call, outside of the
time, unless a heading says that they are untouched. Times are medians over rounds of the slowest rank's time;
contenders take turns within each round, so that what else the machine does hits all of them, and their ratio holds
where their times do not. Intervals are 95 %: the larger of what samples differ by within a launch and what launches
differ by. Results are checked outside the timing. Bus bandwidth is nccl-tests' definition: what the link of each rank
would carry in the best algorithm. With more ranks than cores, times contain waiting for a core: read ratios only."""


def page(runs: Sequence[Run]) -> str:
    """Return the page."""
    tables = table.group(runs)
    names = list(dict.fromkeys(n for rows in tables.values() for row in rows.values() for n in row if n != "copy"))
    parts = [_top(runs), *_headline(runs)]
    kinds = {"kernel ": plots.kernels, "overlap ": plots.overlap}
    plain = {t: rows for t, rows in tables.items() if not t.benchmark.startswith(tuple(kinds))}
    for benchmark in dict.fromkeys(title.benchmark for title in plain):
        parts += _benchmark(benchmark, {t: rows for t, rows in plain.items() if t.benchmark == benchmark}, names)
    for prefix, draw in kinds.items():
        some = {t: rows for t, rows in tables.items() if t.benchmark.startswith(prefix)}
        if some:
            parts += [
                f"<h2>{prefix.strip()}</h2>",
                _figure(draw(some), f"{prefix.strip()}s"),
                *map(_table, some.items()),
            ]
    parts += ["<h2>Method</h2>", f"<p>{_METHOD}</p>", "<h2>What was measured where</h2>", *_facts(runs)]
    title = "mpicoll benchmarks"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _top(runs: Sequence[Run]) -> str:
    started = min(str(run.metadata.get("started", "")) for run in runs)
    commits = ", ".join(sorted({str(run.metadata.get("commit", "")) for run in runs}))
    wrong = sum(run.wrong for run in runs)
    banner = f'<p class="wrong">{wrong} elements of results were wrong.</p>' if wrong else ""
    notes = dict.fromkeys(str(note) for run in runs for note in run.metadata.get("warnings", ()))
    warnings = _notes(list(notes)) if notes else ""
    return f"<h1>mpicoll benchmarks</h1><p>{_safe(started)}, commit {_safe(commits)}</p>{banner}{warnings}"


def _notes(notes: Sequence[str]) -> str:
    first, rest = (
        f'<ul class="note">{"".join(f"<li>{_safe(note)}</li>" for note in some)}</ul>'
        for some in (notes[:_NOTES], notes[_NOTES:])
    )
    more = len(notes) - _NOTES
    return first + (f"<details><summary>{more} more notes</summary>{rest}</details>" if more > 0 else "")


def _headline(runs: Sequence[Run]) -> Iterable[str]:
    yield "<h2>In short</h2>"
    cells = [("benchmark", "library", "calls", "ranks", "ours", "against", "geometric mean", "least", "lengths")]
    cells += headline.lines(runs)
    yield _html_table(cells)
    yield (
        "<p>How many times as fast ours are. <em>best baseline</em> is, for each length, the fastest of the MPI "
        "library's own call at any thread level, with any algorithm forced and on memory from MPI.Alloc_mem, of its "
        "own persistent operation, and of other libraries that were measured. Thread levels and forced algorithms need "
        "launches of their own, so those ratios are between launches; ratios with <em>native</em> are within one.</p>"
    )


def _benchmark(name: str, tables: Mapping[Title, Any], names: Sequence[str]) -> Iterable[str]:
    yield f"<h2>{_safe(name)}</h2>"
    shown = {title: rows for title, rows in tables.items() if _has_contenders(rows)}
    if shown:
        caption = "the fastest for each length, plain calls on ordinary arrays"
        yield _figure(plots.crossover(shown, names), f"{name}: {caption}")
    for title, rows in shown.items():
        what = table.heading(title)
        yield f"<h3>{_safe(what)}</h3>"
        yield _figure(plots.curves(title, rows, names), f"{what}: time, bus bandwidth and speed-up against length")
        yield _table((title, rows))


def _has_contenders(rows: Any) -> bool:
    return any(len(row) > 1 for row in rows.values())


def _figure(svg: str, caption: str) -> str:
    start = svg.replace("<svg ", f'<svg role="img" aria-label="{_safe(caption)}" ', 1)
    return f"<figure>{start}<figcaption>{_safe(caption)}</figcaption></figure>"


def _table(one: tuple[Title, Any]) -> str:
    title, rows = one
    cells = _html_table(table.cells(rows))
    return f"<details><summary>{_safe(table.heading(title))}: numbers</summary>{cells}</details>"


def _html_table(cells: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_safe(cell)}</th>" for cell in cells[0])
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in line) + "</tr>" for line in cells[1:])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(runs: Sequence[Run]) -> Iterable[str]:
    """Yield what all launches have in common, and what differs."""
    names = list(dict.fromkeys(name for run in runs for name in run.metadata))
    lines = []
    for name in names:
        values = list(dict.fromkeys(str(run.metadata.get(name, "")) for run in runs))
        lines.append((name, "; ".join(values) if len(values) <= 8 else f"{len(values)} different"))
    body = "".join(f"<tr><th>{_safe(name)}</th><td>{_safe(value)}</td></tr>" for name, value in lines)
    yield f'<table class="facts"><tbody>{body}</tbody></table><p>{len(runs)} launches.</p>'


def _safe(text: str) -> str:
    return html.escape(str(text), quote=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; exit status 1 if any element was wrong, 2 if there is nothing to show."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="folders or files of results")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html in the first folder")
    arguments = parser.parse_args(argv)
    try:
        runs = records.load_all(arguments.results)
        text = page(runs)
    except (ResultsError, ImportError) as error:
        cure = "; pip install mpicoll[bench]" if isinstance(error, ImportError) else ""
        sys.stderr.write(f"bench.report: {error}{cure}\n")
        return 2
    first = arguments.results[0]
    output = arguments.output or (first if first.is_dir() else first.parent) / "report.html"
    output.write_text(text)
    short = headline.in_short(runs)
    if len(short) > 1:
        sys.stdout.write("\n".join(["", *layout.markdown(short, names=3), "", ""]))
    sys.stdout.write(f"{output}: {len(runs)} launches, {len(text) / 1e6:.1f} MB\n")
    return 1 if any(run.wrong for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
