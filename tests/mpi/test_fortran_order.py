"""Arrays in Fortran's order travel as they lie in memory, as with mpi4py, by compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm

ORDERS = ("CC", "FF", "CF", "FC")
CALLS: dict[str, Callable[[Any, np.ndarray, np.ndarray], Any]] = {
    "Allreduce": lambda c, a, b: c.Allreduce(a, b),
    "Reduce": lambda c, a, b: c.Reduce(a, b, root=c.size - 1),
    "Bcast": lambda c, a, b: c.Bcast(b),
    "Scan": lambda c, a, b: c.Scan(a, b),
    "Allgather": lambda c, a, b: c.Allgather(a, b),
    "Gather": lambda c, a, b: c.Gather(a, b),
    "Scatter": lambda c, a, b: c.Scatter(b if c.rank == 0 else None, a),
    "Alltoall": lambda c, a, b: c.Alltoall(a, b),
    "Reduce_scatter_block": lambda c, a, b: c.Reduce_scatter_block(b, a),
    "Allgatherv": lambda c, a, b: c.Allgatherv(a, [b, [a.size] * c.size]),
    "Gatherv": lambda c, a, b: c.Gatherv(a, [b, a.size]),
    "Scatterv": lambda c, a, b: c.Scatterv([b, [a.size] * c.size, MPI.DOUBLE], a),
    "Alltoallv": lambda c, a, b: c.Alltoallv([a, [a.size // c.size] * c.size], [b, [b.size // c.size] * c.size]),
}
WHOLE = ("Allgather", "Gather", "Scatter", "Reduce_scatter_block", "Allgatherv", "Gatherv", "Scatterv")
"""Collectives whose second array has the parts of all ranks."""


def arrays(comm: Intracomm, name: str, orders: str) -> tuple[np.ndarray, np.ndarray]:
    shape = (comm.size, 6)
    first = (np.arange(6.0 * comm.size).reshape(shape) + 100 * comm.rank).copy(order=orders[0])
    second = np.arange(6.0 * comm.size * comm.size).reshape(comm.size * comm.size, 6) * 3 + comm.rank
    return first, (second if name in WHOLE else second[: comm.size]).copy(order=orders[1])


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_mpi4py(comm: Intracomm, name: str, orders: str) -> None:
    expected = arrays(comm, name, orders)
    plain = comm._scope.channel.comm  # the MPI library's
    CALLS[name](plain, *expected)
    for _ in range(3):
        found = arrays(comm, name, orders)
        CALLS[name](comm, *found)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_takes_them(comm: Intracomm, compiled: Callable[[], None], name: str) -> None:
    given = arrays(comm, name, "FF")
    for _ in range(2):
        CALLS[name](comm, *given)
    compiled()
    CALLS[name](comm, *given)


@pytest.mark.parametrize("make", [np.asfortranarray, np.ascontiguousarray])
def test_objects_keep_their_order(comm: Intracomm, make: Callable[[np.ndarray], np.ndarray]) -> None:
    """As with mpi4py's pickles."""
    mine = make(np.arange(12.0).reshape(3, 4) + comm.rank)
    for each in (
        comm.bcast(mine),
        comm.allgather(mine)[0],
        comm.allgather((1, mine))[0][1],
        comm.alltoall([mine] * comm.size)[0],
    ):
        assert each.tolist() == (np.arange(12.0).reshape(3, 4)).tolist()
        assert each.flags.f_contiguous == mine.flags.f_contiguous
