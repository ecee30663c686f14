"""Assembly of a run from its options: model, mesh, engine, strategy and coordination."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import Checkpoint
from mpicoll.collectives.select import check_default
from mpicoll.data.datasets import Dataset
from mpicoll.errors import CheckpointFailed, UnknownAlgorithm, UsageError
from mpicoll.models.initial_parameters import InitialParameters, StoredParameters
from mpicoll.models.layers import batch_norms
from mpicoll.models.micro_batches import SequentialMicroBatches, StepExecutor
from mpicoll.models.sequential import Model
from mpicoll.parallel.gradient_norm import Unify, already_equal
from mpicoll.parallel.local_sgd import LocalSteps
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.mixed_precision import MixedReplicated
from mpicoll.parallel.mixed_sharded import MixedSharded
from mpicoll.parallel.model_shard import ModelShard
from mpicoll.parallel.pipeline import PipelineStage
from mpicoll.parallel.sharded import Sharded
from mpicoll.parallel.strategy import Replicated, Strategy, SynchronousStrategy
from mpicoll.train.asynchronous.artificial_stragglers import delayed
from mpicoll.train.asynchronous.asynchronous_state import ResumedState, read_state
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
from mpicoll.train.memory_check import check_memory
from mpicoll.train.metrics import EpochRecord
from mpicoll.train.step_plan import StepPlan
from mpicoll.train.strategies import strategy_name

EXCHANGES: dict[str, Callable[..., Exchange]] = {
    "ps": ServerExchange,
    "p2p": AllToAllExchange,
    "gossip": GossipExchange,
}
_OF_GRADIENTS = ("allreduce", "reduce_scatter", "allgather")
"""Collectives whose algorithm ``--algorithm`` names, the first one where every rank has all parameters."""
Found = Checkpoint | ResumedState | None
"""What a run goes on from; None for a new run."""


def _leave(size: int) -> str:
    return "1 rank leaves" if size == 1 else f"{size} ranks leave"


def check_ranks(config: TrainConfig, size: int) -> None:
    """Raise if the options do not fit the number of ranks.

    Raises
    ------
    UsageError
        If servers, backup workers or spare ranks leave no worker, or an option names a rank that takes no steps.
    """
    if config.servers >= size:
        raise UsageError(f"--servers {config.servers}: {_leave(size)} no worker")
    if config.backup and config.backup >= size - config.servers:
        raise UsageError(
            f"--backup {config.backup}: it must be less than the number of workers, {size - config.servers}"
        )
    if config.spares >= size:
        raise UsageError(f"--spares {config.spares}: {_leave(size)} none for training")
    working = size - config.servers - config.spares
    for rank, _ in config.slow:
        if rank >= working:
            raise UsageError(f"--slow {rank}: not a rank that takes steps; these are 0 to {working - 1}")


def make_loop(
    config: TrainConfig, mesh: Mesh, dataset: Dataset, model: Model, clock: Clock, found: Found = None
) -> Loop:
    """Return this rank's loop. Collective over the mesh.

    Parameters
    ----------
    found
        Checkpoint from which the run resumes, None for a new run; in asynchronous training on rank 0 alone. Or the
        state from which an asynchronous run goes on without dead ranks, on all.

    Raises
    ------
    CheckpointFailed
        On every rank: the checkpoint is damaged, or of another model.
    """
    if isinstance(found, ResumedState) and found.servers is not None:
        config = replace(config, servers=found.servers)
    portion = ModelShard(model, mesh, (dataset.feature_count,))
    check_memory(config, portion.model, mesh)
    return assemble_loop(config, mesh, dataset, model, portion, clock, found)


def assemble_loop(
    config: TrainConfig, mesh: Mesh, dataset: Dataset, model: Model, portion: ModelShard, clock: Clock,
    found: Found = None,
) -> Loop:  # fmt: skip
    """Return this rank's loop, as :func:`make_loop` does, without a check of the memory that is left.

    Parameters
    ----------
    portion
        This rank's part of `model`.
    """
    plan = StepPlan(config, dataset.train.count)
    _check_batch_norms(config, portion.model)
    initial = model.initial_parameters(config.seed)
    if isinstance(initial, StoredParameters):  # a model of the user's own may not give all ranks the same ones
        mesh.world.Bcast(initial.vector)
    make = _asynchronous if config.is_asynchronous else _synchronous
    strategy, coordination = make(config, mesh, portion, portion.initial(initial), plan, clock, found)
    epochs = [EpochRecord(**record) for record in found.facts["epochs"]] if isinstance(found, Checkpoint) else []
    # An epoch that --steps cut short is reported again when it is complete.
    whole_epochs = coordination.first // coordination.shares_per_step // plan.steps_per_epoch
    epochs = [epoch for epoch in epochs if epoch.epoch < whole_epochs]
    engine = _make_engine(config, mesh, portion)
    return Loop(config, mesh, dataset, engine, strategy, coordination, clock, portion.common, epochs)


def _check_batch_norms(config: TrainConfig, model: Model) -> None:
    """Refuse batch normalisation where ranks have no step in common, or no parameters, for its statistics.

    Raises
    ------
    UsageError
        On every rank.
    """
    for layer in batch_norms(model.layers):
        if config.is_asynchronous or (layer.synchronized and config.mode == "local"):
            kind, name = "synchronized" if layer.synchronized else "local", strategy_name(config.mode)
            raise UsageError(f"--strategy {name} is not for models with {kind} batch normalisation")


def _synchronous(
    config: TrainConfig, mesh: Mesh, portion: ModelShard, initial: InitialParameters, plan: StepPlan, clock: Clock,
    found: Found,
) -> tuple[Strategy, Coordination]:  # fmt: skip
    strategy = _make_strategy(config, mesh, portion, initial)
    places = mesh.world.Get_size() // mesh.replicas
    balance = LoadBalance(mesh.replicas, places, config.step_batch) if config.balance == "auto" else None
    lockstep = Lockstep(mesh, plan, strategy, clock, balance)
    if isinstance(found, Checkpoint):
        lockstep.go_on(found)
    return strategy, lockstep


def _asynchronous(
    config: TrainConfig, mesh: Mesh, portion: ModelShard, initial: InitialParameters, plan: StepPlan, clock: Clock,
    found: Found,
) -> tuple[Strategy, Coordination]:  # fmt: skip
    whole = _all_of(initial, portion.model)
    resumed = found if isinstance(found, ResumedState) else read_state(config, mesh.world, found)
    if resumed.state is not None:
        there = resumed.state["parameters"]
        if (there.size, there.dtype) != (whole.size, whole.dtype):
            has, wants = f"{there.size:,} of {there.dtype}", f"{whole.size:,} of {whole.dtype}"
            raise CheckpointFailed(f"{config.checkpoint}: the checkpoint has {has} parameters, the model {wants}")
        whole[:] = there
    exchange = EXCHANGES[config.mode](config, mesh.world, whole, resumed.state)
    strategy = AsynchronousStrategy(config, portion.model, whole, exchange, mesh.world.Get_size() - config.servers)
    return strategy, WorkSharing(config, mesh.world, plan, strategy, resumed)


def _make_engine(config: TrainConfig, mesh: Mesh, portion: ModelShard) -> StepExecutor:
    if mesh.pipeline is not None:
        return PipelineStage(portion.model, portion.inputs, mesh.pipeline, config.pipeline_schedule, config.timeout)
    parts = mesh.world.Get_size() - config.servers if config.is_asynchronous else mesh.replicas
    return delayed(SequentialMicroBatches(portion.model), config, mesh.world.Get_rank(), parts)


def _all_of(initial: InitialParameters, model: Model) -> np.ndarray:
    vector = np.empty(model.parameter_count, model.dtype)
    initial.fill(0, vector)
    return vector


def _make_strategy(
    config: TrainConfig, mesh: Mesh, portion: ModelShard, initial: InitialParameters
) -> SynchronousStrategy:
    comm = Intracomm(MPI.COMM_SELF) if config.algorithm == NOOP else mesh.data
    if config.mode == "local":
        return LocalSteps(portion.model, _all_of(initial, portion.model), comm, config, squares=portion.total_squares)
    overlap = config.overlap == "on" or (config.overlap == "auto" and _between_hosts(mesh.data))
    if config.shard == "parameters":  # where ranks meet at every unit, those that are early had better begin
        overlap = config.overlap != "off"
    squares, unify = portion.total_squares, _unify(config, mesh, portion)
    if config.shard != "none":
        sharded = Sharded if config.precision == "full" else MixedSharded
        return sharded(portion.model, initial, comm, config, overlap=overlap, squares=squares, unify=unify)
    replicated = Replicated if config.precision == "full" else MixedReplicated
    parameters = _all_of(initial, portion.model)
    return replicated(portion.model, parameters, comm, config, overlap=overlap, squares=squares, unify=unify)


def _unify(config: TrainConfig, mesh: Mesh, portion: ModelShard) -> Unify:
    """Return the function that makes sums equal on ranks with the same arrays, unless all compute them alike."""
    if mesh.replicas == 1 and config.compression is None:
        return already_equal
    return portion.common.unify if config.shard == "none" else portion.common.unify_chunks


def _between_hosts(comm: MPI.Intracomm) -> bool:
    """Return True if messages between some of these ranks use a network; the same on all of them."""
    return isinstance(comm, Intracomm) and (comm.channel.apart or comm.channel.cluster is not None)


def make_communicator(config: TrainConfig, world: MPI.Intracomm) -> Intracomm:
    """Return the communicator of a run.

    Raises
    ------
    UsageError
        If no collective of the gradients has such an algorithm.
    """
    try:
        algorithm = "auto" if config.algorithm == NOOP else config.algorithm
        collectives = _OF_GRADIENTS[:1] if config.shard == "none" else _OF_GRADIENTS
        return Intracomm(world, algorithm=check_default(algorithm, collectives), timeout=config.timeout)
    except UnknownAlgorithm as error:
        raise UsageError(f"--{error}, {NOOP}") from None
