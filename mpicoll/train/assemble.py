"""From the options to what a run is made of: model, place in the mesh, engine and strategy."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicoll import ErrorFeedback, Intracomm
from mpicoll.errors import UnknownAlgorithm
from mpicoll.train.agreement import wait_politely
from mpicoll.train.clock import Clock
from mpicoll.train.config import NOOP, TrainConfig
from mpicoll.train.data import Dataset
from mpicoll.train.engine import Engine, OneAfterTheOther
from mpicoll.train.failures import DataError, UsageError
from mpicoll.train.loop import SynchronousLoop
from mpicoll.train.mesh import Mesh
from mpicoll.train.models import Flat, Model, convolutional, perceptron
from mpicoll.train.modes.local import LocalSteps
from mpicoll.train.modes.stragglers import delayed
from mpicoll.train.optimizer import MomentumSGD
from mpicoll.train.pipeline import Pipelined
from mpicoll.train.portion import Portion
from mpicoll.train.sharded import Sharded
from mpicoll.train.strategy import Replicated, Strategy


def make_trainer(config: TrainConfig, mesh: Mesh, dataset: Dataset, model: Model, clock: Clock) -> SynchronousLoop:
    """Return this rank's trainer. Collective over the mesh."""
    whole = model.initial(config.seed)
    mesh.world.Bcast(whole)
    portion = Portion(model, mesh, dataset.feature_count)
    strategy = _make_strategy(config, mesh, portion, portion.cut(whole))
    return SynchronousLoop(config, mesh, dataset, _make_engine(config, mesh, portion), strategy, clock)


def _make_engine(config: TrainConfig, mesh: Mesh, portion: Portion) -> Engine:
    if mesh.pipeline is not None:
        return Pipelined(portion.model, portion.inputs, mesh.pipeline, config.pipeline_schedule, config.timeout)
    return delayed(OneAfterTheOther(portion.model), config, mesh.world.Get_rank())


def _make_strategy(config: TrainConfig, mesh: Mesh, portion: Portion, parameters: np.ndarray) -> Strategy:
    comm = Intracomm(MPI.COMM_SELF) if config.algorithm == NOOP else mesh.data
    if config.mode == "local":
        return LocalSteps(portion.model, parameters, comm, config, squares=portion.total_squares)
    overlap = config.overlap == "on" or (config.overlap == "auto" and _between_hosts(mesh.data))
    if config.shard == "parameters":  # where ranks meet at every unit, those that are early had better begin
        overlap = config.overlap != "off"
    made = Replicated if config.shard == "none" else Sharded
    return made(portion.model, parameters, comm, config, overlap=overlap, squares=portion.total_squares)


def _between_hosts(comm: MPI.Intracomm) -> bool:
    """Say whether messages between some of these ranks go by a network; the same on all of them."""
    return isinstance(comm, Intracomm) and (comm.channel.apart or comm.channel.cluster is not None)


def build_model(config: TrainConfig, dataset: Dataset) -> Model:
    """Return the model that `config` names, of the size that the data set needs.

    Raises
    ------
    DataError
        If the samples are no images and the model needs some.
    """
    if config.model != "conv":
        return perceptron((dataset.feature_count, *config.hidden, dataset.class_count), config.dtype)
    if dataset.image_shape is None or min(dataset.image_shape[:2]) < 2:
        raise DataError(f"--model conv needs images of at least 2 x 2, {config.dataset} has none")
    return convolutional(dataset.image_shape, config.filters, dataset.class_count, config.dtype)


def make_communicator(config: TrainConfig, world: MPI.Intracomm) -> Intracomm:
    """Return the communicator that everything in a run goes through.

    Raises
    ------
    UsageError
        If the algorithm is unknown.
    """
    try:
        algorithm = "auto" if config.algorithm == NOOP else config.algorithm
        return Intracomm(world, algorithm=algorithm, timeout=config.timeout)
    except UnknownAlgorithm as error:
        raise UsageError(f"--{error}") from None


def compile_kernels(model: Model, dataset: Dataset, comm: MPI.Intracomm, compression: str | None) -> None:
    """Load the model's kernels on every rank, before the first step: a kernel not yet compiled takes seconds.

    Of the ranks of a node one compiles it and the others wait for the entry on disk; see :mod:`mpicoll.kernels.jit`.
    """
    _touch_kernels(model, dataset, compression)
    wait_politely(comm)


def _touch_kernels(model: Model, dataset: Dataset, compression: str | None) -> None:
    parameters = model.initial(0)
    gradient = np.zeros_like(parameters)
    if dataset.feature_count:  # a model of the user's own has no kernels of ours
        x, y = np.zeros((1, dataset.feature_count), model.dtype), np.zeros(1, np.int64)
        model.loss_and_gradient(Flat(model.layout, parameters, gradient), x, y)
    MomentumSGD(parameters, momentum=0).step(gradient, 0.0)
    if compression is not None:
        feedback = ErrorFeedback(compression)
        Intracomm(MPI.COMM_SELF).Allreduce(MPI.IN_PLACE, np.ones(5000, np.float32), compression=feedback)
