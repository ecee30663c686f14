"""A rank that is killed, or interrupted, in the middle of operations on shared memory ends the whole job."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bench import launch

RANKS, DEADLINE = 3, 60.0
STREAM = str(Path(__file__).parent / "programs" / "stream.py")
SHM = Path("/dev/shm")


def wait_for(what: object, seconds: float) -> bool:
    assert callable(what)
    until = time.monotonic() + seconds
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ours() -> set[str]:
    return {path.name for path in SHM.iterdir() if "mpicoll" in path.name} if SHM.exists() else set()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_the_job_ends(how: signal.Signals, tmp_path: Path) -> None:
    before = ours()
    command = launch.command(RANKS, [STREAM, str(tmp_path)])
    job = subprocess.Popen(
        command,
        env=launch.clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        files = [tmp_path / f"rank-{rank}" for rank in range(RANKS)]
        assert wait_for(lambda: all(file.exists() and file.read_text() for file in files), DEADLINE)
        pids = [int(file.read_text()) for file in files]
        time.sleep(0.5)
        os.kill(pids[1], how)
        assert wait_for(lambda: job.poll() is not None, DEADLINE), "the launcher goes on"
        assert job.returncode != 0
        assert wait_for(lambda: not any(map(is_running, pids)), 10), "a rank goes on"
        assert ours() == before
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
        if job.poll() is None:
            job.kill()
        job.communicate()
