"""One page that shows a set of results: ``python -m bench.report bench/results/<time>``.

``report.html`` needs nothing else: figures are inside, no script, no network. It begins with what speaks against the
numbers, then says how ours compare with the best that the MPI library can do; that is printed, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import headline, plots, result_files, result_table, text_tables
from bench.result_files import ResultsError, ResultSet
from bench.result_table import Title

_TEMPLATES = Path(__file__).parent / "templates"
_NOTES = 4
"""So many notes are shown at once; the reader unfolds the others."""


class Figure(NamedTuple):
    """A drawing and the line below it."""

    svg: str
    caption: str


class Entry(NamedTuple):
    """One table of results, with its figure where it has one."""

    heading: str
    figure: Figure | None
    cells: Sequence[Sequence[str]]


class Section(NamedTuple):
    """One benchmark."""

    name: str
    overview: Figure | None
    entries: Sequence[Entry]


def page(runs: Sequence[ResultSet]) -> str:
    """Return the page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cells = [("benchmark", "library", "calls", "ranks", "ours", "against", "geometric mean", "least", "lengths")]
    return environment.get_template("report.html").render(
        started=min(str(run.metadata.get("started", "")) for run in runs),
        commits=", ".join(sorted({str(run.metadata.get("commit", "")) for run in runs})),
        wrong=sum(run.wrong for run in runs),
        warnings=list(dict.fromkeys(str(note) for run in runs for note in run.metadata.get("warnings", ()))),
        shown=_NOTES,
        headline=[*cells, *headline.lines(runs)],
        sections=list(_sections(result_table.group(runs))),
        facts=_facts(runs),
        launches=len(runs),
    )


def _sections(tables: Mapping[Title, Any]) -> Iterable[Section]:
    """Yield collectives one by one, then kernels, then overlap."""
    names = list(dict.fromkeys(n for rows in tables.values() for row in rows.values() for n in row if n != "copy"))
    kinds = {"kernel ": plots.kernels, "overlap ": plots.overlap}
    plain = {t: rows for t, rows in tables.items() if not t.benchmark.startswith(tuple(kinds))}
    for benchmark in dict.fromkeys(title.benchmark for title in plain):
        yield _collective(benchmark, {t: rows for t, rows in plain.items() if t.benchmark == benchmark}, names)
    for prefix, draw in kinds.items():
        some = {t: rows for t, rows in tables.items() if t.benchmark.startswith(prefix)}
        if some:
            name = prefix.strip()
            entries = [Entry(result_table.heading(t), None, result_table.cells(rows)) for t, rows in some.items()]
            yield Section(name, Figure(draw(some), f"{name}s"), entries)


def _collective(name: str, tables: Mapping[Title, Any], names: Sequence[str]) -> Section:
    shown = {title: rows for title, rows in tables.items() if any(len(row) > 1 for row in rows.values())}
    if not shown:
        return Section(name, None, ())
    caption = f"{name}: the fastest for each length, plain calls on ordinary arrays"
    return Section(
        name, Figure(plots.crossover(shown, names), caption), [_entry(t, rows, names) for t, rows in shown.items()]
    )


def _entry(title: Title, rows: Any, names: Sequence[str]) -> Entry:
    heading = result_table.heading(title)
    caption = f"{heading}: time, bus bandwidth and speed-up against length"
    return Entry(heading, Figure(plots.curves(title, rows, names), caption), result_table.cells(rows))


def _facts(runs: Sequence[ResultSet]) -> list[tuple[str, str]]:
    """Return each fact with what all launches have in common, or with what differs."""
    lines = []
    for name in dict.fromkeys(name for run in runs for name in run.metadata):
        values = list(dict.fromkeys(str(run.metadata.get(name, "")) for run in runs))
        lines.append((name, "; ".join(values) if len(values) <= 8 else f"{len(values)} different"))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; exit status 1 if any element was wrong, 2 if there is nothing to show."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="folders or files of results")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: report.html in the first folder")
    arguments = parser.parse_args(argv)
    try:
        runs = result_files.load_all(arguments.results)
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
        sys.stdout.write("\n".join(["", *text_tables.markdown(short, names=3), "", ""]))
    sys.stdout.write(f"{output}: {len(runs)} launches, {len(text) / 1e6:.1f} MB\n")
    return 1 if any(run.wrong for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
