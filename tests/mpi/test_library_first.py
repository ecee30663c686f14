"""Communicators that make their first collectives by the MPI library, as those that a program makes do."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.communicator import timed_agreement
from mpicoll.errors import CollectiveTimeout, MismatchError, UnknownAlgorithm
from mpicoll.program import library_first
from mpicoll.program.library_first import LibraryFirst, begin_with_library

pytestmark = pytest.mark.mpi
CALLS = 3


@pytest.fixture
def comm():
    """A communicator whose children begin with the library's calls."""
    plain = MPI.COMM_WORLD.Dup()
    made = mpicoll.Intracomm(plain)
    begin_with_library(CALLS)
    yield made
    begin_with_library(0)
    plain.Free()


def _is_ours(comm):
    assert isinstance(comm, mpicoll.Intracomm)
    return not isinstance(comm, LibraryFirst)


def _sum(comm):
    total = np.full(100, float(comm.rank))
    comm.Allreduce(MPI.IN_PLACE, total)
    assert (total == np.arange(comm.size).sum()).all()


MAKERS = {
    "Split": lambda comm: comm.Split(0, -comm.rank),
    "Dup": lambda comm: comm.Dup(),
    "Clone": lambda comm: comm.Clone(),
    "Create": lambda comm: comm.Create(comm.Get_group()),
    "Create_group": lambda comm: comm.Create_group(comm.Get_group()),
    "Create_cart": lambda comm: comm.Create_cart([comm.size]),
    "Sub": lambda comm: comm.Create_cart([1, comm.size]).Sub([False, True]),
    "dist_graph": lambda comm: comm.Create_dist_graph_adjacent([comm.rank], [comm.rank]),
    "Split of Split": lambda comm: comm.Split(0, 0).Split(0, 0),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_it_becomes_ours_after_some_calls(comm, make):
    made = make(comm)
    for _ in range(CALLS):
        assert not _is_ours(made)
        assert made.choice("allreduce", 8) == "native"
        _sum(made)
    _sum(made)
    assert _is_ours(made)
    assert made.choice("allreduce", 8) != "native"
    assert made.timeout == comm.timeout
    kind = {"Create_cart": mpicoll.Cartcomm, "Sub": mpicoll.Cartcomm}.get(make, mpicoll.Intracomm)
    assert isinstance(made, kind)
    assert made.allgather({made.rank}) == [{rank} for rank in range(made.size)]
    _sum(made.Dup())
    made.Free()


def test_requests_of_a_duplicate_that_is_still_made(comm):
    made, request = comm.Idup()
    request.Wait()
    for _ in range(CALLS + 1):
        _sum(made)
    assert _is_ours(made)


def test_it_stays_with_the_library_where_that_can_make_no_more(comm, monkeypatch):
    def refuse(comm):
        raise MPI.Exception(MPI.ERR_OTHER)

    monkeypatch.setattr("mpicoll.communicator.channel_cache.private_duplicate", refuse)
    made = comm.Split(0, 0)
    for _ in range(2 * CALLS):
        _sum(made)
    assert not _is_ours(made)
    assert made.allgather(made.rank) == list(range(made.size))
    monkeypatch.undo()
    _sum(made)
    assert not _is_ours(made)
    made.Free()


def test_it_stays_with_the_library_where_a_rank_has_very_many(comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(library_first, "live_channels", lambda: library_first.MOST_CHANNELS << 10)
    made = comm.Split(0, 0)
    for _ in range(2 * CALLS):
        _sum(made)
    assert not _is_ours(made)
    made.Allreduce(MPI.IN_PLACE, np.zeros(4), algorithm="ring")
    assert _is_ours(made)  # the library does not know that argument
    made.Free()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_where_it_would_become_ours(comm, monkeypatch):
    monkeypatch.setattr(timed_agreement, "MEETING_SECONDS", 0.2)
    made = mpicoll.Intracomm(comm, timeout=0.1).Split(0, comm.rank)
    for _ in range(CALLS):
        _sum(made)
    if comm.rank:
        with pytest.raises(CollectiveTimeout, match="waited"):
            _sum(made)
    MPI.COMM_WORLD.Barrier()
    if comm.rank == 0:
        timed_agreement.largest_of_all(MPI.Intracomm(made), np.zeros(1, np.int64))  # what the others wait for
    while timed_agreement._abandoned:
        timed_agreement._abandoned.pop()[0].Wait()
    made.Free()


def test_nonblocking_calls_wait_for_nobody(comm):
    """Whatever their number: the last rank begins when all others have begun, and have sent it a message."""
    made, last = comm.Split(0, comm.rank), comm.size - 1
    plain = MPI.Intracomm(comm)
    if comm.rank == last:
        for source in range(last):
            plain.recv(source=source)
    requests = [made.Ibarrier() for _ in range(CALLS + 2)]
    if comm.rank != last:
        plain.send(None, last)
    MPI.Request.Waitall(requests)
    assert not _is_ours(made)
    _sum(made)
    assert _is_ours(made)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.Allreduce(np.ones(3), np.empty(3), algorithm="ring"),
        lambda comm: comm.Allreduce(np.ones(3, "f"), np.empty(3, "f"), compression="int8"),
        lambda comm: comm.Allreduce(np.ones(3), np.empty(3), mpicoll.op(lambda a, b: a + b)),
        lambda comm: comm.Allreduce(np.ones(3), np.empty(3), op=mpicoll.op(lambda a, b: a + b)),
        lambda comm: comm.Allreduce_init(np.ones(3), np.empty(3)).Start(),
    ],
    ids=["algorithm", "compression", "operation", "named operation", "persistent"],
)
def test_what_only_we_can_do_is_ours_at_once(comm, call):
    made = comm.Split(0, comm.rank)
    request = call(made)
    if request is not None:
        request.Wait()
    assert _is_ours(made)
    _sum(made)


