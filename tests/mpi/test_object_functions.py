"""Reductions by code of the program: results as mpi4py's, few long objects on a rank, errors on every rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.errors import RemoteError
from mpicoll.objects import trees

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="needs several ranks")
REDUCING = ("allreduce", "reduce", "scan", "exscan")
_LENGTHS = (100, 5000, 90_000)
_LONG = 200_000
_WHERE = ("function", "object")


def merged(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    """Return sums by key; the order of the keys, and rounding, tell in which order the objects were combined."""
    result = dict(one)
    for key, number in other.items():
        result[key] = result.get(key, 0.1) + number
    return result


def joined(one: Any, other: Any) -> Any:
    return one + other


class Text:
    """Text with operators of its own; counts the objects that were unpickled on this rank, and fails where told."""

    unpickled = 0
    refuses: type[BaseException] | None = None

    def __init__(self, text: str) -> None:
        self.text = text

    def __add__(self, other: Text) -> Text:
        return Text(f"({self.text}{other.text})")

    def __getstate__(self) -> str:
        return self.text

    def __setstate__(self, text: str) -> None:
        if Text.refuses is not None:
            raise Text.refuses("cannot be read here")
        self.text = text
        Text.unpickled += 1


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce from rank to rank on few ranks, too; compiled code gathers objects of together up to 256 KB."""
    monkeypatch.setattr(trees, "MIN_SIZES", dict.fromkeys(REDUCING, 2))


@pytest.fixture
def plain(comm: mpicoll.Intracomm) -> Any:
    """mpi4py's own communicator of the same ranks."""
    made = MPI.Intracomm(comm).Dup()
    yield made
    made.Free()


@pytest.mark.parametrize("name", REDUCING)
def test_functions_of_the_program_as_with_mpi4py(comm: mpicoll.Intracomm, plain: Any, name: str) -> None:
    rank = comm.rank
    for length in _LENGTHS:
        entries = {(rank * 7 + place) % 1777: place * 0.1 for place in range(length)}
        for obj, op in ((entries, merged), ([(rank, length)] * (length + rank), joined), (str(rank) * length, joined)):
            found, expected = getattr(comm, name)(obj, op), getattr(plain, name)(obj, op)
            assert type(found) is type(expected)
            assert found == expected
            assert not isinstance(found, dict) or [*found] == [*expected]


@pytest.mark.parametrize("root", range(MPI.COMM_WORLD.size))
def test_reduce_to_every_root(comm: mpicoll.Intracomm, plain: Any, root: int) -> None:
    for obj in ([comm.rank] * 3000, [str(comm.rank)] * (_LONG if comm.rank == root else 1)):
        assert comm.reduce(obj, joined, root) == plain.reduce(obj, joined, root)


@pytest.mark.parametrize("name", REDUCING)
def test_operators_of_the_program_as_with_mpi4py(comm: mpicoll.Intracomm, plain: Any, name: str) -> None:
    for given in (str(comm.rank), str(comm.rank) * _LONG, "x" * (1 if comm.rank else _LONG)):
        found, expected = (getattr(each, name)(Text(given), MPI.SUM) for each in (comm, plain))
        assert getattr(found, "text", None) == getattr(expected, "text", None)


@pytest.mark.parametrize("name", ["allreduce", "reduce"])
def test_no_rank_reads_the_objects_of_all(comm: mpicoll.Intracomm, name: str) -> None:
    levels = (comm.size - 1).bit_length()
    Text.unpickled = 0
    getattr(comm, name)(Text(str(comm.rank) * _LONG), joined)
    assert Text.unpickled <= levels + 2  # one each step, its own, and the result


@pytest.mark.parametrize("count", [20, 3000, _LONG])
@pytest.mark.parametrize("culprit", range(MPI.COMM_WORLD.size))
@pytest.mark.parametrize("name", REDUCING)
def test_a_function_that_raises_on_one_rank(comm: mpicoll.Intracomm, name: str, culprit: int, count: int) -> None:
    called = False

    def op(one: Any, other: Any) -> Any:
        nonlocal called
        called = True
        if comm.rank == culprit:
            raise KeyError("not here")
        return one + other

    _raises(comm, lambda: getattr(comm, name)("x" * count, op), culprit, lambda: called)


