"""Communicators of every kind, side by side, with the user's own traffic, from threads, by the thousand."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.errors import CommunicatorBroken, RemoteError
from mpicoll.kernels import operation_words as words
from mpicoll.schedules import ALGORITHMS
from mpicoll.shared_memory import numpy_allocator

pytestmark = pytest.mark.mpi(min_size=2)

WORLD = MPI.COMM_WORLD
TIMEOUT = 20.0


def check(comm: Intracomm, count: int = 11, **settings: Any) -> None:
    """Make some calls on `comm` and compare with what every rank can work out."""
    size, rank = comm.size, comm.rank
    data = np.arange(count) + 100.0 * rank
    result = np.zeros(count)
    comm.Allreduce(data, result, **settings)
    assert (result == size * np.arange(count) + 100 * sum(range(size))).all()
    comm.Bcast(data, size - 1)
    assert (data == np.arange(count) + 100.0 * (size - 1)).all()
    parts = np.zeros(size)
    comm.Allgather(np.float64(rank), parts)
    assert (parts == np.arange(size)).all()
    comm.Barrier()


def test_pickles_name_the_communicator() -> None:
    for plain in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm = Intracomm(plain, algorithm="native", timeout=7)
        again = pickle.loads(pickle.dumps(comm))
        assert type(again) is Intracomm
        assert again == plain
        assert (again.algorithm, again.timeout) == ("native", 7.0)
        check(again)
        made = comm.Dup()
        with pytest.raises(ValueError, match="cannot serialize"):
            pickle.dumps(made)
        made.Free()


# Kinds of communicators -----------------------------------------------------------------------------------------------


def test_alone() -> None:
    for plain in (MPI.COMM_SELF, MPI.COMM_SELF.Dup()):
        comm = Intracomm(plain, timeout=TIMEOUT)
        for collective in ALGORITHMS:
            for algorithm in comm.algorithms(collective):
                if collective == "allreduce":
                    check(comm, algorithm=algorithm)
        data, result = np.arange(5.0), np.zeros(5)
        comm.Reduce(data, result)
        assert (result == data).all()
        comm.Reduce_scatter(data, result, [5], MPI.MAX)
        comm.Reduce_scatter_block(data, result)
        comm.Allgatherv(data, [result, [5]])
        comm.Iallreduce(data, result).Wait()
        comm.Ibcast(data).Wait()
        assert (result == data).all()
        if plain != MPI.COMM_SELF:
            plain.Free()


def halves() -> MPI.Intracomm:
    return WORLD.Split(WORLD.rank % 2, WORLD.rank)


def backwards() -> MPI.Intracomm:
    return WORLD.Split(0, -WORLD.rank)


def all_but_the_last() -> MPI.Intracomm:
    return WORLD.Split(int(WORLD.rank == WORLD.size - 1), WORLD.rank)


def grid() -> MPI.Intracomm:
    return WORLD.Create_cart([WORLD.size], [True])


def graph() -> MPI.Intracomm:
    return WORLD.Create_dist_graph_adjacent([(WORLD.rank - 1) % WORLD.size], [(WORLD.rank + 1) % WORLD.size])


@pytest.mark.parametrize("make", [halves, backwards, all_but_the_last, WORLD.Dup, grid, graph])
def test_kinds(make: Callable[[], MPI.Intracomm]) -> None:
    plain = make()
    comm = Intracomm(plain, timeout=TIMEOUT)
    for algorithm in (*ALGORITHMS["allreduce"], "native"):
        check(comm, algorithm=algorithm)
    check(comm, 3000)
    plain.Free()


def test_overlapping_communicators_used_in_turn(comm: Intracomm) -> None:
    plain = [halves(), backwards(), all_but_the_last(), WORLD.Dup()]
    several = [comm, *(Intracomm(each, timeout=TIMEOUT) for each in plain)]
    for _ in range(5):
        for each in several:
            check(each)
        results = [np.full(9, 1.0) for _ in several]
        requests = [each.Iallreduce(MPI.IN_PLACE, data) for each, data in zip(several, results, strict=True)]
        for request in reversed(requests):
            request.Wait()
        for each, data in zip(several, results, strict=True):
            assert (data == each.size).all()
    for each in plain:
        each.Free()


def test_the_world_itself() -> None:
    comm = Intracomm(WORLD, timeout=TIMEOUT)
    check(comm)
    check(Intracomm(comm, timeout=TIMEOUT))


def test_two_objects_over_one_communicator(comm: Intracomm) -> None:
    """They share what is private to the communicator, whatever their settings."""
    tree, native = Intracomm(comm, algorithm="tree", timeout=9), Intracomm(comm, algorithm="native")
    assert tree._scope.channel is native._scope.channel is comm._scope.channel
    for _ in range(3):
        for face in (comm, tree, native):
            check(face)
            check(face, 3000)
    kept = [face.Iallreduce(MPI.IN_PLACE, np.ones(4)) for face in (tree, comm, native)]
    for request in reversed(kept):
        request.Wait()


# Making communicators from ours ---------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Intracomm], Any]] = {
    "Split": lambda c: c.Split(c.rank % 2, -c.rank),
    "Split_type": lambda c: c.Split_type(MPI.COMM_TYPE_SHARED),
    "Dup": lambda c: c.Dup(),
    "Dup_with_hints": lambda c: c.Dup(MPI.INFO_ENV),
    "Dup_with_info": lambda c: c.Dup_with_info(MPI.INFO_ENV),
    "Clone": lambda c: c.Clone(),
    "Create": lambda c: c.Create(c.Get_group().Incl(range(1, c.size))),
    "Create_group": lambda c: c.Create_group(c.Get_group().Excl([0])) if c.rank else MPI.COMM_NULL,
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_made_of_ours_is_ours(comm: Intracomm, name: str) -> None:
    parent = Intracomm(comm, algorithm="recursive_doubling", timeout=13)
    for _ in range(3):
        made = MAKERS[name](parent)
        if name.startswith("Create") and comm.rank == 0:
            assert made == MPI.COMM_NULL
            continue
        assert type(made) is mpicoll.Intracomm
        assert (made.algorithm, made.timeout) == ("recursive_doubling", 13)
        assert made != comm
        check(made)
        made.Free()
        assert made == MPI.COMM_NULL
    check(comm)


def test_what_is_made_of_ours_knows_what_its_ranks_know_already(comm: Intracomm) -> None:
    """Reversed, in parts, of parts, and when the first one is gone: as if all had been found out anew."""
    first = comm.Dup()
    reversed_ranks = first.Split(0, -first.rank)
    part = reversed_ranks.Split(reversed_ranks.rank % 2)
    first.Free()
    for made in (reversed_ranks, part):
        plain = MPI.Intracomm(made).Dup()
        anew = Intracomm(plain)
        ours, wanted = made.channel, anew.channel
        assert (ours.check, ours.polls, ours.is_alone, ours.apart) == (
            wanted.check,
            wanted.polls,
            wanted.is_alone,
            wanted.apart,
        )
        assert (ours.node is None) == (wanted.node is None)
        if ours.node is not None and wanted.node is not None:
            assert (ours.node.segments, ours.node.reach) == (wanted.node.segments, wanted.node.reach)
            assert (ours.node.peers.table[:, : words.STAGES] == wanted.node.peers.table[:, : words.STAGES]).all()
        for count in (3, 5000, 300_000):
            check(made, count)
        anew.Free()
    part.Free()
    reversed_ranks.Free()


def test_a_full_segment_of_one_rank_counts_for_all(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new communicator has its common memory in a file then, and copies between processes."""
    if comm.channel.node is None or not comm.channel.node.segments:
        pytest.skip("no segments here")
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(numpy_allocator, "empty", np.empty)
        made = comm.Dup()
    assert made.channel.node is not None
    assert not made.channel.node.segments
    for count in (3, 5000, 300_000):
        check(made, count)
    again = made.Dup()
    check(again, 300_000)
    again.Free()
    made.Free()


