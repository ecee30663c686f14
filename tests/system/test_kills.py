"""Ranks that are killed: the supervisor starts the job again, or the others go on, and no promise is broken."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import launch
from mpicoll.train.launched_processes import processes_with
from tests import extent
from tests.kills.killed_run import Undisturbed, disturbed, undisturbed
from tests.kills.second_death import SECOND

pytestmark = pytest.mark.alone  # deadlines are short, or launches are many

KNOWN = Undisturbed((0.97,), frozenset())
"""About the accuracy of each run; the bits differ from run to run."""


@pytest.mark.skipif(extent.SECOND_LIBRARY and not extent.ALL, reason="the supervisor is the same")
def test_a_supervised_run_survives_its_server(tmp_path: Path) -> None:
    run = disturbed("ps", ["server"], tmp_path, 7, KNOWN)
    assert run.problems == [], (tmp_path / "output").read_text()
    assert [kill["victim"] for kill in run.kills] == ["server"]
    assert run.kills[0]["at_step"] > 0
    assert run.starts == 2


@pytest.mark.skipif(not extent.SECOND_LIBRARY, reason="only Open MPI goes on without dead ranks")
def test_a_run_goes_on_in_the_same_job_without_two_dead_ranks(tmp_path: Path) -> None:
    run = disturbed("shrink", ["rank 0", "worker"], tmp_path, 7, KNOWN)
    assert run.problems == [], (tmp_path / "output").read_text()
    assert [kill["victim"] for kill in run.kills] == ["rank 0", "worker"]
    assert run.starts == 1
    assert "1 of 3 ranks died; the others go on after step " in (tmp_path / "output").read_text()


@pytest.mark.skipif(not extent.SECOND_LIBRARY, reason="only Open MPI goes on without dead ranks")
def test_spare_ranks_take_the_place_of_dead_ones_and_the_bits_stay_the_same(tmp_path: Path) -> None:
    """Three ranks train and three are spare; of each kind some die, and three train on."""
    known = undisturbed("spares", tmp_path, 1)
    folder = tmp_path / "disturbed"
    folder.mkdir()
    run = disturbed("spares", ["rank 0", "worker", "spare"], folder, 14, known)
    output = (folder / "output").read_text()
    assert run.problems == [], output
    assert [kill["victim"] for kill in run.kills] == ["rank 0", "worker", "spare"]
    assert run.starts == 1
    assert "1 of 6 ranks died; 5 are left, of which 3 train on after step " in output


@pytest.mark.skipif(not extent.SECOND_LIBRARY, reason="other launchers do not end with status 0")
def test_a_run_all_of_whose_ranks_die_is_started_again(tmp_path: Path) -> None:
    folder, report, mark = tmp_path / "run", tmp_path / "report.json", ("TRAINING_UNDER_TEST", str(tmp_path))
    steps = ("--steps", "150", "--step-seconds", "0.004", "--checkpoint-every", "20", "--quiet")
    train = ("-m", "mpicoll.train", *steps, "--on-failure", "shrink", "--checkpoint", str(folder))
    mpirun, *more = launch.command(2, train)
    supervise = [sys.executable, "-m", "mpicoll.train.supervise", "--restarts", "1", "--json", str(report), "--"]
    environment = {**launch.clean_environment(), mark[0]: mark[1]}
    command = [*supervise, mpirun, "--with-ft", "ulfm", *more]
    job = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 100
        while not list(folder.glob("step-*")):
            assert job.poll() is None
            assert time.monotonic() < until
            time.sleep(0.005)
        _kill([process for process, rank in processes_with(*mark) if rank is not None])
        text = job.communicate(timeout=100)[1]
    finally:
        _kill([process for process, _ in processes_with(*mark)])
    assert job.returncode == 0, text
    assert "it was cut off in training, though its launcher ended with status 0; restart 1 of 1 from step " in text
    assert [attempt["status"] for attempt in json.loads(report.read_text())] == [1, 0]


@pytest.mark.skipif(not extent.SECOND_LIBRARY, reason="only Open MPI goes on without dead ranks")
@pytest.mark.parametrize(
    ("size", "options", "second"), [(4, (), 2), (5, ("--spares", "2"), 1), (5, ("--spares", "2"), 3)]
)
def test_a_rank_dies_while_the_others_make_their_communicator(size: int, options: tuple[str, ...], second: int) -> None:
    train = ("-m", "tests.kills.second_death", "--steps", "60", "--quiet", "--on-failure", "shrink", *options)
    mpirun, *more = launch.command(size, train)
    environment = {**launch.clean_environment(), SECOND: str(second)}
    job = subprocess.run(
        [mpirun, "--with-ft", "ulfm", *more], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr
    left = "3 are left, of which 3 train on" if options else "the others go on"
    assert f"2 of {size} ranks died; {left} after step " in job.stderr, job.stderr


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.skipif(not extent.SECOND_LIBRARY, reason="only Open MPI goes on without dead ranks")
def test_training_goes_on_without_a_server_a_worker_and_rank_0(tmp_path: Path) -> None:
    """Three workers and two servers with replicas; a worker and a server are left."""
    run = disturbed("replicas", ["server", "worker", "rank 0"], tmp_path, 7, KNOWN)
    output = (tmp_path / "output").read_text()
    assert run.problems == [], output
    assert sorted(kill["victim"] for kill in run.kills) == ["rank 0", "server", "worker"]
    assert run.starts == 1
    assert "1 of 5 ranks died; the others go on after step " in output
