"""Training that is killed, stopped and resumed ends where training that was left alone does, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import launch
from tests import extent
from tests.system.test_train_cli import MODULE, only_line, train
from tests.system.test_train_cli import launch as start_and_wait

KILLS = int(os.environ.get("MPICOLL_TEST_KILLS", "2"))
"""How often a rank is killed, each time in another run."""
OPTIONS = {
    "momentum of each rank": "--steps 200 --batch 20 --compression topk:0.05",
    "plain": "--steps 200 --batch 20",
    "accumulation and clipping": "--steps 200 --batch 10 --accumulate 2 --clip 1.0",
}


def final(folder: Path, size: int, options: str, *more: str) -> str:
    path = folder / "result.json"
    train(size, *options.split(), "--json", str(path), *more)
    digest: str = json.loads(path.read_text())["parameters_sha256"]
    return digest


LONG = "--steps 500 --batch 20"
"""Options of a run in which ranks are killed, in its first half."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters at the end of a run that is left alone."""
    return final(tmp_path_factory.mktemp("undisturbed"), 3, LONG)


def begin(size: int, *arguments: str) -> subprocess.Popen[str]:
    command = launch.command(size, [*MODULE, "--quiet", *arguments])
    return subprocess.Popen(
        command, env=launch.clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def children() -> dict[int, list[int]]:
    """Return the child processes of each process of this machine."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        found.setdefault(parent, []).append(int(path.name))
    return found


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """Return the processes that train; those that are not yet Python do not.

    A child's number may be below its parent's, where the system has begun to count anew.
    """
    below, found, rest = children(), [], [job.pid]
    while rest:
        process = rest.pop()
        rest += below.get(process, [])
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue
        if process != job.pid and b"mpicoll.train" in command and b"python" in command.split(b"\0")[0]:
            found.append(process)
    return sorted(found)


def ended(job: subprocess.Popen[str]) -> str:
    """Wait for the end; what the launcher leaves behind is killed too."""
    try:
        return job.communicate(timeout=60)[1]
    finally:
        for process in ranks_of(job):
            os.kill(process, signal.SIGKILL)
        job.kill()


@pytest.mark.parametrize("name", extent.first(1, list(OPTIONS)))
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    options = OPTIONS[name]
    wanted = final(tmp_path, 3, options)
    steps = int(options.split()[1])
    saved = ("--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "7")
    # The number of steps decides the learning rates, so that the first part is ended by a signal, not by --steps.
    first = begin(3, *options.split(), *saved)
    wait_for_checkpoint(tmp_path / "run", first)
    os.kill(ranks_of(first)[1], signal.SIGTERM)
    ended(first)
    assert first.returncode == 0
    done = max(int(path.name[5:]) for path in (tmp_path / "run").glob("step-*"))
    assert 7 <= done <= steps
    assert final(tmp_path, 3, options, *saved, "--resume") == wanted


def wait_for_checkpoint(folder: Path, job: subprocess.Popen[str], step: int = 1) -> None:
    """Wait for a checkpoint of that step or a later one."""
    until = time.monotonic() + 60
    while max(steps_in(folder), default=0) < step:
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.01)


def test_killed_at_random_and_resumed(tmp_path: Path, undisturbed: str) -> None:
    dice = random.Random(5)
    for kill in range(KILLS):
        saved = ("--checkpoint", str(tmp_path / f"run{kill}"), "--checkpoint-every", str(dice.choice([1, 3, 10])))
        job = begin(3, *LONG.split(), *saved)
        wait_for_checkpoint(tmp_path / f"run{kill}", job, dice.randrange(1, 250))
        time.sleep(dice.random() * 0.01)
        os.kill(dice.choice(ranks_of(job)), signal.SIGKILL)
        ended(job)
        assert job.returncode != 0
        assert final(tmp_path, 3, LONG, *saved, "--resume") == undisturbed, f"kill {kill}"


def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    options = "--steps 30 --batch 60"
    saved = ("--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "10")
    train(4, *options.split(), *saved)
    (tmp_path / "run" / "step-00000030").rename(tmp_path / "kept")
    path = tmp_path / "result.json"
    train(2, *options.split(), *saved, "--resume", "--json", str(path))
    result = json.loads(path.read_text())
    assert result["resumed_after"] == 20
    assert result["steps"] == 30


def test_a_damaged_checkpoint_is_refused_and_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--steps", "20", "--batch", "60", "--checkpoint", str(folder), "--checkpoint-every", "8")
    train(2, *options)
    newest = max(folder.glob("step-*"))
    path = next(newest.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused = start_and_wait(2, *MODULE, "--quiet", *options, "--resume")
    assert refused.returncode == 1
    assert path.name in only_line(refused)
    taken = start_and_wait(2, *MODULE, "--no-progress", *options, "--resume", "fallback")
    assert taken.returncode == 0, taken.text
    assert re.search(r"skipped checkpoint: .*" + path.name, taken.stderr)
    assert "resuming after step 16 of 20" in taken.stdout


@pytest.mark.parametrize(
    ("changed", "says"), [("--lr 0.2", "--lr was 0.1, is 0.2"), ("--hidden 10", "--hidden was 256,128, is 10")]
)
def test_another_run_is_refused(tmp_path: Path, changed: str, says: str) -> None:
    options = ("--steps", "3", "--checkpoint", str(tmp_path / "run"))
    train(2, *options)
    done = start_and_wait(2, *MODULE, "--quiet", *options, "--resume", *changed.split())
    assert done.returncode == 1
    assert says in only_line(done)


def test_a_supervised_run_survives_its_ranks(tmp_path: Path, undisturbed: str) -> None:
    """Ranks are killed one after the other; the run ends with the bits of one that was left alone."""
    result = tmp_path / "supervised.json"
    saved = ["--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "5", "--json", str(result)]
    command = launch.command(3, [*MODULE, "--quiet", *LONG.split(), *saved])
    report = tmp_path / "report.json"
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "mpicoll.train.supervise", "--backoff", "0.1", "--json", str(report), "--", *command],
        env=launch.clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    dice = random.Random(3)
    for kill in range(KILLS):
        before = kill and max(steps_in(tmp_path / "run"))
        until = time.monotonic() + 60
        while max(steps_in(tmp_path / "run"), default=0) <= before or len(ranks_of(supervisor)) < 3:
            assert supervisor.poll() is None, supervisor.communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(dice.choice(ranks_of(supervisor)), signal.SIGKILL)
        while len(ranks_of(supervisor)) == 3:
            time.sleep(0.01)
    text = ended(supervisor)
    assert supervisor.returncode == 0, text
    assert json.loads(result.read_text())["parameters_sha256"] == undisturbed
    attempts = json.loads(report.read_text())
    assert len(attempts) == 1 + KILLS
    assert [attempt["status"] == 0 for attempt in attempts] == [False] * KILLS + [True]
    assert all(attempt["resumed_from"] for attempt in attempts[1:])


def steps_in(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in folder.glob("step-*")]