def test_nonblocking_dup(comm: Intracomm) -> None:
    made, request = comm.Idup()
    request.Wait()
    check(Intracomm(made, timeout=TIMEOUT))
    made.Free()


def test_what_one_rank_asks_a_duplicate_changes_nothing(comm: Intracomm) -> None:
    """Another object of the communicator has made the channel, from which all ranks go on alike."""
    made, request = comm.Idup()
    request.Wait()
    other = Intracomm(made)
    if comm.rank == 0:
        assert made.choice("allreduce", 8)
    part = made.Split(0, -made.rank)
    check(part, 5000)
    part.Free()
    other.Free()


def test_ranks_without_a_colour_get_no_communicator(comm: Intracomm) -> None:
    made = comm.Split(MPI.UNDEFINED if comm.rank == 0 else 5, comm.rank)
    assert (made == MPI.COMM_NULL) == (comm.rank == 0)
    if made != MPI.COMM_NULL:
        check(made)
        made.Free()


def test_the_rest_of_mpi4py_still_works(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    assert (comm.Get_size(), comm.Get_rank()) == (WORLD.size, WORLD.rank)
    assert comm.Get_group().size == size
    received = np.zeros(1)
    comm.Sendrecv(np.array([float(rank)]), (rank + 1) % size, recvbuf=received, source=(rank - 1) % size)
    assert received == (rank - 1) % size
    everything = np.zeros(size)
    comm.Alltoall(np.full(size, float(rank)), everything)
    assert (everything == np.arange(size)).all()
    scanned = np.zeros(1)
    comm.Scan(np.ones(1), scanned)
    assert scanned == rank + 1
    window = MPI.Win.Create(received, comm=comm)
    window.Free()
    check(comm)


# Freeing --------------------------------------------------------------------------------------------------------------


def test_what_was_freed_is_refused() -> None:
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=TIMEOUT)
    again = Intracomm(plain, timeout=TIMEOUT)
    check(comm)
    comm.Free()
    for face in (comm, again):
        with pytest.raises(CommunicatorBroken, match="it was freed") as caught:
            face.Allreduce(MPI.IN_PLACE, np.ones(3))
        assert isinstance(caught.value, MPI.Exception)
        assert caught.value.Get_error_class() == MPI.ERR_COMM
        with pytest.raises(CommunicatorBroken, match="it was freed"):
            face.Barrier()


