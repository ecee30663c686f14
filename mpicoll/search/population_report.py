"""Report of population-based training on rank 0: a line for each member and generation, plots, a file of results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpicoll.quantities import counted
from mpicoll.search.population_settings import COPIED, FAILED, MemberRecord, PopulationResult, as_json
from mpicoll.search.search_options import METRICS, SearchOptions
from mpicoll.search.search_space import Choice, Parameter, Range
from mpicoll.train.run_report import bar_below_table, say, write_json

PLOT = "population.png"
_HEAD = f"{'generation':>10} {'member':>6} {'score':>9}  parameters"


class PopulationTable:
    """Table that grows by a line for each member of a generation, above a progress bar on a terminal with tqdm."""

    def __init__(self, options: SearchOptions, generations: int) -> None:
        self._options, self._total = options, generations
        self._begun = False
        self._bar: Any = None

    def add(self, records: Sequence[MemberRecord]) -> None:
        """Print a generation, best member first."""
        if self._options.quiet:
            return
        if not self._begun:
            self._begin(records[0].generation)
        if self._bar is not None:
            self._bar.clear()
        for record in ranked(records, self._options.metric):
            say(line_of_member(record))
        if self._bar is not None:
            best = ranked(records, self._options.metric)[0].score
            self._bar.set_postfix_str(f"best {self._options.metric} {best:.4f}", refresh=False)
            self._bar.update()

    def _begin(self, generation: int) -> None:
        self._begun = True
        if generation:
            say(f"going on after generation {generation - 1}")
        say(_HEAD)
        if self._options.progress:
            self._bar = bar_below_table(self._total, generation, "generation")

    def close(self) -> None:
        """Leave the bar's last state on the screen."""
        if self._bar is not None:
            self._bar.close()


def ranked(records: Sequence[MemberRecord], metric: str) -> list[MemberRecord]:
    """Return records with the best score first, and those of failed members last."""
    sign = -1 if METRICS[metric] == "maximize" else 1
    return sorted(
        records, key=lambda each: (math.isnan(each.score), 0 if math.isnan(each.score) else sign * each.score)
    )


def line_of_member(record: MemberRecord) -> str:
    """Return the line of a member after a generation."""
    score = "" if math.isnan(record.score) else f"{record.score:.5g}"
    told = {COPIED: f"  continues from {record.source}", FAILED: f"  failed: {record.reason}"}.get(record.state, "")
    if record.state == FAILED and record.source != record.member:
        told += f"; continues from {record.source}"
    return f"{record.generation:>10} {record.member:>6} {score:>9}  {values_of(record.params)}{told}"


def values_of(params: Mapping[str, Any]) -> str:
    """Return hyper-parameters in short."""
    texts = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in params.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())


def publish(result: PopulationResult, options: SearchOptions) -> None:
    """Print the summary and write the files that the options name."""
    if not options.quiet:
        say(summary_of_population(result, options))
    if options.json is not None:
        best = None if result.best_number is None else {
            "member": result.best_number, "score": result.best_score, "schedule": result.schedule(),
        }  # fmt: skip
        facts = {"new_generations": result.new_generations, "seconds": result.seconds, "stopped": result.stopped}
        write_json(options.json, {"best": best, **facts, "history": [as_json(each) for each in result.history]})
    if options.plot is not None:
        draw_population(result, options.space, options.metric, Path(options.plot, PLOT).expanduser())


def summary_of_population(result: PopulationResult, options: SearchOptions) -> str:
    """Return the lines at the end: the best member, and the hyper-parameters that led to it."""
    generations = 1 + (result.history[-1].generation if result.history else -1)
    copies = sum(record.source != record.member for record in result.history)
    failures = sum(record.state == FAILED for record in result.history)
    lines = [f"generations: {generations}, {result.new_generations} of them in {result.seconds:.1f} s; "
             f"{counted(copies, 'member')} copied, {failures} failed"]  # fmt: skip
    if result.stopped:
        lines.append("stopped; the same command goes on" if options.storage else "stopped")
    if result.best_number is None:
        return "\n".join([*lines, "no member has a score"])
    lines.append(f"best: member {result.best_number}, {options.metric} {result.best_score:.6g}, trained with")
    last = None
    for generation, params in enumerate(result.schedule()):
        if params != last:
            lines.append(f"  from epoch {generation * options.interval}: {values_of(params)}")
        last = params
    return "\n".join(lines)


def draw_population(result: PopulationResult, space: Sequence[Parameter], metric: str, path: Path) -> None:
    """Draw score and hyper-parameters of all members over the generations, those that led to the best one in bold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 2.6 * (1 + len(space))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1 + len(space), 1, sharex=True, squeeze=False)[:, 0]
    members = sorted({record.member for record in result.history})
    for member in members:
        own = [record for record in result.history if record.member == member]
        generations = [record.generation for record in own]
        panels[0].plot(generations, [record.score for record in own], linewidth=0.9, marker=".", alpha=0.7)
        for axes, parameter in zip(panels[1:], space, strict=True):
            values = [_height(parameter, record.params[parameter.name]) for record in own]
            axes.plot(generations, values, linewidth=0.9, marker=".", alpha=0.7)
    schedule = result.schedule()
    for axes, parameter in zip(panels[1:], space, strict=True):
        values = [_height(parameter, params[parameter.name]) for params in schedule]
        axes.plot(range(len(values)), values, color="black", linewidth=2.2)
        axes.set(ylabel=parameter.name)
        if isinstance(parameter, Range) and parameter.log:
            axes.set_yscale("log")
        if isinstance(parameter, Choice):
            axes.set_yticks(range(len(parameter.values)), [str(value) for value in parameter.values])
    panels[0].set(ylabel=metric, title=f"{counted(len(members), 'member')}; black: what led to the best")
    panels[-1].set(xlabel="generation")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def _height(parameter: Parameter, value: Any) -> float:
    """Return the place of a value on its axis."""
    return float(parameter.values.index(value)) if isinstance(parameter, Choice) else float(value)
