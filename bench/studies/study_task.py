"""Training of one run of a study, on all its ranks, with the replicas' distance to each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from bench.compressed_training import clouds
from bench.studies.study_runs import TEST, TRAIN, StudyError, StudyOutcome, StudyRun
from mpicoll.errors import NonFiniteLoss
from mpicoll.models.micro_batches import SequentialMicroBatches
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.train.assembly import make_communicator
from mpicoll.train.config import TrainConfig
from mpicoll.train.model_choice import build_model
from mpicoll.train.step_plan import shares_for_evaluation
from mpicoll.train.training_run import Observer
from mpicoll.train.training_run import run as run_training

if TYPE_CHECKING:
    from mpicoll.data.datasets import Dataset
    from mpicoll.train.loop import Loop

_SNAPSHOTS = 64
"""Updates between two snapshots, the first of which is one update earlier, so that averages every 2, 4, ... steps come
after it."""
_KEPT = 64
"""Largest number of snapshots, about."""
_REPLICAS = ("local", "gossip")
"""Modes in which replicas differ."""


class _RecordedStrategy:
    """A strategy that copies this rank's replica from time to time, and behaves like the original otherwise."""

    def __init__(self, strategy: Any, model: Model, updates: int) -> None:
        self._strategy, self._model, self._updates = strategy, model, 0
        self._every = max(1, updates // _KEPT // _SNAPSHOTS) * _SNAPSHOTS
        self.snapshots: list[tuple[int, np.ndarray]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def update(self, rate: float, clip: float | None) -> float:
        """Update, then copy if that is due."""
        norm: float = self._strategy.update(rate, clip)
        self._updates += 1
        if (self._updates + 1) % self._every == 0:
            self.snapshots.append((self._updates, self._replica()))
        return norm

    def _replica(self) -> np.ndarray:
        layers = range(len(self._model.layers))
        arrays = [array.ravel() for layer in layers for array in self._strategy.parameters(layer)]
        return np.concatenate(arrays)

    def last(self) -> np.ndarray:
        """Return the rank's own replica after its last step; before the ranks meet."""
        found: np.ndarray = self._strategy.replica
        return found.copy()


class _ReplicaObserver(Observer):
    """Observer that measures the distance between replicas, and the accuracy of each of them."""

    def __init__(self, comm: MPI.Intracomm, config: TrainConfig) -> None:
        self._comm, self._config = comm, config
        self.distances: list[list[float]] = []
        self.accuracies: list[float] = []
        self._recorded: _RecordedStrategy | None = None
        self._model: Model
        self._dataset: Dataset

    def source(self, config: TrainConfig, comm: MPI.Intracomm) -> tuple[Dataset, Model]:
        """Return data set and model."""
        self._dataset = clouds(TRAIN, TEST)
        self._model = build_model(config, self._dataset)
        return self._dataset, self._model

    def began(self, loop: Loop) -> None:
        """Record the replica, on every rank."""
        if self._config.mode in _REPLICAS:
            self._recorded = _RecordedStrategy(loop.strategy, self._model, loop.step_plan.total_steps)
            loop.strategy = self._recorded

    def ended(self, loop: Loop) -> None:
        """Compare the replicas; collective."""
        if self._recorded is None:
            return
        snapshots = self._recorded.snapshots
        count = np.array([len(snapshots)])
        self._comm.Allreduce(MPI.IN_PLACE, count, MPI.MIN)  # ranks that do not wait take different numbers of steps
        for steps, replica in snapshots[: int(count[0])]:
            self.distances.append([steps, _distance(self._comm, replica)])
        if self._config.averaging == "final":
            self.accuracies = self._tested(self._recorded.last())

    def _tested(self, replica: np.ndarray) -> list[float]:
        """Return the accuracy of every rank's replica on all test samples."""
        store: Any = FlatParameters(self._model.layout, replica)
        engine = SequentialMicroBatches(self._model)
        samples = self._dataset.test
        hits = sum(engine.loss(store, x, y)[1] for x, y in shares_for_evaluation(samples, 1, 0))
        found = np.empty(self._comm.Get_size())
        self._comm.Allgather(np.array([hits / samples.count]), found)
        return [float(each) for each in found]


def _distance(comm: MPI.Intracomm, replica: np.ndarray) -> float:
    """Return the root of the mean square distance of the replicas to their mean; collective."""
    mean = replica.astype(np.float64)
    comm.Allreduce(MPI.IN_PLACE, mean, MPI.SUM)
    mean /= comm.Get_size()
    squares = np.array([np.sum((replica - mean) ** 2)])
    comm.Allreduce(MPI.IN_PLACE, squares, MPI.SUM)
    return math.sqrt(float(squares[0]) / comm.Get_size())


def execute(run: StudyRun, world: MPI.Intracomm) -> StudyOutcome:
    """Train once, and return the outcome, which is complete on rank 0; collective.

    Raises
    ------
    StudyError
        On every rank, if SIGTERM ended the run before its last step.
    """
    config = TrainConfig(dataset="clouds", seed=run.seed, progress=False, quiet=True, **run.options)
    comm = make_communicator(config, world)
    observer = _ReplicaObserver(comm, config)
    try:
        result = run_training(config, comm, observer.source, observer)
    except NonFiniteLoss as error:
        return StudyOutcome(run, diverged=str(error))
    if result["stopped"]:
        raise StudyError(f"{run.variant}, seed {run.seed}: was stopped after {result['steps']} steps")
    own: dict[str, Any] = result["mode"] or {}
    tested = [epoch for epoch in result["epochs"] if epoch["test_accuracy"] is not None]
    return StudyOutcome(
        run,
        accuracy=result["test_accuracy"],
        steps=result["steps"],
        seconds=result["training_seconds"],
        samples_per_second=result["samples_per_second"],
        sent_nbytes=result["sent_nbytes_per_step"],
        curve=[[epoch["steps"], epoch["seconds"], epoch["test_accuracy"]] for epoch in tested],
        distances=observer.distances,
        replicas=observer.accuracies,
        late=(own.get("staleness") or {}).get("mean"),
    )
