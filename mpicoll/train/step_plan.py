"""Step plan of a run: number of steps, samples and learning rate of each step; and the division of samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpicoll.data.datasets import Samples
from mpicoll.data.sampler import batch_of, epoch_order, part, steps_per_epoch
from mpicoll.models.layers import RandomKey
from mpicoll.models.micro_batches import MicroBatch
from mpicoll.optim.learning_rate import learning_rate, scaled
from mpicoll.train.config import TrainConfig
from mpicoll.train.load_balance import LoadBalance

_EVALUATION_ROWS = 1024


class StepPlan:
    """Steps of a run over `count` training samples.

    Attributes
    ----------
    config
        Options of the run.
    steps_per_epoch
        Steps of an epoch; the last one may take fewer samples.
    total_steps
        Steps of the whole run.
    epoch_count
        Number of epochs; the last one may be cut short.
    schedule_steps
        Length of the learning rate's schedule: steps of the run that `config` describes.
    peak
        Largest learning rate.
    balance
        Division of batches by the pace of the replicas; None for equal parts.
    """

    balance: LoadBalance | None = None

    def __init__(self, config: TrainConfig, count: int) -> None:
        self.config, self._count = config, count
        self.steps_per_epoch = steps_per_epoch(count, config.step_batch)
        steps = config.epochs * self.steps_per_epoch
        self.total_steps = steps if config.steps is None else min(steps, config.steps)
        self.epoch_count = -(-self.total_steps // self.steps_per_epoch)
        self.schedule_steps = self.total_steps
        self.peak = scaled(config.lr, config.scale_lr, config.step_batch, config.base_batch)
        self._epoch, self._order = -1, np.empty(0, np.int32)

    def stop_after(self, epochs: int) -> None:
        """End after so many epochs, or with the run; learning rates stay those of the whole run."""
        self.total_steps = min(self.schedule_steps, epochs * self.steps_per_epoch)
        self.epoch_count = -(-self.total_steps // self.steps_per_epoch)

    def ends_epoch(self, step: int) -> bool:
        """Return True if an epoch, or the run, ends with a step."""
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.total_steps

    def samples(self, step: int, size: int, rank: int) -> tuple[np.ndarray, int]:
        """Return indices of the samples of part `rank` of `size` parts of a step, and the step's number of samples."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self._count, self.config.seed, epoch)
        whole = batch_of(self._order, number, self.config.step_batch)
        start, stop = self.balance.part(len(whole), rank) if self.balance is not None else part(len(whole), size, rank)
        return whole[start:stop], len(whole)

    def batch_count(self, step: int) -> int:
        """Return the number of samples of a step, over all ranks."""
        batch = self.config.step_batch
        return min(self._count - step % self.steps_per_epoch * batch, batch)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        config = self.config
        return learning_rate(step, self.schedule_steps, self.peak, config.warmup, config.schedule)


def micro_batches(x: Any, y: Any, indices: np.ndarray, step: int, config: TrainConfig) -> list[MicroBatch]:
    """Return the samples `indices` of a step in ``accumulate * microbatches`` parts, some of them perhaps empty."""
    parts, numbers = config.accumulate * config.microbatches, indices.astype(np.int64)
    cuts = [slice(*part(len(x), parts, number)) for number in range(parts)]
    return [MicroBatch(x[cut], y[cut], RandomKey(config.seed, step, numbers[cut])) for cut in cuts]


def shares_for_evaluation(samples: Samples, size: int, rank: int) -> Iterator[tuple[Any, Any]]:
    """Yield features and labels of a rank's share in batches; equally many batches on all ranks, some perhaps empty."""
    start, stop = part(samples.count, size, rank)
    batches = -(-part(samples.count, size, 0)[1] // _EVALUATION_ROWS)
    for first in itertools.islice(itertools.count(start, _EVALUATION_ROWS), batches):
        indices = np.arange(min(first, stop), min(first + _EVALUATION_ROWS, stop))
        yield samples.batch(indices)
