"""A plain call by messages that was made before is made by compiled code, with the same plan and the same results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.kernels.dispatch_table import KNOWN_LENGTH
from mpicoll.messages import bound_plan
from tests.mpi.conftest import WORLD

pytestmark = pytest.mark.mpi(min_size=2)
SHORT, LONG = 60, 12_000
TIMEOUT = 5.0
TURNS = 3000


def _communicator() -> Iterator[Intracomm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOLL_NODE", "off")
        plain = WORLD.Dup()
        yield Intracomm(plain, timeout=TIMEOUT)
        plain.Free()


@pytest.fixture
def apart(verdicts: MPI.Intracomm) -> Iterator[Intracomm]:
    """A communicator whose ranks share no memory."""
    yield from _communicator()


@pytest.fixture
def from_python(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Intracomm]:
    """One where the MPI library cannot be called by address."""
    monkeypatch.setattr(bound_plan, "functions", lambda: None)
    yield from _communicator()


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what lets every call fail that compiled code does not begin."""

    def close() -> None:
        def fail(*arguments: Any) -> None:
            raise AssertionError(f"made from Python: {arguments[2:4]}")

        monkeypatch.setattr("mpicoll.collectives.execute.run", fail)

    return close


def _everything(comm: Intracomm, part: int) -> list[np.ndarray]:
    """Make every collective once; return all results."""
    size, rank, at_root = comm.size, comm.rank, comm.rank == 1
    own, whole = (np.arange(count, dtype=np.int64) + 100 * rank for count in (part, part * size))
    results = [np.zeros(part * size, np.int64) for _ in range(8)]
    parts = [np.zeros(part, np.int64) for _ in range(2)]
    comm.Allreduce(whole, results[0], MPI.MAX)
    comm.Reduce(whole, results[1] if at_root else None, root=1)
    results[2][:] = whole
    comm.Bcast(results[2], 1)
    comm.Allgather(own, results[3])
    comm.Reduce_scatter_block(whole, parts[0])
    comm.Gather(own, results[4] if at_root else None, 1)
    comm.Scatter(whole if at_root else None, parts[1], 1)
    comm.Alltoall(whole, results[5])
    comm.Scan(whole, results[6])
    comm.Exscan(whole, results[7])
    comm.Allreduce(MPI.IN_PLACE, whole)
    comm.Barrier()
    return [*results, *parts, whole]


def _expected(size: int, rank: int, part: int) -> list[np.ndarray]:
    base, count = np.arange(part * size), part * size
    own, total = base[:part], size * base + 50 * size * (size - 1)
    nothing, at_root, mine = np.zeros(count), rank == 1, slice(rank * part, (rank + 1) * part)
    everybody = np.concatenate([own + 100 * each for each in range(size)])
    scan = (rank + 1) * base + 50 * rank * (rank + 1)
    results = [
        base + 100 * (size - 1),
        total if at_root else nothing,
        base + 100,
        everybody,
        everybody if at_root else nothing,
        np.concatenate([base[mine] + 100 * each for each in range(size)]),
        scan,
        rank * base + 50 * rank * (rank - 1),
    ]
    return [*results, total[mine], base[mine] + 100, total]


def test_the_second_time_compiled_code_makes_them(apart: Intracomm, closed: Callable[[], None]) -> None:
    for made in range(4):
        for got, wanted in zip(_everything(apart, SHORT), _expected(apart.size, apart.rank, SHORT), strict=True):
            assert (got == wanted).all()
        if made == 0:
            assert len(apart.channel.plans.known) == 12
            closed()


def test_long_ones_are_known_by_their_buffers(apart: Intracomm, closed: Callable[[], None]) -> None:
    data, result = np.arange(LONG) + apart.rank, np.zeros(LONG, np.int64)
    wanted = apart.size * np.arange(LONG) + apart.size * (apart.size - 1) // 2
    apart.Allreduce(data, result)
    closed()
    for _ in range(3):
        result[:] = 0
        apart.Allreduce(data, result)
        assert (result == wanted).all()
    with pytest.raises(AssertionError, match="made from Python"):
        apart.Allreduce(data, np.zeros(LONG, np.int64))


def test_bytes_are_counted(apart: Intracomm) -> None:
    data, result = np.ones(SHORT), np.zeros(SHORT)
    apart.Allreduce(data, result)
    once = apart.channel.messages_nbytes
    for _ in range(4):
        apart.Allreduce(data, result)
    assert apart.channel.messages_nbytes == 5 * once > 0


def test_rows_can_be_done_from_python(from_python: Intracomm) -> None:
    for part in (SHORT, LONG):
        for _ in range(2):
            results = _everything(from_python, part)
            for got, wanted in zip(results, _expected(from_python.size, from_python.rank, part), strict=True):
                assert (got == wanted).all()
    assert not from_python.channel.plans.known


def test_calls_with_other_signatures_are_not_mixed_up(apart: Intracomm) -> None:
    size, rank = apart.size, apart.rank
    data, part = np.ones(size * 3), np.zeros(3)
    for _ in range(2):
        for which in range(2):
            if which:
                apart.Reduce_scatter(data, part, [3] * size)
            else:
                apart.Reduce_scatter_block(data, part)
            assert (part == size).all(), (rank, which)
    titles = {lane.plan.signature.text.partition("(")[0] for lane in apart.channel.plans.known.values()}
    assert titles == {"Reduce_scatter_block"}


