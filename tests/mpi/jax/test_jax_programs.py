"""Collectives of `mpicoll.jax` in programs: their order, loops, derivatives, batches, and errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import mpicoll
import mpicoll.jax


def integers(rank: int, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, seed]).integers(-4, 5, shape).astype(np.float32)


def summed(comm: mpicoll.Intracomm, value: Any) -> float:
    """Return the sum of a number over the ranks, by mpicoll itself."""
    total = np.array(value, np.float64).reshape(1)
    comm.Allreduce(MPI.IN_PLACE, total)
    return float(total[0])


def test_independent_collectives_are_executed_in_program_order(
    comm: mpicoll.Intracomm, executed: list[tuple[str, int]]
) -> None:
    """The operands of the first are ready last."""

    @jax.jit
    def program(matrix: Any, x: Any) -> Any:
        late = matrix
        for _ in range(6):
            late = jnp.tanh(late @ matrix)
        parts = [jnp.ravel(late), x[:11], jnp.sort(jnp.ravel(late))[:17], x[:13]]
        results = [mpicoll.jax.allreduce(part, comm=comm) for part in parts]
        return results, mpicoll.jax.bcast(x[:3], comm=comm), mpicoll.jax.allgather(x[0], comm=comm)

    matrix, x = jnp.full((200, 200), 0.01), jnp.arange(20.0)
    once = [("allreduce", 40000), ("allreduce", 11), ("allreduce", 17), ("allreduce", 13), ("bcast", 3)]
    once.append(("allgather", 1))
    for _ in range(10):
        results = program(matrix, x)
    np.testing.assert_array_equal(results[0][1], np.arange(11) * comm.size)
    assert executed == once * 10


def test_programs_and_eager_calls_are_executed_in_their_order(
    comm: mpicoll.Intracomm, executed: list[tuple[str, int]]
) -> None:
    @jax.jit
    def late(matrix: Any) -> Any:
        for _ in range(10):
            matrix = jnp.tanh(matrix @ matrix)
        return mpicoll.jax.allreduce(matrix[:2, :3], comm=comm)

    early = jax.jit(lambda x: mpicoll.jax.allreduce(x, comm=comm))
    matrix = jnp.full((300, 300), 0.01)
    results = [(late(matrix), early(jnp.ones(5)), mpicoll.jax.bcast(jnp.ones(4), comm=comm)) for _ in range(5)]
    jax.block_until_ready(results)
    assert executed == [("allreduce", 6), ("allreduce", 5), ("bcast", 4)] * 5


def test_the_program_goes_on_beside_calls_of_the_main_thread(comm: mpicoll.Intracomm) -> None:
    @jax.jit
    def program(x: Any) -> Any:
        return lax.fori_loop(0, 5, lambda _, x: mpicoll.jax.allreduce(jnp.tanh(x @ x), comm=comm) / comm.size, x)

    x, y, total = jnp.full((100, 100), 0.01), np.ones(1000), np.empty(1000)
    expected = np.asarray(program(x))
    for _ in range(20):
        running = program(x)
        for _ in range(20):
            comm.Allreduce(y, total)  # on the same communicator, but not on the duplicate that JAX uses
            assert total[0] == comm.size
        np.testing.assert_array_equal(running, expected)


def test_loops_and_branches(comm: mpicoll.Intracomm) -> None:
    size = comm.size

    def total(x: Any) -> Any:
        return mpicoll.jax.allreduce(x, comm=comm)

    @jax.jit
    def program(x: Any) -> Any:
        scanned, sums = lax.scan(lambda carry, each: (carry + total(each), total(carry)), x, jnp.arange(3.0))
        looped = lax.while_loop(lambda x: total(x) < 100 * size, lambda x: x + 1, x)
        chosen = lax.cond(x > 0, total, lambda x: x - total(1.0), x)
        return scanned, sums, looped, chosen

    scanned, sums, looped, chosen = program(2.0)
    assert scanned == 2 + 3 * size
    np.testing.assert_array_equal(sums, [2 * size, 2 * size, (2 + size) * size])
    assert looped == 100
    assert chosen == 2 * size
    assert program(-1.0)[3] == -1 - size


LINEAR: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[int, ...]]]] = {
    "allreduce": (lambda x, c: mpicoll.jax.allreduce(x, comm=c), lambda size: (2, 3)),
    "bcast": (lambda x, c: mpicoll.jax.bcast(x, c.size - 1, comm=c), lambda size: (2, 3)),
    "allgather": (lambda x, c: mpicoll.jax.allgather(x, comm=c), lambda size: (2, 3)),
    "reduce_scatter": (lambda x, c: mpicoll.jax.reduce_scatter(x, comm=c), lambda size: (size, 2)),
    "alltoall": (lambda x, c: mpicoll.jax.alltoall(x, comm=c), lambda size: (size, 2)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_are_adjoint(comm: mpicoll.Intracomm, name: str) -> None:
    """Forward mode is the collective itself; <Ax, y> = <x, A'y> in reverse mode, summed over the ranks."""
    function, shape = LINEAR[name]
    x, tangent = (integers(comm.rank, seed, shape(comm.size)) for seed in (0, 1))
    for way in (lambda f: f, jax.jit):
        call = way(lambda x: function(x, comm))
        expected = np.asarray(call(tangent))
        value, derivative = jax.jvp(call, (x,), (tangent,))
        np.testing.assert_array_equal(value, call(x))
        np.testing.assert_array_equal(derivative, expected)
        cotangent = integers(comm.rank, 2, expected.shape)
        (back,) = jax.vjp(call, x)[1](jnp.asarray(cotangent))
        assert summed(comm, np.sum(expected * cotangent)) == summed(comm, np.sum(tangent * np.asarray(back)))


