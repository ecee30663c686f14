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
from mpicoll.deploy.inference import Runtime
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
        Seconds for one sample, the median of several rounds.
    throughput
        Samples a second in calls of :data:`BATCH` samples on one rank, the median of several rounds.
    """

    name: str
    accuracy: float | None
    nbytes: int
    operations: int
    nonzero_operations: int
    latency: float
    throughput: float


def evaluate(models: Sequence[tuple[str, DeployedModel]], dataset: Dataset, comm: MPI.Intracomm) -> list[Evaluation]:
    """Return the properties of named models, the same on all ranks. Collective over `comm`.

    Accuracy is counted by all ranks, each with its share of the samples. Times are taken on rank 0, while the other
    ranks sleep; models take turns, so that what else the machine does meets all of them.
    """
    runtimes = [Runtime(model) for _, model in models]
    accuracies = [accuracy(runtime, dataset, comm) for runtime in runtimes]
    record = {"times": _times(runtimes, dataset)} if comm.Get_rank() == 0 else None
    wait_politely(comm)
    times = share(comm, record)["times"]
    return [
        Evaluation(name, reached, stored_nbytes(model), *model.operations, *pair)
        for (name, model), reached, pair in zip(models, accuracies, times, strict=True)
    ]


def accuracy(runtime: Runtime, dataset: Dataset, comm: MPI.Intracomm) -> float | None:
    """Return the share of the test samples that are classified right; None without samples. Collective."""
    if dataset.test.count == 0:
        return None
    hits = np.zeros(1, np.int64)
    for x, y in shares_for_evaluation(dataset.test, comm.Get_size(), comm.Get_rank()):
        if len(x):
            hits += np.count_nonzero(runtime.predict(x) == y)
    comm.Allreduce(MPI.IN_PLACE, hits, MPI.SUM)
    return float(hits[0] / dataset.test.count)


def _times(runtimes: Sequence[Runtime], dataset: Dataset) -> list[tuple[float, float]]:
    """Return latency and throughput of each runtime."""
    x = dataset.train.batch(np.arange(BATCH) % dataset.train.count)[0].copy()
    one = x[:1].copy()
    taken = []
    for samples in (one, x):
        for runtime in runtimes:  # loads kernels, takes memory
            runtime.logits(samples)
        rounds = [[_seconds(runtime, samples) for runtime in runtimes] for _ in range(_ROUNDS)]
        taken.append([statistics.median(column) for column in zip(*rounds, strict=True)])
    return [(latency, BATCH / batch) for latency, batch in zip(*taken, strict=True)]


def _seconds(runtime: Runtime, samples: np.ndarray) -> float:
    """Return the mean time of a call, over calls of a few hundredths of a second."""
    calls, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < _ROUND_SECONDS:
        runtime.logits(samples)
        calls += 1
    return passed / max(calls, 1)
