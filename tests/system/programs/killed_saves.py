"""Kill a job at every call of the system that a save makes, one job a call, and look at what is left each time.

A job is a forked process whose ranks are threads. It resumes from step 1, saves steps 2 and 3, and dies just before its
n-th call. Whatever n is, all checkpoints must be whole, and a new job must be able to go on. Prints how many
calls there were, and how often each step was the newest afterwards.

To be started with MPI4PY_RC_INITIALIZE=0: a forked process must not have MPI, and no rank here needs it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from mpicoll.checkpoint import CheckpointStore, PerRank, Piece, Whole, tensor_file
from mpicoll.data.sampler import part
from tests.threads import results

SIZE, TOTAL = 2, 5000
CALLS = ("open", "mkdir", "rename", "unlink", "rmdir", "ftruncate", "pwrite", "close", "fsync")


def tensors(comm, step):
    start, stop = part(TOTAL, SIZE, comm.Get_rank())
    return {
        "whole": Whole(np.full(40_000, step, np.float32)),
        "pieces": Piece(np.arange(start, stop) * step, start, TOTAL),
        "own": PerRank(np.full(3, step * 10 + comm.Get_rank())),
    }


def job(comm, folder, steps):
    with CheckpointStore(folder, comm, patience=0) as checkpoints:
        if checkpoints.steps():
            checkpoints.open()
        for step in steps:
            checkpoints.save(step, tensors(comm, step), {"step": step})


class Killer:
    """Count calls, and die before the one that is due; a file is written in two halves."""

    def __init__(self, due: int) -> None:
        self._left, self._lock = due, threading.Lock()

    def count(self) -> None:
        with self._lock:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._counting(getattr(os, name)))
        io.open = self._counting(io.open)
        write = tensor_file.write

        def in_halves(path, arrays):
            self.count()
            written = write(path, arrays)
            whole = path.read_bytes()
            path.write_bytes(whole[: len(whole) // 2])
            self.count()
            path.write_bytes(whole)
            return written

        tensor_file.write = in_halves

    def _counting(self, function):
        def counted(*arguments, **options):
            self.count()
            return function(*arguments, **options)

        return counted


def in_a_job_that_dies(folder: Path, due: int) -> bool:
    """Return whether the job has ended by itself."""
    child = os.fork()
    if child == 0:
        try:
            Killer(due).install()
            results(SIZE, lambda comm: job(comm, folder, (2, 3)))
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), f"status {status} at call {due}"
    return status == 0


def newest(folder: Path) -> int:
    """Check all checkpoints, on another number of ranks, and that a new job can go on; return the newest's step."""

    def check(comm):
        with CheckpointStore(folder, comm, patience=0) as checkpoints:
            assert not list(folder.glob(".step-*"))
            for step in checkpoints.steps():
                found = checkpoints.open(step)
                assert (found.read("whole") == step).all()
                assert (found.read("pieces") == np.arange(TOTAL) * step).all()
                assert found.facts == {"step": step}
            old = found.step
            checkpoints.save(9, {"x": PerRank(np.zeros(1))}, {})
            assert checkpoints.steps() == [old, 9]
            return old

    return results(3, check)[0]


def main(scratch: Path) -> None:
    os.fsync = lambda descriptor: None  # what a process has written survives it; the disk is not what is tested
    template = scratch / "template"
    results(SIZE, lambda comm: job(comm, template, (0, 1)))
    found: Counter[int] = Counter()
    due, done = 0, False
    while not done:
        folder = scratch / str(due)
        shutil.copytree(template, folder)
        done = in_a_job_that_dies(folder, due)
        found[newest(folder)] += 1
        shutil.rmtree(folder)
        due += 1
    print(json.dumps({"calls": due - 1, "newest": found}))


main(Path(sys.argv[1]))
