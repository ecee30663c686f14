"""One supervised run whose ranks are killed, and the statements that it must keep."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench import launch
from mpicoll.train.launched_processes import processes_with
from tests.kills.step_log import LOG, read_log

_MARK = "TRAINING_UNDER_TEST"
"""Environment variable by which the processes of a run are found."""
_DEADLINE_SECONDS = 240.0
_LONGEST_START_SECONDS = 45.0
"""A start that goes on longer than this has waited for the timeout of the collectives, which is a minute."""
_POLL_SECONDS = 0.005
_NOISE_DEVIATIONS = 4.0
PROGRAM = ("-m", "tests.kills.logged_training")
STEPS = 240
INTERVAL = 20
"""Steps between checkpoints."""
COMMON = ("--quiet", "--steps", str(STEPS), "--step-seconds", "0.004", "--checkpoint-every", str(INTERVAL))
_PHASES = {"start": (2, 2.0), "steps": (7, 0.01), "end": (1, 0.3)}
"""Weight of each phase of a start among the moments of kills, and the longest delay in it, in seconds."""
TEST_SAMPLES = 359
"""Samples of the digits' test part, over which accuracies are means."""


@dataclass(frozen=True)
class Mode:
    """Strategy of training, and the ranks that are killed in turn, by what they do.

    Attributes
    ----------
    same_bits
        True where a restart on as many ranks must end with the bits of an undisturbed run.
    in_one_job
        True where the other ranks go on in the same job.
    size
        Number of ranks that the launcher starts.
    in_flight
        Largest number of steps whose shares workers have drawn and not finished. Where they draw their own shares, that
        is one share each in computation and one whose update is not published.
    """

    options: tuple[str, ...]
    victims: dict[str, int]
    same_bits: bool
    in_one_job: bool = False
    size: int = 3
    in_flight: int = 1

    @property
    def interval(self) -> int:
        """Largest number of steps that a kill may cost.

        Servers save what they have applied when a checkpoint is due: steps in flight count for the next one.
        """
        if self.in_one_job:
            return self.in_flight
        return INTERVAL + self.in_flight * ("parameter_server" in self.options)


MODES = {
    "sync": Mode((), {"worker": 1, "rank 0": 0}, True),
    "shard": Mode(("--strategy", "sharded"), {"worker": 2, "rank 0": 0}, True),
    "ps": Mode(("--strategy", "parameter_server"), {"worker": 1, "server": 2, "rank 0": 0}, False),
    "shrink": Mode(("--on-failure", "shrink"), {"worker": 1, "rank 0": 0}, False, in_one_job=True),
    "spares": Mode(
        ("--on-failure", "shrink", "--spares", "3"),
        {"worker": 1, "rank 0": 0, "spare": 3},
        True,
        in_one_job=True,
        size=6,
    ),
    "replicas": Mode(
        ("--strategy", "parameter_server", "--servers", "2", "--replicas", "2", "--on-failure", "shrink"),
        {"server": 3, "worker": 1, "rank 0": 0},
        False,
        in_one_job=True,
        size=5,
        in_flight=2,
    ),
}


@dataclass(frozen=True)
class Undisturbed:
    """Accuracies and bits of runs of a mode that nobody disturbs."""

    accuracies: tuple[float, ...]
    digests: frozenset[str]

    @property
    def noise(self) -> float:
        """Largest difference of accuracies that chance explains: that of two samples of the test part's size."""
        mean = sum(self.accuracies) / len(self.accuracies)
        return _NOISE_DEVIATIONS * math.sqrt(2 * mean * (1 - mean) / TEST_SAMPLES)


