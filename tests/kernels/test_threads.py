"""Ranks as threads of one process: the machine code of the executor at full speed, on many ranks, without a launcher.

The proof of the same operations, in tests/kernels/test_every_interleaving.py, is about their source as Python runs it.
"""

from __future__ import annotations

import itertools
import random
import threading
import time

import numpy as np
import pytest

from mpicoll.kernels.decorators import DISABLED
from mpicoll.plans.simulated_executor import PLANS_NBYTES, Ranks, SimulatedOperation
from mpicoll.plans.thread_memory import ThreadMemory
from mpicoll.plans.verify_plan import METHODS, counted_operations, every_operation, operation
from mpicoll.shared_memory.slot_lengths import ahead
from tests import extent
from tests.kernels.world import COUNTS, KINDS, draw

pytestmark = pytest.mark.skipif(DISABLED, reason="the executor is not compiled")
SECONDS = 60


def ranks_as_threads(size: int, method: str) -> Ranks:
    return Ranks(ThreadMemory(size, size * (PLANS_NBYTES + (3 << 17))), method, ahead=ahead(size))


def work(ranks: Ranks, rank: int, operations: list[SimulatedOperation], until: float) -> None:
    for number, one in enumerate(operations):
        status = ranks.start(rank, one)
        while status == ranks.executor.WAITING:
            assert time.monotonic() < until, f"rank {rank} waits in operation {number}, {one}"
            time.sleep(0)
            status = ranks.advance(rank)
        assert status == ranks.executor.DONE, (rank, number, one, status)
        ranks.check(rank, one)


def run_on_threads(ranks: Ranks, operations: list[SimulatedOperation]) -> None:
    """Raise the first error of any rank."""
    for rank, one in itertools.product(range(ranks.size), operations):
        ranks.plan_of(rank, one)
    errors: list[BaseException] = []
    until = time.monotonic() + SECONDS

    def rank_of(rank: int) -> None:
        try:
            work(ranks, rank, operations, until if not errors else 0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(ranks.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4, 8, 13, 32, 64] if extent.ALL else [2, 3, 32])
def test_every_operation(size: int, method: str) -> None:
    run_on_threads(ranks_as_threads(size, method), [*every_operation(size), *counted_operations(size)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_random_sequences(size: int, method: str) -> None:
    seed = random.randrange(1 << 30)
    numbers = random.Random(seed)
    operations = [draw(numbers, size, KINDS, COUNTS) for _ in range((4000 if extent.ALL else 1500) // size)]
    try:
        run_on_threads(ranks_as_threads(size, method), operations)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def test_a_wrong_element_is_found() -> None:
    ranks, one = ranks_as_threads(3, "STAGE"), operation(3, "allreduce", 70)
    one.values = np.vstack([one.values[:2], one.values[2:] + 1])
    wanted = one.values.sum(axis=0)
    run_on_threads(ranks, [one])
    ranks.memory.fill(ranks.buffers[1][one.places[1][1]], wanted + 1)
    with pytest.raises(AssertionError, match="rank 1 of 3: wrong result"):
        ranks.check(1, one)
