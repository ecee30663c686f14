"""Collectives of `mpicoll.jax` against NumPy: eager and compiled, of all element types, of pytrees and blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
import mpicoll.jax
from mpicoll.kernels.reduce import DTYPES

NUMBERS = [dtype for dtype in DTYPES if dtype != np.bool_]
WAYS = {"eager": lambda function: function, "jit": jax.jit}


def own(rank: int, shape: tuple[int, ...] = (5,), dtype: Any = np.float32) -> np.ndarray:
    """Return small integers, other ones on each rank and at each place."""
    return (np.arange(np.prod(shape)).reshape(shape) % 7 + rank).astype(dtype)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    return WAYS[request.param]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_sums_of_all_element_types(comm: mpicoll.Intracomm, way: Any, dtype: np.dtype) -> None:
    with jax.enable_x64(True):
        result = way(lambda x: mpicoll.jax.allreduce(x, comm=comm))(jnp.asarray(own(comm.rank, dtype=dtype)))
    assert result.dtype == dtype
    np.testing.assert_array_equal(np.asarray(result), sum(own(rank, dtype=dtype) for rank in range(comm.size)))


@pytest.mark.parametrize(("op", "expected"), [(MPI.MAX, np.max), (MPI.MIN, np.min), (MPI.PROD, np.prod)])
def test_other_operations(comm: mpicoll.Intracomm, way: Any, op: MPI.Op, expected: Any) -> None:
    result = way(lambda x: mpicoll.jax.allreduce(x, op, comm=comm))(own(comm.rank))
    np.testing.assert_array_equal(result, expected([own(rank) for rank in range(comm.size)], axis=0))


def test_bools(comm: mpicoll.Intracomm, way: Any) -> None:
    x = jnp.arange(comm.size + 1) == comm.rank
    result = way(lambda x: mpicoll.jax.allreduce(x, MPI.LOR, comm=comm))(x)
    np.testing.assert_array_equal(result, np.arange(comm.size + 1) < comm.size)


def test_operations_of_the_callers_own(comm: mpicoll.Intracomm) -> None:
    largest = MPI.Op.Create(
        lambda a, b, _: np.maximum(np.frombuffer(a, "f4"), np.frombuffer(b, "f4"), out=np.frombuffer(b, "f4")), True
    )
    for op in (largest, mpicoll.op(lambda a, b: max(a, b))):
        np.testing.assert_array_equal(mpicoll.jax.allreduce(own(comm.rank), op, comm=comm), own(comm.size - 1))
    largest.Free()


def test_bcast_from_every_root(comm: mpicoll.Intracomm, way: Any) -> None:
    for root in range(comm.size):
        result = way(lambda x, root=root: mpicoll.jax.bcast(x, root, comm=comm))(own(comm.rank))
        np.testing.assert_array_equal(result, own(root))


def test_blocks(comm: mpicoll.Intracomm, way: Any) -> None:
    size, rank = comm.size, comm.rank
    everything = np.array([own(each, (size, 3)) for each in range(size)])
    gathered = way(lambda x: mpicoll.jax.allgather(x, comm=comm))(own(rank, (size, 3)))
    np.testing.assert_array_equal(gathered, everything)
    scattered = way(lambda x: mpicoll.jax.reduce_scatter(x, comm=comm))(own(rank, (size, 3)))
    np.testing.assert_array_equal(scattered, everything.sum(0)[rank])
    exchanged = way(lambda x: mpicoll.jax.alltoall(x, comm=comm))(own(rank, (size, 3)))
    np.testing.assert_array_equal(exchanged, everything[:, rank])


def test_a_pytree_travels_as_one_vector_for_each_element_type(
    comm: mpicoll.Intracomm, way: Any, executed: list[tuple[str, int]]
) -> None:
    tree = {"a": own(comm.rank, (2, 3)), "b": [own(comm.rank, (4,), np.int32), own(comm.rank, ())], "c": None}
    result = way(lambda x: mpicoll.jax.allreduce(x, comm=comm))(tree)
    expected = jax.tree.map(lambda *leaves: sum(leaves), *(_tree_of(rank) for rank in range(comm.size)))
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert executed == [("allreduce", 7), ("allreduce", 4)]


def _tree_of(rank: int) -> Any:
    return {"a": own(rank, (2, 3)), "b": [own(rank, (4,), np.int32), own(rank, ())], "c": None}


def test_pytrees_of_blocks(comm: mpicoll.Intracomm, executed: list[tuple[str, int]]) -> None:
    size, rank = comm.size, comm.rank
    tree = [own(rank, (size, 2, 2)), own(rank, (size,))]
    everything = [np.array([own(each, leaf.shape) for each in range(size)]) for leaf in tree]
    for function, expected in (
        (mpicoll.jax.allgather, everything),
        (mpicoll.jax.reduce_scatter, [leaf.sum(0)[rank] for leaf in everything]),
        (mpicoll.jax.alltoall, [leaf[:, rank] for leaf in everything]),
    ):
        jax.tree.map(np.testing.assert_array_equal, function(tree, comm=comm), expected)
    assert [kind for kind, _ in executed] == ["allgather", "reduce_scatter", "alltoall"]


def test_numbers_empty_arrays_and_empty_trees(comm: mpicoll.Intracomm, way: Any) -> None:
    total = way(lambda x: mpicoll.jax.allreduce(x, comm=comm))
    assert total(2.5) == 2.5 * comm.size
    assert total(np.float32(2.5)).shape == ()
    assert total(jnp.zeros((0, 3))).shape == (0, 3)
    assert total({"none": None}) == {"none": None}
    tree = total([jnp.zeros((0, 3)), jnp.ones(2)])
    assert tree[0].shape == (0, 3)
    np.testing.assert_array_equal(tree[1], [comm.size] * 2)


def test_parts_of_the_ranks_and_the_default(subcomm: mpicoll.Intracomm) -> None:
    total = jax.jit(lambda x: (mpicoll.jax.allreduce(x, comm=subcomm), mpicoll.jax.allreduce(x)))
    part, whole = total(own(MPI.COMM_WORLD.rank))
    first = MPI.COMM_WORLD.rank - subcomm.rank
    np.testing.assert_array_equal(part, sum(own(first + rank) for rank in range(subcomm.size)))
    np.testing.assert_array_equal(whole, sum(own(rank) for rank in range(MPI.COMM_WORLD.size)))


def test_average_gradients(comm: mpicoll.Intracomm, way: Any) -> None:
    tree = {"w": own(comm.rank), "b": own(comm.rank, dtype=ml_dtypes.bfloat16)}
    mean = way(lambda tree: mpicoll.jax.average_gradients(tree, comm=comm))(tree)
    for name, leaf in mean.items():
        assert leaf.dtype == tree[name].dtype
        np.testing.assert_allclose(leaf.astype(np.float32), own(0) + (comm.size - 1) / 2, rtol=1e-2)


def test_average_gradients_of_float16_whose_sum_is_out_of_range(comm: mpicoll.Intracomm, way: Any) -> None:
    tree = {"w": np.array([40000, 2.0**-24], np.float16), "b": own(comm.rank)}
    mean = way(lambda tree: mpicoll.jax.average_gradients(tree, comm=comm))(tree)
    assert mean["w"].dtype == np.float16
    np.testing.assert_array_equal(mean["w"], tree["w"])
    with pytest.raises(TypeError, match=r"compression: 'int8' is for float32, but x\['w'\] is float16"):
        mpicoll.jax.average_gradients(tree, comm=comm, compression="int8")


def test_compressed_sums(comm: mpicoll.Intracomm, way: Any) -> None:
    x = np.linspace(-1, 1, 1000, dtype=np.float32) * (comm.rank + 1)
    exact = np.linspace(-1, 1, 1000) * comm.size * (comm.size + 1) / 2
    for compression in ("int8", mpicoll.ErrorFeedback("int8")):
        total = way(lambda x, c=compression: mpicoll.jax.allreduce(x, comm=comm, compression=c))(x)
        assert np.abs(total - exact).max() < 0.02 * comm.size * (comm.size + 1)
        assert comm.size == 1 or (np.asarray(total) != exact.astype(np.float32)).any()


def test_a_donated_array_becomes_the_result(comm: mpicoll.Intracomm) -> None:
    x = jnp.asarray(own(comm.rank))
    result = jax.jit(lambda x: mpicoll.jax.allreduce(x, comm=comm), donate_argnums=0)(x)
    np.testing.assert_array_equal(result, sum(own(rank) for rank in range(comm.size)))
    assert x.is_deleted()


def test_the_argument_is_not_changed(comm: mpicoll.Intracomm, way: Any) -> None:
    x = jnp.asarray(own(comm.rank))
    for function in (mpicoll.jax.allreduce, mpicoll.jax.bcast):
        way(lambda x, f=function: f(x, comm=comm))(x)
        np.testing.assert_array_equal(x, own(comm.rank))


WRONG = {
    "op BAND is not defined on elements of float32": lambda c: mpicoll.jax.allreduce(1.0, MPI.BAND, comm=c),
    "is not defined on elements of float32": lambda c: mpicoll.jax.allreduce(1.0, MPI.MAXLOC, comm=c),
    r"x\['k'\]: op SUM is not defined on elements of bool": lambda c: mpicoll.jax.allreduce({"k": True}, comm=c),
    "x: elements of float8_e4m3fn": lambda c: mpicoll.jax.bcast(jnp.ones(2, jnp.float8_e4m3fn), comm=c),
    "x: elements of key<fry>": lambda c: mpicoll.jax.bcast(jax.random.key(0), comm=c),
    r"x\[1\]: 'text' is neither": lambda c: mpicoll.jax.bcast([1, "text"], comm=c),
    "op: 'sum' is neither": lambda c: mpicoll.jax.allreduce(1.0, "sum", comm=c),
    "root: -1 is not in 0": lambda c: mpicoll.jax.bcast(1.0, -1, comm=c),
    "root: 'first' is not a rank": lambda c: mpicoll.jax.bcast(1.0, "first", comm=c),
    "comm: 'world' is not an intracommunicator": lambda c: mpicoll.jax.bcast(1.0, comm="world"),
    r"x: of shape \(\), but the first dimension must be the": lambda c: mpicoll.jax.alltoall(1.0, comm=c),
    r"x: of shape \(99,\), but the first": lambda c: mpicoll.jax.reduce_scatter(jnp.ones(99), comm=c),
    "compression: 'int8' is for float32, but x is int32": lambda c: mpicoll.jax.allreduce(
        1, comm=c, compression="int8"
    ),
    "compression: 'int8' is for SUM, not MAX": lambda c: mpicoll.jax.allreduce(
        1.0, MPI.MAX, comm=c, compression="int8"
    ),
    "'nothing' is not one of": lambda c: mpicoll.jax.allreduce(1.0, comm=c, compression="nothing"),
    r"tree\['n'\]: elements of int32 have no mean": lambda c: mpicoll.jax.average_gradients({"n": 1}, comm=c),
    "op MAX has no derivatives": lambda c: jax.grad(lambda x: mpicoll.jax.allreduce(x, MPI.MAX, comm=c))(1.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused_while_a_function_is_traced(comm: mpicoll.Intracomm, message: str) -> None:
    for way in WAYS.values():
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
            way(lambda: WRONG[message](comm))()
    assert mpicoll.jax.allreduce(1.0, comm=comm) == comm.size
