"""Processes that need the same kernel at the same time: one compiles it."""

import errno
import subprocess
import sys

import pytest

from mpicoll.kernels import turns
from mpicoll.kernels.turns import Turn

COMPILE = """
import sys
import numpy as np
from mpicoll.kernels import updates
sys.stdin.readline()
updates.checksum(np.empty(0, np.uint32), np.uint64(0))
stats = updates.checksum.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""
TRY = """
import sys
from mpicoll.kernels import turns
turns._PATIENCE_SECONDS = 0.2
turn = turns.Turn(sys.argv[1])
turn.take()
print(turn._descriptor is None)
"""


def test_one_of_many_processes_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", COMPILE]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    outcomes = [process.communicate(timeout=100)[0].split() for process in started]
    assert sorted(outcomes) == [["0", "1"], ["1", "0"], ["1", "0"]]


def test_a_turn_is_one_process_at_a_time(tmp_path):
    path = tmp_path / "x.lock"
    turn = Turn(path)
    turn.take()
    turn.take()
    command = [sys.executable, "-c", TRY, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "True"
    turn.give()
    turn.give()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_where_files_have_no_locks_nobody_waits(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(turns.fcntl, "flock", flock)
    monkeypatch.setattr(turns.time, "sleep", lambda seconds: pytest.fail("it waits"))
    turn = Turn(tmp_path / "x.lock")
    turn.take()
    turn.give()


def test_where_there_can_be_no_file_nobody_waits(tmp_path):
    turn = Turn(tmp_path / "missing" / "x.lock")
    turn.take()
    turn.give()
