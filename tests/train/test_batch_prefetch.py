"""Batches made ahead by a thread: the same ones, in time, with their errors, and no thread at the end."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.data.datasets import ArraySamples, StoredSamples
from mpicoll.errors import NonFiniteLoss
from mpicoll.train.batch_prefetch import BatchPrefetch
from mpicoll.train.options import parse
from mpicoll.train.step_plan import StepPlan
from mpicoll.train.trainer import Trainer
from tests.own_models import Softmax, samples

COUNT = 50


def plan(batch: int = 8, epochs: int = 3) -> StepPlan:
    return StepPlan(parse(["--dataset=synthetic:50", f"--batch={batch}", f"--epochs={epochs}"]), COUNT)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mpicoll-batches")]


class Slow:
    """Samples that are their own numbers, in memory that is used again; each batch takes a while."""

    def __init__(self, seconds: float = 0.0, wrong: int = -1) -> None:
        self.count, self._seconds, self._wrong, self._x = COUNT, seconds, wrong, np.empty(COUNT, np.int64)
        self.batches = 0

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        time.sleep(self._seconds)
        self.batches += 1
        if self.batches == self._wrong:
            raise OSError("the disk is gone")
        x = self._x[: len(indices)]
        x[:] = indices
        return x, indices.tolist()


def stored() -> StoredSamples:
    x = np.arange(COUNT * 3, dtype=np.float64).reshape(COUNT, 3)
    return StoredSamples(ArraySamples(x, np.arange(COUNT), 1.0), 3, "float64")


@pytest.mark.parametrize("ahead", [1, 2, 5, 100])
@pytest.mark.parametrize("make", [stored, Slow])
def test_batches_are_those_of_the_steps(ahead: int, make: Any) -> None:
    steps, reader = plan(), BatchPrefetch(make(), plan(), ahead)
    for step in range(steps.total_steps):
        indices, _ = steps.samples(step, 3, 1)
        x, y = reader.batch(indices, step, 3, 1)
        time.sleep(0.002)  # the thread goes on, and may not touch this batch
        np.testing.assert_array_equal(x[:, 0] / 3 if x.ndim > 1 else x, indices)
        np.testing.assert_array_equal(y, indices)
    reader.close()
    assert not threads()


def test_a_batch_that_was_not_expected_is_made_anew() -> None:
    steps, reader = plan(), BatchPrefetch(stored(), plan(), 3)
    for step, part in [(0, 0), (1, 0), (5, 0), (6, 1), (7, 1), (2, 0), (20, 0)]:
        indices, _ = steps.samples(step, 2, part)
        np.testing.assert_array_equal(reader.batch(indices, step, 2, part)[1], indices)
    other = np.array([3, 1, 4])
    np.testing.assert_array_equal(reader.batch(other, 1, 2, 0)[1], other)
    reader.close()


def test_no_more_batches_are_made_than_asked_for() -> None:
    slow, steps = Slow(), plan()
    reader = BatchPrefetch(slow, plan(), 2)
    reader.batch(steps.samples(0, 1, 0)[0], 0, 1, 0)
    time.sleep(0.2)
    assert slow.batches == 3
    for step in range(1, steps.total_steps):
        reader.batch(steps.samples(step, 1, 0)[0], step, 1, 0)
    reader.close()
    assert slow.batches == steps.total_steps  # none beyond the last step


def test_reading_and_computing_go_on_at_the_same_time() -> None:
    steps, seconds = plan(epochs=2), {}
    for ahead in (0, 2):
        slow = Slow(0.02)
        reader = BatchPrefetch(slow, plan(epochs=2), ahead) if ahead else None
        begin = time.perf_counter()
        for step in range(steps.total_steps):
            indices, _ = steps.samples(step, 1, 0)
            _ = reader.batch(indices, step, 1, 0) if reader is not None else slow.batch(indices)
            time.sleep(0.02)
        seconds[ahead] = time.perf_counter() - begin
        if reader is not None:
            reader.close()
    assert seconds[2] < 0.8 * seconds[0]


def test_an_error_comes_with_its_batch() -> None:
    steps, reader = plan(), BatchPrefetch(Slow(wrong=3), plan(), 2)
    for step in range(2):
        reader.batch(steps.samples(step, 1, 0)[0], step, 1, 0)
    with pytest.raises(OSError, match="the disk is gone"):
        reader.batch(steps.samples(2, 1, 0)[0], 2, 1, 0)
    reader.close()
    assert not threads()


class Failing:
    """Data of a user, of which a batch fails."""

    def __init__(self, calls: int) -> None:
        self._inner, self._calls = samples(200), calls

    def __len__(self) -> int:
        return len(self._inner)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self._calls -= 1
        if not self._calls:
            raise OSError("the disk is gone")
        return self._inner.batch(indices)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"strategy": "local"}, {"strategy": "sharded"}], ids=str)
def test_training_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    found = {}
    for ahead in (0, 3):
        trainer = Trainer(
            Softmax(),
            samples(200),
            test_data=samples(40, seed=4),
            comm=MPI.COMM_SELF,
            epochs=3,
            prefetch=ahead,
            **options,
        )
        found[ahead] = trainer.fit()["parameters_sha256"]
    assert found[0] == found[3]
    assert not threads()


def test_an_error_of_the_data_arrives_and_ends_the_thread() -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        Trainer(Softmax(), Failing(8), comm=MPI.COMM_SELF, epochs=3, prefetch=2).fit()
    assert not threads()


def test_a_run_that_ends_early_ends_the_thread() -> None:
    with pytest.raises(NonFiniteLoss):
        Trainer(Softmax(), samples(200), comm=MPI.COMM_SELF, epochs=30, prefetch=2, lr=1e38, warmup=0).fit()
    assert not threads()
