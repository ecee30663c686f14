"""Error feedback in an allreduce: nothing that was given is ever lost, in every form of the call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import ErrorFeedback, Intracomm
from mpicoll.collectives import select
from mpicoll.compression import Key, compressor
from mpicoll.errors import MpicollError, RemoteError
from tests.mpi.compression.test_compressed import given, same_everywhere
from tests.mpi.conftest import TIMEOUT, WORLD

pytestmark = pytest.mark.mpi
SPECS = ("sign:block=32", "int4:block=32", "int2:block=32:rounding=nearest", "fp16")
STEPS = 4


def all_residuals(comm: Intracomm, feedback: ErrorFeedback) -> np.ndarray:
    """Return the sum over all ranks of both residuals."""
    assert feedback.residual is not None
    owed = feedback.residual.astype(np.float64)
    if feedback.result_residual is not None:
        owed += feedback.result_residual
    MPI.Intracomm(comm).Allreduce(MPI.IN_PLACE, owed)
    return owed


def total(comm: Intracomm, count: int) -> np.ndarray:
    return sum(given(rank, count).astype(np.float64) for rank in range(comm.size))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [1, 33, 5000])
def test_what_arrived_and_what_is_owed_is_all_that_was_given(comm: Intracomm, spec: str, count: int) -> None:
    feedback, x, y = ErrorFeedback(spec), given(comm.rank, count), np.empty(count, np.float32)
    arrived = np.zeros(count)
    for _ in range(STEPS):
        comm.Allreduce(x, y, compression=feedback)
        assert same_everywhere(comm, y)
        arrived += y
    assert (x == given(comm.rank, count)).all()
    np.testing.assert_allclose(arrived + all_residuals(comm, feedback), STEPS * total(comm, count), atol=2e-4)
    assert feedback.steps == STEPS


def test_both_shots_by_hand(comm: Intracomm) -> None:
    count = 64 * comm.size
    feedback = ErrorFeedback("int4:block=32")
    codec = feedback.compressor

    def decoded(x: np.ndarray) -> np.ndarray:
        payload, out = np.empty(codec.wire_nbytes(x.size), np.uint8), np.empty_like(x)
        codec.compress(x, payload, Key())
        codec.decompress(payload, out)
        return out

    owed, owed_of_sum = np.zeros((comm.size, count), np.float32), np.zeros(count, np.float32)
    for step in range(3):
        xs = np.array([given(rank + 10 * step, count) for rank in range(comm.size)])
        y = xs[comm.rank].copy()
        comm.Allreduce(MPI.IN_PLACE, y, compression=feedback)
        owed += xs
        sent = np.array([decoded(each) for each in owed])
        owed -= sent
        result = sent[0].copy()
        for each in sent[1:]:
            result += each
        owed_of_sum += result
        result = decoded(owed_of_sum)
        owed_of_sum -= result
        np.testing.assert_array_equal(y, result)
        np.testing.assert_array_equal(feedback.residual, owed[comm.rank])
    own = slice(64 * comm.rank, 64 * (comm.rank + 1))
    assert feedback.result_residual is not None
    np.testing.assert_array_equal(feedback.result_residual[own], owed_of_sum[own])
    feedback.result_residual[own] = 0
    assert (feedback.result_residual == 0).all()


def forms(comm: Intracomm, feedback: ErrorFeedback) -> dict[str, Callable[[np.ndarray, np.ndarray], None]]:
    def nonblocking(x: np.ndarray, y: np.ndarray) -> None:
        comm.Iallreduce(x, y, compression=feedback).Wait()

    def persistent(x: np.ndarray, y: np.ndarray) -> None:
        plan = comm.Allreduce_init(x, y, compression=feedback)
        plan.Start()
        plan.Wait()
        plan.Free()

    def in_place(x: np.ndarray, y: np.ndarray) -> None:
        y[:] = x
        comm.Allreduce(MPI.IN_PLACE, y, compression=feedback)

    return {"nonblocking": nonblocking, "persistent": persistent, "in place": in_place}


@pytest.mark.parametrize("count", [100, 5000])
@pytest.mark.parametrize("form", ["nonblocking", "persistent", "in place"])
def test_every_form_does_the_same(comm: Intracomm, form: str, count: int) -> None:
    feedback, other = ErrorFeedback("sign:block=32"), ErrorFeedback("sign:block=32")
    x, y, wanted = given(comm.rank, count), np.empty(count, np.float32), np.empty(count, np.float32)
    for _ in range(3):
        comm.Allreduce(x, wanted, compression=other)
        forms(comm, feedback)[form](x, y)
        np.testing.assert_array_equal(y, wanted)
    for name, array in other.state().items():
        np.testing.assert_array_equal(feedback.state()[name], array)


def test_a_persistent_call_started_again(comm: Intracomm) -> None:
    feedback, x, y = ErrorFeedback("sign:block=32"), given(comm.rank, 3000), np.empty(3000, np.float32)
    plan, arrived = comm.Allreduce_init(x, y, compression=feedback), np.zeros(3000)
    for _ in range(STEPS):
        plan.Start()
        plan.Wait()
        arrived += y
    np.testing.assert_allclose(arrived + all_residuals(comm, feedback), STEPS * total(comm, 3000), atol=2e-4)
    plan.Free()


def test_nothing_and_then_something(comm: Intracomm) -> None:
    feedback, nothing = ErrorFeedback("sign"), np.empty(0, np.float32)
    comm.Allreduce(nothing, nothing.copy(), compression=feedback)
    assert feedback.steps == 1
    with pytest.raises(ValueError, match="0 elements, not 5"):
        comm.Allreduce(np.ones(5, np.float32), np.ones(5, np.float32), compression=feedback)
    feedback.reset()
    comm.Allreduce(np.ones(5, np.float32), np.ones(5, np.float32), compression=feedback)


@pytest.mark.mpi(min_size=2)
def test_another_count_is_refused_and_the_others_are_told(comm: Intracomm) -> None:
    feedback, x = ErrorFeedback("sign"), given(comm.rank, 500)
    comm.Allreduce(x, x.copy(), compression=feedback)
    before = feedback.state()
    last = comm.rank == comm.size - 1
    count = 501 if last else 500
    with pytest.raises(ValueError if last else RemoteError, match="500 elements, not 501"):
        comm.Allreduce(np.ones(count, np.float32), np.ones(count, np.float32), compression=feedback)
    if last:
        np.testing.assert_array_equal(feedback.residual, before["residual"])


def test_one_call_at_a_time(comm: Intracomm) -> None:
    """Rank 0 begins when the others have seen that theirs is under way: without it no call can end."""
    if comm.size == 1:
        return  # a call of one rank is complete when it returns
    feedback, x = ErrorFeedback("sign"), given(comm.rank, 5000)
    plan = comm.Allreduce_init(x, x.copy(), compression=feedback)
    wait_for_others(comm)
    request = comm.Iallreduce(x, x.copy(), compression=feedback)
    if comm.rank:
        with pytest.raises(ValueError, match="in use by a call"):
            plan.Start()
        comm.Send(np.zeros(1), 0)
    request.Wait()
    plan.Start()
    plan.Wait()
    plan.Free()
    assert feedback.steps == 2
    wait_for_others(comm)
    request = comm.Iallreduce(x, x.copy(), compression=feedback)
    if comm.rank:
        with pytest.raises(ValueError, match="in use by a call"):
            comm.Iallreduce(x, x.copy(), compression=feedback)
        comm.Send(np.zeros(1), 0)
    else:
        with pytest.raises((ValueError, MpicollError), match="in use by a call"):
            comm.Iallreduce(x, x.copy(), compression=feedback).Wait()


def wait_for_others(comm: Intracomm) -> None:
    for source in range(1, comm.size if comm.rank == 0 else 1):
        comm.Recv(np.empty(1), source)


def test_what_is_not_finite_comes_once(comm: Intracomm) -> None:
    feedback, y = ErrorFeedback("sign:block=32"), np.empty(1000, np.float32)
    for step in range(3):
        x = given(comm.rank, 1000)
        if step == 1 and comm.rank == 0:
            x[500] = np.nan
        comm.Allreduce(x, y, compression=feedback)
        assert np.isnan(y[500]) == (step == 1)
        assert np.isfinite(y[:480]).all()
    assert np.isfinite(all_residuals(comm, feedback)).all()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("count", [5, 5000, 700_001])
def test_between_nodes(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("MPICOLL_NODES", "2")
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=TIMEOUT)
    feedback, x, y = ErrorFeedback("sign:block=32"), given(comm.rank, count), np.empty(count, np.float32)
    arrived = np.zeros(count)
    for algorithm in (select.AUTO, select.HIERARCHY, select.AUTO, select.TWO_SHOT):
        comm.Allreduce(x, y, compression=feedback, algorithm=algorithm)
        assert same_everywhere(comm, y)
        arrived += y
    np.testing.assert_allclose(arrived + all_residuals(comm, feedback), 4 * total(comm, count), atol=5e-4)
    assert feedback.steps == feedback.state()["steps"] == 4
    longer = np.ones(count + 1, np.float32)
    with pytest.raises(ValueError, match=f"is for {count} elements, not {count + 1}"):
        comm.Allreduce(longer, longer.copy(), compression=feedback)
    comm.Allreduce(x, y, compression=feedback)  # all ranks have refused that call
    plain.Free()


@pytest.mark.parametrize("nodes", ["", "2"])
@pytest.mark.parametrize(
    "spec", ["sign", "fp16", "topk:0.01", "oktopk:0.01", "powersgd:2", "common:16", "int4:rounding=nearest"]
)
def test_plans_that_are_kept_do_not_keep_residuals(monkeypatch: pytest.MonkeyPatch, spec: str, nodes: str) -> None:
    if nodes and MPI.COMM_WORLD.size < 3:
        pytest.skip("one node")
    if compressor(spec).unbiased:
        pytest.skip("without error feedback")
    monkeypatch.setenv("MPICOLL_NODES", nodes)
    plain = MPI.COMM_WORLD.Dup()
    comm, seen = Intracomm(plain, timeout=20.0), []
    x, y = np.ones(5000, np.float32), np.empty(5000, np.float32)
    for _ in range(6):
        feedback = ErrorFeedback(spec)
        seen.append(weakref.ref(feedback))
        for _ in range(2):
            comm.Allreduce(x, y, compression=feedback)
        assert feedback.steps == 2
        del feedback
        gc.collect()  # its parts, of which there are some over several nodes, refer to it
    assert [each() for each in seen] == [None] * len(seen)
    assert len(comm.channel.plans._plans) <= 2
    plain.Free()