def test_gradients_are_those_of_the_sum_of_all_objectives(comm: mpicoll.Intracomm) -> None:
    size, rank = comm.size, comm.rank
    gradient = jax.jit(jax.grad(lambda x: (rank + 1) * jnp.sum(mpicoll.jax.allreduce(x, comm=comm))))
    np.testing.assert_array_equal(gradient(jnp.ones(3)), [size * (size + 1) / 2] * 3)
    gradient = jax.jit(jax.grad(lambda x: (rank + 1) * jnp.sum(mpicoll.jax.bcast(x, comm=comm))))
    np.testing.assert_array_equal(gradient(jnp.ones(3)), [size * (size + 1) / 2 * (rank == 0)] * 3)


def test_gradients_through_loops_branches_and_checkpoints(comm: mpicoll.Intracomm) -> None:
    size = comm.size

    def total(x: Any) -> Any:
        return mpicoll.jax.allreduce(x, comm=comm)

    def scanned(x: Any) -> Any:
        return lax.scan(lambda carry, _: (jnp.sin(total(carry)), None), x, None, length=3)[0]

    def unrolled(x: Any) -> Any:  # equal values on all ranks: their sum is a multiple, and so is that of the cotangents
        for _ in range(3):
            x = jnp.sin(size * x)
        return x

    expected = jax.grad(unrolled)(0.3)
    for function in (scanned, jax.checkpoint(scanned), lambda x: lax.cond(x > 0, scanned, jnp.cos, x)):
        np.testing.assert_allclose(jax.jit(jax.grad(function))(0.3), expected, rtol=1e-5)


def test_within_a_function_with_its_own_derivative(comm: mpicoll.Intracomm) -> None:
    @jax.custom_vjp
    def total(x: Any) -> Any:
        return mpicoll.jax.allreduce(x, comm=comm)

    total.defvjp(lambda x: (total(x), None), lambda _, cotangent: (7 * cotangent,))
    assert jax.jit(jax.grad(total))(1.0) == 7

    @jax.custom_jvp
    def mean(x: Any) -> Any:
        return mpicoll.jax.allreduce(x, comm=comm) / comm.size

    mean.defjvp(lambda x, t: (mean(*x), 5 * t[0]))
    assert jax.jit(jax.grad(mean))(1.0) == 5


def test_only_sums_have_derivatives(comm: mpicoll.Intracomm) -> None:
    def largest(x: Any) -> Any:
        return mpicoll.jax.allreduce(x, MPI.MAX, comm=comm)

    with pytest.raises(NotImplementedError, match=r"mpicoll.jax.allreduce: op MAX has no derivatives"):
        jax.jit(jax.grad(largest))(1.0)
    with pytest.raises(NotImplementedError, match=r"mpicoll.jax.reduce_scatter: op PROD has no derivatives"):
        jax.grad(lambda x: mpicoll.jax.reduce_scatter(x, MPI.PROD, comm=comm).sum())(jnp.ones(comm.size))
    gradient = jax.jit(jax.grad(lambda x: x * largest(lax.stop_gradient(x))))
    assert gradient(float(comm.rank)) == comm.size - 1


def test_gradients_of_compressed_sums_are_not_compressed(comm: mpicoll.Intracomm) -> None:
    feedback = mpicoll.ErrorFeedback("int8")
    total = jax.jit(lambda x: mpicoll.jax.allreduce(x, comm=comm, compression=feedback))
    x, weights = integers(comm.rank, 0, (100,)), np.linspace(0, 1, 100, dtype=np.float32)
    np.testing.assert_allclose(jax.grad(lambda x: weights @ total(x))(x), comm.size * weights, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(total, (x,), (weights,))[1], comm.size * weights, rtol=1e-6)
    assert feedback.steps == 2