def test_a_function_called_like_a_predefined_operation(comm: Intracomm, apart: Intracomm) -> None:
    def SUM(a: float, b: float) -> float:
        return a * b

    product = mpicoll.op(SUM)
    for each in (comm, apart):
        for count in (SHORT, LONG):
            data, result = np.full(count, 3.0), np.zeros(count)
            for _ in range(2):
                each.Allreduce(data, result, product)
                assert (result == 3.0**each.size).all()
                each.Allreduce(data, result)
                assert (result == 3.0 * each.size).all()


def test_more_calls_than_there_are_entries(apart: Intracomm) -> None:
    for step in (1, 5):
        for count in range(1, 3 * KNOWN_LENGTH, step):
            data = np.full(count, apart.rank, np.int32)
            apart.Allreduce(MPI.IN_PLACE, data, MPI.MAX)
            assert (data == apart.size - 1).all()
    assert len(apart.channel.plans.known) <= 2 * KNOWN_LENGTH
    assert apart.channel.dispatch.remembered <= 2 * KNOWN_LENGTH + 64


def test_calls_after_plans_were_released(apart: Intracomm) -> None:
    """As other exit handlers may make them, when ours has run."""
    data = np.zeros(SHORT)
    for _ in range(3):
        data[:] = 1
        apart.Allreduce(MPI.IN_PLACE, data)
        assert (data == apart.size).all()
        apart.channel.release()
        assert not apart.channel.plans.known


def test_a_wrong_call_is_told(apart: Intracomm) -> None:
    data, other = np.ones(SHORT), np.ones(SHORT + 1)
    for _ in range(3):
        apart.Allreduce(MPI.IN_PLACE, data)
        apart.Allreduce(MPI.IN_PLACE, other)
    with pytest.raises(mpicoll.errors.MismatchError, match=f"count={SHORT}"):
        apart.Allreduce(MPI.IN_PLACE, other if apart.rank == 0 else data)
    with pytest.raises(mpicoll.errors.CommunicatorBroken):
        apart.Allreduce(MPI.IN_PLACE, data)


def test_a_refusal_is_told(apart: Intracomm) -> None:
    """To ranks that repeat a known call, before their timeout."""
    data = np.ones(SHORT)
    for _ in range(3):
        apart.Allreduce(MPI.IN_PLACE, data)
    with pytest.raises(TypeError if apart.rank == 0 else mpicoll.errors.RemoteError):
        apart.Allreduce(MPI.IN_PLACE, "nothing" if apart.rank == 0 else data)


def test_nothing_is_learned_from_empty_arrays(apart: Intracomm) -> None:
    for kind in (np.int64, np.bool_):
        apart.Allreduce(MPI.IN_PLACE, np.zeros(0, kind), MPI.LOR)
    assert not apart.channel.plans.known
    flags = np.array([False] * SHORT)
    flags[apart.rank] = True
    for _ in range(3):
        result = np.zeros_like(flags)
        apart.Allreduce(flags, result, MPI.LOR)
        assert result.sum() == apart.size


def test_one_rank_alone() -> None:
    alone, data = Intracomm(MPI.COMM_SELF.Dup()), np.ones(SHORT)
    for _ in range(3):
        result = np.zeros(SHORT)
        alone.Allgather(data, result)
        assert (result == 1).all()
        with pytest.raises(ValueError, match="overlap"):
            alone.Allgather(data[1:], data[:-1])
        alone.Allgather(data, data)  # as IN_PLACE
        assert (data == 1).all()


@pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="threads may not call the MPI library")
def test_a_function_of_the_program_in_another_thread(apart: Intracomm) -> None:
    """The MPI library calls it under a lock of its own, where it waits for the interpreter."""

    def add(given: Any, result: Any, datatype: MPI.Datatype) -> None:
        np.frombuffer(result, np.int64)[:] += np.frombuffer(given, np.int64)

    operation, other = MPI.Op.Create(add, commute=True), WORLD.Dup()

    def work() -> None:
        for _ in range(TURNS):
            numbers = np.ones(8, np.int64)
            other.Iallreduce(MPI.IN_PLACE, numbers, operation).Wait()

    thread = threading.Thread(target=work)
    thread.start()
    data = np.zeros(SHORT)
    for _ in range(TURNS):
        data[:] = 1
        apart.Allreduce(MPI.IN_PLACE, data)
    thread.join()
    assert (data == apart.size).all()
    operation.Free()
    other.Free()


def test_a_late_rank_is_waited_for(apart: Intracomm) -> None:
    data = np.ones(SHORT)
    for turn in range(6):
        if apart.rank == turn % apart.size and turn > 1:
            _sleep(0.05)
        data[:] = 1
        apart.Allreduce(MPI.IN_PLACE, data)
        assert (data == apart.size).all()


def _sleep(seconds: float) -> None:
    until = MPI.Wtime() + seconds
    while MPI.Wtime() < until:
        WORLD.Iprobe()
