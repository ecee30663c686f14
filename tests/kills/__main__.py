"""Kill ranks of supervised training at random moments, and check where the runs end.

``python -m tests.kills --kills 50`` trains a small model again and again under ``python -m mpicoll.train.supervise``,
in synchronous, sharded and parameter-server training in turn, and under Open MPI with ``--on-failure shrink``, with
spare ranks and without, and with replicated servers, too. A
worker, a server and rank 0 get SIGKILL, in turn, at random moments: mostly between or within steps, some at the start
and at the end. Of every run these statements are checked:

- it ends with status 0, and leaves no processes;
- its accuracy is that of a run without kills, within four standard deviations of a difference between two accuracies;
- synchronous and sharded training, also with spare ranks, end with the bits of a run without kills;
- each restart takes at most one checkpoint interval again, and one step where the others go on in the same job;
- no start fails that nobody disturbed, and none waits for a dead rank until the timeout of the collectives.

A seed repeats victims and moments, though not what they meet. Exit status: 0 if all statements held, 1 if one did not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from mpicoll.quantities import positive
from tests import extent
from tests.kills.killed_run import INTERVAL, MODES, KilledRun, disturbed, undisturbed

_MOST_KILLS_PER_RUN = 3
_RUNS_WITHOUT_KILLS = {True: 1, False: 3}
"""Runs that tell a mode's accuracy, by whether all of its runs end with the same bits."""
_FRUITLESS = 10
"""Runs in a row that ended before their first kill, after which the harness gives up."""


def _default_modes() -> list[str]:
    """Return the modes that the MPI library allows: those in one job need ULFM."""
    return [name for name, mode in MODES.items() if not mode.in_one_job or extent.SECOND_LIBRARY]


def _settings(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=positive, default=50, metavar="N", help="number of kills (default: 50)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=_default_modes(),
                        help="modes (default: all; shrink, spares and replicas only under Open MPI)")  # fmt: skip
    parser.add_argument("--seed", type=int, help="decides victims and moments (default: another one each time)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all runs to a file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep folders and outputs of failed runs there")
    return parser.parse_args(argv)


def _runs(settings: argparse.Namespace, seed: int, folder: Path) -> Iterator[KilledRun]:
    """Yield runs until there have been enough kills."""
    known, dice = {}, random.Random(seed)
    for mode in settings.modes:
        known[mode] = undisturbed(mode, folder / mode, _RUNS_WITHOUT_KILLS[MODES[mode].same_bits])
        accuracies = ", ".join(f"{accuracy:.4f}" for accuracy in known[mode].accuracies)
        print(f"{mode}, without kills: accuracy {accuracies} +- {known[mode].noise:.4f}", flush=True)
    turns = dict.fromkeys(settings.modes, 0)
    left, fruitless, number = settings.kills, 0, 0
    for mode in itertools.cycle(settings.modes):
        if left <= 0 or fruitless == _FRUITLESS:
            return
        here, number = folder / f"run-{number}", number + 1
        here.mkdir()
        victims = itertools.islice(itertools.cycle(MODES[mode].victims), turns[mode], None)
        chosen = list(itertools.islice(victims, min(left, dice.randint(1, _MOST_KILLS_PER_RUN))))
        run = disturbed(mode, chosen, here, dice.randrange(1 << 30), known[mode])
        left, turns[mode] = left - len(run.kills), turns[mode] + len(run.kills)
        fruitless = 0 if run.kills else fruitless + 1
        if run.problems and settings.keep is not None:
            shutil.copytree(here, settings.keep / f"seed-{seed}" / here.name)
        shutil.rmtree(here)
        yield run


def _line(run: KilledRun, done: int, kills: int) -> str:
    """Return a run's line of the progress report."""
    moments = (f"after {kill['at_step']} steps" if kill["at_step"] >= 0 else "at its start" for kill in run.kills)
    pairs = zip(run.kills, moments, strict=True)
    killed = ", ".join(f"{kill['victim']} {moment}" for kill, moment in pairs) or "nobody in time"
    accuracy = "-" if run.accuracy is None else f"{run.accuracy:.4f}"
    facts = f"killed: {killed}; {run.starts} starts; lost steps: {run.lost}; accuracy {accuracy}; {run.seconds:.1f} s"
    return f"[{done}/{kills}] {run.mode}: {facts}" + "".join(f"\n    WRONG: {problem}" for problem in run.problems)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    settings = _settings(argv)
    seed = secrets.randbelow(1 << 30) if settings.seed is None else settings.seed
    print(f"seed {seed}", flush=True)
    runs: list[KilledRun] = []
    with tempfile.TemporaryDirectory(prefix="mpicoll-kills-") as folder:
        for run in _runs(settings, seed, Path(folder)):
            runs.append(run)
            print(_line(run, sum(len(each.kills) for each in runs), settings.kills), flush=True)
            if settings.json is not None:
                settings.json.write_text(json.dumps({"seed": seed, "runs": [asdict(each) for each in runs]}, indent=1))
    kills, wrong = sum(len(run.kills) for run in runs), sum(bool(run.problems) for run in runs)
    lost = max((lost for run in runs for lost in run.lost), default=0)
    print(f"{kills} kills in {len(runs)} runs; at most {lost} steps lost, of {INTERVAL} between checkpoints; "
          f"{wrong} runs with problems")  # fmt: skip
    return int(wrong > 0 or kills < settings.kills)


if __name__ == "__main__":
    sys.exit(main())
