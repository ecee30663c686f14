"""Ranks that are left after a failure agree on a step: none is applied twice, and all hold what one of them has."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import NonFiniteLoss, UsageError
from mpicoll.parallel.mesh import make_mesh
from mpicoll.train import rank_failures
from mpicoll.train.assembly import make_loop
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.lockstep import Lockstep
from mpicoll.train.loop import Loop
from mpicoll.train.synchronous_state import state_in_memory
from mpicoll.train.training_run import named

pytestmark = pytest.mark.mpi
CONFIG = TrainConfig(
    dataset="synthetic:600x6x4", hidden=(40,), batch=48, steps=30, warmup=2, lr=0.05, timeout=20.0, progress=False
)
TAKEN = 6
"""Steps that the ranks have applied before one of them dies; not a step after which losses are summed."""


def begun(comm: Intracomm) -> Loop:
    dataset, model = named(CONFIG, comm)
    return make_loop(CONFIG, make_mesh(comm, CONFIG), dataset, model, Clock())


def lockstep(loop: Loop) -> Lockstep:
    assert isinstance(loop.coordination, Lockstep)
    return loop.coordination


def take_steps(loop: Loop, last_applied_by: int) -> None:
    """Take steps of which the last one seems to have failed, on all ranks but one, before it was applied."""
    coordination, before = lockstep(loop), {}
    for share in coordination.shares():
        if share.step == TAKEN - 1 and loop._mesh.replica != last_applied_by:
            before = {name: array.copy() for name, array in state_in_memory(loop.strategy).items()}
        loop.take_step(share)
        if share.step == TAKEN - 1:
            break
    for name, array in state_in_memory(loop.strategy).items() if before else ():
        array[...] = before[name]
    if before:
        coordination.applied = TAKEN - 1
        coordination.metrics._open.pop()


def test_the_others_take_over_the_newest_state(comm: Intracomm) -> None:
    rank, size = comm.Get_rank(), comm.Get_size()
    if size < 3:
        pytest.skip("two ranks must be left")
    ahead, dead = 1, size - 1
    loop = begun(comm)
    take_steps(loop, ahead)
    own = lockstep(loop)
    sums, applied = own.metrics.open_sums(), own.applied
    assert applied == TAKEN - (rank != ahead)
    left = comm.Split(int(rank == dead), rank)
    if rank != dead:
        after = begun(left)
        rank_failures._take_over(left, loop, after)
        assert lockstep(after).first == lockstep(after).applied == TAKEN
        assert len(set(left.allgather(after.strategy.digest()))) == 1
        assert left.bcast(loop.strategy.digest(), ahead) == after.strategy.digest()
        check_records(left, loop, after, sums)
        assert next(lockstep(after).shares())[:3] == (TAKEN, left.Get_rank(), size - 1)
    left.Free()


def check_records(left: Intracomm, before: Loop, after: Loop, sums: dict[int, tuple[float, float]]) -> None:
    """Check that a step which had not been summed has the mean loss over the samples of the ranks that are left."""
    records, mesh, known = after.records, before._mesh, len(before.records)
    assert [record.step for record in records] == list(range(TAKEN))
    assert records[:known] == before.records
    assert known < TAKEN, "no step is left to be summed"
    for record in records[known:]:
        count = len(before.step_plan.samples(record.step, mesh.replicas, mesh.replica)[0])
        mine = (sums[record.step][0], count) if record.step in sums else (0.0, 0)
        total, samples = np.sum(left.allgather(mine), axis=0)
        assert math.isclose(record.loss, total / samples, rel_tol=1e-12)
        assert record.learning_rate == before.step_plan.rate(record.step)


def test_a_loss_that_was_not_finite_is_found_by_all(comm: Intracomm) -> None:
    loop, after = begun(comm), begun(comm)
    take_steps(loop, 0)
    if comm.Get_rank() == 0:
        lockstep(loop).metrics._sums[1, 0] = math.nan
    with pytest.raises(NonFiniteLoss, match="the loss became nan in step"):
        rank_failures._take_over(comm, loop, after)


def test_an_error_that_no_death_has_caused_is_not_one_to_go_on_from(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_failures, "_NOTICE_SECONDS", 0.05)
    shrink = TrainConfig(on_failure="shrink")
    if MPI.get_vendor()[0] == "Open MPI":
        assert not rank_failures.can_go_on(shrink, comm, MPI.Exception(MPI.ERR_TRUNCATE))
    assert not rank_failures.can_go_on(CONFIG, comm, MPI.Exception(MPI.ERR_PROC_FAILED))
    assert not rank_failures.can_go_on(shrink, comm, NonFiniteLoss("nan"))


def test_it_is_refused_where_a_death_ends_the_job() -> None:
    with pytest.raises(UsageError, match=r"--on-failure shrink: .* \(ULFM\).*--with-ft ulfm; this is "):
        rank_failures.check_possible(TrainConfig(on_failure="shrink"))
