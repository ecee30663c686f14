"""Run a Python program on several ranks, with a deadline, and leave nothing behind.

``python -m tests.mpirun -n 8 -m pytest --with-mpi tests/mpi`` runs the MPI tests. When a test takes too long, every
rank is asked for its stack, the stacks and the names of the tests are printed, and all ranks are killed: by process
id, since the ranks of Open MPI do not belong to the launcher's process group.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import launch
from mpicoll.progress.running_clock import RunningClock

FOLDER = "MPICOLL_TEST_FOLDER"
REPOSITORY = Path(__file__).resolve().parent.parent
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
STACK_SECONDS = 2.0


@dataclass
class Outcome:
    """How a run ended; `report` holds the stacks if it was killed."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    report: str = ""

    @property
    def hung(self) -> bool:
        return bool(self.report)

    @property
    def text(self) -> str:
        return self.stdout + self.stderr + self.report


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _pids(folder: Path) -> dict[int, int]:
    """Return rank (or a running number) -> process id, as the ranks have written them."""
    found = {}
    for path in folder.glob("rank-*.pid"):
        with contextlib.suppress(ValueError):
            found[int(path.stem.partition("-")[2])] = int(path.read_text())
    return found


def _signal(pids: Mapping[int, int], number: int) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def survivors(folder: Path) -> list[int]:
    """Return the ranks whose process is still there."""
    return [rank for rank, pid in _pids(folder).items() if _alive(pid)]


class _Tests:
    """Times for which the ranks have been in the tests that they are in, by a clock that a stopped machine stops."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._clock = folder, RunningClock()
        self._begun: dict[Path, tuple[int, float]] = {}

    def overdue(self, limit: float) -> bool:
        """Say whether some rank has been in one test for longer than `limit` seconds."""
        now, ranks = self._clock.read(), list(self._folder.glob("rank-*.test"))
        for path in ranks:
            written = path.stat().st_mtime_ns
            if self._begun.get(path, (0, 0.0))[0] != written:
                self._begun[path] = written, now
        return any(path.read_text() and now - self._begun[path][1] > limit for path in ranks)


def _where_everybody_stands(folder: Path) -> str:
    _signal(_pids(folder), signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    lines = ["", "=== killed: it took too long; where every rank stood:"]
    for rank in sorted(_pids(folder)):
        test, stack = folder / f"rank-{rank}.test", folder / f"rank-{rank}.stack"
        lines.append(f"--- rank {rank}: {test.read_text() if test.exists() else ''}")
        lines.append(stack.read_text() if stack.exists() else "(no stack)")
    return "\n".join(lines)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Kill the launcher and every rank that is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _signal({rank: pid for rank, pid in _pids(folder).items() if _alive(pid)}, signal.SIGKILL)
    process.wait()


def run(
    size: int,
    arguments: Sequence[str],
    *,
    timeout: float = 60.0,
    test_timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path = REPOSITORY,
    stream: bool = False,
    meanwhile: Callable[[dict[int, int]], None] | None = None,
) -> Outcome:
    """Run Python with `arguments` on `size` ranks.

    Parameters
    ----------
    timeout, test_timeout
        Seconds for the whole run, and for a single test of it.
    folder
        Working directory of the ranks.
    stream
        Let the output through instead of collecting it.
    meanwhile
        Called every 20 ms with the process ids by rank.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpicoll-test-") as name:
        notes = Path(name)
        command = launch.command(size, [str(BOOTSTRAP), *arguments])
        variables = {**launch.clean_environment(), FOLDER: name, "PYTHONUNBUFFERED": "1", **(environment or {})}
        with (notes / "out").open("wb") as out, (notes / "err").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=None if stream else out,
                stderr=None if stream else err,
                start_new_session=True,
            )
            report, clock, tests = "", RunningClock(), _Tests(notes)
            while process.poll() is None:
                time.sleep(0.02)
                if meanwhile is not None:
                    meanwhile(_pids(notes))
                late = clock.read() > timeout
                if late or (test_timeout is not None and tests.overdue(test_timeout)):
                    report = _where_everybody_stands(notes)
                    break
            _end(process, notes)
        texts = [(notes / kind).read_text(errors="replace") for kind in ("out", "err")]
        if stream and process.returncode:
            report += _quiet_ranks(notes)
        return Outcome(process.returncode, *texts, time.monotonic() - begin, report)


def _quiet_ranks(folder: Path) -> str:
    """Return what the ranks without a terminal wrote last, for a failed run."""
    texts = [(path, path.read_text(errors="replace")[-3000:]) for path in sorted(folder.glob("rank-*.out"))]
    return "".join(f"\n--- last output of {path.stem}\n{text}" for path, text in texts if "rror" in text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mpirun", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, required=True, help="number of ranks")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--test-timeout", type=float, default=120.0, help="seconds for one test")
    arguments, rest = parser.parse_known_args(argv)
    outcome = run(
        arguments.n,
        rest,
        timeout=arguments.timeout,
        test_timeout=arguments.test_timeout,
        stream=True,
        environment={"MPICOLL_TEST_QUIET": "1"},
    )
    sys.stdout.write(outcome.report + "\n" if outcome.report else "")
    return outcome.returncode or int(outcome.hung)


if __name__ == "__main__":
    sys.exit(main())
