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
from mpicoll.train.environment import process_age, threads
from mpicoll.train.events import EventLog
from mpicoll.train.failures import UsageError
from mpicoll.train.loop import Trainer
from mpicoll.train.mesh import make_mesh
from mpicoll.train.monitor import Monitor
from mpicoll.train.plot import check_drawable, draw
from mpicoll.train.saving import Saver
from mpicoll.train.strategy import Traffic
from mpicoll.train.trace import Trace


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
    events = all_succeed(comm, lambda: _prepare_outputs(config) if rank == 0 else None)
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
            with contextlib.closing(Trace(config, comm)) as trace:
                clock.seconds["start-up"] = process_age()
                result = _train(config, comm, trainer, saver, events) | {"parameter_count": model.parameter_count}
                trace.write()
    finally:
        saver.close()
    _publish(config, result, trainer, rank)
    return result


def _prepare_outputs(config: TrainConfig) -> EventLog | None:
    """Refuse outputs that could not be written, before hours of training; begin those that grow meanwhile."""
    report.check_writable([config.json, config.log_steps, config.plot, config.trace])
    if config.plot is not None:
        check_drawable(config.plot)
    return None if config.tensorboard is None else EventLog(config.tensorboard, config.run)


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
    config: TrainConfig, comm: MPI.Intracomm, trainer: Trainer, saver: Saver, events: EventLog | None
) -> dict[str, Any]:
    monitor = Monitor(config, trainer.total_steps, comm.Get_rank(), trainer.first_step, events)
    began = time.perf_counter()
    try:
        with _stopping_on_sigterm(trainer):
            trainer.train(monitor, saver)
    finally:
        monitor.close()
    seconds = time.perf_counter() - began
    tested = _last_test(trainer)
    digest = trainer.check_replicas()
    clock = trainer.clock.mean(comm)
    slowest = trainer.tally.pace.slowest()
    traffic = mean_traffic(trainer.strategy.traffic(), comm)
    taken = max(1, len(trainer.records) - trainer.first_step)
    first_step = np.array([trainer.seconds_to_first_step])
    comm.Allreduce(MPI.IN_PLACE, first_step, MPI.MAX)
    return {
        "test_accuracy": tested[1] if tested else None,
        "test_loss": tested[0] if tested else None,
        "train_loss": trainer.epochs[-1].train_loss if trainer.epochs else trainer.records[-1].loss,
        "epochs": [record._asdict() for record in trainer.epochs],
        "samples_per_second": trainer.samples_per_second,
        "seconds_to_first_step": float(first_step[0]),
        "communication_share": clock.communication_share,
        "ranks": comm.Get_size(),
        "threads": threads(),
        "steps": len(trainer.records),
        "stopped": trainer.stopped,
        "resumed_after": trainer.first_step,
        "sent_nbytes_per_step": traffic.sent / taken,
        "compression_ratio": traffic.dense / traffic.sent if traffic.sent else None,
        "overlap": 1 - traffic.waited / traffic.under_way if traffic.under_way else None,
        "error_feedback": any(name.startswith("owed.") for name in trainer.strategy.own_state()),
        "nbytes": trainer.strategy.nbytes(),
        "parameters_sha256": digest,
        "training_seconds": seconds,
        "seconds": clock.seconds,
        "seconds_by_rank": trainer.clock.by_rank(comm),
        "slowest_rank": slowest and slowest._asdict(),
        "config": asdict(config),
        "versions": _versions(),
    }


def _last_test(trainer: Trainer) -> tuple[float, float] | None:
    """Return loss and accuracy of the model as it is now. Collective."""
    last = trainer.epochs[-1] if trainer.epochs else None
    if last is None or last.steps != len(trainer.records) or last.test_loss is None or last.test_accuracy is None:
        return trainer.evaluate()
    return last.test_loss, last.test_accuracy


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
    if config.plot:
        draw(config.plot, result, trainer.records)
    if not config.quiet:
        report.say(report.summary(result))
