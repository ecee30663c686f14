"""Programming interface of :mod:`mpicoll.train`: training of user-defined models."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.data.datasets import Dataset, check_same_data
from mpicoll.data.own_samples import OwnSamples, check_samples
from mpicoll.errors import DataError, MpicollError, TrainingError, UsageError
from mpicoll.models.own_model import OwnModel, TrainableModel
from mpicoll.models.sequential import Model
from mpicoll.quantities import counted
from mpicoll.train.assembly import make_communicator
from mpicoll.train.config import TrainConfig
from mpicoll.train.loop import Loop
from mpicoll.train.metrics import EpochRecord, StepRecord
from mpicoll.train.option_checks import DEFAULTS
from mpicoll.train.option_types import integer
from mpicoll.train.options import parse, written
from mpicoll.train.strategies import STRATEGIES, Strategy
from mpicoll.train.training_run import Observer, Source, run

_GIVEN = (
    "dataset", "labels", "target", "test_fraction", "share_data", "model", "hidden", "filters", "layers", "heads",
    "width", "context", "dropout", "batch_norm", "dtype", "mode", "shard",
)  # fmt: skip
_OF_LAYERS = ("recompute", "tensor", "pipeline", "microbatches", "pipeline_schedule")
OPTIONS = tuple(name for name in DEFAULTS if name not in _GIVEN + _OF_LAYERS)
"""Keyword arguments of :class:`Trainer` that are options of the command line."""


class ArrayDataset:
    """Data set of arrays in memory; sample i is row i of both.

    Parameters
    ----------
    x, y : (count, ...) arrays
        Features and targets, of any element type that the model takes.

    Raises
    ------
    ValueError
        If `x` and `y` have different lengths.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        for name, values in (("x", x), ("y", y)):
            if not hasattr(values, "shape"):
                raise TypeError(f"{name}: {type(values).__name__} is not an array")
        if len(x) != len(y):
            raise ValueError(f"x: {counted(len(x), 'sample')} do not fit {counted(len(y), 'target')} in y")
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return features and targets of the samples `indices`."""
        return self.x[indices], self.y[indices]


class Callback:
    """Base class of callbacks of a :class:`Trainer`; they are called on rank 0."""

    def on_start(self, trainer: Trainer, epochs: Sequence[EpochRecord]) -> None:
        """Called before the first step; `epochs` are those of a run that this one resumes."""

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Called for each step after its loss is known; in synchronous training, for up to eight steps in a row."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Called after an epoch, with its mean loss and accuracy and those over the test samples."""

    def on_checkpoint(self, trainer: Trainer, steps: int) -> None:
        """Called after a checkpoint has been written; `steps` is the number of steps that it includes."""

    def on_end(self, trainer: Trainer, result: dict[str, Any]) -> None:
        """Called when :meth:`Trainer.fit` is about to return `result`; not after an error."""


class EarlyStopping(Callback):
    """Callback that ends training when the test loss has not improved for some evaluations.

    Parameters
    ----------
    patience
        Number of successive evaluations without improvement after which training stops.
    min_delta
        Decrease of the loss above which it counts as improved.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0) -> None:
        self.patience, self.min_delta = patience, min_delta
        self.best, self.waited = np.inf, 0

    def on_start(self, trainer: Trainer, epochs: Sequence[EpochRecord]) -> None:
        """Begin anew, with the test losses of a run that this one resumes."""
        self.best, self.waited = np.inf, 0
        for record in epochs:
            self.on_epoch(trainer, record)

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Compare the test loss with the best one so far."""
        if record.test_loss is None:
            return
        if record.test_loss < self.best - self.min_delta:
            self.best, self.waited = record.test_loss, 0
        else:
            self.waited += 1
        if self.waited >= self.patience:
            trainer.stop()


