"""Reductions that no kernel executes, made again: compiled code gathers the vectors and calls MPI_Reduce_local."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import execute, gathered_reductions, kept_reductions
from mpicoll.errors import MismatchError, MpicollError

pytestmark = pytest.mark.mpi(min_size=2)
PAIR = np.dtype([("value", "f8"), ("place", "i4")], align=True)
FILLER = 0x5B


def _join(left: memoryview, right: memoryview, datatype: MPI.Datatype) -> None:
    """The numbers of ranks one after the other, so that the order can be seen."""
    a, b = np.frombuffer(left, np.float64), np.frombuffer(right, np.float64)
    b[:] = a * 10 ** (1 + np.floor(np.log10(b))) + b


@pytest.fixture
def join() -> Iterator[MPI.Op]:
    op = MPI.Op.Create(_join, commute=False)
    yield op
    op.Free()


@pytest.fixture
def known(comm: Intracomm, refused: Callable[..., None]) -> Callable[[], None]:
    """A function after which reductions that are not known raise."""
    comm.Allreduce(np.ones(1), np.ones(1))  # the first call takes the general path
    return lambda: refused("_gather", "run")


def _pairs(rank: int, turn: int) -> np.ndarray:
    made = np.zeros(5, PAIR)
    made.view(np.uint8)[:] = rank + 1  # gaps, too
    made["value"], made["place"] = (np.arange(5) + rank + turn) % 3, rank
    return made


def _untouched() -> np.ndarray:
    made = np.zeros(5, PAIR)
    made.view(np.uint8)[:] = FILLER
    return made


def _every_pair(comm: Intracomm, turn: int) -> None:
    rank, root, x = comm.rank, turn % comm.size, _pairs(comm.rank, turn)
    everybodys = [_pairs(each, turn) for each in range(comm.size)]
    for name in ("Allreduce", "Reduce", "Scan", "Exscan"):
        last = {"Scan": rank + 1, "Exscan": rank}.get(name, comm.size)
        is_given = name != "Reduce" or rank == root
        result = _untouched()
        spec: Any = [result, MPI.DOUBLE_INT] if is_given else None
        getattr(comm, name)([x, MPI.DOUBLE_INT], spec, MPI.MINLOC, *([root] if name == "Reduce" else []))
        if not is_given or not last:
            assert (result.view(np.uint8) == FILLER).all()
            continue
        for place in range(5):
            value, where = min((each[place]["value"], number) for number, each in enumerate(everybodys[:last]))
            assert (result[place]["value"], result[place]["place"]) == (value, where)
        assert (result.view(np.uint8).reshape(5, -1)[:, 12:] == FILLER).all()


def test_pairs(comm: Intracomm, known: Callable[[], None]) -> None:
    for turn in range(comm.size):
        _every_pair(comm, turn)
    if comm.size <= 4:  # as many rows as the table has
        for _ in range(2):
            _every_pair(comm, 0)
        known()
        for turn in range(0, 10 * comm.size, comm.size):
            _every_pair(comm, turn)


@pytest.mark.parametrize("name", ["Allreduce", "Scan"])
def test_long_double_in_place_and_with_arrays_of_other_forms(
    comm: Intracomm, known: Callable[[], None], name: str
) -> None:
    last = comm.rank + 1 if name == "Scan" else comm.size
    for turn in range(30):
        if turn == 8:
            known()
        values = np.arange(6, dtype=np.longdouble) + turn
        wanted = sum(values + rank for rank in range(last))
        x, y = values + comm.rank, np.zeros(6, np.longdouble)
        in_place = bool((comm.rank + turn // 2) % 2)
        if in_place:
            y[:] = x
            getattr(comm, name)(MPI.IN_PLACE, y)
        elif turn % 4 == 0:
            getattr(comm, name)(x.reshape(2, 3), y)
        else:
            getattr(comm, name)((x, MPI.LONG_DOUBLE), [y, MPI.LONG_DOUBLE])
        np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(x, values + comm.rank)


def test_operands_are_combined_in_rank_order(comm: Intracomm, join: MPI.Op, known: Callable[[], None]) -> None:
    x, wanted = np.full(3, comm.rank + 1.0), float("".join(str(rank + 1) for rank in range(comm.size)))
    for turn in range(20):
        if turn == 3:
            known()
        y = np.zeros(3)
        comm.Allreduce(x, y, join)
        assert (y == wanted).all()


def test_long_vectors_and_late_ranks(comm: Intracomm, known: Callable[[], None]) -> None:
    """Python completes what compiled code has begun."""
    count = (32 << 10) // comm.size // 16
    for turn in range(12):
        if turn == 3:
            known()
        if turn % comm.size == comm.rank and turn > 4:
            time.sleep(0.05)
        x, y = np.arange(count, dtype=np.longdouble) + comm.rank, np.zeros(count, np.longdouble)
        comm.Allreduce(x, y)
        np.testing.assert_array_equal(y, comm.size * np.arange(count) + sum(range(comm.size)))
        comm.Allreduce(np.ones(3, np.longdouble), y[:3])
        np.testing.assert_array_equal(y[:3], comm.size)


def test_an_operation_that_makes_reductions_itself(comm: Intracomm, known: Callable[[], None]) -> None:
    """On another communicator."""
    inner, others = np.zeros(2, np.longdouble), [comm.Dup()]

    def add(left: memoryview, right: memoryview, datatype: MPI.Datatype) -> None:
        for other in others:
            other.Allreduce(np.full(2, 1 + comm.rank, np.longdouble), inner, MPI.SUM)
        a, b = np.frombuffer(left, np.longdouble), np.frombuffer(right, np.longdouble)
        b += a

    op = MPI.Op.Create(add, commute=True)
    for turn in range(12):
        if turn == 4:
            known()
        y = np.zeros(2, np.longdouble)
        comm.Allreduce(np.full(2, comm.rank, np.longdouble), y, op)
        np.testing.assert_array_equal(y, sum(range(comm.size)))
        np.testing.assert_array_equal(inner, sum(range(comm.size + 1)))
    others[0].Free()
    op.Free()


def test_an_operation_of_the_same_handle_is_another_one(comm: Intracomm) -> None:
    for factor in (1.0, 2.0, 3.0):

        def scaled(left: memoryview, right: memoryview, datatype: MPI.Datatype, factor: float = factor) -> None:
            b = np.frombuffer(right, np.float64)
            b += factor * np.frombuffer(left, np.float64)

        op, y = MPI.Op.Create(scaled, commute=True), np.zeros(1)
        for _ in range(3):
            comm.Allreduce(np.ones(1), y, op)
            assert y == 1 + factor * (comm.size - 1)
        op.Free()
        with pytest.raises((MPI.Exception, MpicollError, ValueError)):
            comm.Allreduce(np.ones(1), y, op)
        comm.Barrier()


def test_more_kinds_than_the_table_has_rows(comm: Intracomm) -> None:
    for _ in range(3):
        for count in range(1, 40):
            x = np.full(count, comm.rank, np.longdouble)
            y = np.zeros(count, np.longdouble)
            comm.Allreduce(x, y)
            assert (y == sum(range(comm.size))).all()
            comm.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
            assert (x == comm.size - 1).all()


def test_another_call_on_one_rank_is_an_error_on_all(comm: Intracomm) -> None:
    x, y = np.ones(4, np.longdouble), np.zeros(4, np.longdouble)
    for op in (MPI.SUM, MPI.MAX):
        for _ in range(3):
            comm.Allreduce(x, y, op)
    with pytest.raises(MismatchError, match=r"Allreduce.*SUM"):
        comm.Allreduce(x, y, MPI.MAX if comm.rank == 1 else MPI.SUM)
    with pytest.raises(MpicollError):
        comm.Barrier()


def test_a_rank_that_does_not_know_it_makes_the_same_call(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.full(4, comm.rank, np.longdouble), np.zeros(4, np.longdouble)
    for turn in range(12):
        if comm.rank == turn % comm.size:
            monkeypatch.setattr(execute, "_reduce_known", lambda *arguments: False)
            if turn % 2:
                monkeypatch.setattr(gathered_reductions, "begin", lambda *arguments: None)
        comm.Allreduce(x, y)
        monkeypatch.undo()
        np.testing.assert_array_equal(y, sum(range(comm.size)))


def test_an_error_of_the_library_is_raised(comm: Intracomm, known: Callable[[], None]) -> None:
    x, y = np.ones(4, np.longdouble), np.zeros(4, np.longdouble)
    for _ in range(3):
        comm.Allreduce(x, y)
    table = comm.channel.kept_reductions
    assert isinstance(table, kept_reductions.KeptReductions)
    table._rows[:, kept_reductions.words.TYPE_HANDLE] = kept_reductions.handle_word(MPI.DOUBLE_INT)
    with pytest.raises(MPI.Exception, match=r"(?i)op"):  # no sums of pairs
        comm.Allreduce(x, y)
    assert not table._words[kept_reductions.words.IN_USE]
    comm.Barrier()