def test_ranks_without_a_communicator_and_communicators_of_one_rank(comm):
    for turn in range(10):
        left_out = turn % comm.size
        made = comm.Split(MPI.UNDEFINED if comm.rank == left_out else 0, comm.rank)
        alone = comm.Split(comm.rank, 0)
        for _ in range(turn):
            if made != MPI.COMM_NULL:
                _sum(made)
            assert alone.allreduce(5) == 5
        for each in (made, alone):
            if each != MPI.COMM_NULL:
                each.Free()


def test_another_object_of_the_communicator(comm):
    made = comm.Split(0, comm.rank)
    other = mpicoll.Intracomm(MPI.Intracomm(made))
    for _ in range(CALLS + 2):
        _sum(other)
        _sum(made)
    assert _is_ours(made)
    assert made._scope.channel is other._scope.channel
    made.Free()


def test_wrong_arguments_are_mpi4pys_at_first(comm):
    made = comm.Split(0, comm.rank)
    with pytest.raises((TypeError, ValueError)):
        made.Allreduce(MPI.IN_PLACE, object())
    for _ in range(CALLS + 1):
        _sum(made)
    assert _is_ours(made)


def test_errors_are_found_once_it_is_ours(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    made = comm.Split(0, comm.rank)
    for _ in range(CALLS):
        _sum(made)
    with pytest.raises(MismatchError):
        made.Allreduce(np.ones(3 + made.rank), np.empty(3 + made.rank))


def test_an_object_made_by_the_class(comm):
    made = comm.Split(0, comm.rank)
    again = type(made)(made)
    for _ in range(2):
        _sum(again)
    assert _is_ours(again)


def test_a_class_derived_from_one_that_begins_with_the_library(comm):
    made = comm.Split(0, comm.rank)

    class Named(type(made)):
        name = "own"

    named = Named(made)
    for _ in range(2):
        _sum(named)
    assert named.name == "own"
    assert named.choice("allreduce", 8) == mpicoll.Intracomm(MPI.Intracomm(made)).choice("allreduce", 8)
    assert "native" in named.algorithms("allreduce")
    assert named.allgather(named.rank) == list(range(named.size))


REFUSED = {
    "an object without a pickle": lambda comm: comm.allgather(lambda: 0),
    "the root's object without a pickle": lambda comm: comm.bcast(lambda: 0),
    "a buffer that is none": lambda comm: comm.Allreduce(MPI.IN_PLACE, "text"),
    "too few objects": lambda comm: comm.alltoall([None] * (comm.size - 1)),
    "objects for no rank": lambda comm: comm.scatter([], 0),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", REFUSED.values(), ids=list(REFUSED))
def test_a_call_that_is_refused_on_one_rank_is_not_counted(comm, call):
    """A program may catch the error, and try again: all ranks have to become ours in the same call."""
    made = comm.Split(0, comm.rank)
    if made.rank == 0:
        with pytest.raises((AttributeError, TypeError, ValueError, pickle.PicklingError)):
            call(made)
    for _ in range(CALLS):
        assert not _is_ours(made)
        _sum(made)
    _sum(made)
    assert _is_ours(made)


@pytest.mark.mpi(min_size=2)
def test_a_call_that_fails_after_its_messages_is_counted(comm):
    class Unloadable:
        def __reduce__(self):
            return _raise, ()

    made = comm.Split(0, comm.rank)
    with pytest.raises(ZeroDivisionError):  # the root unpickles its object, too
        made.bcast(Unloadable() if made.rank == 0 else None)
    for _ in range(CALLS - 1):
        assert not _is_ours(made)
        _sum(made)
    _sum(made)
    assert _is_ours(made)


def _raise():
    raise ZeroDivisionError


def test_a_class_derived_from_ours(comm):
    class Named(mpicoll.Intracomm):
        name = "own"

    own = Named(MPI.Intracomm(comm))
    made = own.Dup()
    assert type(made) is Named
    _sum(made)
    assert not _is_ours(own.Split(0))
    made.Free()


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_asks_is_local(comm):
    made = comm.Split(0, comm.rank)
    if comm.rank == 0:
        assert made.algorithms("allreduce") == ("native",)
        assert made.choice("bcast", 100) == made.algorithm.replace("auto", "native")
        with pytest.raises(UnknownAlgorithm):
            made.algorithms("everything")
    _sum(made)
    assert not _is_ours(made)


def test_communicators_of_ours_are_ours_without_it(comm):
    begin_with_library(0)
    made = comm.Split(0, comm.rank)
    assert _is_ours(made)
    _sum(made)
