"""Ranks with one lane of operations, interleaved at random, and random operations for them."""

from __future__ import annotations

import random

import numpy as np

from mpicoll import plans
from mpicoll.plans.simulated_executor import BY_PARTS, COUNTED, PLANS_NBYTES, Edits, Ranks, SimulatedOperation
from tests.kernels.interleaving import Machine

KINDS = (*plans.COLLECTIVES, *COUNTED)
COUNTS = (1, 13, 30, 70, 130, 200)
"""By record, by slot, in one segment and in several."""


def draw(pick: random.Random, size: int, kinds: tuple[str, ...], counts: tuple[int, ...]) -> SimulatedOperation:
    """Draw an operation of `size` ranks."""
    kind, count = pick.choice(kinds), pick.choice(counts)
    if kind in BY_PARTS:
        count = -(-count // size) * size
    near = pick.random()
    places = [_places(pick, near) for _ in range(size)]
    values = np.array([[pick.randrange(1 << 40) for _ in range(count)] for _ in range(size)], np.int64)
    in_place = pick.random() < 0.3 and kind == "allreduce"
    return SimulatedOperation(kind, count, pick.randrange(size), in_place, places, values)


def _places(pick: random.Random, near: float) -> tuple[int, int]:
    send, recv = (pick.randrange(2) if pick.random() < near else 4 + pick.randrange(2) for _ in range(2))
    return send, recv + 2


class World(Ranks):
    """Ranks with one lane of operations."""

    def __init__(self, size: int, seed: int, method: str = "STAGE", ahead: int = 1, edits: Edits = None) -> None:
        self.machine = Machine(size, size * (PLANS_NBYTES + (1 << 19)), seed)
        super().__init__(self.machine, method, edits, ahead=ahead)

    def draw(self, kinds: tuple[str, ...], counts: tuple[int, ...] = COUNTS) -> SimulatedOperation:
        """Draw an operation, of which all ranks know everything."""
        return draw(self.machine.random, self.size, kinds, counts)

    def finish(self, rank: int, status: int) -> int:
        """Advance to the end; return the last status."""
        while status == self.executor.WAITING:
            self.machine.wait()
            status = self.advance(rank)
        return status


def run_all(world: World, operations: list[SimulatedOperation]) -> None:
    def program(rank: int) -> None:
        for operation in operations:
            status = world.finish(rank, world.start(rank, operation))
            assert status == world.executor.DONE, (rank, status, operation)
            world.check(rank, operation)

    world.machine.run([lambda rank=rank: program(rank) for rank in range(world.size)])  # type: ignore[misc]