@pytest.mark.parametrize("count", [20, 3000, _LONG])
@pytest.mark.parametrize(("name", "where"), [*product(("allreduce", "reduce", "scan"), _WHERE), ("exscan", "object")])
def test_an_interrupt_on_one_rank_is_told(comm: mpicoll.Intracomm, name: str, where: str, count: int) -> None:
    """In code of the program; the others, which wait for it, hear of it long before their deadline."""
    comm = comm.Dup()
    is_culprit = comm.rank == (0 if name in ("allreduce", "reduce") else 1)

    def op(one: Any, other: Any) -> Any:
        if is_culprit and where == "function":
            raise KeyboardInterrupt
        return one + other

    given = Text("x" * count) if where == "object" else "x" * count
    Text.refuses = KeyboardInterrupt if is_culprit else None
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt if is_culprit else RemoteError, match=None if is_culprit else "Keyboard"):
            getattr(comm, name)(given, op)
    finally:
        Text.refuses = None
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("count", [20, 3000, _LONG])
@pytest.mark.parametrize("culprit", range(MPI.COMM_WORLD.size))
@pytest.mark.parametrize("name", REDUCING)
def test_a_result_that_cannot_be_sent(comm: mpicoll.Intracomm, name: str, culprit: int, count: int) -> None:
    sends = False

    class Unpicklable(str):
        __slots__ = ()

        def __reduce__(self) -> Any:
            nonlocal sends
            sends = True
            raise KeyError("not here")

    def op(one: str, other: str) -> str:
        return Unpicklable(one + other) if comm.rank == culprit else one + other

    _raises(comm, lambda: getattr(comm, name)("x" * count, op), culprit, lambda: sends)


@pytest.mark.parametrize("count", [20, 3000, _LONG])
@pytest.mark.parametrize("culprit", range(MPI.COMM_WORLD.size))
@pytest.mark.parametrize("name", REDUCING)
def test_an_object_that_cannot_be_read_on_one_rank(
    comm: mpicoll.Intracomm, name: str, culprit: int, count: int
) -> None:
    given = Text("x" * count)
    Text.refuses = ValueError if comm.rank == culprit else None
    try:
        getattr(comm, name)(given, joined)
        error = None
    except (ValueError, RemoteError) as raised:
        error = raised
    finally:
        Text.refuses = None
    failed = [*map(bool, comm.allgather(error is not None))]
    # The last reader of an allreduce is told nothing: it raises what it has read alone.
    assert len(set(failed)) == 1 or (name == "allreduce" and failed[culprit] and sum(failed) == 1)
    assert error is None or "cannot be read here" in str(error)


class Alarm(Exception):
    """Raised by a signal handler."""


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Function that lets a signal handler raise Alarm after some seconds."""

    def handler(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    yield partial(signal.setitimer, signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("count", [20, _LONG])
def test_an_exception_of_a_signal_handler_in_the_wait(
    comm: mpicoll.Intracomm, alarm: Callable[[float], None], count: int
) -> None:
    comm = comm.Dup()
    comm.allreduce(["x" * count], joined)
    comm.Barrier()
    if comm.rank == 0:
        alarm(0.2)
    else:
        time.sleep(1.0)
    with pytest.raises(Alarm if comm.rank == 0 else RemoteError):
        comm.allreduce(["x" * count], joined)


class Failing:
    """Object whose pickling calls a function and fails."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.calls, self._call = 0, call

    def __reduce__(self) -> Any:
        self.calls += 1
        self._call()
        raise KeyError("not here")


@pytest.mark.parametrize("name", [*REDUCING, "bcast", "allgather", "gather"])
def test_an_object_is_pickled_once_if_that_fails(comm: mpicoll.Intracomm, name: str) -> None:
    other = comm.Dup()
    given: Any = Failing(other.Barrier) if comm.rank == 0 else [1]
    if comm.rank:
        other.Barrier()
    with pytest.raises(KeyError if comm.rank == 0 else RemoteError, match="not here"):
        getattr(comm, name)(*((given, joined) if name in REDUCING else (given,)))
    assert comm.rank or given.calls == 1
    assert comm.allreduce(1) == other.allreduce(1) == comm.size
    other.Free()


def test_a_handlers_exception_while_an_object_is_pickled(
    comm: mpicoll.Intracomm, alarm: Callable[[float], None]
) -> None:
    def wait() -> None:
        alarm(0.05)
        time.sleep(1.0)

    with pytest.raises(Alarm if comm.rank == 0 else RemoteError, match=None if comm.rank == 0 else "Alarm"):
        comm.allreduce(Failing(wait) if comm.rank == 0 else [1], joined)
    assert comm.allreduce(1) == comm.size


def _raises(comm: mpicoll.Intracomm, call: Callable[[], Any], culprit: int, has_failed: Callable[[], bool]) -> None:
    """Make a call in which `culprit` may fail; if it does, all ranks have to raise its error."""
    error: Exception | None = None
    try:
        call()
    except (KeyError, RemoteError) as raised:
        error = raised
    failed = comm.bcast(has_failed(), culprit)
    assert (error is not None) == failed
    assert error is None or "not here" in str(error)
    assert error is None or isinstance(error, KeyError if comm.rank == culprit else RemoteError)
    assert comm.allreduce(1) == comm.size
