"""What goes wrong on shared memory: the same clear errors, in time, and nothing stays behind."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests import extent
from tests.mpirun import run
from tests.system.outcomes import check_missing_rank, check_no_data_of_a_refused_call, check_refused, outcomes_of

pytestmark = pytest.mark.alone  # deadlines are short, or launches are many

PROGRAM = "tests/system/programs/disagree_shared.py"
RUNS = extent.shared_out(((3, "default"), (2, "full"), (8, "default")))
"""Sizes and modes; each is one launch."""
DIFFER = (
    "blocking_and_nonblocking",
    "blocking_and_nonblocking_vector",
    "short_count",
    "dtype",
    "op",
    "long_count",
    "short_and_long",
    "shared_and_private",
    "collective",
    "barrier",
    "new_bcast_root",
    "new_reduce_root",
    "long_bcast_root",
    "known_bcast_root",
    "known_reduce_root",
    "scatterv_dtype",
    "scatterv_root",
    "scatterv_and_bcast",
    "scatterv_and_gatherv",
    "gatherv_dtype",
    "gatherv_root",
    "plan_count",
    "plan_root",
    "shared_and_messages",
)


def outcomes(size: int, mode: str) -> dict[str, list[dict]]:
    return outcomes_of(PROGRAM, size, mode)


@pytest.mark.parametrize(("size", "mode"), RUNS)
@pytest.mark.parametrize("case", DIFFER)
def test_every_rank_learns_who_called_what(case: str, size: int, mode: str) -> None:
    for entry in outcomes(size, mode)[case]:
        assert entry["error"] == "MismatchError", entry
        assert entry["seconds"] < 4, entry
        assert len(set(re.findall(r"called (\w+\(.*?\))", entry["text"]))) == 2, entry
        assert re.search(r"rank 1 called|ranks 0 called", entry["text"]), entry
        assert entry["usable"] == (mode == "full"), entry


@pytest.mark.parametrize(("size", "mode"), RUNS)
@pytest.mark.parametrize("case", ["never_came", "never_came_long", "never_started"])
def test_a_rank_that_does_not_come_is_named_when_the_time_is_up(case: str, size: int, mode: str) -> None:
    check_missing_rank(outcomes(size, mode)[case])


@pytest.mark.parametrize(("size", "mode"), RUNS)
@pytest.mark.parametrize("case", ["refused", "refused_long", "refused_nonblocking"])
def test_one_ranks_bad_argument_is_an_error_on_all(case: str, size: int, mode: str) -> None:
    check_refused(outcomes(size, mode)[case], mode)


@pytest.mark.parametrize(("size", "mode"), RUNS)
@pytest.mark.parametrize("case", ["refused_counts", "gathered_counts", "known_gathered_counts"])
def test_another_count_than_the_roots_is_an_error_on_all(case: str, size: int, mode: str) -> None:
    """Where every call is compared first the root tells its counts; else root and rank find the difference."""
    for entry in outcomes(size, mode)[case]:
        assert entry["seconds"] < 3, entry
        if mode == "full":
            assert entry["error"] == ("ValueError" if entry["rank"] == 1 else "RemoteError"), entry
            assert re.search(r"(send|recv)buf has . elements, but its part has .", entry["text"]), entry
            continue
        assert entry["error"] == "MismatchError", entry
        calls = re.findall(r"called \w+\(root=0, (\d) elements of float64( for rank 1| from rank 1|)\)", entry["text"])
        assert len({count for count, _ in calls}) == 2, entry
        assert sorted(bool(part) for _, part in calls) == [False, True], entry


@pytest.mark.parametrize(("size", "mode"), [run for run in RUNS if run[1] == "default"])
def test_a_rank_that_refused_a_call_gets_no_data_of_it_later(size: int, mode: str) -> None:
    check_no_data_of_a_refused_call(outcomes(size, mode)["refused_bcast"])


@pytest.mark.parametrize(("size", "mode"), RUNS)
def test_the_same_bad_argument_everywhere_leaves_the_communicator_usable(size: int, mode: str) -> None:
    for entry in outcomes(size, mode)["refused_by_all"]:
        assert (entry["error"], entry["usable"]) == ("ValueError", True)


@pytest.mark.parametrize(("size", "mode"), RUNS)
def test_a_slow_rank_is_waited_for(size: int, mode: str) -> None:
    for entry in outcomes(size, mode)["slow_is_fine"]:
        assert (entry["error"], entry["usable"]) == ("NoneType", True)


# Ranks that are gone --------------------------------------------------------------------------------------------------

STREAM = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import mpicoll
comm = mpicoll.Intracomm(MPI.COMM_WORLD, timeout=5)
small, large, other = np.ones(10), comm.zeros(200_000), np.zeros(150_000)
plan = comm.Allreduce_init(MPI.IN_PLACE, comm.zeros(50_000))
comm.Barrier()
sys.stdout.write(f"pid {{os.getpid()}}\\n")
sys.stdout.flush()
for turn in range(10**9):
    comm.Allreduce(MPI.IN_PLACE, small)
    comm.Allreduce(MPI.IN_PLACE, large)
    comm.Bcast(other, turn % comm.size)
    plan.Start()
    plan.Wait()
    if comm.rank == 1 and turn == 300:
        {action}
"""


