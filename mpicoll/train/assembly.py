"""Assembly of a run from its options: model, mesh, engine, strategy and coordination."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpicoll import ErrorFeedback, Intracomm
from mpicoll.checkpoint import Checkpoint
from mpicoll.consensus import wait_politely
from mpicoll.data.datasets import Dataset
from mpicoll.errors import DataError, UnknownAlgorithm, UsageError
from mpicoll.models.micro_batches import SequentialMicroBatches, StepExecutor
from mpicoll.models.sequential import FlatParameters, Model, convolutional, perceptron
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.parallel.local_sgd import LocalSteps
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.model_shard import ModelShard
from mpicoll.parallel.pipeline import PipelineStage
from mpicoll.parallel.sharded import Sharded
from mpicoll.parallel.strategy import Replicated, Strategy, SynchronousStrategy
from mpicoll.train.asynchronous.artificial_stragglers import delayed
from mpicoll.train.asynchronous.asynchronous_state import read_state
from mpicoll.train.asynchronous.asynchronous_strategy import AsynchronousStrategy
from mpicoll.train.asynchronous.decentralized_exchange import AllToAllExchange, GossipExchange
from mpicoll.train.asynchronous.gradient_exchange import Exchange
from mpicoll.train.asynchronous.server_exchange import ServerExchange
from mpicoll.train.asynchronous.work_sharing import WorkSharing
from mpicoll.train.clock import Clock
from mpicoll.train.config import NOOP, TrainConfig
from mpicoll.train.coordination import Coordination
from mpicoll.train.load_balance import LoadBalance
from mpicoll.train.lockstep import Lockstep
from mpicoll.train.loop import Loop
from mpicoll.train.metrics import EpochRecord
from mpicoll.train.step_plan import StepPlan

EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "ps": ServerExchange,
    "p2p": AllToAllExchange,
    "gossip": GossipExchange,
}


def check_ranks(config: TrainConfig, size: int) -> None:
    """Raise if the options do not fit the number of ranks.

    Raises
    ------
    UsageError
        If servers or backup workers leave no worker, or an option names a rank that does not exist.
    """
    if config.servers >= size:
        raise UsageError(f"--servers {config.servers}: {size} ranks leave no worker")
    if config.backup and config.backup >= size - config.servers:
        raise UsageError(f"--backup {config.backup}: it must be less than the {size - config.servers} workers")
    for rank, _ in config.slow:
        if rank >= size:
            raise UsageError(f"--slow {rank}: not a rank; ranks are 0 to {size - 1}")


def make_loop(
    config: TrainConfig, mesh: Mesh, dataset: Dataset, model: Model, clock: Clock, found: Checkpoint | None = None
) -> Loop:
    """Return this rank's loop. Collective over the mesh.

    Parameters
    ----------
    found
        Checkpoint from which the run resumes, None for a new run; in asynchronous training on rank 0 alone.

    Raises
    ------
    CheckpointFailed
        On every rank: the checkpoint is damaged, or of another model.
    """
    whole = model.initial(config.seed)
    mesh.world.Bcast(whole)
    plan, portion = StepPlan(config, dataset.train.count), ModelShard(model, mesh, dataset.feature_count)
    make = _asynchronous if config.is_asynchronous else _synchronous
    strategy, coordination = make(config, mesh, portion, whole, plan, clock, found)
    epochs = [EpochRecord(**record) for record in found.facts["epochs"]] if found is not None else []
    # An epoch that --steps cut short is reported again when it is complete.
    whole_epochs = coordination.first // coordination.shares_per_step // plan.steps_per_epoch
    epochs = [epoch for epoch in epochs if epoch.epoch < whole_epochs]
    return Loop(config, mesh, dataset, _make_engine(config, mesh, portion), strategy, coordination, clock, epochs)


def _synchronous(
    config: TrainConfig, mesh: Mesh, portion: ModelShard, whole: np.ndarray, plan: StepPlan, clock: Clock,
    found: Checkpoint | None,
) -> tuple[Strategy, Coordination]:  # fmt: skip
    strategy = _make_strategy(config, mesh, portion, portion.cut(whole))
    places = mesh.world.Get_size() // mesh.replicas
    balance = LoadBalance(mesh.replicas, places, config.step_batch) if config.balance == "auto" else None
    lockstep = Lockstep(mesh, plan, strategy, clock, balance)
    if found is not None:
        lockstep.go_on(found)
    return strategy, lockstep


def _asynchronous(
    config: TrainConfig, mesh: Mesh, portion: ModelShard, whole: np.ndarray, plan: StepPlan, clock: Clock,
    found: Checkpoint | None,
) -> tuple[Strategy, Coordination]:  # fmt: skip
    resumed = read_state(config, mesh.world, found)
    if resumed.state is not None:
        whole[:] = resumed.state["parameters"]
    exchange = EXCHANGES[config.mode](config, mesh.world, whole, resumed.state)
    strategy = AsynchronousStrategy(config, portion.model, whole, exchange, mesh.world.Get_size() - config.servers)
    return strategy, WorkSharing(config, mesh.world, plan, strategy, resumed)


def _make_engine(config: TrainConfig, mesh: Mesh, portion: ModelShard) -> StepExecutor:
    if mesh.pipeline is not None:
        return PipelineStage(portion.model, portion.inputs, mesh.pipeline, config.pipeline_schedule, config.timeout)
    parts = mesh.world.Get_size() - config.servers if config.is_asynchronous else mesh.replicas
    return delayed(SequentialMicroBatches(portion.model), config, mesh.world.Get_rank(), parts)


def _make_strategy(config: TrainConfig, mesh: Mesh, portion: ModelShard, parameters: np.ndarray) -> SynchronousStrategy:
    comm = Intracomm(MPI.COMM_SELF) if config.algorithm == NOOP else mesh.data
    if config.mode == "local":
        return LocalSteps(portion.model, parameters, comm, config, squares=portion.total_squares)
    overlap = config.overlap == "on" or (config.overlap == "auto" and _between_hosts(mesh.data))
    if config.shard == "parameters":  # where ranks meet at every unit, those that are early had better begin
        overlap = config.overlap != "off"
    made = Replicated if config.shard == "none" else Sharded
    return made(portion.model, parameters, comm, config, overlap=overlap, squares=portion.total_squares)


def _between_hosts(comm: MPI.Intracomm) -> bool:
    """Return True if messages between some of these ranks use a network; the same on all of them."""
    return isinstance(comm, Intracomm) and (comm.channel.apart or comm.channel.cluster is not None)


def build_model(config: TrainConfig, dataset: Dataset) -> Model:
    """Return the model that `config` names, with the data set's numbers of features and classes.

    Raises
    ------
    DataError
        If the model needs images and the samples are not images.
    """
    if config.model != "conv":
        return perceptron((dataset.feature_count, *config.hidden, dataset.class_count), config.dtype)
    if dataset.image_shape is None or min(dataset.image_shape[:2]) < 2:
        raise DataError(f"--model conv needs images of at least 2 x 2, {config.dataset} has none")
    return convolutional(dataset.image_shape, config.filters, dataset.class_count, config.dtype)


def make_communicator(config: TrainConfig, world: MPI.Intracomm) -> Intracomm:
    """Return the communicator of a run.

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


