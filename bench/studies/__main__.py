"""Studies of distributed training: many short runs, and a page of the documentation from their results.

``python -m bench.studies`` takes the runs that are not finished yet, and writes a page and a plot for each study. Each
finished run is in ``NAME.jsonl``, and is never repeated; an interrupted study goes on with the same command. Two hours
on two cores; ``--quick`` takes runs of three steps, or of one epoch, to see that they work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import launch
from bench.studies import batch_size, compressor_choice, distilled_students, link_rates, slow_workers, synchronisation
from bench.studies.run_scheduler import planned, run_all
from bench.studies.study_definition import Study
from bench.studies.study_pages import draw, method_page, outcomes_of, page_of
from bench.studies.study_runs import StudyError

PROGRAM = "bench.studies"
STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        batch_size.STUDY,
        synchronisation.STUDY,
        compressor_choice.STUDY,
        link_rates.STUDY,
        slow_workers.STUDY,
        distilled_students.STUDY,
    )
}
_FOLDER, _QUICK_FOLDER = Path("docs", "studies"), Path("build", "quick-studies")
_SEEDS = 5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=STUDIES, default=list(STUDIES), metavar="NAME",
        help=f"default: all of {', '.join(STUDIES)}")  # fmt: skip
    add("--seeds", type=int, metavar="N", help=f"runs of each configuration (default: {_SEEDS}, with --quick 1)")
    add("--quick", action="store_true", help="runs of three steps, in a folder of their own")
    add("--output", type=Path, metavar="FOLDER",
        help=f"results, pages and plots (default: {_FOLDER}, with --quick {_QUICK_FOLDER})")  # fmt: skip
    add("--pages-only", action="store_true", help="take no runs; write pages from the results that there are")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run studies; 1 if one of them failed, 2 if the options are wrong, 130 after an interrupt."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    seeds = arguments.seeds if arguments.seeds is not None else 1 if arguments.quick else _SEEDS
    if seeds < 1:
        parser.error("--seeds is at least 1")
    folder: Path = arguments.output or (_QUICK_FOLDER if arguments.quick else _FOLDER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {folder}: {error.strerror}")
    status = 0
    for name in arguments.only:
        try:
            _run(STUDIES[name], seeds, folder, quick=arguments.quick, measure=not arguments.pages_only)
        except StudyError as error:
            sys.stderr.write(f"{parser.prog}: {name}: {error}\n")
            status = 1
        except KeyboardInterrupt:
            sys.stderr.write(f"{parser.prog}: stopped; the same command goes on\n")
            return 130
    (folder / "method.md").write_text(method_page(list(STUDIES.values())), encoding="utf-8")
    return status


def _run(study: Study, seeds: int, folder: Path, *, quick: bool, measure: bool) -> None:
    sys.stdout.write(f"{study.name}: {study.title}\n")
    sys.stdout.flush()
    results = folder / f"{study.name}.jsonl"
    if measure:
        run_all(planned(study, seeds, results, quick=quick), results)
        if study.follow is not None:
            run_all(planned(study, seeds, results, quick=quick), results)
    runs = planned(study, seeds, results, quick=quick)
    outcomes = outcomes_of(study, runs, results)
    if not outcomes:
        raise StudyError(f"{results}: has no results of this study")
    page, plot = folder / f"{study.name}.md", folder / f"{study.name}.svg"
    page.write_text(page_of(study, outcomes), encoding="utf-8")
    draw(study, outcomes, plot)
    sys.stdout.write(f"  {page}, {plot}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    launch.end_on_signals()
    sys.exit(main())