def test_many_communicators_made_used_and_freed(comm: Intracomm) -> None:
    """With two contexts each, more than MPICH has, if none came back."""
    turns = 1100 if comm.size <= 4 and "MPICH" in MPI.Get_library_version() else 300
    for turn in range(turns):
        made = comm.Split(comm.rank % 2 if turn % 2 else 0, comm.rank)
        data = np.full(3, turn, np.int64)
        made.Allreduce(MPI.IN_PLACE, data)
        assert data[0] == made.size * turn
        if turn % 4 > 1:
            assert made.channel  # so that it is freed, and not kept for the next communicator
        made.Free()


def test_news_of_a_freed_communicator_reach_no_other(comm: Intracomm) -> None:
    """Refusals are told to ranks that need not hear of them; smaller communicators then get the same context."""
    for turn in range(20):
        plain = WORLD.Dup()
        own = Intracomm(plain, timeout=TIMEOUT)
        with pytest.raises(ValueError, match="sendbuf has 3 elements, but recvbuf 4"):
            own.Allreduce(np.zeros(3), np.zeros(4))
        if turn == 0:
            check(own)
        plain.Free()
        parts = [WORLD.Split(WORLD.rank % 2), *(WORLD.Split(WORLD.rank // 2) for _ in range(3))]
        check(Intracomm(parts[-1], timeout=TIMEOUT))
        for part in parts:
            part.Free()


def test_freeing_by_the_plain_handle(comm: Intracomm) -> None:
    for turn in range(50):
        plain = WORLD.Split(0, comm.rank)
        ours = Intracomm(plain, timeout=TIMEOUT)
        data = np.full(2000, 1.0)
        ours.Allreduce(MPI.IN_PLACE, data)
        ours.Iallreduce(MPI.IN_PLACE, data).Wait()
        assert (data == comm.size**2).all()
        plain.Free()
        if turn % 10 == 0:
            del ours
            gc.collect()


def test_the_world_cannot_be_freed() -> None:
    world = Intracomm(MPI.COMM_WORLD, timeout=TIMEOUT)
    check(world)
    with pytest.raises(MPI.Exception):
        world.Free()
    check(world)


def test_freeing_with_messages_under_way(comm: Intracomm) -> None:
    """MPICH keeps a communicator until they are over, and calls what was attached to it only then."""
    made = comm.Dup()
    check(made)
    began, last = time.monotonic(), comm.size - 1
    if comm.rank == 0:
        given = np.zeros(3)
        request = made.Irecv(given, last, 7)
    if comm.rank == last:
        sent = made.Isend(np.ones(3), 0, 7)
    other = comm.Dup()
    if comm.rank == 1:
        never = other.Irecv(np.zeros(1), 0, 8)
    check(other)
    for each in (made, other):
        each.Free()
    MPI.COMM_WORLD.Barrier()
    assert time.monotonic() - began < 30
    if comm.rank == 0:
        request.Wait()
        assert (given == 1).all()
    if comm.rank == last:
        sent.Wait()
    if comm.rank == 1:
        never.Cancel()
        never.Wait()


# The user's own traffic -----------------------------------------------------------------------------------------------


def test_receives_of_anything_from_anybody_catch_nothing_of_ours(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    plain = MPI.Intracomm(comm)
    boxes = np.full((4, 3), -1.0)
    pending = [plain.Irecv(boxes[i], MPI.ANY_SOURCE, MPI.ANY_TAG) for i in range(4)]
    for turn in range(20):
        check(comm)
        check(comm, 3000, algorithm=list(ALGORITHMS["allreduce"])[turn % len(ALGORITHMS["allreduce"])])
        request = comm.Iallreduce(MPI.IN_PLACE, np.ones(10))
        request.Wait()
    assert not any(request.Test() for request in pending)
    assert (boxes == -1).all()
    assert not plain.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    comm.Barrier()
    sends = [plain.Isend(np.full(3, 10.0 * rank + i), (rank + 1) % size, i) for i in range(4)]
    check(comm)
    MPI.Request.Waitall(pending + sends)
    assert (boxes[:, 0] == 10.0 * ((rank - 1) % size) + np.arange(4)).all()


def test_the_users_own_collectives_in_between(comm: Intracomm) -> None:
    plain = MPI.Intracomm(comm)
    for turn in range(10):
        given, result = np.full(5, float(turn)), np.zeros(5)
        pending = plain.Iallreduce(given, result)
        check(comm)
        other = np.ones(5)
        plain.Allreduce(MPI.IN_PLACE, other)
        assert (other == comm.size).all()
        ours = comm.Iallreduce(MPI.IN_PLACE, other)
        plain.Barrier()
        ours.Wait()
        assert (other == comm.size**2).all()
        pending.Wait()
        assert (result == comm.size * turn).all()


def test_messages_of_the_users_with_every_tag(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    highest = comm.Get_attr(MPI.TAG_UB)
    tags = [0, 1, 2, 3, 77, highest // 2, highest - 1, highest]
    got = np.zeros(len(tags))
    receives = [comm.Irecv(got[i : i + 1], (rank - 1) % size, tag) for i, tag in enumerate(tags)]
    check(comm)
    sends = [comm.Isend(np.full(1, float(i)), (rank + 1) % size, tag) for i, tag in enumerate(tags)]
    check(comm)
    MPI.Request.Waitall(receives + sends)
    assert (got == np.arange(len(tags))).all()


# Very many calls ------------------------------------------------------------------------------------------------------


def test_ten_thousand_tiny_calls(comm: Intracomm) -> None:
    """Nobody waits in between, so fast ranks run ahead as far as the algorithm lets them."""
    turns = 10_000 if comm.size <= 4 else 2_500
    one, result = np.zeros(1), np.zeros(1)
    for turn in range(turns):
        one[0] = turn + comm.rank
        comm.Allreduce(one, result)
        assert result[0] == comm.size * turn + comm.size * (comm.size - 1) // 2


def test_a_root_that_runs_ahead(comm: Intracomm) -> None:
    data = np.zeros(2)
    for turn in range(1000):
        data[:] = turn if comm.rank == 0 else -1
        comm.Bcast(data, 0)
        assert (data == turn).all()
    result = np.zeros(2)
    for turn in range(1000):
        comm.Reduce(np.full(2, float(turn)), result, root=1)
        assert comm.rank != 1 or (result == comm.size * turn).all()


# Threads and callbacks ------------------------------------------------------------------------------------------------


def needs_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI_THREAD_MULTIPLE")


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread; the list gets the result, or the exception."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_two_threads_on_one_communicator(comm: Intracomm) -> None:
    """The second thread is refused at once; the first one's call is not disturbed."""
    needs_threads()
    token, data = np.zeros(1), np.full(4000, comm.rank + 1.0)
    if comm.rank == 1:
        WORLD.Recv(token, 0, 79)
        comm.Allreduce(MPI.IN_PLACE, data)
    else:
        thread, outcome = in_thread(lambda: comm.Allreduce(MPI.IN_PLACE, data))
        if comm.rank == 0:
            time.sleep(0.1)
            calls: list[Callable[[], Any]] = [
                lambda: comm.Allreduce(MPI.IN_PLACE, np.ones(3)),
                comm.Barrier,
                lambda: comm.Iallreduce(MPI.IN_PLACE, np.ones(3)),
                lambda: comm.Allreduce_init(MPI.IN_PLACE, np.ones(3)),
                lambda: comm.Allreduce(MPI.IN_PLACE, data),
            ]
            for call in calls:
                with pytest.raises(RuntimeError, match="another collective is being called on this communicator"):
                    call()
            WORLD.Send(token, 1, 79)
        thread.join(30)
        assert outcome == [None]
    assert (data == comm.size * (comm.size + 1) / 2).all()
    check(comm)


def test_threads_on_communicators_of_their_own() -> None:
    needs_threads()
    plain = [WORLD.Dup() for _ in range(3)]
    several = [Intracomm(each, timeout=TIMEOUT) for each in plain]

    def work(comm: Intracomm) -> None:
        for _ in range(20):
            check(comm)
            check(comm, 3000)
            request = comm.Iallreduce(MPI.IN_PLACE, data := np.ones(5))
            request.Wait()
            assert (data == comm.size).all()

    started = [in_thread(lambda comm=comm: work(comm)) for comm in several]
    for thread, _ in started:
        thread.join(60)
    assert [outcome for _, outcome in started] == [[None]] * 3
    for each in plain:
        each.Free()


def test_a_call_from_inside_an_operation_is_refused(comm: Intracomm) -> None:
    caught: list[Exception] = []

    def nosy(invec: Any, inoutvec: Any, datatype: MPI.Datatype) -> None:
        try:
            comm.Barrier()
        except RuntimeError as error:
            caught.append(error)
        total = np.frombuffer(inoutvec)
        total += np.frombuffer(invec)

    op = MPI.Op.Create(nosy, True)
    data = np.ones(3)
    comm.Allreduce(MPI.IN_PLACE, data, op)
    op.Free()
    assert (data == comm.size).all()
    assert all("another collective is being called" in str(error) for error in caught)
    anywhere = np.array(len(caught))
    comm.Allreduce(MPI.IN_PLACE, anywhere)
    assert anywhere > 0
    check(comm)


@pytest.mark.parametrize("settings", [{"timeout": -1}, {"algorithm": "rings"}], ids=["timeout", "algorithm"])
def test_settings_that_are_wrong_on_one_rank_are_an_error_on_all(settings: dict[str, Any]) -> None:
    """At once: making a communicator is collective, and the others had waited for the rank that raised."""
    plain = WORLD.Dup()
    wrong = WORLD.rank == WORLD.size - 1
    name = next(iter(settings))
    begin = time.monotonic()
    if wrong:
        with pytest.raises(ValueError, match=f"{name}: "):
            Intracomm(plain, **settings)
    else:
        comm = Intracomm(plain, timeout=TIMEOUT)
        with pytest.raises(RemoteError, match=f"{name}: "):
            comm.Allreduce(MPI.IN_PLACE, np.ones(3))
    assert time.monotonic() - begin < TIMEOUT / 2
    plain.Free()


@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="others allow many more")
def test_too_many_communicators_are_an_error(comm: Intracomm) -> None:
    comm.Barrier()
    kept = []
    with contextlib.suppress(MPI.Exception):
        while True:
            kept.append(MPI.COMM_WORLD.Dup())
    with pytest.raises(MPI.Exception):
        comm.Split(0)
    for one in kept:
        one.Free()
    made = comm.Split(0)
    made.Barrier()
    made.Free()


@pytest.mark.parametrize("nodes", ["", "2", "1"])
def test_two_threads_make_communicators_of_all_and_of_some_ranks(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI hangs after some ten of these where a rank is ahead of the others, also with mpi4py alone."""
    needs_threads()
    monkeypatch.setenv("MPICOLL_NODES", nodes)
    parents = [Intracomm(WORLD.Dup(), timeout=TIMEOUT) for _ in range(2)]

    def make(number: int) -> bool:
        parent, chance = parents[number], random.Random(number)
        for turn in range(200):
            first = parent.Dup() if chance.random() < 0.5 else parent.Split(parent.rank % 2)
            second = first.Dup()
            if turn % 50 == 0:  # calls let slow ranks catch up
                check(second)
            second.Free()
            first.Free()
        return True

    thread, outcome = in_thread(lambda: make(1))
    assert make(0)
    thread.join(60)
    assert outcome == [True]
    for parent in parents:
        parent.Free()
