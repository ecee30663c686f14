"""Sleep of ranks that wait for a record: no wake-up is lost, in every interleaving and on threads of the machine.

The first part runs the source of :mod:`mpicoll.kernels.futex` in all interleavings of two ranks, one atomic operation
at a time. A rank's store is seen by the other one only after its next fence or atomic addition, as late as a processor
may let it be.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mpicoll import plans
from mpicoll.kernels import futex
from mpicoll.plans.simulated_modules import load_modules
from tests.kernels.test_threads import SECONDS, ranks_as_threads, run_on_threads
from tests.kernels.world import COUNTS, draw

FLAG, JOB = 0, 1 << 20
WAIT, WAKE = 0, 1


class Stopped(BaseException):
    """Ends a rank of a schedule that has been looked at."""


class Schedule:
    """Two ranks, of which one at a time executes an atomic operation, in the order of the choices.

    Parameters
    ----------
    choices
        Which of the ranks that can go on does so, step by step; after the last choice the first one.
    """

    def __init__(self, choices: list[int]) -> None:
        self.choices, self.taken, self.open = choices, [], []  # type: ignore[var-annotated]
        self.memory: dict[int, int] = {}
        self.stores: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.asleep: set[int] = set()
        self.ended: set[int] = set()
        self.is_over = False
        self._numbers: dict[int, int] = {}
        self._turns = [threading.Semaphore(0), threading.Semaphore(0)]
        self._back = threading.Semaphore(0)

    def run(self, *ranks: Callable[[], None]) -> bool:
        """Run the ranks; return whether both end, as opposed to one that sleeps for ever."""
        threads = [threading.Thread(target=self._rank, args=each, daemon=True) for each in enumerate(ranks)]
        for thread in threads:
            thread.start()
            self._back.acquire()
        while runnable := [rank for rank in (0, 1) if rank not in self.ended | self.asleep]:
            step = len(self.taken)
            choice = min(self.choices[step], len(runnable) - 1) if step < len(self.choices) else 0
            self.taken.append(choice)
            self.open.append(len(runnable))
            self._turns[runnable[choice]].release()
            self._back.acquire()
        good, self.is_over = len(self.ended) == 2, True
        for rank in self.asleep:
            self._turns[rank].release()
        for thread in threads:
            thread.join()
        return good

    def _rank(self, number: int, program: Callable[[], None]) -> None:
        self._numbers[threading.get_ident()] = number
        try:
            self.step()
            program()
            self._flush(self.step())
        except Stopped:
            return
        self.ended.add(number)
        self._back.release()

    def step(self) -> int:
        """Wait for this rank's turn; return its number."""
        number = self._numbers[threading.get_ident()]
        self._back.release()
        self._turns[number].acquire()
        if self.is_over:
            raise Stopped
        return number

    def _flush(self, rank: int) -> None:
        self.memory.update(self.stores[rank])
        self.stores[rank].clear()

    # Atomic operations of kernels -------------------------------------------------------------------------------------

    def load(self, address: int) -> int:
        number = self.step() if address < JOB else 0
        return self.stores[number].get(address, self.memory.get(address, 0))

    load_acquire = load

    def store_release(self, address: int, value: int) -> None:
        self.stores[self.step()][address] = value

    def fence(self) -> None:
        self._flush(self.step())

    def fetch_add(self, address: int, value: int) -> int:
        self._flush(self.step())
        found = self.memory.get(address, 0)
        self.memory[address] = found + value
        return found

    def system_call(self, number: int, address: int, what: int, value: int, *_: int) -> None:
        """Sleep or wake, in one step each as the system does it."""
        rank = self.step()
        if what == WAKE:
            self.asleep.clear()
        elif self.memory.get(address, 0) & 0xFFFFFFFF == value:
            self.asleep.add(rank)
            self.step()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None  # what the modules import, and these ranks do not use


