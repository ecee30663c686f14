"""Saves that are killed, in processes of their own."""

import json
import os
import subprocess
import sys

import pytest

from tests.mpirun import REPOSITORY, run


def test_a_save_killed_at_any_call_leaves_a_good_checkpoint(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.programs.killed_saves", str(tmp_path)],
        env=os.environ | {"MPI4PY_RC_INITIALIZE": "0"}, cwd=REPOSITORY, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["calls"] > 50
    assert set(found["newest"]) == {"1", "2", "3"}


SAVES = """
import os, signal, sys
import numpy as np
from mpi4py import MPI
from mpicoll.checkpoint import CheckpointStore, Piece
comm, (folder, victim, where) = MPI.COMM_WORLD, sys.argv[1:]
checkpoints = CheckpointStore(folder, comm)
if checkpoints.steps():
    found = checkpoints.open()
    assert (found.read("x") == found.step).all()
    if comm.rank == 0:
        print("resumed from", found.step, sorted(os.listdir(folder)))
else:
    checkpoints.save(1, {"x": Piece(np.full(9, 1.0), 9 * comm.rank, 9 * comm.size)}, {})
if where:
    module, name, moment = where.split()
    function = getattr(sys.modules["mpicoll.checkpoint." + module], name)
    def killed(*arguments):
        if moment == "after":
            function(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == int(victim):
        setattr(sys.modules["mpicoll.checkpoint." + module], name, killed)
checkpoints.save(2, {"x": Piece(np.full(9, 2.0), 9 * comm.rank, 9 * comm.size)}, {})
"""


@pytest.mark.parametrize(
    ("victim", "where", "step"),
    [
        (1, "tensor_file write before", 1),
        (0, "durable_files write_durably after", 1),
        (0, "durable_files clean before", 2),
    ],
)
def test_a_rank_that_is_killed_ends_the_job_and_the_next_one_resumes(tmp_path, victim, where, step):
    died = run(3, ["-c", SAVES, str(tmp_path), str(victim), where], timeout=60)
    assert not died.hung, died.text
    assert died.returncode != 0
    went_on = run(2, ["-c", SAVES, str(tmp_path), "0", ""], timeout=60)
    assert went_on.returncode == 0, went_on.text
    assert f"resumed from {step} " in went_on.stdout
    assert ".step-" not in went_on.stdout
