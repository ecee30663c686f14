"""Collectives of a communicator with one rank, which programs make when they are run without a launcher."""

from __future__ import annotations

import copy
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
import mpicoll.errors
from mpicoll.collectives import execute
from mpicoll.interface import blocking


@pytest.fixture
def comm() -> Iterator[mpicoll.Intracomm]:
    made = mpicoll.Intracomm(MPI.COMM_SELF.Dup())
    yield made
    made.Free()


COUNTS = (1, 100, 5000, 200_000)
CALLS = ("Allreduce", "Reduce", "Allgather", "Alltoall", "Gather", "Scatter", "Scan", "Reduce_scatter_block")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_result_is_the_input_each_time(comm: mpicoll.Intracomm, name: str, count: int) -> None:
    send, recv = np.empty(count), np.empty(count)
    for turn in range(6):
        send[:] = turn + np.arange(count)
        recv[:] = -1
        getattr(comm, name)(send, recv)
        np.testing.assert_array_equal(recv, send)
        recv[:] = -1
        request = getattr(comm, f"I{name.lower()}")(send, recv)
        assert request.Test()
        assert request.Wait()
        np.testing.assert_array_equal(recv, send)
    other, result = send * 2, np.empty(count)  # the same call with other arrays
    getattr(comm, name)(other, result)
    np.testing.assert_array_equal(result, other)
    np.testing.assert_array_equal(recv, send)


@pytest.mark.parametrize("count", COUNTS)
def test_in_place_changes_nothing(comm: mpicoll.Intracomm, count: int) -> None:
    x = np.arange(count, dtype=np.float32)
    for _ in range(4):
        for op in (MPI.SUM, MPI.MAX, mpicoll.op(lambda a, b: a * b + 1)):
            comm.Allreduce(MPI.IN_PLACE, x, op=op)
            comm.Reduce(MPI.IN_PLACE, x, op=op)
        comm.Bcast(x)
        comm.Barrier()
        np.testing.assert_array_equal(x, np.arange(count))
    comm.Exscan(MPI.IN_PLACE, x)


def test_what_is_wrong_is_refused_again_and_again(comm: mpicoll.Intracomm) -> None:
    x = np.zeros(10)
    comm.Allreduce(x, np.zeros(10))
    for call in (comm.Allreduce, comm.Iallreduce):
        for _ in range(3):
            with pytest.raises(ValueError, match="sendbuf has 10 elements, but recvbuf 9"):
                call(x, np.zeros(9))
            with pytest.raises(ValueError, match="overlap"):
                call(x[:6], x[4:])
            with pytest.raises(ValueError, match="sendbuf has elements of float64, but recvbuf of int64"):
                call(x, np.zeros(10, np.int64))
        y = np.full(10, -1.0)
        comm.Allreduce(x, y)
        assert (y == 0).all()


def test_persistent_operations(comm: mpicoll.Intracomm) -> None:
    send, recv = np.zeros(300), np.zeros(300)
    plan = comm.Allreduce_init(send, recv)
    for turn in range(5):
        send[:] = turn
        plan.Start()
        plan.Wait()
        assert (recv == turn).all()
    plan.Free()


ALONE = """
import numpy as np
from mpi4py import MPI
import mpicoll
comm = mpicoll.Intracomm(MPI.COMM_SELF)
part = MPI.DOUBLE.Create_subarray([4, 6], [2, 3], [1, 2]).Commit()
rows = MPI.DOUBLE.Create_subarray([3, 2], [3, 2], [0, 0]).Commit()
x, y = np.arange(24.0).reshape(4, 6), np.zeros((3, 2))
comm.Alltoallw([x, [part]], [y, [rows]])
assert (y.ravel() == x[1:3, 2:5].ravel()).all(), y
comm.Alltoallw([y, [rows]], [x[::1], [part]])
assert (x[1:3, 2:5].ravel() == y.ravel()).all()
"""