def schedules(program: Callable[[Schedule], tuple[Callable[[], None], Callable[[], None]]]) -> Iterator[bool]:
    """Yield of every interleaving whether both ranks end."""
    choices: list[int] | None = []
    while choices is not None:
        schedule = Schedule(choices)
        yield schedule.run(*program(schedule))
        choices = schedule.taken
        while choices and choices[-1] + 1 >= schedule.open[len(choices) - 1]:
            choices.pop()
        choices = [*choices[:-1], choices[-1] + 1] if choices else None


def two_ranks(edit: tuple[str, str], stages: int, schedule: Schedule) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a rank that waits for the last of some stages, and the one that publishes them."""
    kernels: SimpleNamespace = load_modules(schedule, ("operation_words", "futex"), {"futex": edit})  # type: ignore[arg-type]
    kernels.futex.fetch_add, kernels.futex.system_call = schedule.fetch_add, schedule.system_call

    def waits() -> None:
        while not kernels.futex.sleep_until(JOB, FLAG, stages):
            pass

    def publishes() -> None:
        for stage in range(1, stages + 1):
            schedule.store_release(FLAG, stage)
            kernels.futex.wake_sleepers(FLAG)

    return waits, publishes


def test_no_wake_up_is_lost_in_any_interleaving() -> None:
    found = list(schedules(partial(two_ranks, ("", ""), 1)))
    assert len(found) > 100
    assert all(found)


def test_no_wake_up_is_lost_in_random_interleavings_of_several_stages() -> None:
    numbers = random.Random(3)
    for _ in range(500):
        schedule = Schedule([numbers.randrange(2) for _ in range(60)])
        assert schedule.run(*two_ranks(("", ""), 3, schedule)), schedule.taken


@pytest.mark.parametrize(
    "edit",
    [
        ("    fence()\n    if load(flag", "    if load(flag"),
        ("    fetch_add(sleepers, 1)\n    fence()\n    seen = load_acquire(flag)", "    seen = load_acquire(flag)"),
        ("seen & _LOW_HALF", "load_acquire(flag) & _LOW_HALF"),
        ("system_call(_FUTEX, flag, _WAKE", "(_FUTEX, flag, _WAKE"),
    ],
    ids=["no fence", "no count of sleepers", "another value compared", "no wake-up"],
)
def test_planted_errors_are_found(edit: tuple[str, str]) -> None:
    assert not all(schedules(partial(two_ranks, edit, 1)))


@pytest.mark.skipif(not futex.AVAILABLE, reason="the system has no futex, or the executor is not compiled")
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_sleep_get_on(size: int) -> None:
    """A sleep ends only when the rank waited for wakes this one: its limit is longer than the test may take."""
    limit, until = np.array([2 * SECONDS, 0], np.int64), time.monotonic() + SECONDS
    numbers, ranks = random.Random(size), ranks_as_threads(size, "STAGE")
    for rank in range(size):
        ranks.put(rank, ranks.words.SLEEP_LIMIT, limit.ctypes.data)
    ranks.advance = lambda rank: int(ranks.executor.await_others(ranks.jobs[rank]))  # type: ignore[method-assign]
    run_on_threads(ranks, [draw(numbers, size, plans.COLLECTIVES, COUNTS) for _ in range(3000 // size)])
    assert time.monotonic() < until


@pytest.mark.skipif(not futex.AVAILABLE, reason="the system has no futex, or the executor is not compiled")
def test_a_sleep_has_an_end() -> None:
    limit, ranks = np.array([0, 1000], np.int64), ranks_as_threads(2, "STAGE")
    ranks.put(0, ranks.words.SLEEP_LIMIT, limit.ctypes.data)
    one = draw(random.Random(1), 2, ("barrier",), (1,))
    assert ranks.start(0, one) == ranks.executor.WAITING
    assert ranks.executor.await_others(ranks.jobs[0]) == ranks.executor.WAITING
