"""What belongs to a communicator: tag slots, the plan cache, news that several threads read."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives.message_requests import MessageRequest
from mpicoll.collectives.native_requests import NativeRequest
from mpicoll.communicator import channel as channels
from mpicoll.communicator import environment_agreement, kept_plans, timed_agreement
from mpicoll.consensus import wait_politely
from mpicoll.errors import CollectiveTimeout, MismatchError, RemoteError
from mpicoll.progress import control_messages, progress_engine, wait_reports
from mpicoll.progress.call_signature import Signature
from mpicoll.progress.control_messages import CONTROL_TAG
from mpicoll.progress.watchdog import Watchdog
from mpicoll.schedules import ALGORITHMS, find, register
from tests import extent
from tests.mpi.conftest import TIMEOUT
from tests.mpi.test_communicators import in_thread, needs_threads

HALF = 24
"""Slots for persistent operations in these tests."""


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Intracomm]:
    """A communicator with few tag slots."""

    class Few(channels.Tags):
        def __init__(self, upper_bound: int) -> None:
            super().__init__(upper_bound)
            self.slots = 2 * HALF

    monkeypatch.setattr(channels, "Tags", Few)
    plain = MPI.COMM_WORLD.Dup()
    yield Intracomm(plain, timeout=20, algorithm="ring")
    plain.Free()


def use(request: Any, data: np.ndarray, comm: Intracomm) -> None:
    data[:] = comm.rank
    request.Start()
    request.Wait()
    assert (data == sum(range(comm.size))).all()


# Slots of persistent operations ---------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_slot_is_not_given_again_while_its_operation_lives(few_slots: Intracomm) -> None:
    """One operation outlives many others of the same signature."""
    old, young = np.zeros(3), np.zeros(3)
    kept = few_slots.Allreduce_init(MPI.IN_PLACE, old)
    for _ in range(5 * HALF):
        made = few_slots.Allreduce_init(MPI.IN_PLACE, young)
        assert made._slot != kept._slot
        use(made, young, few_slots)
        use(kept, old, few_slots)
        made.Free()
    kept.Free()


@pytest.mark.mpi(min_size=2)
def test_a_slot_is_free_only_when_all_ranks_have_freed_it(few_slots: Intracomm) -> None:
    """Each rank keeps another operation for good; all take the same slots nevertheless."""
    comm, data, late, taken = few_slots, np.zeros(3), [], []
    for turn in range(4 * HALF):
        made = comm.Allreduce_init(MPI.IN_PLACE, data)
        taken.append(made._slot)
        use(made, data, comm)
        if turn == comm.rank:
            late.append(made)
        else:
            made.Free()
    lowest, highest = np.array(taken), np.array(taken)
    comm.Allreduce(MPI.IN_PLACE, lowest, MPI.MIN)
    comm.Allreduce(MPI.IN_PLACE, highest, MPI.MAX)
    assert (lowest == highest).all()
    assert not set(taken[HALF:]) & set(taken[: comm.size])
    for request in late:
        request.Free()


@pytest.mark.mpi(min_size=2)
def test_persistent_operations_without_a_tag_slot_are_those_of_the_mpi_library(few_slots: Intracomm) -> None:
    """On all ranks, also where one rank alone has not freed its own; compressed ones are refused."""
    data = np.zeros(3)
    kept = [few_slots.Allreduce_init(MPI.IN_PLACE, data) for _ in range(HALF)]
    if few_slots.rank:
        for request in kept:
            request.Free()
    more = [few_slots.Allreduce_init(MPI.IN_PLACE, data, algorithm=name) for name in (None, "ring", "native")]
    assert {type(request) for request in more} == {NativeRequest}
    for request in more:
        use(request, data, few_slots)
    with pytest.raises(RuntimeError, match=f"persistent request: all {HALF} tag slots of the communicator are in use"):
        few_slots.Allreduce_init(MPI.IN_PLACE, np.zeros(3, np.float32), compression="int8")
    for request in kept + more:
        request.Free()
    again = few_slots.Allreduce_init(MPI.IN_PLACE, data)
    assert isinstance(again, MessageRequest)
    use(again, data, few_slots)
    again.Free()


@pytest.mark.mpi(min_size=2)
def test_operations_that_nobody_frees_give_their_slots_back(few_slots: Intracomm) -> None:
    data = np.zeros(3)
    for _ in range(5 * HALF):
        made = few_slots.Allreduce_init(MPI.IN_PLACE, data)
        assert isinstance(made, MessageRequest)
        use(made, data, few_slots)


@pytest.mark.mpi(min_size=2)
def test_operations_in_flight_that_nobody_has_end_and_give_their_slots_back(few_slots: Intracomm) -> None:
    sums = np.full((2 * HALF, 3), few_slots.rank)
    for data in sums:
        few_slots.Allreduce_init(MPI.IN_PLACE, data).Start()
        few_slots.Barrier()
    until = time.monotonic() + 20
    while progress_engine.pending() and time.monotonic() < until:
        progress_engine.progress()
    few_slots.Barrier()
    assert (sums == sum(range(few_slots.size))).all()
    assert isinstance(few_slots.Allreduce_init(MPI.IN_PLACE, sums), MessageRequest)


# The plan cache -------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_the_plan_in_use_stays_while_others_are_dropped(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MAX_PLANS", 4)
    data = np.zeros(5)

    def call() -> None:
        data[:] = comm.rank
        comm.Allreduce(MPI.IN_PLACE, data, algorithm="ring")
        assert (data == sum(range(comm.size))).all()

    call()
    call()
    [hot] = comm.channel.plans.lanes.values()
    for count in range(6, 26):
        others = np.ones(count)
        comm.Allreduce(MPI.IN_PLACE, others, algorithm="ring")
        assert (others == comm.size).all()
        call()
        assert hot.plan.requests, "the plan that is used most was dropped"
        assert hot in comm.channel.plans.lanes.values()


@pytest.mark.mpi(min_size=2)
def test_dropping_a_plan_drops_no_other_shortcut(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MAX_PLANS", 4)
    for count in range(1, 12):
        data = np.ones(count)
        comm.Allreduce(MPI.IN_PLACE, data, algorithm="ring")
        assert (data == comm.size).all()
        lanes = comm.channel.plans.lanes.values()
        assert len(lanes) == min(count, 4)
        assert all(lane.plan.requests for lane in lanes)


# News -----------------------------------------------------------------------------------------------------------------


class Meeting(MPI.Intracomm):
    """A communicator on which two threads that look for a message see it at the same time, if they can."""

    both: threading.Barrier

    def _meet(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.both.wait(0.5)

    def Iprobe(self, *arguments: Any) -> bool:  # type: ignore[override]
        found = super().Iprobe(*arguments)
        self._meet()
        return found

    def Improbe(self, *arguments: Any) -> MPI.Message | None:  # type: ignore[override]
        found = super().Improbe(*arguments)
        self._meet()
        return found


def test_two_threads_read_the_same_news() -> None:
    """One message, two readers: none may wait for a second message."""
    needs_threads()
    comm = Meeting(MPI.COMM_SELF.Dup())
    comm.both = threading.Barrier(2)
    sender, reader = Watchdog(MPI.Intracomm(comm), 7), Watchdog(comm, 7)
    sender._mailbox.tell(0, {"kind": "waiting", "number": 3, "code": 1, "text": "x", "progress": ""})
    threads = [in_thread(reader.read_news) for _ in range(2)]
    for thread, _ in threads:
        thread.join(5)
    stuck = [thread for thread, _ in threads if thread.is_alive()]
    if stuck:  # let it go on
        MPI.Intracomm(comm).Send(np.frombuffer(b'{"session": 0}', np.uint8), 0, CONTROL_TAG)
        stuck[0].join(5)
    assert not stuck
    assert [outcome for _, outcome in threads] == [[None], [None]]
    assert reader._reports[0].number == 3
    sender.read_news()
    MPI.Intracomm(comm).Free()


def test_an_alarm_is_heard_in_every_wait() -> None:
    """What one wait has read is not news to another one, but concerns it too."""
    comm = MPI.Intracomm(MPI.COMM_SELF.Dup())
    watchdog = Watchdog(comm, 7)
    watchdog.record(1, Signature.of("a"))
    watchdog._mailbox.tell(0, {"kind": "mismatch", "number": 1, "text": "they differ"})
    for _ in range(2):
        with pytest.raises(MismatchError, match="they differ"):
            watchdog.read_news()
    comm.Free()


# Algorithms of users --------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_collective_that_shared_memory_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its algorithms can be registered; communicators are made as before."""
    monkeypatch.setitem(ALGORITHMS, "exchange_of_something", {})
    register("exchange_of_something", "mine")(find("allgather", "ring").build)
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=20)
    assert comm.algorithms("exchange_of_something") == ("mine", "native")
    assert comm.choice("exchange_of_something", 100) == "mine"
    data = np.ones(3)
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size).all()
    plain.Free()


