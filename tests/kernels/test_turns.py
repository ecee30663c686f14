"""Processes that need the same kernel at the same time: one compiles it."""

import errno
import subprocess
import sys

import pytest

from mpicoll.kernels import compile_lock, compile_progress
from mpicoll.kernels.compile_lock import CompileLock

COMPILE = """
import sys
import numpy as np
from mpicoll.kernels import optimizer_updates
sys.stdin.readline()
optimizer_updates.checksum(np.empty(0, np.uint32), np.uint64(0))
from mpicoll.kernels import compile_progress
print(compile_progress.speaker.count)
"""
TRY = """
import sys
from mpicoll.kernels import compile_lock, compile_progress
compile_lock._PATIENCE_SECONDS = 0.2
turn = compile_lock.CompileLock(sys.argv[1])
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
    assert sorted(outcomes) == [["0"], ["0"], ["1"]]


def test_a_turn_is_one_process_at_a_time(tmp_path):
    path = tmp_path / "x.lock"
    turn = CompileLock(path)
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

    monkeypatch.setattr(compile_lock.fcntl, "flock", flock)
    monkeypatch.setattr(compile_lock.time, "sleep", lambda seconds: pytest.fail("it waits"))
    turn = CompileLock(tmp_path / "x.lock")
    turn.take()
    turn.give()


def test_where_there_can_be_no_file_nobody_waits(tmp_path):
    turn = CompileLock(tmp_path / "missing" / "x.lock")
    turn.take()
    turn.give()


def test_one_process_says_that_it_compiles(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compile_progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(compile_progress, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(compile_progress.machine_code, "folder_to_write", lambda: tmp_path)
    monkeypatch.setenv("MPICOLL_PROGRESS", "off")
    silent, first, second = (compile_progress._Speaker() for _ in range(3))
    with silent.compiling("a kernel"):
        pass
    monkeypatch.delenv("MPICOLL_PROGRESS")
    for speaker in (first, second, first):
        with speaker.compiling("a kernel"):
            pass
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "not on disk yet" in line and "mpicoll warmup" in line]) == 1
    assert lines[-1].startswith("mpicoll: 2 kernels compiled")
    assert (silent.count, first.count, second.count) == (1, 2, 1)
