"""Requests of mpicoll among those of mpi4py, in the functions of ``MPI.Request`` for several of them."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm, Request
from mpicoll.collectives.requests import PersistentRequest
from mpicoll.errors import CollectiveTimeout, CommunicatorBroken, MismatchError, RemoteError
from mpicoll.progress import progress_engine
from tests import extent

pytestmark = pytest.mark.mpi(min_size=2)

WORLD = MPI.COMM_WORLD
LONG = 200_000


class Exchange:
    """Requests of both kinds, among them messages too long to be buffered, which move only while somebody waits."""

    def __init__(self, comm: Intracomm, count: int = 5) -> None:
        size, rank = comm.size, comm.rank
        self.comm, self.sums = comm, [np.full(count, rank + 1.0) for _ in range(2)]
        self.given, self.got = np.full(LONG, float(rank)), np.full(LONG, -1.0)
        self.persistent = comm.Allreduce_init(MPI.IN_PLACE, self.sums[1])
        self.persistent.Start()
        self.requests: list[Any] = [
            comm.Irecv(self.got, (rank - 1) % size, 3),
            comm.Iallreduce(MPI.IN_PLACE, self.sums[0]),
            comm.Isend(self.given, (rank + 1) % size, 3),
            self.persistent,
            comm.Ibarrier(),
        ]

    def check(self) -> None:
        size, rank = self.comm.size, self.comm.rank
        for data in self.sums:
            assert (data == size * (size + 1) / 2).all()
        assert (self.got == (rank - 1) % size).all()
        assert [bool(request) for request in self.requests] == [False, False, False, True, False]
        assert [request == MPI.REQUEST_NULL for request in self.requests] == [True, True, True, False, True]
        assert all(request.Test() for request in self.requests)
        self.persistent.Free()
        assert not self.persistent


def by_waitall(requests: Sequence[Any]) -> None:
    statuses: list[MPI.Status] = []
    assert MPI.Request.Waitall(requests, statuses) is True
    assert [status.tag for status in statuses] == [3, MPI.ANY_TAG, statuses[2].tag, MPI.ANY_TAG, MPI.ANY_TAG]
    assert [status.Get_count(MPI.DOUBLE) for status in (statuses[0], statuses[1])] == [LONG, 0]


def by_own_waitall(requests: Sequence[Any]) -> None:
    assert Request.Waitall(requests)


def by_testall(requests: Sequence[Any]) -> None:
    while not MPI.Request.Testall(requests, statuses := []):
        pass
    assert len(statuses) == 5


def by_waitany(requests: Sequence[Any]) -> None:
    status = MPI.Status()
    found = sorted(MPI.Request.Waitany(requests, status) for _ in requests)
    assert found == list(range(len(requests)))
    assert MPI.Request.Waitany(requests) == MPI.UNDEFINED


def by_testany(requests: Sequence[Any]) -> None:
    found = []
    while len(found) < len(requests):
        index, flag = MPI.Request.Testany(requests)
        assert flag == (index != MPI.UNDEFINED)
        found += [index] * flag
    assert sorted(found) == list(range(len(requests)))
    assert MPI.Request.Testany(requests) == (MPI.UNDEFINED, True)


def by_some(requests: Sequence[Any], method: Callable[..., list[int] | None]) -> None:
    found: list[int] = []
    while True:
        statuses: list[MPI.Status] = []
        indices = method(requests, statuses)
        if indices is None:
            break
        assert len(statuses) == len(indices)
        found += indices
        for index, status in zip(indices, statuses, strict=True):
            assert index != 0 or (status.tag, status.Get_count(MPI.DOUBLE)) == (3, LONG)
    assert sorted(found) == list(range(len(requests)))


def by_waitsome(requests: Sequence[Any]) -> None:
    by_some(requests, MPI.Request.Waitsome)


def by_testsome(requests: Sequence[Any]) -> None:
    by_some(requests, MPI.Request.Testsome)


WAYS = [by_waitall, by_own_waitall, by_testall, by_waitany, by_testany, by_waitsome, by_testsome]


@pytest.mark.parametrize("count", [5, 40_000])
@pytest.mark.parametrize("way", WAYS)
def test_mixtures(comm: Intracomm, way: Callable[[Sequence[Any]], None], count: int) -> None:
    for _ in range(3):
        exchange = Exchange(comm, count)
        time.sleep(0.01 * (comm.rank % 2))
        way(exchange.requests)
        exchange.check()


def test_each_rank_another_way(comm: Intracomm) -> None:
    for turn in range(2 * len(WAYS)):
        exchange = Exchange(comm)
        WAYS[(turn + comm.rank) % len(WAYS)](exchange.requests)
        exchange.check()


def test_classes(comm: Intracomm) -> None:
    nonblocking, persistent = comm.Ibarrier(), comm.Barrier_init()
    assert isinstance(nonblocking, MPI.Request)
    assert isinstance(nonblocking, Request)
    assert isinstance(persistent, MPI.Prequest)
    assert isinstance(persistent, PersistentRequest)
    assert nonblocking
    assert persistent
    assert nonblocking != persistent
    assert nonblocking != MPI.REQUEST_NULL
    assert nonblocking == nonblocking
    with pytest.raises(RuntimeError, match="cannot be cancelled"):
        nonblocking.Cancel()
    nonblocking.wait()
    assert not nonblocking
    assert nonblocking == MPI.REQUEST_NULL
    nonblocking.Free()
    persistent.free()
    assert not persistent


def test_pickled_messages_among_ours(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    for way in (MPI.Request.waitall, lambda requests: _until_true(lambda: MPI.Request.testall(requests))):
        send, receive = comm.isend({"from": rank}, (rank + 1) % size), comm.irecv(source=(rank - 1) % size)
        data = np.ones(3)
        messages = way([send, comm.Iallreduce(MPI.IN_PLACE, data), receive])
        assert messages == [None, None, {"from": (rank - 1) % size}]
        assert (data == size).all()
    send, receive = comm.isend(rank, (rank + 1) % size), comm.irecv(source=(rank - 1) % size)
    requests = [send, comm.Ibarrier(), receive]
    found = dict(MPI.Request.waitany(requests) for _ in requests)
    assert found == {0: None, 1: None, 2: (rank - 1) % size}
    assert MPI.Request.waitsome(requests) == (None, None)
    assert MPI.Request.testany(requests) == (MPI.UNDEFINED, True, None)


def _until_true(test: Callable[[], tuple[bool, Any]]) -> Any:
    while True:
        flag, result = test()
        if flag:
            return result


def test_startall_and_inactive_ones(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    given, got, sums = np.full(4, float(rank)), np.zeros(4), np.zeros(4)
    requests = [
        comm.Recv_init(got, (rank - 1) % size),
        comm.Allreduce_init(given, sums),
        comm.Send_init(given, (rank + 1) % size),
    ]
    assert MPI.Request.Waitany(requests) == MPI.UNDEFINED
    for turn in range(3):
        given[:] = rank + turn
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        assert (got == (rank - 1) % size + turn).all()
        assert (sums == sum(range(size)) + size * turn).all()
        assert MPI.Request.Testsome(requests) is None
    own = requests[1:2]
    for call in (MPI.Prequest.Startall, MPI.Request.Waitall):
        with pytest.raises(TypeError, match="has no len"):
            call(iter(own))
    for request in requests:
        request.Free()


def test_plain_ones_alone_go_to_mpi4py(comm: Intracomm) -> None:
    data = np.zeros(2)
    receive = comm.Irecv(data, comm.rank, 5)
    assert MPI.Request.Testany([receive]) == (MPI.UNDEFINED, False)
    comm.Send(np.ones(2), comm.rank, 5)
    status = MPI.Status()
    assert MPI.Request.Waitany(requests=[receive], status=status) == 0
    assert status.tag == 5
    with pytest.raises(TypeError):
        MPI.Request.Waitall([receive, 3])
    with pytest.raises(TypeError):
        MPI.Request.Waitall(None)


@pytest.mark.parametrize("wait", [MPI.Request.Waitall, MPI.Request.Waitany, MPI.Request.Waitsome])
def test_a_rank_that_does_not_come_is_named(wait: Callable[[Sequence[Any]], Any]) -> None:
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=1.0)
    if comm.rank == comm.size - 1:
        WORLD.Barrier()
        plain.Free()
        return
    receive = WORLD.Irecv(np.zeros(1), comm.rank, 9)
    request = comm.Iallreduce(MPI.IN_PLACE, np.ones(3))
    with pytest.raises(CollectiveTimeout, match=f"rank {comm.size - 1} did not arrive"):
        wait([receive, request])
    WORLD.Send(np.zeros(1), comm.rank, 9)
    assert MPI.Request.Waitall([receive, request])
    WORLD.Barrier()
    plain.Free()


@pytest.mark.parametrize("kind", ["nonblocking", "persistent", "messages"])
def test_another_thread_completes_an_operation_while_one_begins_to_wait(
    comm: Intracomm, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, algorithm = np.ones(2000), "ring" if kind == "messages" else "auto"
    if kind == "nonblocking":
        request: Any = comm.Iallreduce(MPI.IN_PLACE, x) if comm.rank else None
    else:
        request = comm.Allreduce_init(MPI.IN_PLACE, x, algorithm=algorithm)
        if comm.rank:
            request.Start()

    def ended_meanwhile() -> int:  # what another thread does between two lines of Wait
        while not request.has_ended:
            progress_engine.progress()
        return 1

    if comm.rank == 0:
        time.sleep(0.05)
        if kind == "nonblocking":
            request = comm.Iallreduce(MPI.IN_PLACE, x)
        else:
            request.Start()
    else:
        assert not request.has_ended
        monkeypatch.setattr(progress_engine, "pending", ended_meanwhile)
    request.Wait()
    assert (x == comm.size).all()


def test_waitall_raises_what_has_failed_though_a_message_never_comes(comm: Intracomm) -> None:
    plain = WORLD.Dup()
    made = Intracomm(plain, timeout=20)
    receive = WORLD.Irecv(np.zeros(1), comm.rank, 9)
    with pytest.raises(MismatchError):
        MPI.Request.Waitall([receive, made.Iallreduce(MPI.IN_PLACE, np.ones(10 if comm.rank else 20))])
    WORLD.Send(np.zeros(1), comm.rank, 9)
    receive.Wait()
    WORLD.Barrier()
    plain.Free()


def test_waitall_takes_partitioned_messages(comm: Intracomm) -> None:
    given, got, size = np.arange(8.0) + comm.rank, np.zeros(8), comm.size
    messages = [
        WORLD.Psend_init(given, 4, (comm.rank + 1) % size, 11),
        WORLD.Precv_init(got, 4, (comm.rank - 1) % size, 11),
    ]
    for _ in range(2):
        MPI.Prequest.Startall(messages)
        request = comm.Iallreduce(MPI.IN_PLACE, total := np.ones(3))
        messages[0].Pready_range(0, 3)
        assert MPI.Request.Waitall([*messages, request])
        assert (got == np.arange(8.0) + (comm.rank - 1) % size).all()
        assert (total == size).all()
    for message in messages:
        message.Free()


def of_messages(statuses: Sequence[MPI.Status]) -> list[tuple[int, int, int]]:
    return [(each.source, each.tag, each.Get_count(MPI.BYTE)) for each in statuses]


def test_waitall_gives_the_statuses_of_persistent_receives(comm: Intracomm) -> None:
    size, got = comm.size, np.zeros(5)
    given = WORLD.Send_init(np.arange(3.0), (comm.rank + 1) % size, 13)
    taken = WORLD.Recv_init(got, (comm.rank - 1) % size, 13)
    for _ in range(2):
        MPI.Prequest.Startall([given, taken])
        statuses: list[MPI.Status] = []
        assert MPI.Request.Waitall([given, taken, comm.Ibarrier()], statuses)
        assert of_messages(statuses)[1] == ((comm.rank - 1) % size, 13, 24)
    given.Free()
    taken.Free()


@pytest.mark.parametrize("is_persistent", [False, True])
def test_waitall_raises_for_a_message_that_is_too_long(comm: Intracomm, is_persistent: bool) -> None:
    """MPI completes the other requests; of ours another wait does."""
    source, dest = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    got, short = np.zeros(3), np.zeros(3)
    if is_persistent:
        requests = [WORLD.Send_init(np.ones(5), dest, 14), WORLD.Recv_init(short, source, 14)]
        MPI.Prequest.Startall(requests)
    else:
        requests = [WORLD.Isend(np.ones(5), dest, 14), WORLD.Irecv(short, source, 14)]
    own = comm.Iallreduce(np.ones(3), got)
    statuses: list[MPI.Status] = []
    with pytest.raises(MPI.Exception) as caught:
        MPI.Request.Waitall([requests[0], own, requests[1]], statuses)
    assert caught.value.Get_error_class() == MPI.ERR_IN_STATUS
    assert MPI.Get_error_class(statuses[2].error) == MPI.ERR_TRUNCATE
    own.Wait()
    assert (got == comm.size).all()
    WORLD.Barrier()
    for request in requests if is_persistent else ():
        request.Free()


def keep_testing(how: str, request: Request, receive: MPI.Request) -> None:
    """Test a request among others, for 20 s at most, until that raises what has failed."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if how == "Testall":
            MPI.Request.Testall([request, receive])
        elif how == "Test":
            request.Test()
        elif request.Get_status():  # which does not raise it
            request.Wait()
        time.sleep(0.001)