# Progress -------------------------------------------------------------------------------------------------------------


def test_a_signal_handler_may_begin_an_operation() -> None:
    """It may come while the interrupted thread drives others; the operation that it begins is driven from then on."""

    may_end = threading.Event()

    class Second:
        is_driven = False

        def step(self) -> bool:
            return may_end.is_set()

    class First:
        is_driven = False

        def step(self) -> bool:
            progress_engine.add(Second())
            progress_engine.progress()  # does nothing: somebody is at it
            return True

    progress_engine.add(First())
    thread = threading.Thread(target=progress_engine.progress, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for a lock that it holds"
    assert progress_engine.pending() == 1
    may_end.set()
    until = time.monotonic() + TIMEOUT
    while progress_engine.pending() and time.monotonic() < until:  # the progress thread may be at it
        progress_engine.progress()
    assert progress_engine.pending() == 0


def test_a_rank_that_frees_late_is_waited_for(verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are freed by all ranks or by none: the late one would wait for ever."""
    monkeypatch.setenv("MPICOLL_SEGMENTS", "off")
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(2.5)
    plain.Free()


@pytest.mark.mpi(min_size=2)
def test_a_communicator_that_is_broken_on_some_ranks_is_freed_without_a_wait(
    verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time passes: messages alone end the wait. The MPI library's collectives on it do not match any more."""
    plain = MPI.COMM_WORLD.Dup()
    comm, size = Intracomm(plain, timeout=TIMEOUT), plain.size
    counts, give_up = [-1 if comm.rank == 1 else 1] * size, time.monotonic() + TIMEOUT
    with pytest.raises((ValueError, RemoteError)):
        comm.Ialltoallv([np.ones(size), [1] * size], [np.zeros(size), counts]).Wait()
    wait_politely(verdicts)

    given_up = []

    def stopped() -> float:
        if time.monotonic() < give_up:
            return 0.0
        given_up.append(True)
        return np.inf

    monkeypatch.setattr(control_messages, "time", SimpleNamespace(monotonic=stopped))
    plain.Free()
    assert not given_up, "no message has ended the wait"


# Freeing after a refused call -----------------------------------------------------------------------------------------


def refused(comm: Intracomm) -> None:
    """Make a call of the MPI library that this rank refuses."""
    with pytest.raises(ValueError, match="recvbuf: the blocks end at element"):
        comm.Igatherv(np.ones(4), [np.zeros(3), [4] * comm.size], comm.rank)


@pytest.mark.mpi(min_size=2)
def test_nobody_waits_in_free_for_a_rank_that_refused_a_call_which_others_made() -> None:
    """The other ranks' parts of the call end in the MPI library without that rank."""
    comm = Intracomm(MPI.COMM_WORLD.Dup(), timeout=TIMEOUT)
    begin = time.monotonic()
    if comm.rank == 0:
        refused(comm)
    else:
        with contextlib.suppress(RemoteError):
            comm.Igatherv(np.ones(4), None, 0).Wait()
    comm.Free()
    assert time.monotonic() - begin < TIMEOUT
    MPI.COMM_WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_communicator_is_freed_after_a_call_that_all_ranks_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(channels, "_kept", kept)
    comm = Intracomm(MPI.COMM_WORLD.Dup(), timeout=TIMEOUT)
    if comm.rank == 1:
        time.sleep(0.2)
    refused(comm)
    comm.Free()
    assert not kept


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("node", extent.first(1, ["on", "off"]))
def test_the_user_is_told_of_long_waits_by_one_rank(node, monkeypatch, capfd):
    monkeypatch.setattr(wait_reports, "FIRST_REPORT_SECONDS", 0.6)
    monkeypatch.setenv("MPICOLL_NODE", node)
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=TIMEOUT)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(1.5)
    comm.Allreduce(np.zeros(3), np.zeros(3))
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("mpicoll: still waiting: ")]
    assert bool(told) == (comm.rank == 1)
    assert all(
        re.search(r"Allreduce\(.*: rank 0 did not arrive within \d s; ranks? 1.* waited there$", e) for e in told
    )
    plain.Free()


def test_a_rank_that_does_not_come_to_the_first_call(monkeypatch):
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank waits for nobody")
    monkeypatch.setattr(timed_agreement, "MEETING_SECONDS", 0.2)
    plain = MPI.COMM_WORLD.Dup()
    if plain.rank:
        with pytest.raises(CollectiveTimeout, match=r"waited 0\.2 s for the others to make their first call"):
            Intracomm(plain, timeout=0.1)
    MPI.COMM_WORLD.Barrier()
    if plain.rank == 0:
        environment_agreement.agree(plain, timeout=60.0)  # what the others wait for
    while timed_agreement._abandoned:
        timed_agreement._abandoned.pop()[0].Wait()
    plain.Free()
