"""Programs that are wrong end with the same clear error on every rank, in time, and never hang."""

from __future__ import annotations

import json

import pytest

from tests import extent
from tests.mpirun import run
from tests.system.outcomes import check_missing_rank, check_no_data_of_a_refused_call, check_refused, outcomes_of

pytestmark = pytest.mark.alone  # deadlines are short, or launches are many

PROGRAM = "tests/system/programs/disagree.py"
RUNS = extent.shared_out(((3, "full"), (3, "default"), (8, "default")))
"""Sizes and modes; each is one launch."""
DIFFER = (
    "blocking_and_nonblocking",
    "blocking_and_nonblocking_vector",
    "count",
    "count_zero",
    "count_large",
    "dtype",
    "dtype_width",
    "op",
    "algorithm",
    "bcast_root",
    "reduce_root",
    "bcast_count",
    "collective",
    "order",
    "barrier",
    "recvcounts",
    "nonblocking",
)


def outcomes(size: int, mode: str) -> dict[str, list[dict]]:
    return outcomes_of(PROGRAM, size, mode)


@pytest.mark.parametrize(("size", "mode"), RUNS)
@pytest.mark.parametrize("case", DIFFER)
def test_every_rank_learns_who_called_what(case: str, size: int, mode: str) -> None:
    for entry in outcomes(size, mode)[case]:
        assert entry["error"] == "MismatchError", entry
        assert entry["seconds"] < 4, entry
        assert "rank 1 called" in entry["text"], entry
        assert entry["text"].count(" called ") == 2, entry
        assert entry["usable"] or mode == "default", entry


@pytest.mark.parametrize(("size", "mode"), RUNS)
@pytest.mark.parametrize("case", ["refused", "refused_nonblocking"])
def test_one_ranks_bad_argument_is_an_error_on_all(case: str, size: int, mode: str) -> None:
    check_refused(outcomes(size, mode)[case], mode)


@pytest.mark.parametrize(("size", "mode"), [run for run in RUNS if run[1] == "default"])
def test_a_rank_that_refused_a_call_gets_no_data_of_it_later(size: int, mode: str) -> None:
    check_no_data_of_a_refused_call(outcomes(size, mode)["refused_bcast"])


@pytest.mark.parametrize(("size", "mode"), RUNS)
def test_the_same_bad_argument_everywhere_leaves_the_communicator_usable(size: int, mode: str) -> None:
    for entry in outcomes(size, mode)["refused_by_all"]:
        assert (entry["error"], entry["usable"]) == ("ValueError", True)
        assert entry["text"] == "sendbuf has 3 elements, but recvbuf 4"


@pytest.mark.parametrize(("size", "mode"), RUNS)
@pytest.mark.parametrize("case", ["never_came", "left_early"])
def test_a_rank_that_does_not_come_is_named_when_the_time_is_up(case: str, size: int, mode: str) -> None:
    check_missing_rank(outcomes(size, mode)[case])
    for entry in outcomes(size, mode)[case]:
        says = "waiting for all to begin" in entry["text"] or "step" in entry["text"]
        assert says or entry["rank"] == 1, entry


@pytest.mark.parametrize("mode", ["default", "full", "off"])
def test_a_slow_rank_is_waited_for(mode: str) -> None:
    for entry in outcomes(3, mode)["slow_is_fine"] if (3, mode) in RUNS else _slow_alone(mode):
        assert (entry["error"], entry["usable"]) == ("NoneType", True)


def _slow_alone(mode: str) -> list[dict]:
    outcome = run(3, [PROGRAM, "slow_is_fine"], environment={"MPICOLL_CHECK": mode})
    return [json.loads(line) for line in outcome.stdout.splitlines()]


RAISING = """
import numpy as np, time
from mpi4py import MPI
import mpicoll
comm = mpicoll.Intracomm(MPI.COMM_WORLD)
x = np.ones(1000)
comm.Allreduce(MPI.IN_PLACE, x)
if comm.rank == 2:
    raise KeyError("the culprit")
comm.Allreduce(MPI.IN_PLACE, x)
"""

RAISING_OPERATION = """
import sys
import numpy as np
from mpi4py import MPI
import mpicoll
def careful(a, b):
    if a + b > 5:
        raise ValueError("too large")
    return a + b
comm = mpicoll.Intracomm(MPI.COMM_WORLD)
x = np.ones(4)
comm.Allreduce(MPI.IN_PLACE, x, mpicoll.op(careful), algorithm="native")
x[:] = comm.rank + 3
request = getattr(comm, sys.argv[1])(MPI.IN_PLACE, x, mpicoll.op(careful), algorithm="native")
if request is not None:
    request.Wait()
print("went on with", x, flush=True)
"""

CATCHING = """
import numpy as np
from mpi4py import MPI
import mpicoll
comm = mpicoll.Intracomm(MPI.COMM_WORLD, timeout=5)
try:
    comm.Allreduce(MPI.IN_PLACE, np.ones(300_000 + comm.rank))
except mpicoll.errors.MismatchError:
    pass
again = mpicoll.Intracomm(MPI.COMM_WORLD.Dup())
again.Allreduce(MPI.IN_PLACE, np.ones(300_000))
print("went on", flush=True)
"""


@pytest.mark.parametrize("size", extent.first(1, [3, 8]))
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(size: int, tmp_path) -> None:
    program = tmp_path / "raising.py"
    program.write_text(RAISING)
    outcome = run(size, [str(program)], timeout=40)
    assert not outcome.hung, outcome.report
    assert outcome.returncode != 0
    assert 'raise KeyError("the culprit")' in outcome.text
    assert "rank 2 failed" in outcome.text
    assert outcome.seconds < 20


@pytest.mark.parametrize("call", ["Allreduce", "Iallreduce"])
def test_an_operation_that_raises_inside_the_mpi_library_ends_the_job(call: str, tmp_path) -> None:
    """No rank goes on with what the reduction has left."""
    program = tmp_path / "raising_operation.py"
    program.write_text(RAISING_OPERATION)
    outcome = run(3, [str(program), call], timeout=60)
    assert not outcome.hung, outcome.report
    assert outcome.returncode != 0
    assert "ValueError: too large" in outcome.text
    assert "failed in a reduction" in outcome.text
    assert "went on" not in outcome.text


def test_a_program_may_go_on_with_another_communicator_after_a_mismatch(tmp_path) -> None:
    program = tmp_path / "catching.py"
    program.write_text(CATCHING)
    outcome = run(3, [str(program)], timeout=40)
    assert not outcome.hung, outcome.report
    assert outcome.stdout.count("went on") == 3, outcome.text
    assert outcome.returncode == 0, outcome.text


HANGING = """
import sys, time
from mpi4py import MPI
def stuck_here():
    time.sleep(60)
if MPI.COMM_WORLD.rank == 1:
    stuck_here()
MPI.COMM_WORLD.Barrier()
"""


def test_a_run_that_hangs_is_killed_and_says_where_every_rank_stood(tmp_path) -> None:
    program = tmp_path / "hanging.py"
    program.write_text(HANGING)
    outcome = run(3, [str(program)], timeout=4)
    assert outcome.hung
    assert outcome.seconds < 20
    assert "in stuck_here" in outcome.report
    assert all(f"--- rank {rank}" in outcome.report for rank in range(3))