@dataclass
class KilledRun:
    """Outcome of one run.

    Attributes
    ----------
    kills
        Victim, rank, phase of the start, and the steps that rank 0 had taken, -1 before its first, of each kill.
    slowest_seconds
        Seconds of the start that took longest.
    lost
        Steps that were taken again after each of the starts that took any.
    problems
        Statements that do not hold, in words; empty if all do.
    """

    mode: str
    seed: int
    kills: list[dict[str, Any]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    status: int = 0
    starts: int = 0
    slowest_seconds: float = 0.0
    accuracy: float | None = None
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def undisturbed(mode: str, folder: Path, count: int) -> Undisturbed:
    """Run a mode `count` times without the supervisor.

    Raises
    ------
    RuntimeError
        If a run does not end well; the message has its output.
    """
    results = []
    for number in range(count):
        here = folder / f"undisturbed-{number}"
        command, result = _command(mode, here), here / "result.json"
        done = subprocess.run(
            command, env=_environment(here, ""), capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{mode}: a run without kills ended with status {done.returncode}: {done.stderr}")
        results.append(json.loads(result.read_text()))
    accuracies = tuple(result["test_accuracy"] for result in results)
    return Undisturbed(accuracies, frozenset(result["parameters_sha256"] for result in results))


def _command(mode: str, folder: Path) -> list[str]:
    (folder / "log").mkdir(parents=True)
    outputs = ("--checkpoint", str(folder / "run"), "--json", str(folder / "result.json"))
    words = launch.command(MODES[mode].size, [*PROGRAM, *COMMON, *MODES[mode].options, *outputs])
    return [words[0], *("--with-ft", "ulfm") * MODES[mode].in_one_job, *words[1:]]


def _environment(folder: Path, token: str) -> dict[str, str]:
    return {**launch.clean_environment(), LOG: str(folder / "log"), _MARK: token}


def disturbed(mode: str, victims: Sequence[str], folder: Path, seed: int, known: Undisturbed) -> KilledRun:
    """Run a mode under the supervisor, kill the victims one after the other, each in another start, and check the end.

    The moments are drawn by `seed`, see :class:`Moment`. A victim whose start ends before its moment comes is not
    killed, and neither are those after it.
    """
    run, token, dice = KilledRun(mode, seed), secrets.token_hex(8), random.Random(seed)
    options = ["--restarts", str(len(victims) + 1), "--backoff", "0.1", "--json", str(folder / "report.json")]
    command = [sys.executable, "-m", "mpicoll.train.supervise", *options, "--", *_command(mode, folder)]
    began = time.monotonic()
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(command, env=_environment(folder, token), stdout=output, stderr=subprocess.STDOUT)
        try:
            kill = _kill_in_one_job if MODES[mode].in_one_job else _kill_in_turn
            kill(run, job, token, victims, dice, folder)
            run.status = job.wait(_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            run.problems.append(f"it did not end within {_DEADLINE_SECONDS:g} s")
        finally:
            run.seconds = round(time.monotonic() - began, 2)
            _end(run, job, token)
    judge(run, folder, known)
    return run


def _kill_in_turn(
    run: KilledRun, job: subprocess.Popen[bytes], token: str, victims: Sequence[str], dice: random.Random, folder: Path
) -> None:
    seen: set[int] = set()
    size = MODES[run.mode].size
    for victim in victims:
        rank, moment = MODES[run.mode].victims[victim], Moment.draw(dice)
        process = _new_rank(job, token, rank, seen, size)
        if process is None:
            return
        log = StartLog(folder / "log")
        while not moment.has_come(log):
            if job.poll() is not None or not _is_alive(process):
                return
            time.sleep(_POLL_SECONDS)
        time.sleep(moment.delay_seconds)
        reached = log.read()[1]
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            return
        run.kills.append({"victim": victim, "rank": rank, "phase": moment.phase, "at_step": reached})


def _kill_in_one_job(
    run: KilledRun, job: subprocess.Popen[bytes], token: str, victims: Sequence[str], dice: random.Random, folder: Path
) -> None:
    """Kill each victim once, after steps of the same job, perhaps while the others still recover from a kill before."""
    chosen = list(dict.fromkeys(victims))
    moments = sorted((dice.random() * STEPS, dice.random() * _PHASES["steps"][1]) for _ in chosen)
    seen: set[int] = set()
    if _new_rank(job, token, 0, seen, MODES[run.mode].size) is None:
        return
    processes, log = {rank: process for process, rank in _ranks(token)}, StartLog(folder / "log")
    for victim, (step, delay) in zip(chosen, moments, strict=True):
        rank = MODES[run.mode].victims[victim]
        while log.read()[1] < step:
            if job.poll() is not None or rank not in processes:
                return
            time.sleep(_POLL_SECONDS)
        time.sleep(delay)
        reached = log.read()[1]
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank], signal.SIGKILL)
            run.kills.append({"victim": victim, "rank": rank, "phase": "steps", "at_step": reached})


class StartLog:
    """Log of the start that is under way, which may not have been written yet."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._before = folder, len(read_log(folder))

    def read(self) -> tuple[int, int]:
        """Return the first step and the steps taken; (0, -1) before the first step."""
        log = read_log(self._folder)
        return log[-1] if len(log) > self._before else (0, -1)


class Moment(NamedTuple):
    """Moment of a kill: at the start, at some step, or at the end with its last checkpoint and its report.

    `fraction` of the steps that a start has before it are taken first; `delay_seconds` pass then.
    """

    phase: str
    fraction: float
    delay_seconds: float

    @classmethod
    def draw(cls, dice: random.Random) -> Moment:
        """Return a random moment, so that every step of a start is as likely as any other."""
        (phase,) = dice.choices(list(_PHASES), [weight for weight, _ in _PHASES.values()])
        return cls(phase, {"end": 1.0}.get(phase, dice.random()), dice.random() * _PHASES[phase][1])

    def has_come(self, log: StartLog) -> bool:
        """Return True when the steps before the moment have been taken."""
        first, reached = log.read()
        return self.phase == "start" or reached >= first + self.fraction * (STEPS - first)


def _new_rank(job: subprocess.Popen[bytes], token: str, rank: int, seen: set[int], size: int) -> int | None:
    """Wait for the process of a rank of the next start, of `size` ranks, and return it; None if the run ends first."""
    until = time.monotonic() + _DEADLINE_SECONDS
    while job.poll() is None and time.monotonic() < until:
        found = dict(_ranks(token))
        fresh = {process for process in found if process not in seen}
        here = [process for process in sorted(fresh) if found[process] == rank]
        if here and len(fresh) >= size:
            seen.update(found)
            return here[0]
        time.sleep(_POLL_SECONDS)
    return None


def _ranks(token: str) -> Iterator[tuple[int, int]]:
    """Yield the living processes that are ranks of a run, with their ranks."""
    for process, rank in processes_with(_MARK, token):
        if rank is not None and _is_alive(process):
            yield process, rank


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _end(run: KilledRun, job: subprocess.Popen[bytes], token: str) -> None:
    """Kill what the run has left, and note it as a problem."""
    left = [process for process, _ in processes_with(_MARK, token) if _is_alive(process)]
    if left:
        run.problems.append(f"{len(left)} processes were left behind")
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    job.wait()


def judge(run: KilledRun, folder: Path, known: Undisturbed) -> None:
    """Check every statement, and add those that do not hold to the run's problems."""
    log, report = read_log(folder / "log"), folder / "report.json"
    run.lost = [reached - first for (_, reached), (first, _) in itertools.pairwise(log)]
    allowed, in_one_job = MODES[run.mode].interval, MODES[run.mode].in_one_job
    if worst := max([lost for lost in run.lost if lost > allowed], default=0):
        run.problems.append(f"{worst} steps were lost by one kill, which may cost {allowed}")
    if run.status:
        run.problems.append(f"it ended with status {run.status}")
    if report.exists():
        attempts = json.loads(report.read_text())
        run.starts, run.slowest_seconds = len(attempts), max(attempt["seconds"] for attempt in attempts)
    if run.slowest_seconds > _LONGEST_START_SECONDS:
        run.problems.append(
            f"a start took {run.slowest_seconds:.1f} s: the other ranks went on waiting for the dead one"
        )
    if run.starts > 1 + len(run.kills) * (not in_one_job):
        run.problems.append(f"{run.starts} starts after {len(run.kills)} kills: a start failed that was not disturbed")
    if run.status == 0:
        _judge_result(run, json.loads((folder / "result.json").read_text()), known)


def _judge_result(run: KilledRun, result: dict[str, Any], known: Undisturbed) -> None:
    run.accuracy = result["test_accuracy"]
    low, high = min(known.accuracies) - known.noise, max(known.accuracies) + known.noise
    if not low <= result["test_accuracy"] <= high:
        run.problems.append(f"the accuracy is {run.accuracy:.4f}; without kills it is {known.accuracies}")
    if MODES[run.mode].in_one_job and result["lost_ranks"] != len(run.kills):
        run.problems.append(f"{result['lost_ranks']} ranks were found dead after {len(run.kills)} kills")
    if MODES[run.mode].same_bits and result["parameters_sha256"] not in known.digests:
        run.problems.append("the parameters are not those of a run without kills, bit for bit")
