"""Records of steps whose shares several workers have taken, some of which have died."""

from __future__ import annotations

from mpi4py import MPI

from mpicoll.train.asynchronous.share_records import ShareRecord, ShareRecords
from mpicoll.train.config import TrainConfig
from mpicoll.train.step_plan import StepPlan

PLAN = StepPlan(TrainConfig(batch=10, epochs=3, schedule="constant", warmup=0), 40)


def piece(number: int) -> ShareRecord:
    return ShareRecord(number, 0.1, 2.0 * number, 1, 2, 0.01)


def test_steps_whose_shares_dead_workers_took_have_the_loss_of_a_step_nearby() -> None:
    before = ShareRecords(PLAN, 3)
    for number in (4, 5, 12):  # steps 1 and 4; the run began with step 0
        before.add(piece(number))
    after = ShareRecords(PLAN, 2)
    after.take_over(before, 0)
    assert [record.step for record in after.records] == [1, 1, 4]
    after.add(piece(15))  # step 7 of two workers
    after.share(MPI.COMM_SELF)
    assert [record.step for record in after.records] == list(range(8))
    assert [record.epoch for record in after.records] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [record.loss for record in after.records] == [4.5, 4.5, 4.5, 4.5, 12.0, 12.0, 12.0, 15.0]
    assert len(after.own) == 1


def test_shares_outlive_several_deaths() -> None:
    records = ShareRecords(PLAN, 4)
    records.add(piece(8))
    for workers in (3, 2):
        records, before = ShareRecords(PLAN, workers), records
        records.take_over(before, 8 if workers == 3 else 100)
        records.add(piece(workers * 3))
    records.share(MPI.COMM_SELF)
    assert [record.step for record in records.records] == [2, 3]


def test_without_a_death_nothing_is_filled_in() -> None:
    records = ShareRecords(PLAN, 2)
    for number in (3, 9):
        records.add(piece(number))
    records.share(MPI.COMM_SELF)
    assert [record.step for record in records.records] == [1, 4]