TESTING = [("Test", "auto"), ("Testall", "ring"), ("Get_status", "auto")]


@pytest.mark.parametrize(
    ("how", "algorithm"), extent.first(3, [*TESTING, ("Test", "ring"), ("Testall", "auto"), ("Get_status", "ring")])
)
def test_who_tests_hears_of_another_rank_s_deadline(comm: Intracomm, how: str, algorithm: str) -> None:
    """The last rank never comes; the first one waits and gives up, the others test, and count as arrived."""
    plain, quiet, last = WORLD.Dup(), WORLD.Dup(), comm.size - 1
    made, data = Intracomm(plain, timeout=1.0, algorithm=algorithm), np.ones(5)
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeout, match=f"rank {last} did not arrive"):
            made.Iallreduce(MPI.IN_PLACE, data).Wait()
    elif comm.rank < last:
        request, receive = made.Iallreduce(MPI.IN_PLACE, data), quiet.Irecv(np.zeros(1), comm.rank, 9)
        with pytest.raises((CollectiveTimeout, RemoteError)):
            keep_testing(how, request, receive)
        quiet.Send(np.zeros(1), comm.rank, 9)
        receive.Wait()
    WORLD.Barrier()
    for each in (plain, quiet):
        each.Free()


@pytest.mark.parametrize("blocking", extent.first(1, [False, True]))
def test_memory_lives_on_after_a_call_by_messages_has_failed(comm: Intracomm, blocking: bool) -> None:
    """The MPI library still sends from it, when the rank that was late looks for its messages."""

    class Owned(np.ndarray):
        pass

    plain = WORLD.Dup()
    made = Intracomm(plain, timeout=0.5, algorithm="ring")
    data = np.ones(300_000).view(Owned)
    alive = weakref.ref(data)
    if comm.rank == comm.size - 1:
        time.sleep(1.5)
    call = made.Allreduce if blocking else lambda *buffers: made.Iallreduce(*buffers).Wait()
    with pytest.raises((CollectiveTimeout, RemoteError)):
        call(data, np.zeros(300_000))
    del data
    gc.collect()
    assert alive() is not None or comm.rank == comm.size - 1
    WORLD.Barrier()


