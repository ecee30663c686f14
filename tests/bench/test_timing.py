"""The warm-up, the turns and the start of what is timed, with a clock that counts what was called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from bench import timing
from bench.result_files import BACK_TO_BACK, SINGLE
from bench.timing import Contender
from mpicoll import measure
from mpicoll.progress.waiting import NodeCores

CALL, BEFORE, LOOK = 1e-3, 7e-3, 1e-7


class Clock:
    """Time passes by calls, by what comes before them, and a little at every look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", self.look)

    def look(self) -> float:
        self.now += LOOK
        return self.now

    def passing(self, seconds: float, log: list[str], name: str) -> Callable[[], None]:
        def call() -> None:
            log.append(name)
            self.now += seconds

        return call


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("pace", [BACK_TO_BACK, SINGLE])
def test_what_comes_before_each_call_is_not_timed(pace: str, clock: Clock) -> None:
    log: list[str] = []
    one = Contender(clock.passing(CALL, log, "call"), clock.passing(BEFORE, log, "before"))
    found = timing.compare(MPI.COMM_SELF, {"one": one}, 0.2, pace)["one"]
    np.testing.assert_allclose(found.samples, CALL, rtol=0.01)
    assert log[::2] == ["before"] * (len(log) // 2)
    assert log[1::2] == ["call"] * (len(log) // 2)
    assert found.calls == (timing.LEAST_CALLS if pace == BACK_TO_BACK else 1)
    assert found.samples.size >= 7


def test_the_first_call_after_another_contender_is_in_no_sample(clock: Clock) -> None:
    last: list[str] = [""]

    def slow_after_another(name: str) -> Callable[[], None]:
        def call() -> None:
            clock.now += CALL if last[0] == name else 10 * CALL
            last[0] = name

        return call

    contenders = {name: Contender(slow_after_another(name)) for name in ("a", "b")}
    for one in timing.compare(MPI.COMM_SELF, contenders, 0.2, BACK_TO_BACK).values():
        np.testing.assert_allclose(one.samples, CALL, rtol=0.01)


def test_very_long_calls_are_timed_one_by_one(clock: Clock) -> None:
    one = Contender(clock.passing(0.2, [], "call"))
    assert timing.compare(MPI.COMM_SELF, {"one": one}, 0.2, BACK_TO_BACK)["one"].calls == 1


def test_without_anything_before_a_batch_is_timed_as_a_whole(clock: Clock) -> None:
    log: list[str] = []
    one = Contender(clock.passing(1e-5, log, "call"))
    found = timing.compare(MPI.COMM_SELF, {"one": one}, 0.01, BACK_TO_BACK, 3e-4)["one"]
    np.testing.assert_allclose(found.samples, 1e-5, rtol=0.05)
    assert 25 <= found.calls <= 30


def test_contenders_take_turns_and_the_first_call_of_a_turn_does_not_count(clock: Clock) -> None:
    log: list[str] = []
    names = ("a", "b")
    found = timing.compare(
        MPI.COMM_SELF, {name: Contender(clock.passing(CALL, log, name)) for name in names}, 0.1, SINGLE
    )
    assert found["a"].samples.size == found["b"].samples.size
    turns = found["a"].samples.size // 4
    orders = measure.turns(names, turns)
    assert log[-10 * turns :] == [name for order in orders for name in order for _ in range(5)]


def test_each_turn_has_an_order_of_its_own() -> None:
    orders = list(measure.turns("abc", 60))
    assert {"".join(order) for order in orders} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert orders == list(measure.turns("abc", 60)), "ranks would call different contenders"


def test_long_calls_are_not_made_twice_for_a_sample(clock: Clock) -> None:
    log: list[str] = []
    found = timing.compare(MPI.COMM_SELF, {"a": Contender(clock.passing(0.1, log, "a"))}, 0.01, SINGLE)
    assert found["a"].samples.size == 7
    assert len(log) == 7 + 1 + 2 + 4  # warmed up for half a second at most


class Ranks:
    """Ranks that are threads, with the few calls of a communicator that are needed."""

    def __init__(self, size: int, numbers: list[int] | None = None) -> None:
        self.size = size
        self._boxes = {(a, b): [] for a in range(size) for b in range(size)}  # type: ignore[var-annotated]
        self._come = threading.Condition()
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            results[rank] = work(Rank(self, rank))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert None not in results
        return results


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, ranks.size

    def Sendrecv(self, out: np.ndarray, to: int, _: int, into: np.ndarray, source: int, __: int) -> None:
        boxes, come = self._ranks._boxes, self._ranks._come
        with come:
            boxes[self.rank, to].append(out.copy())
            come.notify_all()
            assert come.wait_for(lambda: boxes[source, self.rank], 30)
            into[:] = boxes[source, self.rank].pop(0)

    def Allreduce(self, _: object, array: np.ndarray, op: MPI.Op) -> None:
        assert op == MPI.MAX
        ranks = self._ranks
        ranks._values[self.rank] = array.copy()
        ranks._barrier.wait(30)
        array[:] = np.max(ranks._values, axis=0)
        ranks._barrier.wait(30)


@pytest.fixture(name="roomy")
def _roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cores_on_node", lambda comm: NodeCores(comm.size, 64, 64))


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_ranks_agree_on_a_moment_after_the_last_has_come(size: int) -> None:
    def work(rank: Rank) -> tuple[float, float, float]:
        start = timing.Start(rank)  # type: ignore[arg-type]
        came = timing.time.perf_counter()
        moment = start.wait()
        return came, moment, timing.time.perf_counter()

    came, moments, began = zip(*Ranks(size).run(work), strict=True)
    assert len(set(moments)) == 1
    assert moments[0] >= max(came) + timing.DELAY_SECONDS
    assert min(began) >= moments[0]


@pytest.mark.usefixtures("roomy")
def test_ranks_whose_clocks_differ_agree_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "crc32", lambda name: threading.get_ident() % 1000003)
    assert Ranks(3).run(lambda rank: timing.Start(rank).one_clock) == [False] * 3
    one = timing.compare(MPI.COMM_SELF, {"a": Contender(lambda: None)}, 0.01, SINGLE)["a"]
    assert one.skew is not None