def compile_kernels(model: Model, dataset: Dataset, comm: MPI.Intracomm, config: TrainConfig) -> None:
    """Load the model's kernels on every rank, before the first step: a kernel not yet compiled takes seconds.

    Of the ranks of a node one compiles it and the others wait for the entry on disk; see
    :mod:`mpicoll.kernels.decorators`.
    """
    _touch_kernels(model, dataset, config)
    wait_politely(comm)
    _touch_collectives(model, comm)


def _touch_collectives(model: Model, comm: MPI.Intracomm) -> None:
    """Load the kernels of collectives, which would otherwise count as communication in the first step."""
    shares = np.zeros((comm.Get_size(), 64), model.dtype)
    comm.Allreduce(MPI.IN_PLACE, shares)
    comm.Reduce_scatter_block(shares, np.empty(64, model.dtype))
    comm.Allgather(shares[0].copy(), shares)


def _touch_kernels(model: Model, dataset: Dataset, config: TrainConfig) -> None:
    parameters = model.initial(0)
    gradient = np.zeros_like(parameters)
    if dataset.feature_count:  # a model of the user's own has no kernels of ours
        x, y = np.zeros((1, dataset.feature_count), model.dtype), np.zeros(1, np.int64)
        model.loss_and_gradient(FlatParameters(model.layout, parameters, gradient), x, y)
    OPTIMIZERS[config.optimizer](parameters).apply(gradient, 0.0)
    if config.compression is not None:
        feedback = ErrorFeedback(config.compression)
        Intracomm(MPI.COMM_SELF).Allreduce(MPI.IN_PLACE, np.ones(5000, np.float32), compression=feedback)
