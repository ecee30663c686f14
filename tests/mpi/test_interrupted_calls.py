"""Exceptions of signal handlers, raised when compiled code has just begun a call: no rank is left waiting."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import alltoallw, dispatched_requests, message_requests, on_shared_memory, shared_requests
from mpicoll.errors import CommunicatorBroken, RemoteError
from mpicoll.interface import blocking
from mpicoll.kernels.operation_words import DONE, OTHER, WAITING
from mpicoll.objects import reductions
from mpicoll.objects.compiled_records import PENDING

pytestmark = pytest.mark.mpi(min_size=2)
WORLD = MPI.COMM_WORLD
COUNT = 3000


class Interrupting:
    """A compiled function after which an exception is raised if it has begun something that has not ended."""

    def __init__(self, kernel: Any) -> None:
        self._run = kernel.run

    def run(self, *arguments: Any) -> int:
        status: int = self._run(*arguments)
        if status not in (DONE, OTHER):
            raise KeyboardInterrupt
        return status


@pytest.fixture(params=["shared", "messages"])
def made(request: pytest.FixtureRequest) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "messages":
            patch.setenv("MPICOLL_NODE", "off")
        plain = WORLD.Dup()
        yield Intracomm(plain, timeout=20)
        plain.Free()


def persistent(comm: Intracomm) -> Callable[[], None]:
    kept = comm.Allreduce_init(np.ones(COUNT), np.zeros(COUNT))

    def call() -> None:
        kept.Start()
        kept.Wait()

    return call


def blocking_call(comm: Intracomm) -> Callable[[], None]:
    given, result = np.ones(COUNT), np.zeros(COUNT)  # a call by messages is known by its memory
    return lambda: comm.Allreduce(given, result)


class InterruptingObjects:
    """A compiled collective of objects after which an exception is raised if its exchange has not ended."""

    def __init__(self, kernel: Any) -> None:
        self._run = kernel.run

    def run(self, *arguments: Any) -> Any:
        result = self._run(*arguments)
        if result is PENDING:
            raise KeyboardInterrupt
        return result


CALLS: dict[str, Callable[[Intracomm], Callable[[], Any]]] = {
    "blocking": blocking_call,
    "nonblocking": lambda comm: lambda: comm.Iallreduce(np.ones(COUNT), np.zeros(COUNT)).Wait(),
    "persistent": persistent,
    "object": lambda comm: lambda: comm.allreduce(1.5),
}


def interrupt(patch: pytest.MonkeyPatch) -> None:
    """Raise KeyboardInterrupt after each compiled function that begins calls, if the call has not ended."""
    patch.setattr(blocking, "call", Interrupting(blocking.call))
    for module in (on_shared_memory, shared_requests):
        patch.setattr(module, "begin", Interrupting(module.begin))
    begins = Interrupting(message_requests.nonblocking_calls.begin_messages)
    patch.setattr(message_requests, "nonblocking_calls", SimpleNamespace(begin_messages=begins))
    patch.setattr(reductions, "reduce_objects", InterruptingObjects(reductions.reduce_objects))
    settings = dispatched_requests.start_quickly.__kwdefaults__
    patch.setitem(settings, "kernel", Interrupting(settings["kernel"]))


def twice(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


@pytest.mark.parametrize("kind", CALLS)
def test_the_others_hear_of_a_call_that_was_interrupted_at_its_begin(made: Intracomm, kind: str) -> None:
    if kind == "nonblocking" and made.channel.node is None:
        pytest.skip("Python begins it")
    call = CALLS[kind](made)
    for _ in range(3):  # the last ones by compiled code
        call()
    WORLD.Barrier()
    begin = time.monotonic()
    if made.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch)
            with pytest.raises(KeyboardInterrupt):
                call()
        with pytest.raises((RemoteError, CommunicatorBroken)):
            made.Barrier()
        with pytest.raises(CommunicatorBroken):
            call()
    else:
        time.sleep(0.3)
        # Ranks that have got all data from its slot end the call itself.
        with pytest.raises(RemoteError, match=r"rank 0 gave up: (KeyboardInterrupt|InterruptedError)"):
            twice(call, made.Barrier)
    assert time.monotonic() - begin < 10
    WORLD.Barrier()


@pytest.mark.parametrize("status", ["as it was", "ended"])
def test_the_others_hear_of_a_long_call_that_was_interrupted(status: str) -> None:
    """The exception hides how compiled code has ended: another rank may be making the call in another way by then."""
    made = Intracomm(WORLD.Dup(), timeout=20)
    given, result = np.ones(300_000), np.zeros(300_000)
    for _ in range(3):
        made.Allreduce(given, result)
    if made.channel.node is None or not made.channel.node.segments:
        pytest.skip("made by messages")

    def interrupted(*arguments: int) -> int:
        found = WAITING
        while status == "ended" and found == WAITING:
            found = advance(*arguments)
        raise KeyboardInterrupt

    begin, advance = time.monotonic(), on_shared_memory.advance.run
    if made.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            for kernel in ("advance", "await_others"):  # the one that sleeps, where one thread waits
                patch.setattr(on_shared_memory, kernel, SimpleNamespace(run=interrupted))
            with pytest.raises(KeyboardInterrupt):
                made.Allreduce(given, result)
        with pytest.raises(CommunicatorBroken):
            made.Barrier()
    else:
        with pytest.raises(RemoteError, match="rank 0 gave up: KeyboardInterrupt"):
            twice(lambda: made.Allreduce(given, result), made.Barrier)
    assert time.monotonic() - begin < 10
    WORLD.Barrier()


def raise_interrupt(*arguments: Any) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["its lane was taken", "it was begun"])
def test_the_others_hear_of_a_nonblocking_call_that_was_interrupted_after(place: str) -> None:
    """On the general path, which a communicator's first call takes."""
    made = Intracomm(WORLD.Dup(), timeout=20)
    if made.channel.node is None:
        pytest.skip("made by messages")
    begin = time.monotonic()
    if made.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            if place == "its lane was taken":
                patch.setattr(shared_requests, "QueuedOperation", raise_interrupt)
            else:
                begun = shared_requests.begin.run
                patch.setattr(shared_requests, "begin", SimpleNamespace(run=lambda job: raise_interrupt(begun(job))))
            with pytest.raises(KeyboardInterrupt):
                made.Iallreduce(np.ones(COUNT), np.zeros(COUNT))
        with pytest.raises(CommunicatorBroken):
            made.Iallreduce(np.ones(COUNT), np.zeros(COUNT))
    else:
        with pytest.raises(RemoteError, match="rank 0 gave up: KeyboardInterrupt"):
            twice(made.Iallreduce(np.ones(COUNT), np.zeros(COUNT)).Wait, made.Barrier)
    assert time.monotonic() - begin < 10
    WORLD.Barrier()


