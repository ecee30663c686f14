"""What a profile makes of calls: who was waited for, whose clock is off, which calls are measured again."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.program import profile_analysis, program_clock, rank_records
from mpicoll.program.call_recorder import CallRecorder
from mpicoll.program.native_communicators import observed

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
pytestmark = pytest.mark.mpi
NO_DRIFT = program_clock.Drift(0.0, 0.0, 1.0, 0.0)


def test_offsets_of_clocks_are_found() -> None:
    """Every rank but 0 pretends to be elsewhere, with a clock that is off by its rank in hours."""
    comm = MPI.COMM_WORLD.Dup()
    offset = program_clock.offset_to_first(comm, lambda: time.perf_counter() + 3600.0 * RANK, f"system {RANK}")
    same = program_clock.offset_to_first(comm, time.perf_counter, "one system")
    comm.Free()
    assert offset == pytest.approx(-3600.0 * RANK, abs=0.5)
    assert same == 0.0


def test_a_clock_that_drifts_is_corrected_in_between() -> None:
    drift = program_clock.Drift(100.0, 5.0, 200.0, 7.0)
    assert drift.corrected(np.array([100.0, 150.0, 200.0])).tolist() == [105.0, 156.0, 207.0]


@pytest.mark.skipif(SIZE < 2, reason="needs somebody who waits")
def test_the_rank_that_comes_last_is_the_one_waited_for() -> None:
    recorder = CallRecorder(MPI)
    comm = observed(MPI.COMM_WORLD.Dup(), recorder)
    data = np.ones(4)
    for _ in range(3):
        comm.Barrier()
        if RANK == 1:
            time.sleep(0.05)
        comm.Allreduce(MPI.IN_PLACE, data)
    plain = MPI.COMM_WORLD.Dup()
    records = rank_records.gather(plain, rank_records.own_record(recorder, {"rank": RANK}, NO_DRIFT))
    comm.Free()
    plain.Free()
    assert len(records) == (SIZE if RANK == 0 else 0)
    if RANK == 0:
        assert [record.facts["rank"] for record in records] == list(range(SIZE))
        check_analysis(profile_analysis.analyze(records, SIZE))


def check_analysis(analysis: profile_analysis.Analysis) -> None:
    sites = {site["call"]: site for site in (each.as_dict() for each in analysis.sites)}
    reduced = sites["Allreduce"]
    assert (reduced["calls"], reduced["nbytes"], sites["Barrier"]["calls"]) == (3, [32, 32], 3)
    assert reduced["slowest"][0]["rank"] == 1
    assert reduced["slowest"][0]["share_of_calls"] == 1.0
    # Each of the others has waited three times; 0.04 s: a barrier may let ranks go at different times.
    assert reduced["waiting_seconds"] * SIZE >= (SIZE - 1) * 3 * 0.04
    assert analysis.waiting[1] < analysis.waiting[0]
    (target,) = (each for each in analysis.targets if each.method == "Allreduce")
    assert (target.members, target.calls, target.nbytes, target.place) == (tuple(range(SIZE)), 3, 32, 1)
