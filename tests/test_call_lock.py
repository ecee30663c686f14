"""The lock of a communicator's calls is free after an exception of a signal handler, wherever it came."""

from __future__ import annotations

import itertools
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from mpicoll.communicator.call_lock import Alone, InTurn, Nested, lock_of_calls
from mpicoll.errors import CommunicatorBusy


class Interrupted(Exception):
    """Exception of a signal handler."""


def interrupt_at(place: int) -> Any:
    """Return a trace function that raises where a signal handler may run: where the function number `place` begins."""
    numbers = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and next(numbers) == place:
            raise Interrupted

    return trace


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["call", "call_later"])
def test_an_interrupt_leaves_it_free(name: str, size: int) -> None:
    busy = memoryview(bytearray(1))
    lock, interrupts = lock_of_calls(busy, size), 0
    for place in range(6):
        before = sys.gettrace()
        sys.settrace(interrupt_at(place))
        try:
            getattr(lock, name)(lambda: int("1"))
        except Interrupted:
            interrupts += 1
        finally:
            sys.settrace(before)
        assert busy[0] == 0
        assert lock.call(lambda: 7) == 7
    assert interrupts >= 2


def test_a_call_within_a_call_is_refused() -> None:
    for lock, error in (
        (Alone(memoryview(bytearray(1))), CommunicatorBusy),
        (InTurn(memoryview(bytearray(1))), Nested),
    ):
        with pytest.raises(error):
            lock.call(lambda lock=lock: lock.call(lambda: None))
        assert lock.call(lambda: 7) == 7


@pytest.mark.parametrize("size", [1, 2])
def test_another_thread_waits_on_one_rank_and_is_refused_on_several(size: int) -> None:
    lock, found = lock_of_calls(memoryview(bytearray(1)), size), []
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert leave.wait(20)

    def second() -> None:
        try:
            found.append(lock.call(lambda: 7))
        except CommunicatorBusy:
            found.append(-1)

    threads = [threading.Thread(target=lock.call, args=(hold,)), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    if size > 1:
        threads[1].join(20)
    leave.set()
    for thread in threads:
        thread.join(20)
    assert found == [7 if size == 1 else -1]
