"""Every algorithm is proved for every size, and the verifier catches algorithms that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicoll.schedules import ALGORITHMS, COLLECTIVES, Algorithm, Recv, Reduce, Schedule, Send, Step, find, register
from mpicoll.schedules.replay import ScheduleError
from mpicoll.schedules.verify_schedule import verify, verify_schedules
from tests import extent

ROWS = [row for table in ALGORITHMS.values() for row in table.values()]


def sizes(row: Algorithm) -> list[int]:
    """Return every size where all tests are run; otherwise the sizes from 33 on take turns, and 64 is always there."""
    every = 1 if extent.ALL else 4
    return sorted({*range(1, 33), *range(33 + ROWS.index(row) % every, 65, every), 64})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.collective}-{row.name}")
def test_every_algorithm_is_right_for_sizes_1_to_64(row: Algorithm) -> None:
    for size in sizes(row):
        for root in {0, size // 2, size - 1} if COLLECTIVES[row.collective].rooted else {0}:
            verify(row, size, root=root)
        if row.segmented and size <= 16:
            verify(row, size, segments=3)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_sizes_roots_and_segments(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(ROWS))
    most = 40 if row.collective == "alltoall" else 90 if row.segmented else 300
    size = data.draw(st.integers(1, most))
    segments = data.draw(st.integers(1, 5))
    verify(row, size, root=data.draw(st.integers(0, size - 1)), segments=segments)


def schedules(collective: str, name: str, size: int = 5) -> list[Schedule]:
    return [find(collective, name).schedule(size, rank) for rank in range(size)]


Edit = Callable[[Step], Step]


def edited(parts: list[Schedule], rank: int, number: int, edit: Edit) -> list[Schedule]:
    """Return the schedules with one step of one rank changed."""
    steps = list(parts[rank].steps)
    steps[number] = edit(steps[number])
    return [replace(part, steps=tuple(steps)) if part.rank == rank else part for part in parts]


def on_recv(**changes: object) -> Edit:
    return lambda step: Step(step.sends, tuple(recv._replace(**changes) for recv in step.recvs))


def test_the_schedules_to_be_broken_are_right() -> None:
    verify_schedules(schedules("allreduce", "ring"))
    verify_schedules(schedules("allreduce", "recursive_doubling", 4), ordered=True)


LAST = 7
"""The last step of a ring of five."""


@pytest.mark.parametrize(
    ("number", "edit", "complaint"),
    [
        (1, on_recv(peer=3), "never sends"),
        (1, on_recv(start=3, stop=4), "expects chunks"),
        (1, on_recv(reduce=Reduce.COPY), "contributors missing"),
        (1, lambda step: Step((), step.recvs), "expects chunks"),
        (LAST, lambda step: Step((), step.recvs), "never sends"),
        (LAST, lambda step: Step(step.sends, ()), "never received"),
        (LAST, lambda step: Step(step.sends * 2, step.recvs), "never received"),
    ],
)
def test_a_changed_step_of_a_ring_is_found(number: int, edit: Edit, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        verify_schedules(edited(schedules("allreduce", "ring"), 2, number, edit))


def test_swapped_operands_are_found() -> None:
    parts = edited(schedules("allreduce", "recursive_doubling", 4), 1, 0, on_recv(reduce=Reduce.OWN_FIRST))
    with pytest.raises(ScheduleError, match="otherwise than rank 0"):
        verify_schedules(parts)
    reduce = edited(schedules("reduce", "tree", 4), 0, 0, on_recv(reduce=Reduce.RECEIVED_FIRST))
    verify_schedules(reduce)
    with pytest.raises(ScheduleError, match="not in rank order"):
        verify_schedules(reduce, ordered=True)


def test_a_contribution_that_counts_twice_is_found() -> None:
    def exchange(rank: int) -> Step:
        order = Reduce.OWN_FIRST if rank == 0 else Reduce.RECEIVED_FIRST
        return Step((Send(1 - rank, 0, 1),), (Recv(1 - rank, 0, 1, order),))

    with pytest.raises(ScheduleError, match="rank 0 step 2: chunk 0: the contribution of rank 0, 1 is counted twice"):
        verify_schedules([Schedule("allreduce", "twice", 2, rank, 1, (exchange(rank),) * 2) for rank in range(2)])


def test_a_receive_that_is_no_kind_of_reduction_is_refused() -> None:
    step = Step((Send(1, 0, 1),), (Recv(1, 0, 1, None),))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"rank 0 step 1: None of .* is not a Reduce"):
        verify_schedules([Schedule("allreduce", "odd", 2, 0, 1, (step,)), Schedule("allreduce", "odd", 2, 1, 1, ())])


def test_a_name_that_is_taken_is_refused() -> None:
    ring = find("allreduce", "ring")
    with pytest.raises(ValueError, match="'allreduce' has an algorithm 'ring' already"):
        register("allreduce", "ring")(lambda size, rank, root, segments: None)  # type: ignore[arg-type, return-value]
    assert find("allreduce", "ring") is ring
    assert register("allreduce", "ring", segmented=ring.segmented)(ring.build) is ring.build
    ALGORITHMS["allreduce"]["ring"] = ring


def test_sending_before_receiving_in_a_circle_is_a_deadlock() -> None:
    parts = []
    for part in schedules("allgather", "ring", 3):
        halves = [half for step in part.steps for half in (Step(sends=step.sends), Step(recvs=step.recvs))]
        parts.append(replace(part, steps=tuple(halves)))
    with pytest.raises(ScheduleError, match="deadlock"):
        verify_schedules(parts)


def test_a_window_too_wide_is_found() -> None:
    parts = [replace(part, window=2) for part in schedules("allreduce", "ring")]
    with pytest.raises(ScheduleError, match="while step 1 changes it"):
        verify_schedules(parts)


def test_overwriting_what_is_being_sent_is_found() -> None:
    def exchange(rank: int) -> Step:
        return Step((Send(1 - rank, rank, rank + 1), Send(1 - rank, rank, rank + 1)), (
            Recv(1 - rank, 1 - rank, 2 - rank), Recv(1 - rank, 1 - rank, 2 - rank)))  # fmt: skip

    with pytest.raises(ScheduleError, match="two receives in flight"):
        verify_schedules([Schedule("allgather", "over", 2, rank, 2, (exchange(rank),)) for rank in range(2)])


def test_sending_what_one_does_not_hold_is_found() -> None:
    parts = schedules("bcast", "tree", 4)
    with pytest.raises(ScheduleError, match="does not hold"):
        verify_schedules([replace(part, root=1) for part in parts])


def test_a_barrier_that_somebody_leaves_early_is_found() -> None:
    parts = [replace(part, steps=part.steps[:-1]) for part in schedules("barrier", "dissemination", 5)]
    with pytest.raises(ScheduleError, match="before every rank has begun"):
        verify_schedules(parts)
