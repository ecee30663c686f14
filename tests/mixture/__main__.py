"""Random operations on random communicators from random memory, every element of every result compared.

``python -m tests.mixture --ranks 4 --seconds 60`` runs one variant; a seed repeats the same operations, though not the
same interleaving. ``python -m tests.mixture --soak --minutes 60`` goes through all variants on 2, 3, 4, 5 and 8 ranks
under each MPI library that has an environment here, with fresh seeds, and prints a table.

Blocking, nonblocking, persistent and compressed calls of all collectives, and collectives of Python objects; lengths
from 1 to 1.5 million elements; eight element types; buffers in ordinary and shared memory, strided and misaligned, and
laid out by derived datatypes that each rank draws for itself; ranks without elements that give any type; in place; on
duplicates, halves, reversed communicators, grids and their columns; among neighbours; from two threads; with ranks
late, and with ranks stopped (SIGSTOP), at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.text_tables import markdown
from tests import mpirun

VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "stopped ranks": {},
    "no segments": {"MPICOLL_SEGMENTS": "off"},
    "no process copies": {"MPICOLL_SEGMENTS": "off", "MPICOLL_TRANSFER": "off"},
    "pretended nodes": {"MPICOLL_NODES": "2"},
    "messages only": {"MPICOLL_NODE": "off"},
    "every call compared": {"MPICOLL_CHECK": "full"},
    "driver thread": {"MPICOLL_PROGRESS_THREAD": "eager"},
    "methods tried": {"MPICOLL_TRIALS": "eager"},
}
RANKS = (2, 3, 4, 5, 8)
_START_SECONDS = 240.0
_SHARE = {"default": 3, "stopped ranks": 3}
"""Of the time of a soak; the others have 1."""


def stop_somebody(pids: dict[int, int]) -> None:
    """Stop a rank for some milliseconds, now and then."""
    if pids and random.random() < 0.5:
        pid = random.choice(list(pids.values()))
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(random.uniform(1e-3, 30e-3))
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return


def run(size: int, seconds: float, seed: int, variant: str, threads: int) -> mpirun.Outcome:
    """Run one variant on `size` ranks."""
    arguments = ["-m", "tests.mixture.program", "--seconds", str(seconds), "--seed", str(seed)]
    return mpirun.run(
        size,
        [*arguments, "--threads", str(threads), "--sleeps"],
        timeout=seconds + _START_SECONDS,
        environment=VARIANTS[variant],
        meanwhile=stop_somebody if variant == "stopped ranks" else None,
    )


def operations(outcome: mpirun.Outcome) -> int:
    """Return how many operations a run made; 0 if it failed."""
    lines = [line for line in outcome.stdout.splitlines() if line.startswith('{"operations"')]
    return int(json.loads(lines[-1])["operations"]) if lines and outcome.returncode == 0 else 0


def _one(settings: argparse.Namespace) -> int:
    seed = secrets.randbelow(1 << 30) if settings.seed is None else settings.seed
    outcome = run(settings.ranks, settings.seconds, seed, settings.variant, settings.threads)
    done = operations(outcome)
    if done == 0:
        sys.stdout.write(outcome.text)
    state = "none wrong" if done else f"FAILED with status {outcome.returncode}"
    print(f"{settings.variant}, {settings.ranks} ranks, seed {seed}: {done:,} operations, {state}")
    return 0 if done else 1


def _pythons() -> list[Path]:
    """Return this interpreter, and those of the other environments here."""
    here = Path(sys.executable)
    return [here, *(path for path in sorted(Path().glob(".venv*/bin/python")) if path.absolute() != here)]


def _library(python: Path) -> str:
    code = "from mpi4py import MPI; name, version = MPI.get_vendor(); print(name, '.'.join(map(str, version)))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _soak(settings: argparse.Namespace) -> int:
    """Go through everything; return 1 if anything was wrong."""
    pythons = {_library(python): python for python in _pythons()}
    runs = [(library, ranks, variant) for variant in VARIANTS for ranks in RANKS for library in pythons]
    unit = settings.minutes * 60 / sum(_SHARE.get(variant, 1) for *_, variant in runs)
    totals: dict[tuple[str, str], int] = {}
    failures = 0
    for library, ranks, variant in runs:
        seconds = max(5.0, unit * _SHARE.get(variant, 1))
        command = [str(pythons[library]), "-m", "tests.mixture", "--ranks", str(ranks), "--variant", variant]
        done = subprocess.run([*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False)
        last = done.stdout.splitlines()[-1] if done.stdout else done.stderr
        print(f"{library}: {last}" if done.returncode == 0 else done.stdout + done.stderr, flush=True)
        failures += done.returncode != 0
        made = int(last.split(": ")[1].split()[0].replace(",", "")) if done.returncode == 0 else 0
        totals[library, variant] = totals.get((library, variant), 0) + made
    rows = [[variant, *(f"{totals[library, variant]:,}" for library in pythons)] for variant in VARIANTS]
    sums = [sum(totals[library, variant] for variant in VARIANTS) for library in pythons]
    print("\n".join(markdown([["variant", *pythons], *rows, ["all", *(f"{number:,}" for number in sums)]])))
    print(f"{sum(sums):,} operations, {failures} runs failed")
    return int(failures > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mixture", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of operations (default: 30)")
    parser.add_argument("--seed", type=int, help="decides the operations (default: another one each time, printed)")
    parser.add_argument("--variant", choices=VARIANTS, default="default", help="part of the library that is changed")
    parser.add_argument("--threads", type=int, default=2, help="threads, each with its communicators (default: 2)")
    parser.add_argument("--soak", action="store_true", help="all variants, numbers of ranks and MPI libraries")
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes of a soak (default: 60)")
    settings = parser.parse_args(argv)
    return _soak(settings) if settings.soak else _one(settings)


if __name__ == "__main__":
    sys.exit(main())
