"""Definition of a study, and what the pages of all studies have in common: cells, lines of a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import intervals, text_tables
from bench.studies.study_runs import StudyOutcome, StudyRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Outcomes = Sequence[StudyOutcome]


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it.

    Attributes
    ----------
    name
        Name on the command line, of the page and of its files.
    title
        Heading of the page.
    question
        Paragraph at the beginning of the page.
    setting
        Paragraph on what all runs have in common.
    runs
        Function of a seed that returns the runs of that seed.
    tables
        Function of outcomes that returns lines of Markdown.
    draw
        Function of an empty figure and outcomes that draws the plot.
    caption
        Text in place of the plot.
    conclusions
        Sentences on the published results.
    follow
        Function of a seed and the outcomes of `runs` that returns further runs of that seed; None for none.
    """

    name: str
    title: str
    question: str
    setting: str
    runs: Callable[[int], list[StudyRun]]
    tables: Callable[[Outcomes], list[str]]
    draw: Callable[[Figure, Outcomes], None]
    caption: str
    conclusions: tuple[str, ...]
    follow: Callable[[int, Outcomes], list[StudyRun]] | None = None


def names_of(outcomes: Outcomes, attribute: str) -> list[str]:
    """Return the different variants or groups, in the order in which they come."""
    return list(dict.fromkeys(getattr(each.run, attribute) for each in outcomes))


def chosen(outcomes: Outcomes, variant: str, group: str | None = None) -> list[StudyOutcome]:
    """Return the outcomes of a variant, in one group or all."""
    return [each for each in outcomes if each.run.variant == variant and group in (None, each.run.group)]


def accuracy_cell(found: Outcomes) -> str:
    """Return median and interval of accuracies in percent, and the number of runs that diverged."""
    if not found:
        return ""
    diverged = sum(bool(each.diverged) for each in found)
    if diverged == len(found):
        return "diverged"
    cell = interval_cell([100 * each.accuracy for each in found], ".2f")
    return f"{cell} ({diverged} diverged)" if diverged else cell


def interval_cell(values: Sequence[float], spec: str) -> str:
    """Return the median of values, and the two between which it lies (:func:`bench.intervals.of_median`)."""
    found = intervals.of_median(values)
    text = format(found.value, spec)
    return f"{text} [{found.low:{spec}}, {found.high:{spec}}]" if len(values) > 1 else text


def median_cell(values: Sequence[float | None], spec: str) -> str:
    """Return the median of values; empty if one is None, or there are none."""
    known = [value for value in values if value is not None]
    return format(median(known), spec) if known and len(known) == len(values) else ""


def grid_table(outcomes: Outcomes, head: str, unit: str, cell: Callable[[Outcomes], str]) -> list[str]:
    """Return a table with a row for each variant and a column for each group."""
    groups = names_of(outcomes, "group")
    rows = [(head, *(f"{group}{unit}" for group in groups))]
    for variant in names_of(outcomes, "variant"):
        rows.append((variant, *(cell(chosen(outcomes, variant, group)) for group in groups)))
    return container(text_tables.markdown(rows))


def container(lines: Sequence[str]) -> list[str]:
    """Return a table as the pages show tables of numbers."""
    return ["::::{container} numbers", *lines, "::::"]


def line_with_interval(axes: Axes, x: Sequence[float], values: Sequence[Sequence[float]], **style: Any) -> None:
    """Draw medians, and between which values they lie."""
    found = [intervals.of_median(each) for each in values]
    middle = [each.value for each in found]
    (line,) = axes.plot(x, middle, marker=".", **style)
    axes.fill_between(
        x, [each.low for each in found], [each.high for each in found], color=line.get_color(), alpha=0.15
    )


def median_curve(found: Outcomes, attribute: str, column: int) -> tuple[list[float], list[float]]:
    """Return the first column of curves, and the median over the seeds of another one."""
    curves = [getattr(each, attribute) for each in found if getattr(each, attribute)]
    length = min((len(curve) for curve in curves), default=0)
    x = [median(curve[place][0] for curve in curves) for place in range(length)]
    return x, [median(curve[place][column] for curve in curves) for place in range(length)]
