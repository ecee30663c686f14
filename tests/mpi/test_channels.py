"""What belongs to a communicator: tag slots and the plan cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.runtime import channel as channels

HALF = 24
"""Slots for persistent operations in these tests."""


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Intracomm]:
    """A communicator with few tag slots."""

    class Few(channels.Tags):
        def __init__(self, upper_bound: int) -> None:
            super().__init__(upper_bound)
            self.slots = 2 * HALF

    monkeypatch.setattr(channels, "Tags", Few)
    plain = MPI.COMM_WORLD.Dup()
    yield Intracomm(plain, timeout=20, algorithm="ring")
    plain.Free()


def use(request: Any, data: np.ndarray, comm: Intracomm) -> None:
    data[:] = comm.rank
    request.Start()
    request.Wait()
    assert (data == sum(range(comm.size))).all()


# Slots of persistent operations ---------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_slot_is_not_given_again_while_its_operation_lives(few_slots: Intracomm) -> None:
    """One operation outlives many others of the same signature."""
    old, young = np.zeros(3), np.zeros(3)
    kept = few_slots.Allreduce_init(MPI.IN_PLACE, old)
    for _ in range(5 * HALF):
        made = few_slots.Allreduce_init(MPI.IN_PLACE, young)
        assert made._slot != kept._slot
        use(made, young, few_slots)
        use(kept, old, few_slots)
        made.Free()
    kept.Free()


@pytest.mark.mpi(min_size=2)
def test_a_slot_is_free_only_when_all_ranks_have_freed_it(few_slots: Intracomm) -> None:
    """Each rank keeps another operation for good; all take the same slots nevertheless."""
    comm, data, late, taken = few_slots, np.zeros(3), [], []
    for turn in range(4 * HALF):
        made = comm.Allreduce_init(MPI.IN_PLACE, data)
        taken.append(made._slot)
        use(made, data, comm)
        if turn == comm.rank:
            late.append(made)
        else:
            made.Free()
    lowest, highest = np.array(taken), np.array(taken)
    comm.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    comm.Allreduce(MPI.IN_PLACE, highest, MPI.MAX)
    assert (lowest == highest).all()
    assert not set(taken[HALF:]) & set(taken[: comm.size])
    for request in late:
        request.Free()


@pytest.mark.mpi(min_size=2)
def test_too_many_persistent_operations_are_refused_by_all_ranks(few_slots: Intracomm) -> None:
    """Also where one rank alone has not freed its own."""
    data = np.zeros(3)
    kept = [few_slots.Allreduce_init(MPI.IN_PLACE, data) for _ in range(HALF)]
    if few_slots.rank:
        for request in kept:
            request.Free()
    with pytest.raises(RuntimeError, match=f"persistent request: {HALF} of them are alive"):
        few_slots.Allreduce_init(MPI.IN_PLACE, data)
    for request in kept:
        request.Free()
    again = few_slots.Allreduce_init(MPI.IN_PLACE, data)
    use(again, data, few_slots)
    again.Free()


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
