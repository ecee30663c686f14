"""Trials of methods, in random interleavings: all ranks take the same method in each call, and the faster one wins."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.kernels import operation_words
from mpicoll.kernels.operation_words import COLLECTIVES
from mpicoll.plans.simulated_executor import Edits, SimulatedOperation
from mpicoll.plans.simulated_memory import Race
from tests.kernels.interleaving import Lost
from tests.kernels.world import World, run_all

TRIED = tuple(name for name in COLLECTIVES if name != "barrier")
STAGE, TRANSFER = operation_words.STAGE, operation_words.TRANSFER


class TryingWorld(World):
    """Ranks that try methods in vectors of every length.

    Parameters
    ----------
    calls
        Calls before the first trial, at most between two, and in each.

    Attributes
    ----------
    methods, kept
        By rank, the method of each call so far, and of a nonblocking call before each.
    nanoseconds, swaps_after
        By method, how long a call takes; and after how many calls the two are swapped, again and again.
    """

    def __init__(
        self, size: int, seed: int, ahead: int = 1, edits: Edits = None, calls: tuple[int, int, int] = (1, 1, 2)
    ) -> None:
        super().__init__(size, seed, ahead=ahead, edits=edits)
        self.methods: list[list[int]] = [[] for _ in range(size)]
        self.kept: list[list[int]] = [[] for _ in range(size)]
        self.nanoseconds, self.swaps_after = [100, 100], 1 << 30
        trials, memory = self.modules.method_trials, self.machine
        first, longest, trials._TRIAL_CALLS = calls
        trials.FIRST_BITS = 1
        shared = memory.shared(8 * trials.shared_words(size))
        memory.clock_gettime = self._clock  # type: ignore[method-assign]
        trials.clock_gettime = self._clock
        self._now = [0] * size
        for rank in range(size):
            own = memory.private(8 * trials.own_words())
            memory.store(own + 8 * trials.OWN_FIRST, first)
            memory.store(own + 8 * trials.OWN_LONGEST, longest)
            self.put(rank, self.words.METHODS, shared)
            self.put(rank, self.words.METHOD_TIMES, own)

    def _clock(self, clock: int, time: int) -> int:
        rank, memory = self.machine.rank, self.machine
        calls, method = len(self.methods[rank]), self.methods[rank][-1]
        self._now[rank] += self.nanoseconds[(method + calls // self.swaps_after) % 2]
        memory.store(time, 0)
        memory.store(time + 8, self._now[rank])
        return 0

    def start(self, rank: int, operation: SimulatedOperation) -> int:
        """Take the method of the moment, as `dispatch` does, and start the operation."""
        words, trials, job = self.words, self.modules.method_trials, self.jobs[rank]
        collective, method = words.COLLECTIVES.index(operation.kind), STAGE
        tried = operation.kind in TRIED
        if tried:
            choice = job, collective, 8 * operation.count, STAGE + 1
            self.kept[rank].append(trials.current_method(*choice, False) - 1)
            method = trials.current_method(*choice, True) - 1
        self.methods[rank].append(method)
        for word, value in (
            (words.COLLECTIVE, collective),
            (words.COUNT, operation.count),
            (words.METHOD, method),
            (words.TIME_NEXT, int(tried)),
        ):
            self.put(rank, word, value)
        return super().start(rank, operation)


def run_calls(seed: int, size: int, edits: Edits = None, lead: int = 3, kinds: tuple[str, ...] = TRIED) -> TryingWorld:
    """Return a world whose ranks have made calls of few kinds and lengths, so that there are many trials."""
    world = TryingWorld(size, seed, ahead=1 << seed % 3, edits=edits)
    world.modules.method_trials._LEAD = lead
    pick = world.machine.random
    world.nanoseconds = pick.choice(([100, 100], [100, 300], [300, 100]))
    few = tuple(pick.sample(kinds, min(2, len(kinds))))
    run_all(world, [world.draw(few, (1, 13, 70, 70, 200, 200)) for _ in range(24)])
    return world


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_take_the_same_method(size: int) -> None:
    changes = 0
    for seed in range(25):
        world = run_calls(seed, size)
        assert all(each == world.methods[0] for each in world.methods), seed
        changes += np.count_nonzero(np.diff(world.methods[0]))
    assert changes > 50


@pytest.mark.parametrize("kind", ["allreduce", "bcast", "gather"])
@pytest.mark.parametrize("size", [2, 3])
def test_nonblocking_calls_take_the_method_that_is_kept(size: int, kind: str) -> None:
    """Either method is the faster one for a while, and nonblocking calls never take one that is only tried."""
    world = TryingWorld(size, 3, calls=(12, 16, 10))
    world.nanoseconds, world.swaps_after = [300, 100], 100
    run_all(world, [world.draw((kind,), (70,)) for _ in range(300)])
    assert all(each == world.methods[0] for each in world.methods)
    assert all(each == world.kept[0] for each in world.kept)
    assert 1 <= np.count_nonzero(np.diff(world.kept[0])) < np.count_nonzero(np.diff(world.methods[0]))


@pytest.mark.parametrize(
    ("lead", "edits"),
    [
        (2, None),
        (3, {"method_trials": (">> _NUMBER:\n        return", ">> 60:\n        return")}),
        (3, {"method_trials": ("now = 4 * (get(job, METHOD) + 1)", "now = 4 * (2 - get(job, METHOD))")}),
    ],
    ids=["held too early", "decided before the last one holds", "wrong method before"],
)
def test_planted_errors_are_found(lead: int, edits: Edits) -> None:
    for seed in range(400):
        try:
            methods = run_calls(seed, 4, edits, lead, ("bcast", "scatter", "gather", "reduce")).methods
        except (Race, AssertionError, Lost):
            return  # ranks went different ways at once
        if any(each != methods[0] for each in methods):
            return
    pytest.fail("no interleaving in which ranks take different methods")


@pytest.mark.parametrize(("nanoseconds", "faster"), [([300, 100], TRANSFER), ([100, 300], STAGE)])
def test_the_faster_method_is_kept(nanoseconds: list[int], faster: int) -> None:
    world = TryingWorld(2, 1, calls=(12, 1000, 10))
    world.nanoseconds = nanoseconds
    run_all(world, [world.draw(("allreduce",), (70,)) for _ in range(90)])
    assert {STAGE, TRANSFER} == set(world.methods[0])
    assert world.methods[0][-40:].count(faster) == 40


@pytest.mark.parametrize("kind", ["allreduce", "bcast", "gather"])
def test_a_trial_of_a_much_slower_method_is_short(kind: str) -> None:
    tried = []
    for nanoseconds in ([100, 150], [100, 300]):
        world = TryingWorld(2, 1, calls=(12, 1000, 10))
        world.nanoseconds = nanoseconds
        run_all(world, [world.draw((kind,), (70,)) for _ in range(60)])
        tried.append(world.methods[0].count(TRANSFER))
    longer, shorter = tried
    assert 4 <= shorter < longer / 2
