"""Start of a study's runs that are not finished yet: one launch for all that need the same ranks and links."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import launch
from bench.cluster import EmulatedCluster, unavailable
from bench.namespaces import NamespaceError
from bench.studies import distillation_task
from bench.studies.study_definition import Study
from bench.studies.study_runs import StudyError, StudyRun, load, write_runs
from mpicoll.train.launched_processes import LaunchedProcesses

_LONGEST_RUN_SECONDS = 300.0
_QUICK_STEPS = 3
_MARK = "MPICOLL_BENCH_STUDY"
"""Environment variable by which the processes of a launch are found."""


def planned(study: Study, seeds: int, results: Path, *, quick: bool) -> list[StudyRun]:
    """Return all runs of a study that are known yet, those of one seed after the other.

    Parameters
    ----------
    results
        File of results; runs that follow from others are known when those are finished.
    quick
        True for runs of three steps, to see that they work.
    """
    runs = [_shortened(run, quick) for seed in range(seeds) for run in study.runs(seed)]
    runs = list({run.key: run for run in runs}.values())  # short ones may be equal
    if study.follow is None:
        return runs
    known = load(results)
    found = [known[run.key] for run in runs if run.key in known]
    return runs + [_shortened(run, quick) for seed in range(seeds) for run in study.follow(seed, found)]


def _shortened(run: StudyRun, quick: bool) -> StudyRun:
    if not quick:
        return run
    if run.variant in distillation_task.VARIANTS:
        return replace(run, options={**run.options, "epochs": 1})
    return replace(run, options={**run.options, "steps": _QUICK_STEPS, "warmup": 0})


def pending(runs: Sequence[StudyRun], results: Path) -> list[StudyRun]:
    """Return the runs that have no outcome in a file of results."""
    known = load(results)
    return [run for run in runs if run.key not in known]


def run_all(runs: Sequence[StudyRun], results: Path) -> None:
    """Take all runs that are not finished; their outcomes are added to the file of results as they come.

    Raises
    ------
    StudyError
        If a launch failed, or emulated links are needed and cannot be had.
    """
    left = pending(runs, results)
    if len(left) < len(runs):
        sys.stdout.write(f"  {len(runs) - len(left)} of {len(runs)} runs are finished\n")
        sys.stdout.flush()
    places = dict.fromkeys((run.ranks, run.gbit) for run in left)
    for ranks, gbit in places:
        here = [run for run in left if (run.ranks, run.gbit) == (ranks, gbit)]
        where = f"{ranks} ranks" if gbit is None else f"{ranks} emulated hosts, {gbit:g} Gbit/s"
        sys.stdout.write(f"  {len(here)} runs on {where}\n")
        sys.stdout.flush()
        _launch(here, results, ranks, gbit)


def _launch(runs: Sequence[StudyRun], results: Path, ranks: int, gbit: float | None) -> None:
    with tempfile.TemporaryDirectory(prefix="mpicoll-study-") as folder:
        listed = Path(folder, "runs.json")
        write_runs(listed, runs)
        arguments = ["-m", "bench.studies.run_worker", str(listed), str(results.resolve())]
        seconds = _LONGEST_RUN_SECONDS * len(runs)
        try:
            if gbit is None:
                status = _run_here(launch.command(ranks, arguments), seconds)
            else:
                status = _run_on_cluster(arguments, ranks, gbit, seconds)
        except subprocess.TimeoutExpired:
            raise StudyError(f"{len(runs)} runs on {ranks} ranks took more than {seconds:.0f} s") from None
    if status:
        raise StudyError(f"a launch on {ranks} ranks ended with exit status {status}")


def _run_here(command: Sequence[str], seconds: float) -> int:
    """Run a launch on this machine, and return its exit status; nothing of it is left, whatever ends the wait."""
    launched = LaunchedProcesses(command, _MARK, launch.clean_environment())
    try:
        return launched.process.wait(seconds)
    finally:
        launched.kill()


def _run_on_cluster(arguments: Sequence[str], hosts: int, gbit: float, seconds: float) -> int:
    if reason := unavailable():
        raise StudyError(f"emulated links: {reason}")
    try:
        with EmulatedCluster(hosts, 1, gbit) as cluster:
            return cluster.run(arguments, timeout=seconds, stream=True).returncode
    except (ValueError, FileNotFoundError, NamespaceError) as error:
        raise StudyError(f"emulated links: {error}") from None
