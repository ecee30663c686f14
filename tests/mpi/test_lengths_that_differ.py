"""Errors of Gatherv, Scatterv and Alltoallv in which a rank expects another length than is sent to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import MismatchError, MpicollError

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPI.COMM_WORLD.size < 3, reason="needs 3 ranks")]
PART = 4
BLOCKING = ("Gatherv", "Scatterv", "Alltoallv", "Alltoallw")
NONBLOCKING = ("Igatherv", "Iscatterv", "Ialltoallv", "Ialltoallw")
WHERE = {"memory": {}, "messages": {"MPICOLL_NODE": "off"}, "nodes": {"MPICOLL_NODES": "2"}}


@pytest.fixture
def plain() -> Any:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


def arguments(name: str, comm: Intracomm, difference: int) -> tuple[Any, ...]:
    """Return arguments in which rank 1 has `difference` elements more than rank 0 believes."""
    size, rank = comm.size, comm.rank
    counts, own = [PART] * size, PART + difference * (rank == 1)
    whole, part = np.ones(PART * size), np.ones(own)
    if "gather" in name.lower():
        return part, [whole, counts] if rank == 0 else None
    if "scatter" in name.lower():
        return [whole, counts] if rank == 0 else None, part
    expected = [own, *counts[1:]]
    if name.endswith("w"):
        return typed(whole, counts), typed(np.zeros(sum(expected)), expected)
    return [whole, counts], [np.zeros(sum(expected)), expected]


def typed(array: np.ndarray, counts: list[int]) -> list[Any]:
    """Return the specification of blocks for Alltoallw."""
    displs = [8 * sum(counts[:rank]) for rank in range(len(counts))]
    return [array, (counts, displs), [MPI.DOUBLE] * len(counts)]


def error_of(name: str, comm: Intracomm, difference: int) -> Exception | None:
    try:
        request = getattr(comm, name)(*arguments(name, comm, difference))
        if request is not None:
            request.Wait()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("difference", [1, -1])
@pytest.mark.parametrize("name", BLOCKING + NONBLOCKING)
@pytest.mark.parametrize("where", WHERE)
def test_all_ranks_raise_where_calls_are_compared(
    where: str, name: str, difference: int, plain: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"MPICOLL_CHECK": "full", **WHERE[where]}.items():
        monkeypatch.setenv(variable, value)
    comm = Intracomm(plain, timeout=20)
    error = error_of(name, comm, difference)
    if where == "memory" and name in ("Gatherv", "Scatterv"):  # the root tells all ranks its counts
        assert isinstance(error, (MpicollError, ValueError))
        assert "4" in str(error)
        assert "elements" in str(error)
    else:
        sent, expected = PART, PART + difference
        pair = f"rank 0 sends {8 * sent} bytes to rank 1, which expects {8 * expected}"
        if "gather" in name.lower():
            pair = f"rank 1 sends {8 * expected} bytes to rank 0, which expects {8 * sent}"
        assert type(error) is MismatchError
        assert pair in str(error)
    assert error_of(name, comm, 0) is None  # the communicator stays usable


@pytest.mark.parametrize("difference", [1, -1])
@pytest.mark.parametrize("name", BLOCKING)
@pytest.mark.parametrize("where", ["messages", "nodes"])
def test_who_receives_another_length_raises_and_others_hear_of_it(
    where: str, name: str, difference: int, plain: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in WHERE[where].items():
        monkeypatch.setenv(variable, value)
    comm = Intracomm(plain, timeout=20)
    error = error_of(name, comm, difference)
    receiver, sender = (0, 1) if name == "Gatherv" else (1, 0)
    if comm.rank == receiver:
        assert isinstance(error, MismatchError)
        assert f"rank {sender} sends" in str(error)
        assert f"expects {8 * (PART + difference * (receiver == 1))} bytes" in str(error)
    with pytest.raises(MpicollError):
        comm.Barrier()


@pytest.mark.parametrize("dtype", ["f8", "g", "G", "f2"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", [name for name in BLOCKING + NONBLOCKING if not name.endswith("w")])
def test_equal_calls_of_any_type_pass_where_calls_are_compared(
    name: str, stride: int, dtype: str, plain: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPICOLL_CHECK", "full")
    comm = Intracomm(plain, timeout=20)

    def of_type(argument: Any) -> Any:
        if argument is None:
            return None
        array, *counts = argument if isinstance(argument, list) else [argument]
        made = np.repeat(array, stride).astype(dtype)[::stride]
        return [made, *counts] if counts else made

    request = getattr(comm, name)(*map(of_type, arguments(name, comm, 0)))
    if request is not None:
        request.Wait()
