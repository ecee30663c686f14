"""Ranks that are left after a failure agree on a step: none is applied twice, and all hold what one of them has."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import NonFiniteLoss, RankFailed, TrainingError, UsageError
from mpicoll.parallel.mesh import make_mesh
from mpicoll.parameter_server import message_memory
from mpicoll.parameter_server.message_memory import abandon_all
from mpicoll.train import rank_failures
from mpicoll.train.assembly import check_ranks, make_loop
from mpicoll.train.asynchronous.asynchronous_state import ResumedState
from mpicoll.train.asynchronous.work_sharing import WorkSharing
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.lockstep import Lockstep
from mpicoll.train.loop import Loop
from mpicoll.train.metrics import StepRecord
from mpicoll.train.spare_ranks import SpareRanks
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


def test_a_spare_rank_takes_over_all_that_the_others_know(comm: Intracomm) -> None:
    """The last rank was spare, and rank 0 has died."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size < 3:
        pytest.skip("a rank must be left beside the spare one")
    spare = size - 1
    training, left = comm.Split(int(rank == spare), rank), comm.Split(int(rank == 0), rank)
    loop = None
    if rank != spare:
        loop = begun(training)
        loop._first_epoch, loop.resumed_after = 2, 5
        take_steps(loop, training.Get_size() - 1)
    if rank != 0:
        made = begun(left)
        fresh = made.strategy.digest()
        rank_failures._take_over(left, loop or made, made)
        digests = set(left.allgather(made.strategy.digest()))
        assert len(digests) == 1
        assert fresh not in digests
        assert lockstep(made).first == lockstep(made).applied == TAKEN
        assert [record.step for record in made.records] == list(range(TAKEN))
        assert left.allgather(made.records) == [made.records] * (size - 1)
        assert made.start[:2] == (2, 5)
        assert next(lockstep(made).shares())[:3] == (TAKEN, left.Get_rank(), size - 1)
    for part in (training, left):
        part.Free()


def test_records_travel_in_parts(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_failures, "_RECORDS", 2)
    records = [StepRecord(step, 0, 0.1, 0.5, None) for step in range(7)]
    own = records[: comm.Get_rank()] if comm.Get_rank() else records
    counts = np.array(comm.allgather(len(own)))
    assert rank_failures._shared(comm, own, counts, 0, StepRecord) == records


def test_spare_ranks_wait_until_they_are_dismissed(comm: Intracomm) -> None:
    rank, size = comm.Get_rank(), comm.Get_size()
    if size < 3:
        pytest.skip("two ranks must train")
    spares = SpareRanks(replace(CONFIG, spares=1), comm)
    team = spares.team(comm)
    if rank == size - 1:
        assert team is None
        assert not spares.is_training
        assert spares.wait(comm) is None
    else:
        assert team is not None
        assert (team.Get_rank(), team.Get_size()) == (rank, size - 1)
        team.Barrier()
        if rank == 1:
            spares.dismiss()
        assert spares.all_lost(team) == 0


def test_without_spare_ranks_all_train(comm: Intracomm) -> None:
    spares = SpareRanks(CONFIG, comm)
    assert spares.team(comm) is comm
    assert spares.is_training
    spares.dismiss()
    with pytest.raises(UsageError, match=rf"--spares {comm.Get_size()}: {comm.Get_size()} ranks? leaves? none"):
        check_ranks(replace(CONFIG, spares=comm.Get_size()), comm.Get_size())


# ---- parameter servers -----------------------------------------------------------------------------------------------

SERVED = replace(CONFIG, mode="ps", servers=2, replicas=2, on_failure="shrink")
SHARES = 5
"""Shares that each worker has taken before a rank dies."""
DEATH_TAG = 9


def serving(comm: Intracomm, config: TrainConfig, found: ResumedState | None = None) -> Loop:
    dataset, model = named(config, comm)
    return make_loop(config, make_mesh(comm, config), dataset, model, Clock(), found)


def sharing(loop: Loop) -> WorkSharing:
    assert isinstance(loop.coordination, WorkSharing)
    return loop.coordination


