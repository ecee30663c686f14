"""A whole run: load, build, train, evaluate, report. Called by :mod:`mpicoll.train.__main__`."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import time
from dataclasses import asdict
from typing import Any

import mpi4py
import numba
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll import ErrorFeedback, Intracomm
from mpicoll.gradients import differing_ranks
from mpicoll.train import report
from mpicoll.train.agreement import all_succeed, wait_politely
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.data import Dataset, load
from mpicoll.train.environment import process_age
from mpicoll.train.failures import DataError, UsageError
from mpicoll.train.loop import Trainer
from mpicoll.train.models import Flat, Model, convolutional, perceptron
from mpicoll.train.optimizer import MomentumSGD


def run(config: TrainConfig, comm: MPI.Intracomm) -> dict[str, Any]:
    """Train as `config` says, print and write what it asks for, and return the results.

    Collective over `comm`. The result is the same on every rank, and is what ``--json`` writes.

    Raises
    ------
    TrainingError
        On every rank, with the same one-line message.
    """
    clock = Clock()
    rank = comm.Get_rank()
    _check_same_config(config, comm)
    all_succeed(comm, lambda: report.check_writable([config.json, config.log_steps]) if rank == 0 else None)
    dataset = load(config, comm)
    model = build_model(config, dataset)
    compile_kernels(model, dataset, comm, config.compression)
    with np.errstate(all="ignore"):  # a loss that is not finite is found, and reported once
        trainer = Trainer(config, comm, dataset, model, clock)
        comm.Barrier()
        clock.seconds["start-up"] = process_age()
        result = _train(config, comm, trainer)
    _publish(config, result, trainer, rank)
    return result


def _check_same_config(config: TrainConfig, comm: MPI.Intracomm) -> None:
    wait_politely(comm)
    if differing := differing_ranks(comm, hashlib.sha256(repr(config).encode()).digest()):
        raise UsageError(f"rank {', '.join(map(str, differing))} was started with other options than the rest")


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


def compile_kernels(model: Model, dataset: Dataset, comm: MPI.Intracomm, compression: str | None) -> None:
    """Compile the model's kernels or load them from Numba's cache; rank 0 first, so that the others find them there."""
    _prepare_numba()
    if comm.Get_rank() == 0:
        _touch_kernels(model, dataset, compression)
    wait_politely(comm)
    if comm.Get_rank() != 0:
        _touch_kernels(model, dataset, compression)
    wait_politely(comm)


def _prepare_numba() -> None:
    """Import what Numba imports before its first kernel: it takes longest, and ranks can do it side by side."""
    with contextlib.suppress(ImportError, AttributeError):  # not part of its public interface; it would do so later
        from numba.core.registry import cpu_target

        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def _touch_kernels(model: Model, dataset: Dataset, compression: str | None) -> None:
    x, y = np.zeros((1, dataset.feature_count), model.dtype), np.zeros(1, np.int64)
    parameters = model.initial(0)
    gradient = np.zeros_like(parameters)
    model.loss_and_gradient(Flat(model.layout, parameters, gradient), x, y)
    MomentumSGD(parameters, momentum=0).step(gradient, 0.0)
    if compression is not None:
        feedback = ErrorFeedback(compression)
        Intracomm(MPI.COMM_SELF).Allreduce(MPI.IN_PLACE, np.ones(5000, np.float32), compression=feedback)


def _train(config: TrainConfig, comm: MPI.Intracomm, trainer: Trainer) -> dict[str, Any]:
    progress = report.Progress(config, trainer.total_steps, comm.Get_rank())
    began = time.perf_counter()
    try:
        trainer.train(progress)
    finally:
        progress.close()
    seconds = time.perf_counter() - began
    tested = trainer.evaluate()
    digest = trainer.check_replicas()
    clock = trainer.clock.mean(comm)
    sent, dense = trainer.nbytes()
    first_step = np.array([trainer.seconds_to_first_step])
    comm.Allreduce(MPI.IN_PLACE, first_step, MPI.MAX)
    return {
        "test_accuracy": tested[1] if tested else None,
        "test_loss": tested[0] if tested else None,
        "train_loss": trainer.epoch_losses,
        "samples_per_second": trainer.samples_per_second,
        "seconds_to_first_step": float(first_step[0]),
        "communication_share": clock.communication_share,
        "ranks": comm.Get_size(),
        "steps": trainer.total_steps,
        "sent_nbytes_per_step": sent / trainer.total_steps,
        "compression_ratio": dense / sent if sent else None,
        "error_feedback": trainer.error_feedback,
        "parameter_count": len(trainer.parameters),
        "parameters_sha256": digest,
        "training_seconds": seconds,
        "seconds": clock.seconds,
        "config": asdict(config),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {
        "mpi_library": MPI.Get_library_version().strip("\0 \n").partition("\n")[0],
        "mpicoll": mpicoll.__version__,
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
    }


def _publish(config: TrainConfig, result: dict[str, Any], trainer: Trainer, rank: int) -> None:
    if rank:
        return
    if config.json:
        report.write_json(config.json, result)
    if config.log_steps:
        report.write_steps(config.log_steps, trainer.records)
    if not config.quiet:
        report.say(report.summary(result))