@pytest.mark.parametrize("jit", ["0", "1"], ids=["compiled", "not compiled"])
def test_blocks_of_one_rank_are_copied_with_and_without_compiler(jit: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env={**os.environ, "NUMBA_DISABLE_JIT": jit}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _kinds_of_seven() -> list[tuple[MPI.Datatype, int, int, slice]]:
    """Return datatype, count, displacement in bytes, and where the elements are, of seven float32."""
    apart = MPI.FLOAT.Create_vector(1, 1, 1).Create_resized(0, 12).Commit()
    return [
        (MPI.FLOAT, 7, 0, slice(0, 7)),
        (MPI.FLOAT, 7, 8, slice(2, 9)),
        (MPI.FLOAT.Create_contiguous(7).Commit(), 1, 4, slice(1, 8)),
        (MPI.FLOAT.Create_vector(7, 1, 2).Commit(), 1, 4, slice(1, 15, 2)),
        (apart, 7, 12, slice(3, 24, 3)),
    ]


@pytest.mark.parametrize("given", range(5))
@pytest.mark.parametrize("wanted", range(5))
def test_a_block_of_one_rank_is_where_its_displacement_says(given: int, wanted: int) -> None:
    comm, kinds = mpicoll.Intracomm(MPI.COMM_SELF.Dup()), _kinds_of_seven()
    source, target = np.zeros(24, np.float32), np.zeros(24, np.float32)
    source[kinds[given][3]] = range(1, 8)
    sent, got = ([[count], [displ], [kind]] for kind, count, displ, _ in (kinds[given], kinds[wanted]))
    for _ in range(2):
        comm.Alltoallw([source, *sent], [target, *got])
        assert target[kinds[wanted][3]].tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert np.count_nonzero(target) == 7
        target[:] = 0
    comm.Free()


VECTOR_CALLS = {
    "Gatherv": lambda send, recv, n, at: (send, [recv, [n], [at], MPI.DOUBLE]),
    "Scatterv": lambda send, recv, n, at: ([send, ([n], [0])], [recv[at : at + n], MPI.DOUBLE]),
    "Allgatherv": lambda send, recv, n, at: ([send, MPI.DOUBLE], [recv, ((n,), (at,))]),
    "Alltoallv": lambda send, recv, n, at: ([send, [n]], [recv, (np.array([n]), np.array([at])), MPI.DOUBLE]),
}


@pytest.mark.parametrize("name", VECTOR_CALLS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_block_is_copied_to_its_place(comm: mpicoll.Intracomm, name: str, count: int) -> None:
    for form, at in itertools.product((name, f"I{name.lower()}"), (0, 3)):
        send, recv = np.arange(count) + 0.5, np.full(count + 5, -1.0)
        request = getattr(comm, form)(*VECTOR_CALLS[name](send, recv, count, at))
        assert request is None or request.Wait()
        expected = np.full(count + 5, -1.0)
        expected[at : at + count] = send
        np.testing.assert_array_equal(recv, expected)


def test_plain_blocks_are_copied_by_compiled_code(comm: mpicoll.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if not comm._table:
        pytest.skip("the executor is not compiled")
    comm.Barrier()  # the first call takes the general path
    monkeypatch.setattr(execute, "run", None)
    monkeypatch.setattr(blocking, "run", None)
    for name, arguments in VECTOR_CALLS.items():
        getattr(comm, name)(*arguments(np.ones(3), np.zeros(8), 3, 1))
        getattr(comm, f"I{name.lower()}")(*arguments(np.ones(3), np.zeros(8), 3, 1)).Wait()
    comm.Gatherv(MPI.IN_PLACE, [np.zeros(3), [3]])
    comm.Scatterv([np.zeros(3), [3]], MPI.IN_PLACE)


def test_blocks_that_do_not_fit_are_refused(comm: mpicoll.Intracomm) -> None:
    whole = np.arange(8.0)
    comm.Barrier()
    wrong = {
        "counts": lambda: comm.Gatherv(np.ones(2), [np.zeros(8), [3]]),
        "type": lambda: comm.Allgatherv(np.ones(3, np.float32), [np.zeros(8), [3]]),
        "read-only": lambda: comm.Scatterv([whole, [8]], np.frombuffer(bytes(64))),
        "beyond": lambda: comm.Gatherv(np.ones(3), [whole, ([3], [6])]),
        "root": lambda: comm.Gatherv(np.ones(3), [whole, [3]], 1),
    }
    for name, call in wrong.items():
        with pytest.raises((ValueError, TypeError, mpicoll.errors.MpicollError)):
            call()
        assert whole.tolist() == list(range(8)), name


def test_what_is_no_rank_uses_no_communicator(comm: mpicoll.Intracomm) -> None:
    """A forked child shares memory with the other ranks."""
    child = os.fork()
    if child == 0:
        try:
            comm.Allreduce(np.ones(1), np.ones(1))
        except mpicoll.errors.CommunicatorBroken as error:
            os._exit(0 if "this process was forked from a rank" in str(error) else 3)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.Allreduce(np.ones(1), np.ones(1))


def test_segments_are_left_out_of_core_dumps(comm: mpicoll.Intracomm) -> None:
    comm.empty(1)
    mappings = re.findall(r"memfd:mpicoll.*?VmFlags:([^\n]*)", Path("/proc/self/smaps").read_text(), re.DOTALL)
    assert mappings
    assert all("dd" in flags.split() for flags in mappings)


def test_a_persistent_operation_that_was_freed_is_inactive(comm: mpicoll.Intracomm) -> None:
    request = comm.Allreduce_init(np.ones(1), np.ones(1))
    request.Start()
    request.Free()
    assert MPI.Request.Testany([request]) == (MPI.UNDEFINED, True)


def _all_calls(comm: mpicoll.Intracomm, count: int) -> None:
    """Make calls of each kind, and compare their results with what is given."""
    given = np.random.default_rng(count).random(count)
    for name in CALLS:
        result = np.zeros(count)
        getattr(comm, name)(given, result)
        np.testing.assert_array_equal(result, given)
        result[:] = 0
        getattr(comm, f"I{name.lower()}")(given, result).Wait()
        np.testing.assert_array_equal(result, given)
    result = np.zeros(count)
    comm.Gatherv(given, [result, [count]])
    np.testing.assert_array_equal(result, given)
    assert comm.allreduce(count) == count
    assert comm.bcast({"count": count}) == {"count": count}
    comm.Barrier()


def test_threads_take_turns_on_a_communicator_of_one_rank(comm: mpicoll.Intracomm) -> None:
    def work(first: int) -> None:
        try:
            for count in range(first, first + 40):
                _all_calls(comm, count)
        except BaseException as error:
            errors.append(error)

    errors: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 1, 3000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_a_signal_handler_may_interrupt_a_call_and_make_others(comm: mpicoll.Intracomm) -> None:
    calls, depth = 0, 0

    def handler(*_: object) -> None:
        nonlocal calls, depth
        if depth:
            return
        depth += 1
        calls += 1
        _all_calls(comm, 5 + calls % 3)
        depth -= 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        until = time.monotonic() + 2
        while calls < 100 and time.monotonic() < until:
            _all_calls(comm, 5 + calls % 7)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls


def test_communicators_cannot_be_copied(comm: mpicoll.Intracomm) -> None:
    for made in (comm, comm.Create_cart([1])):
        with pytest.raises(ValueError, match="cannot serialize"):
            copy.copy(made)


def test_a_freed_communicator_is_said_to_be_freed(comm: mpicoll.Intracomm) -> None:
    made = comm.Dup()
    request = made.Allreduce_init(np.ones(1), np.ones(1))
    made.Free()
    with pytest.raises(mpicoll.errors.CommunicatorBroken, match="cannot be used any more: it was freed"):
        request.Start()


@pytest.mark.parametrize("when", ["before", "after"])
def test_without_mpi_there_is_an_error(when: str) -> None:
    program = f"""
import mpi4py
mpi4py.rc.initialize = {when == "after"}
from mpi4py import MPI
import mpicoll
if {when == "after"}:
    MPI.Finalize()
try:
    mpicoll.Intracomm(MPI.COMM_WORLD)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MPI is not initialized, or finalized already" in done.stdout, done.stderr
