"""Evaluation of deployed models: accuracy over the test samples, size, operations, latency and throughput."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import share, wait_politely
from mpicoll.data.datasets import Dataset
from mpicoll.deploy.deployed_file import stored_nbytes
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.inference import Inference, Runtime
from mpicoll.deploy.sharded_model import ShardedModel, runtime_of
from mpicoll.train.step_plan import shares_for_evaluation

BATCH = 256
"""Samples of a call whose throughput is measured."""
_ROUNDS = 7
_ROUND_SECONDS = 0.02


class Evaluation(NamedTuple):
    """Properties of a model.

    Attributes
    ----------
    name
        Name of the model, as it was given.
    accuracy
        Share of the test samples that are classified right; None without test samples.
    nbytes
        Bytes of the stored tensors.
    operations, nonzero_operations
        Multiply-accumulate operations of a sample: of all weights, and of those that are not 0.
    latency
        Seconds for one sample, the median of several rounds; None for a model whose parameters are on several ranks.
    throughput
        Samples a second in calls of :data:`BATCH` samples on one rank, the median of several rounds; None likewise.
    """

    name: str
    accuracy: float | None
    nbytes: int
    operations: int
    nonzero_operations: int
    latency: float | None
    throughput: float | None

    @property
    def times(self) -> tuple[float, float]:
        """Latency and throughput of a model that one rank holds."""
        assert self.latency is not None
        assert self.throughput is not None
        return self.latency, self.throughput


def evaluate(
    models: Sequence[tuple[str, DeployedModel | ShardedModel]], dataset: Dataset, comm: MPI.Intracomm
) -> list[Evaluation]:
    """Return the properties of named models, the same on all ranks. Collective over `comm`.

    Accuracy is counted by all ranks, each with its share of the samples. Times are taken on rank 0, while the other
    ranks sleep; models take turns, so that what else the machine does meets all of them.
    """
    runtimes = [runtime_of(model) for _, model in models]
    accuracies = [accuracy(runtime, dataset, comm) for runtime in runtimes]
    record = {"times": _times(runtimes, dataset)} if comm.Get_rank() == 0 else None
    wait_politely(comm)
    times = share(comm, record)["times"]
    return [
        Evaluation(name, reached, stored_nbytes(model), *model.operations, *pair)
        for (name, model), reached, pair in zip(models, accuracies, times, strict=True)
    ]


def accuracy(runtime: Inference, dataset: Dataset, comm: MPI.Intracomm) -> float | None:
    """Return the share of the test samples that are classified right; None without samples. Collective."""
    if dataset.test.count == 0:
        return None
    hits = np.zeros(1, np.int64)
    for x, y in shares_for_evaluation(dataset.test, comm.Get_size(), comm.Get_rank()):
        hits += np.count_nonzero(runtime.predict(x) == y)
    comm.Allreduce(MPI.IN_PLACE, hits, MPI.SUM)
    return float(hits[0] / dataset.test.count)


def _times(every: Sequence[Inference], dataset: Dataset) -> list[tuple[float, float] | tuple[None, None]]:
    """Return latency and throughput of each runtime; None for those that need other ranks."""
    runtimes = [runtime for runtime in every if isinstance(runtime, Runtime)]
    x = dataset.train.batch(np.arange(BATCH) % dataset.train.count)[0].copy()
    one = x[:1].copy()
    taken = []
    for samples in (one, x):
        for runtime in runtimes:  # loads kernels, takes memory
            runtime.logits(samples)
        rounds = [[_seconds(runtime, samples) for runtime in runtimes] for _ in range(_ROUNDS)]
        taken.append([statistics.median(column) for column in zip(*rounds, strict=True)])
    found = iter([(latency, BATCH / batch) for latency, batch in zip(*taken, strict=True)])
    return [next(found) if isinstance(runtime, Runtime) else (None, None) for runtime in every]


def _seconds(runtime: Runtime, samples: np.ndarray) -> float:
    """Return the mean time of a call, over calls of a few hundredths of a second."""
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < _ROUND_SECONDS:
        runtime.logits(samples)
        calls += 1
    return passed / max(calls, 1)
