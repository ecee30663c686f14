"""Channels of freed communicators, which serve the next communicators of the same ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.communicator import channel_cache, closing, spare_agreement, spare_channels, timed_agreement
from mpicoll.communicator.one_rank_channels import MAX_KEPT
from mpicoll.errors import CollectiveTimeout, CommunicatorBroken

pytestmark = pytest.mark.mpi


@pytest.fixture
def comm():
    """A communicator whose channel has no spares yet."""
    plain = MPI.COMM_WORLD.Dup()
    yield mpicoll.Intracomm(plain)
    plain.Free()


def _channel(comm):
    return comm._scope.channel  # not comm.channel, which lends it


def _check(comm):
    """Make calls of several kinds, and check the results."""
    ranks = np.arange(comm.size)
    total = np.full(100, float(comm.rank))
    comm.Allreduce(MPI.IN_PLACE, total)
    assert (total == ranks.sum()).all()
    parts = np.empty(comm.size, np.int64)
    comm.Iallgather(np.array([comm.rank]), parts).Wait()
    assert parts.tolist() == ranks.tolist()
    assert comm.allreduce({comm.rank}, lambda a, b: a | b) == set(ranks.tolist())
    block, got = np.full((comm.size, 3), comm.rank), np.empty((comm.size, 3), np.int64)
    types = [MPI.INT64_T.Create_contiguous(3).Commit() for _ in ranks]
    places = (ranks * 24).tolist()
    comm.Alltoallw([block, [1] * comm.size, places, types], [got, [1] * comm.size, places, types])
    assert (got == ranks[:, None]).all()
    for each in types:
        each.Free()


def _together(comm):
    return comm.Split(0, comm.rank)


def test_communicators_of_the_same_ranks_share_a_channel_in_turn(comm):
    known = set()
    for _ in range(20):
        made = _together(comm)
        known.add(id(_channel(made)))
        _check(made)
        made.Free()
    assert len(known) == 1


def test_two_that_live_at_the_same_time_have_two_channels(comm):
    for _ in range(3):
        first, second = _together(comm), _together(comm)
        assert _channel(first) is not _channel(second)
        assert _channel(first).comm != _channel(second).comm
        _check(second)
        _check(first)
        first.Free()
        second.Free()


def test_parts_of_a_grid_of_a_grid(comm):
    channels = set()
    for _ in range(4):
        grid = comm.Create_cart(MPI.Compute_dims(comm.size, 2))
        parts = [grid.Sub([True, False]), grid.Sub([False, True])]
        grid.Free()
        comm.Barrier()  # a part becomes a spare only if the grid has become one, for which all ranks have to free it
        channels |= {id(_channel(part)) for part in parts}
        for part in parts:
            assert isinstance(part, mpicoll.Cartcomm)
            _check(part)
            part.Free()
    assert len(channels) == 2


@pytest.mark.parametrize("periodic", [False, True])
def test_neighbors_are_those_of_the_grid(comm, periodic):
    for make in (_together, lambda comm: comm.Create_cart([comm.size]), _together) * 2:
        make(comm).Free()
        grid = comm.Create_cart([comm.size], [periodic])
        got = np.full((2, 1), -1)
        grid.Neighbor_allgather(np.array([grid.rank]), got)
        wanted = [rank if rank >= 0 else -1 for rank in grid.Shift(0, 1)]
        assert got[:, 0].tolist() == wanted
        grid.Free()


def test_ranks_in_another_order_get_a_channel_of_their_own(comm):
    made = comm.Split(0, comm.rank)
    channel = _channel(made)
    made.Free()
    turned = comm.Split(0, -comm.rank)
    assert (_channel(turned) is channel) == (comm.size == 1)
    _check(turned)
    turned.Free()


def test_a_freed_communicator_cannot_be_used_while_another_one_has_its_channel(comm):
    made = _together(comm)
    second = mpicoll.Intracomm(MPI.Intracomm(made))
    made.Free()
    other = _together(comm)
    for handle in (made, second):
        for call in (handle.Barrier, handle.Ibarrier, handle.barrier, lambda handle=handle: handle.algorithms("bcast")):
            with pytest.raises(CommunicatorBroken, match="it was freed"):
                call()
    _check(other)
    other.Free()


def test_what_a_persistent_request_holds_is_not_given_away(comm):
    made = _together(comm)
    channel, values = _channel(made), np.ones(4)
    request = made.Allreduce_init(MPI.IN_PLACE, values)
    made.Free()
    other = _together(comm)
    assert _channel(other) is not channel
    with pytest.raises(CommunicatorBroken, match="it was freed"):
        request.Start()
    _check(other)
    other.Free()


def test_a_channel_that_a_tool_refers_to_on_one_rank_is_freed_on_all(comm):
    made = _together(comm)
    channel = _channel(made)
    if comm.rank == comm.size - 1:
        assert made.channel is channel
    made.Free()
    assert channel.broken == "it was freed"


def test_a_channel_with_a_refused_call_is_freed(comm):
    made = _together(comm)
    channel = _channel(made)
    with pytest.raises(TypeError, match="op"):
        made.Allreduce(MPI.IN_PLACE, np.ones(3), "sum")
    made.Free()
    assert channel.broken == "it was freed"
    made = _together(comm)
    _check(made)
    made.Free()


def _freed_channel(comm):
    """Return the channel of a communicator that has been freed."""
    made = _together(comm)
    channel = _channel(made)
    made.Free()
    return channel


def _check_next_ones(comm, *channels):
    """Check that the next communicators work, and do not get these channels."""
    for _ in range(3):
        made = _together(comm)
        assert _channel(made) not in channels
        _check(made)
        made.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", ["spares", "calls"])
def test_a_rank_with_other_spares_or_calls_gets_a_new_channel_with_the_others(comm, other):
    channel = _freed_channel(comm)
    if comm.rank == 0 and other == "spares":
        _channel(comm).spares._kept.clear()
    elif comm.rank == 0:
        channel.dispatch.count()
    _check_next_ones(comm, channel)


@pytest.mark.mpi(min_size=2)
def test_what_not_all_ranks_have_freed_yet_is_refused(comm):
    made = _together(comm)
    _check(made)
    channel = _channel(made)
    other = mpicoll.Intracomm(MPI.Intracomm(made))
    other.Barrier()
    if comm.rank == 0:
        made.Free()
        with pytest.raises(CommunicatorBroken, match="freed"):
            other.Barrier()
        assert channel.broken is not None
    MPI.Intracomm(comm).Barrier()
    if comm.rank != 0:
        made.Free()
    again = _together(comm)
    assert _channel(again) is channel
    _check(again)
    again.Free()


def test_an_interrupted_free_is_ended_later(comm, monkeypatch):
    made = _together(comm)
    _check(made)
    channel, kept = _channel(made), len(closing._kept)

    def interrupt():
        raise KeyboardInterrupt

    if comm.rank == 0:
        monkeypatch.setattr(closing.progress_engine, "progress", interrupt)
        with contextlib.suppress(KeyboardInterrupt):  # where the others come at once, there is no wait
            made.Free()
        monkeypatch.undo()
    else:
        time.sleep(0.1)
        made.Free()
    MPI.Intracomm(comm).Barrier()
    again = _together(comm)
    assert _channel(again) is channel
    _check(again)
    again.Free()
    assert len(closing._kept) == kept


def test_communicators_that_the_garbage_collector_frees(comm):
    """At any place: also while spares are looked for, or channels are closed."""

    class Owner:
        def __init__(self, made):
            self.made, self.myself = made, self
            made.Barrier()

        def __del__(self):
            self.made.Free()

    for lock in (channel_cache._of_one._lock, _channel(comm).spares._lock, closing._lock):
        Owner(mpicoll.Intracomm(MPI.COMM_SELF.Dup()))
        Owner(_together(comm))
        with lock:
            gc.collect()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("node", ["on", "off"])
def test_communicators_are_freed_in_any_order_and_before_others_come(node, monkeypatch):
    """Free does not wait for the other ranks: else this would hang."""
    monkeypatch.setenv("MPICOLL_NODE", node)
    monkeypatch.setattr(closing, "PATIENCE_SECONDS", 0.001)
    plain = MPI.COMM_WORLD.Dup()
    comm = mpicoll.Intracomm(plain)
    _check(comm)
    made, channels = [], set()
    for _ in range(5):
        made = [_together(comm) for _ in range(3)]
        for each in made:
            _check(each)
            channels.add(id(_channel(each)))
        for number in np.roll(np.arange(3), comm.rank):
            made[number].Free()
    made = _together(comm)
    _check(made)
    if comm.rank == 0:
        made.Free()
        comm.send("go on", 1)
    elif comm.rank == 1:
        assert comm.recv() == "go on"
        made.Free()
    else:
        made.Free()
    while closing._closing:  # all have freed all
        closing.go_on()
        time.sleep(0.001)
    assert not closing._kept
    assert node == "off" or len(channels) == 3
    plain.Free()


@pytest.mark.mpi(min_size=2)
def test_spares_of_a_communicator_that_is_broken_on_one_rank_hold_up_nobody():
    plain = MPI.COMM_WORLD.Dup()
    own = mpicoll.Intracomm(plain)
    channel = _freed_channel(own)
    assert channel.broken is None
    plain.Barrier()  # on all ranks the channel is a spare
    if own.rank == 0:
        _channel(own).break_off("this test says so")
    plain.Free()
    assert channel.broken is not None


@pytest.mark.mpi(min_size=2)
def test_settings_of_each_rank_are_kept(comm):
    made = _together(comm)
    made.Free()
    again = mpicoll.Intracomm(MPI.Intracomm(comm), timeout=50.0 + comm.rank)
    for _ in range(3):
        made = _together(again)
        assert made.timeout == 50.0 + comm.rank
        _check(made)
        made.Free()


@pytest.mark.mpi(min_size=2)
def test_a_spare_that_one_rank_would_use_with_other_settings_is_given_up(comm):
    channel = _freed_channel(comm)
    again = mpicoll.Intracomm(MPI.Intracomm(comm), timeout=50.0 if comm.rank == 0 else comm.timeout)
    _check_next_ones(again, channel)


def _alone(comm):
    return comm.Split(comm.rank, 0)


def test_a_communicator_of_one_rank_gets_a_channel_when_it_is_used(comm):
    grid = comm.Create_cart([1, comm.size], [True, False])
    for made in (grid.Sub([True, False]), _alone(comm), _alone(comm).Dup()):
        assert made.size == 1
        assert "_scope" not in vars(made)
        data = np.ones(3)
        made.Allreduce(MPI.IN_PLACE, data)
        assert data.tolist() == [1.0] * 3
        assert made.allgather(5) == [5]
        assert made.algorithm == comm.algorithm
        made.Free()
        with pytest.raises(CommunicatorBroken, match="it was freed"):
            made.Allreduce(MPI.IN_PLACE, data)
    unused = _alone(comm)
    unused.Free()
    with pytest.raises(CommunicatorBroken, match="it was freed"):
        unused.Barrier()
    grid.Free()


@pytest.mark.parametrize("free", [lambda comm: MPI.Intracomm(comm).Free(), lambda comm: comm.Disconnect()])
@pytest.mark.parametrize("used", [False, True])
def test_a_communicator_of_one_rank_that_another_object_has_freed(comm, free, used):
    """Its handle may be that of the next communicator."""
    for made in (_alone(comm), MPI.COMM_SELF.Dup(), _alone(comm).Dup()):
        made = made if isinstance(made, mpicoll.Intracomm) else mpicoll.Intracomm(made)
        if used:
            made.Barrier()
        free(made)
        other = MPI.COMM_SELF.Dup()
        with pytest.raises(CommunicatorBroken, match="it was freed") as caught:
            made.Allreduce(MPI.IN_PLACE, np.ones(3))
        assert isinstance(caught.value, MPI.Exception)
        other.Free()


def test_number_of_channels_of_one_rank_is_bounded():
    for number in range(3 * MAX_KEPT):
        made = mpicoll.Intracomm(MPI.COMM_SELF.Dup(), timeout=1 + number)
        assert made.allreduce(number) == number
        made.Free()
    kept = channel_cache._of_one._kept
    assert len(kept) == MAX_KEPT
    assert [key[0].timeout for key, _ in kept] == [3 * MAX_KEPT - place for place in reversed(range(MAX_KEPT))]


def test_a_channel_of_one_rank_is_not_used_in_another_environment(monkeypatch):
    def check():
        made = mpicoll.Intracomm(MPI.COMM_SELF.Dup())
        found = _channel(made).check
        made.Free()
        return found

    assert check() == "default"
    monkeypatch.setenv("MPICOLL_CHECK", "full")
    assert check() == "full"
    monkeypatch.setenv("MPICOLL_CHECK", "some")
    with pytest.raises(ValueError, match="MPICOLL_CHECK"):
        check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("used", [False, True])
def test_a_forked_child_makes_no_call_on_a_communicator_of_one_rank(comm, used):
    made = _alone(comm)
    if used:
        made.Barrier()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            try:
                made.Allreduce(MPI.IN_PLACE, np.ones(3))
            except CommunicatorBroken as error:
                status = 0 if "forked" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made.Free()


MAKERS = {
    "Dup": lambda comm: comm.Dup(),
    "Idup": lambda comm: comm.Idup(),
    "Split": lambda comm: comm.Split(0, 0),
    "Create": lambda comm: comm.Create(comm.Get_group()),
    "Create_group": lambda comm: comm.Create_group(comm.Get_group()),
    "Create_cart": lambda comm: comm.Create_cart([comm.size]),
    "Sub": lambda comm: comm.Sub([True]),
    "Intracomm": lambda comm: mpicoll.Intracomm(MPI.COMM_SELF),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("name", MAKERS)
def test_a_forked_child_makes_no_communicator(comm, name):
    """It raises before it is in the MPI library, where it would wait for ever, or be taken for its parent."""
    parent = comm.Create_cart([comm.size]) if name == "Sub" else comm
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(10)
        with contextlib.suppress(BaseException):
            try:
                MAKERS[name](parent)
            except CommunicatorBroken as error:
                status = 0 if "forked" in str(error) else 2
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.Barrier()


def test_communicators_of_one_rank_share_channels_in_turn(comm):
    first = _alone(comm)
    _check(first)
    channel = _channel(first)
    first.Free()
    parts = comm.Split(comm.rank % 2, 0)  # from another communicator, too
    second = parts.Split(parts.rank, 0)
    _check(second)
    assert _channel(second) is channel
    other = mpicoll.Intracomm(MPI.COMM_SELF.Dup(), timeout=5)
    assert _channel(other) is not channel
    assert other.timeout == 5
    for each in (second, parts, other):
        each.Free()


@pytest.mark.parametrize(
    "settings", [{"algorithm": ["ring"]}, {"algorithm": "rings"}, {"timeout": 0}, {"timeout": "1"}]
)
def test_wrong_settings_of_a_communicator_of_one_rank(settings):
    (name,) = settings
    plain = MPI.COMM_SELF.Dup()
    with pytest.raises((TypeError, ValueError), match=f"{name}: "):
        mpicoll.Intracomm(plain, **settings)
    again = mpicoll.Intracomm(plain)
    assert again.allreduce(2) == 2
    plain.Free()


def test_random_choices_begin_anew(comm):
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    seen = set()
    for _ in range(3):
        made, out = _together(comm), np.empty(1000, np.float32)
        made.Allreduce(values, out, compression="int4")
        seen.add(out.tobytes())
        made.Free()
    assert len(seen) == 1


@pytest.mark.mpi(min_size=2)
def test_number_of_spares_is_bounded(comm):
    made = [_together(comm) for _ in range(spare_channels.MAX_ALIKE + 3)]
    channels = [_channel(each) for each in made]
    for each in made:
        each.Free()
    kept = sum(channel.broken is None for channel in channels)
    assert kept == spare_channels.MAX_ALIKE
    made = _together(comm)
    assert _channel(made) in channels
    _check(made)
    made.Free()


@pytest.mark.mpi(min_size=2)
def test_ranks_without_a_communicator_take_part(comm):
    """In calls of which each leaves out other ranks, in an order in which some ranks are far ahead."""
    known = set()
    for turn in range(40):
        left_out = turn % comm.size
        made = comm.Split(MPI.UNDEFINED if comm.rank == left_out else 0, comm.rank)
        assert (made == MPI.COMM_NULL) == (comm.rank == left_out)
        if made != MPI.COMM_NULL:
            known.add(_channel(made))
            if turn % 3:
                _check(made)
            made.Free()
    assert len(known) == comm.size - 1


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_is_named(comm, monkeypatch):
    monkeypatch.setattr(timed_agreement, "MEETING_SECONDS", 0.3)
    channel, last = _channel(comm), comm.size - 1
    if channel.node is None:
        pytest.skip("the ranks share no memory")
    if comm.rank != last:
        with pytest.raises(CollectiveTimeout, match=rf"\[{last}\] did not come within 0.3 s") as caught:
            spare_agreement.meet(channel)
        assert caught.value.missing_ranks == (last,)
    MPI.Intracomm(comm).Barrier()
    if comm.rank == last:
        spare_agreement.meet(channel)
    made = _together(comm)
    _check(made)
    made.Free()


@pytest.mark.mpi(min_size=2)
def test_spares_that_ranks_keep_in_different_orders_are_used(comm):
    """Threads free communicators in any order: the spares are in another order on rank 0, and numbered in sequence."""
    made = [_together(comm) for _ in range(2)]
    first, second = map(_channel, made)
    _check(made[0])  # calls are numbered, too
    for each in made if comm.rank == 0 else reversed(made):
        MPI.Intracomm(comm).Barrier()
        _channel(comm).spares.keep(_channel(each).origin.key, _channel(each))
    again = [_together(comm) for _ in range(3)]
    assert [_channel(each) in (first, second) for each in again] == [True, True, False]
    for each in again:
        _check(each)
        each.Free()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_find_different_spares_give_them_up(comm):
    made = [_together(comm) for _ in range(2)]
    first, second = map(_channel, made)
    own = second if comm.rank == 0 else first
    _channel(comm).spares.keep(own.origin.key, own)
    _check_next_ones(comm, first, second)


def test_threads_free_communicators_in_any_order(comm):
    def use_and_free(made, delay):
        time.sleep(delay)
        assert made.allreduce(1) == comm.size
        made.Free()

    channels = set()
    for turn in range(10):
        made = [comm.Dup() for _ in range(3)]
        channels |= {id(_channel(each)) for each in made}
        delays = [0.002 * ((place + comm.rank + turn) % 3) for place in range(3)]
        threads = [threading.Thread(target=use_and_free, args=each) for each in zip(made, delays, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(channels) == 3


@pytest.mark.parametrize("used", [False, True])
def test_grids_that_any_object_frees(comm, used):
    for turn in range(200):
        grid = comm.Create_cart([comm.size - 1 or 1])
        if grid != MPI.COMM_NULL:
            if used:
                grid.Barrier()
            (grid.Free, MPI.Intracomm(grid).Free, grid.Disconnect)[turn % 3]()
        alone = comm.Create_cart([1])
        if alone != MPI.COMM_NULL:
            if used:
                alone.Barrier()
            (alone.Free, MPI.Intracomm(alone).Free, alone.Disconnect)[turn % 3]()


def test_offers_differ_by_channel_and_by_calls():
    offers = {spare_agreement.offer_of(session, calls) for session in range(100) for calls in range(100)}
    assert len(offers) == 10_000
    assert min(offers) > 0
    assert max(offers) < 1 << 62


@pytest.mark.mpi(min_size=2)
def test_a_channel_is_kept_after_messages_about_late_ranks(comm):
    made = _together(comm)
    channel = _channel(made)
    if comm.rank == 0:
        channel.watchdog._mailbox.tell_all({"kind": "waiting", "number": 0, "code": 0, "text": "", "progress": ""})
    made.Free()
    for _ in range(3):
        again = _together(comm)
        assert _channel(again) is channel
        _check(again)
        again.Free()
