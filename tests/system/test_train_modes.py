"""Runs in which nobody waits for everybody, stopped, killed and stuck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import extent
from tests.system.test_resume import begin, ended, ranks_of, wait_for_checkpoint
from tests.system.test_train_cli import train

SERVED = "--mode ps --servers 1 --epochs 300 --step-seconds 0.002 --checkpoint-every 20 --timeout 4"
SIZE = 4


def of_rank(job: subprocess.Popen[str], rank: int) -> int:
    """Return the process of a rank."""
    names = (f"PMI_RANK={rank}".encode(), f"OMPI_COMM_WORLD_RANK={rank}".encode())
    for process in ranks_of(job):
        if set(names) & set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0")):
            return process
    raise AssertionError(f"no rank {rank} in {ranks_of(job)}")


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


def moves(job: subprocess.Popen[str], folder: Path, seconds: float) -> bool:
    """Wait for the next checkpoint, or for the end of the job; return whether there was one in so many seconds."""
    before, until = saved_steps(folder), time.monotonic() + seconds
    while time.monotonic() < until:
        if job.poll() is not None or saved_steps(folder) != before:
            return True
        time.sleep(0.05)
    return False


def stop(job: subprocess.Popen[str], process: int, folder: Path, seconds: float) -> None:
    """Stop a process for good, but not inside a lock of the MPI library, where all others would hang with it.

    After so many seconds it is taken to be there. They have to be less than the timeout where the others go on without
    it, or they would take each other for silent when it goes on; and more where the job ends.
    """
    for _ in range(5):
        os.kill(process, signal.SIGSTOP)
        if moves(job, folder, seconds):
            return
        os.kill(process, signal.SIGCONT)
        moves(job, folder, seconds)


def going_on(folder: Path, shares: int) -> None:
    """Go on for a moment, from the newest checkpoint."""
    path = folder / "result.json"
    steps = shares // (SIZE - 1) + 5
    options = [*SERVED.split(), "--checkpoint", str(folder / "run"), "--steps", str(steps), "--resume"]
    train(SIZE, *options, "--json", str(path))
    result = json.loads(path.read_text())
    assert result["resumed_after"] == shares // (SIZE - 1)
    assert result["test_accuracy"] > 0.5


@pytest.mark.parametrize("rank", extent.first(1, [SIZE - 1, 0]))
def test_sigterm_ends_a_run_with_a_checkpoint(tmp_path: Path, rank: int) -> None:
    job = begin(SIZE, *SERVED.split(), "--checkpoint", str(tmp_path / "run"))
    wait_for_checkpoint(tmp_path / "run", job)
    os.kill(of_rank(job, rank), signal.SIGTERM)
    text = ended(job)
    assert job.returncode == 0, text
    going_on(tmp_path, saved_steps(tmp_path / "run")[-1])


@pytest.mark.parametrize("rank", extent.first(1, [1, SIZE - 1]))
def test_a_run_goes_on_after_a_kill(tmp_path: Path, rank: int) -> None:
    job = begin(SIZE, *SERVED.split(), "--checkpoint", str(tmp_path / "run"))
    wait_for_checkpoint(tmp_path / "run", job)
    os.kill(of_rank(job, rank), signal.SIGKILL)
    ended(job)
    assert job.returncode != 0
    going_on(tmp_path, saved_steps(tmp_path / "run")[-1])


@pytest.mark.parametrize(
    ("rank", "says"), extent.first(1, [(SIZE - 1, f"rank {SIZE - 1} (a server)"), (1, "rank 1, a worker")])
)
def test_a_stuck_rank_is_named_in_time(tmp_path: Path, rank: int, says: str) -> None:
    """The others wait for it: with a bound on staleness for a worker, too."""
    job = begin(SIZE, *SERVED.split(), "--staleness", "8", "--checkpoint", str(tmp_path / "run"))
    wait_for_checkpoint(tmp_path / "run", job)
    stop(job, of_rank(job, rank), tmp_path / "run", 9)
    text = ended(job)
    assert job.returncode != 0
    assert says in text, text
    assert saved_steps(tmp_path / "run")


@pytest.mark.alone  # another worker that gets no core for 1.5 s would be dropped, too
@pytest.mark.parametrize("goes_on", extent.first(1, [True, False]))
def test_a_stuck_worker_can_be_dropped(tmp_path: Path, goes_on: bool) -> None:
    """The others go on; it leaves when it learns that it was dropped, or is named at the end."""
    options = SERVED.replace("--timeout 4", "--timeout 1.5 --on-silence drop")
    job = begin(SIZE, *options.split(), "--checkpoint", str(tmp_path / "run"))
    wait_for_checkpoint(tmp_path / "run", job)
    stuck, chief = of_rank(job, 1), of_rank(job, 0)
    stop(job, stuck, tmp_path / "run", 1)
    time.sleep(3)
    before = saved_steps(tmp_path / "run")[-1]
    if goes_on:
        os.kill(stuck, signal.SIGCONT)
        time.sleep(1)
    os.kill(chief, signal.SIGTERM)
    text = ended(job)
    assert (job.returncode == 0) == goes_on, text
    assert ("rank 1 gave no sign of life" if goes_on else "rank 1 was dropped") in text
    assert saved_steps(tmp_path / "run")[-1] >= before
