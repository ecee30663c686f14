"""Collectives on shared memory, in random interleavings of their loads, stores and copies: no race, no wrong element.

The functions of `kernels/executor.py` themselves run the plans themselves; see `interleaving`.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from mpicoll.plans.simulated_executor import BUFFER_NBYTES, SimulatedOperation
from tests import extent
from tests.kernels.world import COUNTS, KINDS, World, run_all

EVERY_PAIR = list(itertools.product(KINDS, repeat=2))
PAIRS = EVERY_PAIR if extent.ALL else random.Random(2).sample(EVERY_PAIR, 36)
LONG = (70, 130, 200)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_pairs_of_long_operations(size: int, pair: tuple[str, str]) -> None:
    for seed in range(4):
        world = World(size, seed)
        run_all(world, [world.draw((kind,), LONG) for kind in (*pair, pair[0])])


@pytest.mark.parametrize("method", ["STAGE", "TRANSFER"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_mixtures(size: int, method: str) -> None:
    for seed in range(12):
        world = World(size, seed, method, ahead=1 << seed % 3)
        run_all(world, [world.draw(KINDS, (1, *COUNTS)) for _ in range(8)])


def give_up(world: World, rank: int) -> None:
    """Withdraw, wait for those that are at work, and use all buffers for something else."""
    world.modules.withdrawal.withdraw(world.jobs[rank])
    while world.modules.withdrawal.at_work(world.jobs[rank]) >= 0:
        world.machine.wait()
    for place in range(8):
        world.machine.write(world.buffers[rank][place], np.full(BUFFER_NBYTES // 8, -rank - 1))


def run_until_somebody_gives_up(world: World, operations: list[SimulatedOperation]) -> None:
    """Let a rank give up at a random moment, and the others when they see it or have waited long for what comes."""
    pick = world.machine.random
    patience = {pick.randrange(world.size): pick.randrange(40)}

    def program(rank: int) -> None:
        left = patience.get(rank, 4000)
        for operation in operations:
            status = world.start(rank, operation)
            while status == world.executor.WAITING and left:
                left -= 1
                world.machine.wait()
                status = world.advance(rank)
            if status != world.executor.DONE:
                assert status in (world.executor.WAITING, world.words.MISMATCH)
                give_up(world, rank)
                return
            world.check(rank, operation)

    world.machine.run([lambda rank=rank: program(rank) for rank in range(world.size)])  # type: ignore[misc]


@pytest.mark.parametrize("method", ["STAGE", "TRANSFER"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_gives_up_gets_its_buffers_back(size: int, method: str) -> None:
    for seed in range(60):
        world = World(size, seed, method, ahead=1 << seed % 3)
        kinds = world.machine.random.sample(KINDS, 2)
        run_until_somebody_gives_up(world, [world.draw((kind,), LONG) for kind in kinds])


@pytest.mark.parametrize("method", ["STAGE", "TRANSFER"])
def test_a_rank_that_gives_up_a_bcast_to_one_gets_its_buffers_back(method: str) -> None:
    """The root writes half of the vector to the other rank's buffer."""
    for seed in range(150):
        world = World(2, seed, method)
        run_until_somebody_gives_up(world, [world.draw(("bcast",), LONG) for _ in range(2)])


@pytest.mark.parametrize("count", [13, 30, 130])
@pytest.mark.parametrize("kind", ["allreduce", "reduce", "reduce_scatter"])
def test_a_reducer_that_raises_is_noticed(kind: str, count: int) -> None:
    """By its own rank at least; short vectors are reduced by all that need them."""
    world, statuses = World(3, count), [0, 0, 0]
    operation = world.draw((kind,), (count,))
    operation.root = operation.raises = 1

    def program(rank: int) -> None:
        status = world.start(rank, operation)
        for _ in range(500):
            if status == world.executor.WAITING:
                world.machine.wait()
                status = world.advance(rank)
        statuses[rank] = status

    world.machine.run([lambda rank=rank: program(rank) for rank in range(3)])  # type: ignore[misc]
    assert statuses[1] == world.words.RAISED
    assert world.words.RAISED not in (statuses[0], statuses[2])