def our_memory() -> set[str]:
    """What lies in /dev/shm and is not of the MPI library's own making."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_nobody_is_left(text: str, size: int) -> None:
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", text)]
    assert len(pids) == size
    until = time.monotonic() + 5
    while any(map(is_there, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_there, pids))


@pytest.mark.parametrize(
    ("size", "number"),
    extent.first(2, [(2, signal.SIGKILL), (4, signal.SIGINT), (4, signal.SIGKILL), (2, signal.SIGINT)]),
)
def test_a_rank_that_is_killed_or_interrupted_ends_the_job(size: int, number: signal.Signals) -> None:
    before = our_memory()
    action = f"os.kill(os.getpid(), {int(number)})"
    outcome = run(size, ["-c", STREAM.format(action=action)], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode != 0
    assert outcome.seconds < 30
    assert_nobody_is_left(outcome.stdout, size)
    ours = {name for name in our_memory() - before if "mpicoll" in name}
    assert not ours


def test_an_interrupt_is_heard_while_a_rank_waits() -> None:
    """Rank 0 waits in a collective that rank 1 does not join; the signal comes from rank 1."""
    code = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
import mpicoll
comm = mpicoll.Intracomm(MPI.COMM_WORLD, timeout=30)
pids = np.zeros(comm.size, np.int64)
comm.Allgather(np.array([os.getpid()]), pids)
comm.Allreduce(MPI.IN_PLACE, np.ones(3))
if comm.rank == 1:
    time.sleep(1)
    os.kill(int(pids[0]), signal.SIGINT)
    time.sleep({seconds})
    begin = time.monotonic()
try:
    comm.Allreduce(MPI.IN_PLACE, np.ones({count}))
except KeyboardInterrupt:
    print("interrupted", comm.rank, flush=True)
    sys.stdout.flush()
    time.sleep(2)
except mpicoll.errors.MpicollError as error:
    print(type(error).__name__, "in time" if time.monotonic() - begin < 5 else "late", error, flush=True)
"""
    for count in (3, 300_000):
        outcome = run(2, ["-c", code.format(seconds=1, count=count)], timeout=40)
        assert not outcome.hung, outcome.report
        assert "interrupted 0" in outcome.stdout, outcome.text
        assert "RemoteError in time" in outcome.stdout, outcome.text
        assert "gave up" in outcome.stdout


def test_nothing_stays_in_shared_memory_after_a_good_end() -> None:
    before = our_memory()
    code = STREAM.replace("range(10**9)", "range(20)").format(action="pass")
    outcome = run(3, ["-c", code], timeout=60)
    assert outcome.returncode == 0, outcome.text
    assert our_memory() <= before
    assert_nobody_is_left(outcome.stdout, 3)