class Trainer:
    """Data-parallel training of a user-defined model, by any of the strategies.

    Every rank creates a trainer with equal arguments and calls :meth:`fit`. In each step every rank computes the
    gradient of its part of a batch, and the optimizer updates the parameters.

    Parameters
    ----------
    model : TrainableModel
        ``initial(seed)``, ``forward(parameters, x, y)`` and ``backward(parameters, saved)`` on NumPy arrays.
    data
        Training samples, equal on all ranks: an object with ``len(data)``, and with ``data.batch(indices)``, which
        returns ``(x, y)`` with a row for each index. See :class:`ArrayDataset`.
    test_data
        Samples for evaluation after each epoch, of the same kind.
    comm : MPI.Intracomm, optional
        Communicator of the ranks that train; ``MPI.COMM_WORLD`` by default. One of mpicoll's keeps its algorithm and
        its timeout unless options give others.
    strategy : str, ParameterServer or LocalSGD
        Placement and synchronisation of parameters, gradients and optimizer state: ``"replicated"``;
        ``"sharded_optimizer"``, ``"sharded_gradients"`` or ``"sharded"`` (ZeRO stages 1 to 3); ``"local"`` (local SGD);
        ``"parameter_server"``, ``"peer_to_peer"`` or ``"gossip"`` (asynchronous). :class:`ParameterServer` and
        :class:`LocalSGD` have options of their own.
    callbacks : sequence of Callback
        Called on rank 0.
    options
        Those of ``python -m mpicoll.train --help`` with underscores, such as ``epochs=5, batch=64, lr=0.1,
        compression="int8", checkpoint="folder"``. ``quiet`` is true by default.

    Attributes
    ----------
    parameters : list of np.ndarray
        The trained parameters, after :meth:`fit`, on every rank.
    running
        The loop while :meth:`fit` runs, else None.

    Raises
    ------
    UsageError
        If options are out of range or contradict each other.
    TypeError
        If an option is unknown, or given both here and to the strategy, or the model or the data lack a method.
    DataError
        If the model's parameters are not all float32 or all float64.

    Examples
    --------
    >>> trainer = Trainer(model, ArrayDataset(x, y), strategy="sharded", epochs=5, lr=0.1)  # doctest: +SKIP
    >>> result = trainer.fit()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: TrainableModel,
        data: Any,
        *,
        test_data: Any = None,
        comm: MPI.Intracomm | None = None,
        strategy: str | Strategy = "replicated",
        callbacks: Sequence[Callback] = (),
        **options: Any,
    ) -> None:
        self._model = OwnModel(model, _checked_seed(options.get("seed", 0)))
        check_samples(data, "data")
        if data is None or not len(data):
            raise DataError("data: there are no samples to train on")
        check_samples(test_data, "test_data")
        self._data, self._test_data, self._callbacks = data, test_data, _checked_callbacks(callbacks)
        self._config = _config(model, data, strategy, self._model.dtype, {"quiet": True, **options})
        self._comm: MPI.Intracomm = MPI.COMM_WORLD if comm is None else comm
        self._own: Intracomm | None = None
        if isinstance(self._comm, Intracomm) and options.keys().isdisjoint(("algorithm", "timeout")):
            self._own = self._comm
            self._config = replace(self._config, algorithm=self._own.algorithm, timeout=self._own.timeout)
        self.running: Loop | None = None
        self._reports = False
        self.parameters: list[np.ndarray] = []

    def fit(self) -> dict[str, Any]:
        """Train, and return the results that ``python -m mpicoll.train --json`` writes, equal on all ranks.

        Collective over the communicator. The results include ``test_loss``, ``test_accuracy``, ``train_loss``,
        ``epochs``, ``steps``, ``samples_per_second`` and ``parameters_sha256``.

        Raises
        ------
        TrainingError
            On every rank, such as NonFiniteLoss or CheckpointFailed; DataError where ranks have
            other data than others: numbers of samples, the first and the last sample, and shapes are compared.
        Exception
            On the rank where the model, the data set or a callback raised it. The other ranks raise RemoteError or
            TrainingError with its text. The communicator cannot be used for training any more; give
            ``MPI.COMM_WORLD.Dup()`` as `comm` of each Trainer if the program goes on.
        """
        try:
            comm = make_communicator(self._config, MPI.Intracomm(self._comm)) if self._own is None else self._own
            result = _run(self._config, comm, self._load, _Dispatch(self, self._model, self._callbacks))
        except TrainingError as error:
            text = _in_arguments(str(error))
            if text == str(error):
                raise
            raise type(error)(text) from error
        for callback in self._callbacks if self._reports else ():
            callback.on_end(self, result)
        return result

    def stop(self) -> None:
        """Request the end of training on all ranks, within a few steps; for callbacks and signal handlers."""
        if self.running is not None:
            self.running.ask_to_stop()

    def _load(self, config: TrainConfig, comm: MPI.Intracomm) -> tuple[Dataset, Model]:
        train, test = OwnSamples(self._data), OwnSamples(self._test_data)
        samples = train.count, test.count, train.digest(), test.digest()
        check_same_data(comm, (*samples, self._model.shapes, self._model.dtype))
        return Dataset(train, test, 0, 0, None), self._model


class _Dispatch(Observer):
    """Calls a trainer's callbacks, and gives it the parameters at the end."""

    def __init__(self, trainer: Trainer, model: OwnModel, callbacks: tuple[Callback, ...]) -> None:
        self._trainer, self._model, self._callbacks = trainer, model, callbacks

    def began(self, loop: Loop) -> None:
        self._trainer.running = loop
        for callback in self._callbacks if loop.is_chief else ():
            callback.on_start(self._trainer, loop.epochs)

    def report(self, loop: Loop, records: list[StepRecord]) -> None:
        for record in records:
            for callback in self._callbacks:
                callback.on_step(self._trainer, record)

    def on_epoch(self, loop: Loop, record: EpochRecord) -> None:
        for callback in self._callbacks:
            callback.on_epoch(self._trainer, record)

    def on_checkpoint(self, loop: Loop, steps: int) -> None:
        for callback in self._callbacks:
            callback.on_checkpoint(self._trainer, steps)

    def ended(self, loop: Loop) -> None:
        self._trainer.running, self._trainer._reports = None, loop.is_chief
        self._trainer.parameters = self._model.arrays(loop.strategy)