@pytest.mark.parametrize("copied", [MPI.Request, lambda request: MPI.Request.f2py(request.py2f())])
def test_a_copy_of_the_handle_is_refused_by_the_library(comm: Intracomm, copied: Callable[[Request], Any]) -> None:
    for _ in range(4):
        total = np.zeros(2)
        request = comm.Iallreduce(np.ones(2), total)
        with pytest.raises(MPI.Exception):
            copied(request).Wait()
        request.Wait()
        assert (total == comm.size).all()


def test_complete_requests_are_copied_as_null_ones(comm: Intracomm) -> None:
    x, y = np.ones(3), np.zeros(3)
    kept = comm.Allreduce_init(x, y)
    for start in (comm.Ibarrier, lambda: comm.Iallreduce(x, y), lambda: comm.Iallreduce(x, y, algorithm="ring")):
        request = start()
        with pytest.raises(ValueError, match="cannot serialize"):
            copy.copy(request)
        request.Wait()
        found = [copy.copy(request), copy.deepcopy([request])[0], pickle.loads(pickle.dumps(request))]
        assert all(each == MPI.REQUEST_NULL for each in found)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot serialize"):
            copy.copy(kept)
        kept.Start()
        kept.Wait()
    kept.Free()


CHILDS_CALLS: dict[str, Callable[[MPI.Request], object]] = {
    "Wait": lambda request: request.Wait(),
    "Test": lambda request: request.Test(),
    "Waitall": lambda request: MPI.Request.Waitall([request]),
    "Testany": lambda request: MPI.Request.Testany([request]),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("how", ["nonblocking", "persistent", "by messages"])
@pytest.mark.parametrize("call", CHILDS_CALLS)
@pytest.mark.parametrize("count", [10, 300_000])
def test_a_forked_child_leaves_operations_in_flight_alone(comm: Intracomm, how: str, call: str, count: int) -> None:
    """The child has the request of its parent, whose steps it would take in memory that the ranks share."""
    x, y = np.full(count, comm.rank + 1.0, np.float32), np.zeros(count, np.float32)
    kept = comm.Allreduce_init(x, y)
    if comm.rank == 1:
        time.sleep(0.1)
    if how == "persistent":
        kept.Start()
    request = kept if how == "persistent" else comm.Iallreduce(x, y, algorithm="ring" if how == "by messages" else None)
    child = os.fork() if comm.rank == 0 else None
    if child == 0:
        status = 1
        try:
            CHILDS_CALLS[call](request)
        except CommunicatorBroken as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    if child is not None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    request.Wait()
    assert (y == comm.size * (comm.size + 1) / 2).all()
    kept.Free()


def test_wrong_arguments_raise_what_mpi4py_raises(comm: Intracomm) -> None:
    for each in (comm, MPI.Intracomm(comm)):
        request = each.Ibarrier()
        with pytest.raises(MPI.Exception):
            MPI.Prequest.Startall([request])
        with pytest.raises(TypeError):
            request.Wait(3)
        request.Wait()
