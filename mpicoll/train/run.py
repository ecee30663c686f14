"""A whole run: load, build, train, evaluate, report. Called by :mod:`mpicoll.train.__main__`."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import mpi4py
import numba
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.gradients import differing_ranks
from mpicoll.train import report
from mpicoll.train.agreement import all_succeed, wait_politely
from mpicoll.train.assemble import build_model, compile_kernels, make_trainer
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.data import load
from mpicoll.train.environment import process_age
from mpicoll.train.failures import UsageError
from mpicoll.train.loop import Trainer
from mpicoll.train.mesh import make_mesh
from mpicoll.train.saving import Saver
from mpicoll.train.strategy import Traffic


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
    mesh = make_mesh(comm, config)
    saver = Saver(config, mesh)
    try:
        dataset = load(config, comm)
        model = build_model(config, dataset)
        compile_kernels(model, dataset, comm, config.compression)
        with np.errstate(all="ignore"):  # a loss that is not finite is found, and reported once
            trainer = make_trainer(config, mesh, dataset, model, clock)
            _resume(saver, trainer, config, rank)
            comm.Barrier()
            clock.seconds["start-up"] = process_age()
            result = _train(config, comm, trainer, saver, model.parameter_count)
    finally:
        saver.close()
    _publish(config, result, trainer, rank)
    return result


def _resume(saver: Saver, trainer: Trainer, config: TrainConfig, rank: int) -> None:
    found = saver.resume(trainer)
    if rank or config.quiet or config.resume == "no":
        return
    if found is None:
        report.say(f"{config.checkpoint}: no checkpoint yet, training begins")
        return
    for rejected in found.rejected:
        report.complain(f"passed over: {rejected.reason}")
    report.say(f"going on after step {found.step} of {trainer.total_steps}, from {config.checkpoint}")


@contextlib.contextmanager
def _stopping_on_sigterm(trainer: Trainer) -> Iterator[None]:
    """Let SIGTERM end the run after the step at hand; a second one ends the process."""

    def stop(number: int, frame: object) -> None:
        trainer.tally.ask_to_stop()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_same_config(config: TrainConfig, comm: MPI.Intracomm) -> None:
    wait_politely(comm)
    if differing := differing_ranks(comm, hashlib.sha256(repr(config).encode()).digest()):
        raise UsageError(f"rank {', '.join(map(str, differing))} was started with other options than the rest")


def _train(
    config: TrainConfig, comm: MPI.Intracomm, trainer: Trainer, saver: Saver, parameter_count: int
) -> dict[str, Any]:
    progress = report.Progress(config, trainer.total_steps, comm.Get_rank(), trainer.first_step)
    began = time.perf_counter()
    try:
        with _stopping_on_sigterm(trainer):
            trainer.train(progress, saver)
    finally:
        progress.close()
    seconds = time.perf_counter() - began
    tested = trainer.evaluate()
    digest = trainer.check_replicas()
    clock = trainer.clock.mean(comm)
    traffic = mean_traffic(trainer.strategy.traffic(), comm)
    taken = max(1, len(trainer.records) - trainer.first_step)
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
        "steps": len(trainer.records),
        "stopped": trainer.stopped,
        "resumed_after": trainer.first_step,
        "sent_nbytes_per_step": traffic.sent / taken,
        "compression_ratio": traffic.dense / traffic.sent if traffic.sent else None,
        "overlap": 1 - traffic.waited / traffic.under_way if traffic.under_way else None,
        "error_feedback": any(name.startswith("owed.") for name in trainer.strategy.own_state()),
        "nbytes": trainer.strategy.nbytes(),
        "parameter_count": parameter_count,
        "parameters_sha256": digest,
        "training_seconds": seconds,
        "seconds": clock.seconds,
        "config": asdict(config),
        "versions": _versions(),
    }


def mean_traffic(own: Traffic, comm: MPI.Intracomm) -> Traffic:
    """Return the mean over all ranks. Collective."""
    sums = np.array(own)
    comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    return Traffic(*(sums / comm.Get_size()).tolist())


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
