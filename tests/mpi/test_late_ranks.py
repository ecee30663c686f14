"""Calls that a rank enters late: the others wait for it, and find the same mismatches as without delay.

The watchdog looks after 0.2 s; the late rank comes after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import MismatchError

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size < 3, reason="needs 3 ranks")]
LATE_SECONDS = 0.3
WHERE = {"memory": {}, "messages": {"MPICOLL_NODE": "off"}, "nodes": {"MPICOLL_NODES": "2"}}


@pytest.fixture(params=WHERE)
def comm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a communicator that compares all calls."""
    for variable, value in {"MPICOLL_CHECK": "full", **WHERE[request.param]}.items():
        monkeypatch.setenv(variable, value)
    plain = MPI.COMM_WORLD.Dup()
    yield Intracomm(plain, timeout=20)
    plain.Free()


def ones(comm: Intracomm) -> np.ndarray:
    return np.ones(comm.size)


def started(name: str, **more: Any) -> Callable[[Intracomm], Any]:
    """Return a function that makes a nonblocking call whose rank 0 gets a result."""

    def call(comm: Intracomm) -> Any:
        parts, counts = np.zeros((comm.size, comm.size)), [comm.size] * comm.size
        if name == "Ialltoallw":
            block = [ones(comm), [1] * comm.size, [8 * rank for rank in range(comm.size)], [MPI.DOUBLE] * comm.size]
            return comm.Ialltoallw(block, [np.zeros(comm.size), *block[1:]])
        into: Any = [parts, counts] if name == "Igatherv" else np.zeros(comm.size)
        if name == "Igatherv" and comm.rank:
            into = None
        return getattr(comm, name)(ones(comm), into, **more)

    return call


CALLS: dict[str, Callable[[Intracomm], Any]] = {
    **{name: started(name) for name in ("Iallreduce", "Igatherv", "Ialltoallw")},
    "native": started("Iallreduce", algorithm="native"),
    "Ibcast": lambda comm: comm.Ibcast(ones(comm)),
    "compressed": lambda comm: comm.Iallreduce(np.ones(9, np.float32), np.zeros(9, np.float32), compression="int8"),
    "Allreduce": lambda comm: comm.Allreduce(ones(comm), np.zeros(comm.size)),
    "allreduce": lambda comm: comm.allreduce(1),
}


def make(call: Callable[[Intracomm], Any], comm: Intracomm, late: int) -> None:
    if comm.rank == late:
        time.sleep(LATE_SECONDS)
    request = call(comm)
    if isinstance(request, MPI.Request):
        request.Wait()


@pytest.mark.parametrize("name", CALLS)
def test_others_wait_for_a_rank_whose_call_is_the_same(name: str, comm: Intracomm) -> None:
    comm.Barrier()
    make(CALLS[name], comm, late=comm.size - 1)
    make(CALLS[name], comm, late=-1)


@pytest.mark.parametrize("way", ["Allreduce", "Iallreduce"])
def test_the_communicator_stays_usable_if_the_rank_with_another_call_is_not_the_late_one(
    way: str, comm: Intracomm
) -> None:
    count = 1001 if comm.rank == 1 else 1000

    def call(comm: Intracomm) -> Any:
        return getattr(comm, way)(np.ones(count), np.zeros(count))

    comm.Barrier()
    with pytest.raises(MismatchError, match=f"rank 1 called {way.lower().capitalize()}.*1001"):
        make(call, comm, late=comm.size - 1)
    for late in (0, -1):  # reports of the mismatch are still there
        make(CALLS["Allreduce"], comm, late)
        make(CALLS["Iallreduce"], comm, late)