@pytest.mark.parametrize("place", ["after the first round", "between rounds"])
def test_the_others_hear_of_an_exchange_that_was_interrupted(place: str) -> None:
    made = Intracomm(WORLD.Dup(), timeout=20)
    given, result = np.ones(made.size * 1_000_000), np.zeros(made.size * 1_000_000)  # several rounds
    counts = [1_000_000] * made.size

    def call() -> None:
        made.Alltoallv([given, counts], [result, counts], algorithm="shared")

    call()
    if made.channel.node is None or not made.channel.node.segments:
        pytest.skip("made by messages")
    begin = time.monotonic()
    if made.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            name = "offer_round" if place == "after the first round" else "take_round"
            patch.setattr(alltoallw, name, SimpleNamespace(run=raise_interrupt))
            with pytest.raises(KeyboardInterrupt):
                call()
        with pytest.raises((RemoteError, CommunicatorBroken)):
            made.Barrier()
    else:
        with pytest.raises(RemoteError, match=r"rank 0 was interrupted: KeyboardInterrupt$"):
            twice(call, made.Barrier)
    assert time.monotonic() - begin < 10
    WORLD.Barrier()


@pytest.mark.parametrize("collective", ["Alltoallv", "Alltoallw"])
def test_an_exchange_that_was_interrupted_at_its_end_leaves_the_communicator_usable(collective: str) -> None:
    made = Intracomm(WORLD.Dup(), timeout=20)
    given, result, counts = np.full(made.size, made.rank), np.zeros(made.size, "i8"), [1] * made.size
    types = [[1] * made.size, range(0, 8 * made.size, 8)], [MPI.INT64_T] * made.size
    send, recv = [given, counts], [result, counts]
    if collective == "Alltoallw":
        send, recv = [given, *types], [result, *types]  # type: ignore[list-item]
    call = getattr(made, collective)
    for _ in range(3):  # the last ones in one compiled call
        call(send, recv)
    result[:] = -1

    class Interrupted:
        def __init__(self, kernel: Any) -> None:
            self._run = kernel.run

        def run(self, *arguments: Any) -> int:
            status: int = self._run(*arguments)
            if status == alltoallw.TAKEN:
                raise KeyboardInterrupt
            return status

    with pytest.MonkeyPatch.context() as patch:
        for name in ("exchange_vectors", "exchange_typed", "exchange"):
            patch.setattr(alltoallw, name, Interrupted(getattr(alltoallw, name)))
        with contextlib.suppress(KeyboardInterrupt):
            call(send, recv)
    made.Barrier()
    assert result.tolist() == list(range(made.size))
    call(send, recv)


def test_a_call_of_another_thread_is_not_abandoned(comm: Intracomm) -> None:
    """Also where that thread has not yet the lock of the call that compiled code has begun for it."""
    entered, go_on = threading.Event(), threading.Event()
    results: list[float] = []

    class Slow:
        @staticmethod
        def run(*arguments: Any) -> int:
            status: int = compiled.run(*arguments)
            if threading.current_thread() is thread:
                entered.set()
                go_on.wait(10)
            return status

    def work() -> None:
        result = np.zeros(COUNT)
        comm.Allreduce(np.ones(COUNT), result)
        results.append(result[0])

    comm.Allreduce(np.ones(COUNT), np.zeros(COUNT))
    compiled, thread = blocking.call, threading.Thread(target=work)
    if comm.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocking, "call", Slow)
            thread.start()
            entered.wait(10)
            with pytest.raises(RuntimeError, match="another collective is being called"):
                comm.Barrier()
            go_on.set()
            thread.join(20)
    else:
        time.sleep(0.3)
        work()
    assert results == [comm.size]
    comm.Barrier()