def begun_serving(comm: Intracomm, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> Loop:
    """Let all workers take shares, whose effect they have pulled; then a rank seems to have died, for all servers."""
    told, loop = MPI.Intracomm(comm).Dup(), serving(comm, config)
    servers = range(comm.size - config.servers, comm.size)
    together = comm.Split(int(comm.rank in servers), comm.rank)
    with monkeypatch.context() as patch:
        plant_a_death(told, patch)
        if comm.rank in servers:
            with pytest.raises(RankFailed):
                sharing(loop).finish(())
        else:
            try:
                take_shares(loop)
                together.Barrier()
            finally:  # a failure of this test must not let the servers wait
                for server in servers if comm.rank == 0 else ():
                    told.Send(np.empty(0), server, DEATH_TAG)
    loop.close()
    comm.Barrier()
    abandon_all()
    together.Free()
    told.Free()
    return loop


def plant_a_death(told: MPI.Intracomm, patch: pytest.MonkeyPatch) -> None:
    """Let ranks find a death when a message from rank 0 has come, in all waits in which they look for one.

    A server that has found it answers no requests any more. So one that waits for its answer has to find it there.
    """
    found: list[bool] = []

    def look(_comm: MPI.Intracomm) -> None:
        if not found and told.Iprobe(0, DEATH_TAG):
            told.Recv(np.empty(0), 0, DEATH_TAG)
            found.append(True)
        if found:
            raise RankFailed("a rank died")

    patch.setattr(message_memory, "raise_if_failed", look)


def take_shares(loop: Loop) -> None:
    """Take shares as a worker, and pull their effect."""
    for number, share in enumerate(sharing(loop).shares(), 1):
        loop.take_step(share)
        if number == SHARES:
            break
    loop.strategy.fetch()


@pytest.mark.parametrize(
    ("more", "victim"),
    [
        ({}, -1),
        ({}, -2),
        ({}, 0),
        ({}, 1),
        ({"staleness": 0, "optimizer": "adam", "lr": 0.01}, -1),
        ({"staleness": 0}, 0),
        ({"pull_compression": "int8", "compression": "topk:0.2"}, -2),
    ],
)
def test_a_run_with_servers_goes_on_from_copies(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], victim: int
) -> None:
    if comm.size < 4:
        pytest.skip("two workers and two servers are four ranks")
    config, dead, workers = replace(SERVED, **more), victim % comm.size, comm.size - 2  # type: ignore[arg-type]
    loop = begun_serving(comm, config, monkeypatch)
    left = comm.Split(int(comm.rank == dead), comm.rank)
    if comm.rank != dead:
        known = len(loop.records)
        before = [] if loop.strategy.exchange.ps._server is None else held_parameters(loop)  # type: ignore[attr-defined]
        after = rank_failures._go_on_serving(
            left, loop, sharing(loop), lambda team, found: serving(team, config, found)
        )
        now, left_workers = sharing(after), workers - (dead < workers)
        complete, unpublished = SHARES * left_workers, 2 * workers * ("pull_compression" in more)
        assert complete - unpublished <= now.first == now.done <= complete
        assert now.shares_per_step == left_workers
        assert len(after.records) == known
        vector = after.strategy.vector  # type: ignore[attr-defined]
        assert len({each.tobytes() for each in left.allgather(vector)}) == 1
        for first, part in before:
            assert np.array_equal(vector[first : first + part.size], part)
        after.train(())
        assert now.done == after.step_plan.total_steps * left_workers
        assert [record.step for record in after.records] == list(range(after.step_plan.total_steps))
        assert len(set(left.allgather(after.check_replicas()))) == 1
        assert after.facts()["mode"]["steps_by_rank"][left_workers:] == [0] * (left.size - left_workers)
    left.Free()


def held_parameters(loop: Loop) -> list[tuple[int, np.ndarray]]:
    """Return first element and parameters of each copy that this server holds."""
    ps = loop.strategy.exchange.ps  # type: ignore[attr-defined]
    return [(ps._session.layout.bounds(shard)[0], each.parameters) for shard, each in ps._server.held.items()]


def test_requests_to_stop_and_failures_outlive_a_death(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size < 4:
        pytest.skip("two workers and two servers are four ranks")
    loop = begun_serving(comm, SERVED, monkeypatch)
    if comm.rank == 1:
        sharing(loop)._stop = True
        sharing(loop)._failure = NonFiniteLoss("the loss became nan")
    found = sharing(loop).rescued(comm)
    assert (found.is_stopped, found.has_failed, found.servers) == (True, True, 2)
    after = serving(comm, SERVED, found)
    sharing(after).take_over(sharing(loop))
    with pytest.raises(NonFiniteLoss, match="the loss became nan"):
        after.train(())
    assert sharing(after).taken == 0


def test_it_ends_where_all_workers_or_copies_are_dead(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.size < 4:
        pytest.skip("two workers and two servers are four ranks")
    loop = begun_serving(comm, replace(SERVED, replicas=1), monkeypatch)
    is_server = comm.rank >= comm.size - 2
    left = comm.Split(int(is_server), comm.rank)
    text = (
        rf"(all {comm.size - 2} workers|the only worker) died"
        if is_server
        else "are lost: .* died, and there was no replica"
    )
    with pytest.raises(TrainingError, match=text):
        sharing(loop).rescued(left)
    left.Free()


def test_replicas_are_refused_where_a_death_ends_the_job() -> None:
    with pytest.raises(UsageError, match=r"--replicas 2: .* \(ULFM\).*--with-ft ulfm; this is "):
        rank_failures.check_possible(SERVED)