@pytest.mark.parametrize("name", LINEAR)
def test_a_batch_is_one_collective(comm: mpicoll.Intracomm, name: str, executed: list[tuple[str, int]]) -> None:
    function, shape = LINEAR[name]
    for axis in (0, 1, 2):
        batch = np.moveaxis(integers(comm.rank, 0, (4, *shape(comm.size))), 0, axis)
        expected = [np.asarray(function(each, comm)) for each in np.moveaxis(batch, axis, 0)]
        executed.clear()
        result = jax.jit(jax.vmap(lambda x: function(x, comm), in_axes=axis))(batch)
        np.testing.assert_array_equal(result, expected)
        assert len(executed) == 1


def test_a_barrier_orders_what_follows(comm: mpicoll.Intracomm, executed: list[tuple[str, int]]) -> None:
    @jax.jit
    def program(x: Any) -> Any:
        before = mpicoll.jax.allreduce(x, comm=comm)
        mpicoll.jax.barrier(comm=comm)
        return before + mpicoll.jax.bcast(x, comm=comm)

    program(1.0)
    mpicoll.jax.barrier(comm=comm)
    jax.effects_barrier()
    assert [kind for kind, _ in executed] == ["allreduce", "barrier", "bcast", "barrier"]


def test_one_communicator_has_one_duplicate(comm: mpicoll.Intracomm) -> None:
    from mpicoll.jax.jax_communicators import group_of

    group = group_of(comm)
    assert group is group_of(mpicoll.Intracomm(comm, timeout=comm.timeout))
    assert group.comm is not None
    other = group_of(mpicoll.Intracomm(comm, timeout=7.0))
    assert (group.comm.timeout, other.comm.timeout) == (comm.timeout, 7.0)
    assert MPI.Comm.Compare(group.comm, other.comm) == MPI.IDENT
    assert MPI.Comm.Compare(group.comm, comm) == MPI.CONGRUENT


def test_a_freed_communicator_is_named(comm: mpicoll.Intracomm) -> None:
    freed = comm.Dup()
    program = jax.jit(lambda x: mpicoll.jax.allreduce(x, comm=freed))
    assert program(1.0) == comm.size
    freed.Free()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"comm: the communicator of allreduce of \d+ ranks was freed"):
        program(1.0).block_until_ready()


def test_many_communicators_are_made_and_freed(comm: mpicoll.Intracomm) -> None:
    for number in range(30):
        made = comm.Dup()
        assert mpicoll.jax.allreduce(float(number), comm=made) == number * comm.size
        made.Free()


def test_ranks_that_disagree_get_the_error(comm: mpicoll.Intracomm) -> None:
    if comm.size == 1:
        pytest.skip("one rank cannot disagree")
    other = comm.Dup()
    program = jax.jit(lambda x: mpicoll.jax.allreduce(x, comm=comm) + 1)
    assert mpicoll.jax.allreduce(1.0, comm=comm) == comm.size
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"MismatchError: .*rank 0 called Allreduce\(count=2"):
        program(jnp.ones(2 + comm.rank)).block_until_ready()
    assert isinstance(mpicoll.jax.last_error(), mpicoll.errors.MismatchError)
    with pytest.raises(jax.errors.JaxRuntimeError, match="CommunicatorBroken"):
        program(jnp.ones(2)).block_until_ready()
    assert mpicoll.jax.allreduce(1.0, comm=other) == comm.size


def test_a_rank_that_does_not_come_is_named(comm: mpicoll.Intracomm) -> None:
    if comm.size == 1:
        pytest.skip("one rank waits for none")
    impatient = mpicoll.Intracomm(comm, timeout=0.5)
    program = jax.jit(lambda x: mpicoll.jax.allreduce(x, comm=impatient))
    assert program(1.0) == comm.size
    if comm.rank == 0:
        time.sleep(1.5)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"CollectiveTimeout: .*rank 0 did not arrive"):
        program(1.0).block_until_ready()
    error = mpicoll.jax.last_error()
    assert isinstance(error, mpicoll.errors.CollectiveTimeout)
    assert error.missing_ranks == (0,)


def test_an_error_of_one_rank_reaches_all(comm: mpicoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever follows the failed collective in a program is not executed."""
    if comm.size == 1:
        pytest.skip("there are no other ranks")
    from mpicoll.jax import collective_handler

    def refuse(own: Any, collective: Any, x: Any, result: Any) -> None:
        own.Allreduce(x, result[: 1 if comm.rank == 0 else None])

    program = jax.jit(lambda x: mpicoll.jax.bcast(mpicoll.jax.allreduce(x, comm=comm), comm=comm))
    program(jnp.ones(3)).block_until_ready()
    monkeypatch.setitem(collective_handler._RUN, "allreduce", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="sendbuf has 3 elements, but recvbuf 1"):
        program(jnp.ones(3)).block_until_ready()


def test_accelerators_are_refused(comm: mpicoll.Intracomm) -> None:
    from mpicoll.jax.ordered_primitive import _lower_elsewhere

    collective = type("", (), {"kind": "allreduce"})()
    with pytest.raises(NotImplementedError, match="allreduce of arrays on an accelerator; only the CPU"):
        _lower_elsewhere(None, collective=collective)