def _run(config: TrainConfig, comm: Intracomm, source: Source, observer: Observer) -> dict[str, Any]:
    """Train; where the model, the data set or a callback raises on this rank, tell the others."""
    try:
        return run(config, comm, source, observer)
    except (MpicollError, MPI.Exception) as error:  # the others know of it
        if isinstance(error, TrainingError) and error.of_one_rank:
            comm.channel.refuse(error)
        raise
    except Exception as error:
        comm.channel.refuse(error)
        raise


def _checked_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    try:
        found = tuple(callbacks)
    except TypeError:
        raise TypeError(f"callbacks: {callbacks!r} is not a sequence of Callback objects") from None
    for each in found:
        if not isinstance(each, Callback):
            raise TypeError(f"callbacks: {each!r} is not an object of a class derived from Callback")
    return found


def _config(
    model: TrainableModel, data: Any, strategy: str | Strategy, dtype: np.dtype, options: dict[str, Any]
) -> TrainConfig:
    """Read options as the command line does, so that the same ones are refused."""
    if isinstance(strategy, Strategy):
        if twice := sorted(set(options) & set(strategy.options())):
            raise TypeError(f"{twice[0]}: given to Trainer and to {type(strategy).__name__}")
        options, strategy = {**options, **strategy.options()}, strategy.name
    if strategy not in STRATEGIES:
        raise UsageError(f"strategy: {strategy!r} is not one of {', '.join(STRATEGIES)}")
    for name in options:
        if name in _OF_LAYERS:
            raise TypeError(f"{name}: not an option for user-defined models, whose layers cannot be divided")
        if name not in OPTIONS:
            raise TypeError(f"{name}: not an option; the options are {', '.join(OPTIONS)}")
    words = [text for name, value in options.items() for text in written(name, value)]
    try:
        data_of_task = ["--dataset=synthetic_text"] if options.get("task") == "language_modeling" else []
        config = parse(["--model=own:model", *data_of_task, f"--dtype={dtype}", f"--strategy={strategy}", *words])
    except UsageError as error:
        raise UsageError(_in_arguments(str(error))) from None
    dataset, own = (f"{type(each).__module__}.{type(each).__qualname__}" for each in (data, model))
    return replace(config, dataset=dataset, model=own, context=0)


def _checked_seed(seed: Any) -> int:
    """Return the seed, which the model gets before the other options are read."""
    try:
        found: int = integer(0)(str(seed))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"seed: {error}") from None
    return found


def _in_arguments(text: str) -> str:
    """Return a message of the command line with arguments of :class:`Trainer` in place of options."""
    text = text.removeprefix("argument ")
    text = re.sub(r"--strategy (\w+)", r"strategy='\1'", text)
    return re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), text)
