"""Trials of methods, in random interleavings: all ranks take the same method in each call, and the faster one wins."""

from __future__ import annotations

import numpy as np
import pytest

from mpicoll.kernels import operation_words
from mpicoll.plans.simulated_executor import Edits, SimulatedOperation
from mpicoll.plans.simulated_memory import Race
from tests.kernels.interleaving import Lost
from tests.kernels.world import World, run_all

TRIED = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather", "gather", "scatter", "alltoall")
STAGE, TRANSFER = operation_words.STAGE, operation_words.TRANSFER


class TryingWorld(World):
    """Ranks that try methods from the first call on, in vectors of every length.

    Attributes
    ----------
    methods
        By rank, the method of each call so far.
    nanoseconds
        By method, how long a call takes.
    """

    def __init__(self, size: int, seed: int, ahead: int = 1, edits: Edits = None) -> None:
        super().__init__(size, seed, ahead=ahead, edits=edits)
        self.methods: list[list[int]] = [[] for _ in range(size)]
        self.nanoseconds = [100, 100]
        trials, memory = self.modules.method_trials, self.machine
        trials.FIRST_BITS, trials._TRIAL_CALLS = 1, 2
        shared = memory.shared(8 * trials.shared_words(size))
        memory.clock_gettime = self._clock  # type: ignore[method-assign]
        trials.clock_gettime = self._clock
        self._now = [0] * size
        for rank in range(size):
            own = memory.private(8 * trials.own_words())
            memory.store(own + 8 * trials.OWN_FIRST, 1)
            memory.store(own + 8 * trials.OWN_LONGEST, 1)
            self.put(rank, self.words.METHODS, shared)
            self.put(rank, self.words.METHOD_TIMES, own)

    def _clock(self, clock: int, time: int) -> int:
        rank, memory = self.machine.rank, self.machine
        self._now[rank] += self.nanoseconds[self.methods[rank][-1]]
        memory.store(time, 0)
        memory.store(time + 8, self._now[rank])
        return 0

    def start(self, rank: int, operation: SimulatedOperation) -> int:
        """Take the method of the moment, as `dispatch` does, and start the operation."""
        words, trials, job = self.words, self.modules.method_trials, self.jobs[rank]
        collective, method = words.COLLECTIVES.index(operation.kind), STAGE
        tried = operation.kind in TRIED
        if tried:
            method = trials.current_method(job, collective, 8 * operation.count, STAGE + 1) - 1
        self.methods[rank].append(method)
        for word, value in (
            (words.COLLECTIVE, collective),
            (words.COUNT, operation.count),
            (words.METHOD, method),
            (words.FIRST_METHOD, (STAGE + 1) * tried),
        ):
            self.put(rank, word, value)
        trials.begin_timing(job)
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
        methods = run_calls(seed, size).methods
        assert all(each == methods[0] for each in methods), seed
        changes += np.count_nonzero(np.diff(methods[0]))
    assert changes > 50


@pytest.mark.parametrize(
    ("lead", "edits"),
    [
        (2, None),
        (3, {"method_trials": ("    if number < decision >> 4:\n        return", "    if False:\n        return")}),
        (3, {"method_trials": ("4 * (method + 1) + 2 - method", "4 * (2 - method) + 2 - method")}),
    ],
    ids=["held too early", "decided before the last one holds", "wrong method before"],
)
def test_planted_errors_are_found(lead: int, edits: Edits) -> None:
    for seed in range(400):
        try:
            methods = run_calls(seed, 3, edits, lead, ("bcast", "scatter", "gather", "reduce")).methods
        except (Race, AssertionError, Lost):
            return  # ranks went different ways at once
        if any(each != methods[0] for each in methods):
            return
    pytest.fail("no interleaving in which ranks take different methods")


@pytest.mark.parametrize(("nanoseconds", "faster"), [([300, 100], TRANSFER), ([100, 300], STAGE)])
def test_the_faster_method_is_kept(nanoseconds: list[int], faster: int) -> None:
    world = TryingWorld(2, 1)
    world.nanoseconds = nanoseconds
    world.modules.method_trials._TRIAL_CALLS = 10
    for rank in range(2):
        own = world.machine.load(world.jobs[rank] + 8 * world.words.METHOD_TIMES)
        world.machine.store(own + 8 * world.modules.method_trials.OWN_FIRST, 12)
        world.machine.store(own + 8 * world.modules.method_trials.OWN_LONGEST, 1000)
    run_all(world, [world.draw(("allreduce",), (70,)) for _ in range(90)])
    assert {STAGE, TRANSFER} == set(world.methods[0])
    assert world.methods[0][-40:].count(faster) == 40
