"""Pages of studies: Markdown and a plot, written from the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.studies.study_definition import Outcomes, Study
from bench.studies.study_runs import CHANCE, TEST, TRAIN, StudyRun, load


def outcomes_of(study: Study, runs: Sequence[StudyRun], results: Path) -> Outcomes:
    """Return the outcomes of the runs that are finished, ordered as the runs are."""
    known = load(results)
    wanted = sorted(runs, key=lambda run: run.seed)
    return [known[run.key] for run in wanted if run.key in known]


def page_of(study: Study, outcomes: Outcomes) -> str:
    """Return the page of a study, in Markdown."""
    seeds = len({each.run.seed for each in outcomes})
    sizes = sorted({each.run.ranks for each in outcomes})
    ranks = " and ".join(map(str, sizes))
    lines = [
        f"# {study.title}",
        "",
        study.question,
        "",
        "```console",
        f'$ make studies ARGS="--only {study.name}"',
        "```",
        "",
        f"{study.setting} The task, and what the numbers in brackets mean, are described in {{doc}}`method`.",
        "",
        f"*{len(outcomes)} runs with {seeds} {'seed' if seeds == 1 else 'seeds'} each, on {ranks} ranks that shared 2 "
        "cores.*",
        "",
        f"![{study.caption}]({study.name}.svg)",
        "",
        *study.tables(outcomes),
    ]
    if study.conclusions:
        lines += ["", "## What follows", "", *(f"- {sentence}" for sentence in study.conclusions)]
    return "\n".join(lines) + "\n"


def method_page(studies: Sequence[Study]) -> str:
    """Return the page that leads to the studies, and says what they have in common."""
    rows = [f"| {{doc}}`{study.name}` | {study.question} |" for study in studies]
    return f"""# Studies: method

Studies train small models many times, and answer a question about distributed training each.

| study | question |
|---|---|
{chr(10).join(rows)}

```console
$ make studies
$ make studies ARGS="--only batch-size --seeds 5 --output folder"
```

The program writes the results of each run to a file of JSON lines, `NAME.jsonl`, and the pages and plots from these
files. A run that is in the file is not repeated, so that a study which was interrupted goes on, and `--seeds 10` adds
runs to those that there are. The files of the published pages lie beside them in `docs/studies`, where the program
looks unless `--output` names another folder. {{ref}}`cmd-studies` has all options.

## Task

All studies train on *clouds*: {TRAIN} training samples and {TEST} test samples with 32 features in ten classes of eight
Gaussian clouds each, of which logistic regression gets half right. The samples are the same for all seeds; a seed
chooses initial weights and the order of samples. One test sample is {100 / TEST:g} percentage points.
{{doc}}`distillation` has other tasks, too.

## Numbers

A cell is the median over the seeds, and in brackets the two values between which the true median lies with 95 %
confidence; with five seeds these are the least and the largest value, and the confidence is 94 %. A run whose loss
became infinite or NaN counts as one that guesses ({CHANCE:.0%}).

Accuracies and bytes do not depend on the machine, but for asynchronous training. Seconds do. They are published where
emulated links or artificial delays dominate them; a page says so where that is not the case.
"""


def draw(study: Study, outcomes: Outcomes, path: Path) -> None:
    """Draw the plot of a study."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    study.draw(figure, outcomes)
    with mpl.rc_context({"svg.hashsalt": study.name}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
