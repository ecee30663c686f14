"""Nonblocking Gatherv, Scatterv and Alltoallv: every form of arguments, every element, and errors on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import MismatchError, RemoteError

pytestmark = pytest.mark.mpi
FORMS = ("lists", "arrays", "datatype", "gaps", "strided", "swapped", "code")


def counts_of(size: int, length: int) -> list[int]:
    return [0 if rank == 1 else length * (rank + 1) for rank in range(size)]


def begins(counts: list[int], gap: int = 0) -> list[int]:
    return [sum(counts[:rank]) + rank * gap for rank in range(len(counts))]


def block(source: int, target: int, count: int) -> np.ndarray:
    return np.arange(count) + 1000.0 * source + 100_000.0 * target


def filled(parts: list[np.ndarray], form: str) -> tuple[Any, Any]:
    """Return an array with the parts, and its specification."""
    counts = [part.size for part in parts]
    displs = begins(counts, 2 if form == "gaps" else 0)
    memory = np.full(sum(counts) + 2 * len(counts), -1.0)
    if form == "strided":
        memory = np.full((memory.size, 2), -1.0)[:, 0]
    elif form == "swapped":
        memory = memory.astype(memory.dtype.newbyteorder())
    for part, displ in zip(parts, displs, strict=True):
        memory[displ : displ + part.size] = part
    if form == "arrays":
        return memory, [memory, (np.array(counts), np.array(displs))]
    if form == "datatype":
        return memory, [memory, counts, displs, MPI.DOUBLE]
    if form == "code":
        return memory, [memory, counts, displs, np.dtype(float).char]
    return memory, [memory, (counts, displs)]


def of_spec(spec: Any, parts: list[np.ndarray]) -> list[np.ndarray]:
    memory, *where = spec
    counts, displs = where[0] if len(where) == 1 else where[:2]
    return [memory[displ : displ + count] for count, displ in zip(counts, displs, strict=True)]


def check(spec: Any, expected: list[np.ndarray]) -> None:
    assert [part.tolist() for part in of_spec(spec, expected)] == [part.tolist() for part in expected]


@pytest.mark.parametrize("algorithm", [None, "pairwise", "native"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [0, 3, 3000])
def test_alltoallv(comm: Intracomm, form: str, length: int, algorithm: str | None) -> None:
    if algorithm == "native" and form in ("strided", "swapped"):
        pytest.skip("refused by the MPI library")
    size, rank = comm.size, comm.rank
    counts = counts_of(size, length)  # a rank receives as many elements from each as it has
    sent = [block(rank, peer, counts[peer]) for peer in range(size)]
    expected = [block(peer, rank, counts[rank]) for peer in range(size)]
    out, into = filled(sent, form)[1], filled([np.zeros_like(part) for part in expected], form)[1]
    comm.Ialltoallv(out, into, algorithm=algorithm).Wait()
    check(into, expected)


@pytest.mark.parametrize("algorithm", [None, "linear", "native"])
@pytest.mark.parametrize("form", FORMS)
def test_gatherv_and_scatterv(comm: Intracomm, form: str, algorithm: str | None) -> None:
    if algorithm == "native" and form in ("strided", "swapped"):
        pytest.skip("refused by the MPI library")
    size, rank = comm.size, comm.rank
    for length, root in ((3, 0), (3000, size - 1)):
        counts = counts_of(size, length)
        parts = [block(peer, root, counts[peer]) for peer in range(size)]
        whole = filled([np.zeros_like(part) for part in parts], form)[1] if rank == root else None
        comm.Igatherv(parts[rank], whole, root, algorithm=algorithm).Wait()
        if whole is not None:
            check(whole, parts)
        own = np.zeros(counts[rank])
        comm.Iscatterv(whole, own, root, algorithm=algorithm).Wait()
        assert own.tolist() == parts[rank].tolist()


def test_in_place(comm: Intracomm) -> None:
    size, rank, root = comm.size, comm.rank, comm.size - 1
    counts = counts_of(size, 5)
    parts = [block(peer, root, counts[peer]) for peer in range(size)]
    for form in ("lists", "strided"):
        spec = filled([part * (peer == root) for peer, part in enumerate(parts)], form)[1] if rank == root else None
        comm.Igatherv(MPI.IN_PLACE if rank == root else parts[rank], spec, root).Wait()
        if spec is not None:
            check(spec, parts)
        own = np.zeros(counts[rank])
        comm.Iscatterv(spec, MPI.IN_PLACE if rank == root else own, root).Wait()
        assert rank == root or own.tolist() == parts[rank].tolist()
        sent = [block(rank, peer, 4) for peer in range(size)]
        swapped = filled(sent, form)[1]
        comm.Ialltoallv(None, swapped).Wait()
        check(swapped, [block(peer, rank, 4) for peer in range(size)])


def test_ranks_may_give_different_forms(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    sent, expected = ([block(*pair, 6) for pair in pairs] for pairs in (
        [(rank, peer) for peer in range(size)], [(peer, rank) for peer in range(size)]
    ))  # fmt: skip
    form = FORMS[rank % len(FORMS)]
    into = filled([np.zeros(6)] * size, form)[1]
    out = filled(sent, FORMS[(rank + 3) % len(FORMS)])[1]
    if rank == 0:  # two entries of three elements each
        triple = MPI.DOUBLE.Create_contiguous(3).Commit()
        out = [np.concatenate(sent), [2] * size, [2 * peer for peer in range(size)], triple]
    comm.Ialltoallv(out, into).Wait()
    check(into, expected)


def test_many_in_flight(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    kept, requests = [], []
    for number in range(100):
        out = filled([block(rank, peer, number % 7) for peer in range(size)], "lists")[1]
        into = filled([np.zeros(number % 7)] * size, "gaps" if number % 2 else "strided")[1]
        requests.append(comm.Ialltoallv(out, into))
        kept.append((into, [block(peer, rank, number % 7) for peer in range(size)]))
    MPI.Request.Waitall(requests[::-1])
    for into, expected in kept:
        check(into, expected)


WRONG = {
    "a block ends outside": lambda size: [np.zeros(size), [1] * size, [*range(1, size + 1)]],
    "a negative count": lambda size: [np.zeros(size), [-1] * size, [0] * size],
    "too few counts": lambda size: [np.zeros(size), [1] * (size - 1)],
    "blocks that overlap": lambda size: [np.zeros(2 * size), [2] * size, [*range(size)]],
    "memory that is read only": lambda size: [np.broadcast_to(np.zeros(1), (size,)), [1] * size],
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_of_one_rank_are_an_error_on_all(comm: Intracomm, what: str) -> None:
    size = comm.size
    if size == 1:
        pytest.skip("one rank")
    recv = WRONG[what](size) if comm.rank == 1 else [np.zeros(size), [1] * size]
    with pytest.raises((ValueError, TypeError, RemoteError)) as raised:
        comm.Ialltoallv([np.ones(size), [1] * size], recv).Wait()
    assert isinstance(raised.value, RemoteError) == (comm.rank != 1)
    if comm.rank == 1:
        assert "recvbuf" in str(raised.value)


def test_another_type_is_an_error_where_calls_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_CHECK", "full")
    plain = MPI.COMM_WORLD.Dup()
    comm, size = Intracomm(plain, timeout=10), plain.size
    dtype = np.float32 if comm.rank == 1 else np.int32
    for send in (np.ones(size, dtype), np.ones((size, 2), dtype)[:, 0]):
        if size > 1:
            with pytest.raises(MismatchError):
                comm.Ialltoallv([send, [1] * size], [np.zeros(size, dtype), [1] * size]).Wait()
    whole = np.zeros(size)
    comm.Igatherv(np.ones(1), [whole, [1] * size] if comm.rank == 0 else None).Wait()
    assert comm.rank or (whole == 1).all()
    plain.Free()


def test_a_refusal_is_heard_at_once_after_calls_that_compiled_code_has_numbered(comm: Intracomm) -> None:
    if comm.size < 2:
        pytest.skip("one rank")
    whole = [np.zeros(comm.size), [1] * comm.size] if comm.rank == 0 else None
    for _ in range(3):
        comm.Igatherv(np.ones(1), whole).Wait()

    def calls() -> None:
        comm.Igatherv("nothing" if comm.rank == 1 else np.ones(1), whole).Wait()
        comm.Barrier()

    with pytest.raises((TypeError, RemoteError)) as raised:
        calls()
    assert isinstance(raised.value, RemoteError) == (comm.rank != 1)
