"""What belongs to a communicator: the plan cache."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.runtime import channel as channels

# The plan cache -------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_the_plan_in_use_stays_while_others_are_dropped(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_PLANS", 4)
    data = np.zeros(5)

    def call() -> None:
        data[:] = comm.rank
        comm.Allreduce(MPI.IN_PLACE, data, algorithm="ring")
        assert (data == sum(range(comm.size))).all()

    call()
    call()
    [hot] = comm.channel.lanes.values()
    for count in range(6, 26):
        others = np.ones(count)
        comm.Allreduce(MPI.IN_PLACE, others, algorithm="ring")
        assert (others == comm.size).all()
        call()
        assert hot.plan.requests, "the plan that is used most was dropped"
        assert hot in comm.channel.lanes.values()


@pytest.mark.mpi(min_size=2)
def test_dropping_a_plan_drops_no_other_shortcut(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_PLANS", 4)
    for count in range(1, 12):
        data = np.ones(count)
        comm.Allreduce(MPI.IN_PLACE, data, algorithm="ring")
        assert (data == comm.size).all()
        lanes = comm.channel.lanes.values()
        assert len(lanes) == min(count, 4)
        assert all(lane.plan.requests for lane in lanes)
