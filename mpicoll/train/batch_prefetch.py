"""Reading of training samples: by a thread, ahead of the steps that use them, or when they are used."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from mpicoll.data.datasets import Samples, StoredSamples
from mpicoll.models.micro_batches import MicroBatch
from mpicoll.train.config import TrainConfig
from mpicoll.train.coordination import Share
from mpicoll.train.step_plan import StepPlan, micro_batches


class _Ahead(NamedTuple):
    """Batch that is being made; the result of `future` is its indices, features and targets."""

    step: int
    parts: int
    part: int
    future: Future[tuple[np.ndarray, Any, Any]]


class BatchPrefetch:
    """Reader of training samples that makes the batches of the next steps in a thread.

    Batches are those that would be read without it, in arrays of their own: it expects that a rank takes the same part
    of each of the steps in order, and a batch of other samples than a step asks for is made again. An exception of the
    data set is raised where its batch is asked for.

    Parameters
    ----------
    samples
        Training samples; from the first call on, only the thread reads them.
    plan
        Steps of the run, for the thread alone.
    ahead
        Largest number of batches that are made ahead, from 1 on, each of which takes memory.
    """

    def __init__(self, samples: Samples, plan: StepPlan, ahead: int) -> None:
        self._plan, self._ahead = plan, ahead
        # One batch is in use while the others are made. What other data sets return is copied.
        rooms = ahead + 1 if isinstance(samples, StoredSamples) else 0
        self._rooms = [samples.another() for _ in range(rooms)] if isinstance(samples, StoredSamples) else []
        self._samples, self._submitted = samples, 0
        self._queue: deque[_Ahead] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mpicoll-batches")

    def batch(self, indices: np.ndarray, step: int, parts: int, part: int) -> tuple[Any, Any]:
        """Return features and targets of the samples `indices`, valid until the next call.

        Parameters
        ----------
        step, parts, part
            The step, and this rank's part of its samples, as for :meth:`StepPlan.samples`.
        """
        while self._queue and self._queue[0][:3] != (step, parts, part):
            self._queue.popleft().future.cancel()
        if not self._queue:
            self._submit(step, parts, part)
        found = self._queue.popleft()
        # The others are under way while this one is waited for.
        for later in range(self._queue[-1].step + 1 if self._queue else step + 1, step + self._ahead + 1):
            if later < self._plan.total_steps:
                self._submit(later, parts, part)
        made, x, y = found.future.result()
        if not np.array_equal(made, indices):
            return self._thread.submit(self._samples.batch, indices).result()
        return x, y

    def _submit(self, step: int, parts: int, part: int) -> None:
        room = self._rooms[self._submitted % len(self._rooms)] if self._rooms else None
        self._queue.append(_Ahead(step, parts, part, self._thread.submit(self._make, step, parts, part, room)))
        self._submitted += 1

    def _make(self, step: int, parts: int, part: int, room: Samples | None) -> tuple[np.ndarray, Any, Any]:
        """Return the indices, features and targets of a step's part; called in the thread."""
        indices = self._plan.samples(step, parts, part)[0]
        with np.errstate(all="ignore"):  # as in the trainer's thread
            if room is not None:
                return indices, *room.batch(indices)
            return indices, *map(_copied, self._samples.batch(indices))

    def close(self) -> None:
        """End the thread, after the batch that it is making."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._queue.clear()


def _copied(part: Any) -> Any:
    """Return a copy of an array, which a data set may use again; anything else as it is."""
    return part.copy() if isinstance(part, np.ndarray) else part


class BatchReader:
    """Reader of one rank's training samples, ahead of the steps with ``--prefetch``."""

    def __init__(self, config: TrainConfig, samples: Samples) -> None:
        self._config, self._samples = config, samples
        ahead = config.prefetch
        self._prefetch = BatchPrefetch(samples, StepPlan(config, samples.count), ahead) if ahead else None

    def parts(self, indices: np.ndarray, share: Share) -> list[MicroBatch]:
        """Return the samples `indices` of a share in parts: see :func:`~mpicoll.train.step_plan.micro_batches`."""
        if self._prefetch is None:
            x, y = self._samples.batch(indices)
        else:
            x, y = self._prefetch.batch(indices, share.step, share.parts, share.part)
        return micro_batches(x, y, indices, share.step, self._config)

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._prefetch is not None:
            self._prefetch.close()
