"""A whole run: load, build, train, evaluate, report. The command line and :class:`mpicoll.train.Trainer` call it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import mpi4py
import numba
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.gradients import differing_ranks
from mpicoll.train import report
from mpicoll.train.agreement import all_succeed, wait_politely
from mpicoll.train.assemble import build_model, compile_kernels, make_trainer
from mpicoll.train.checkpoints import Checkpoint
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.data import Dataset, load
from mpicoll.train.environment import process_age, threads
from mpicoll.train.events import EventLog
from mpicoll.train.failures import UsageError
from mpicoll.train.loop import SynchronousLoop
from mpicoll.train.mesh import make_mesh
from mpicoll.train.models import Model
from mpicoll.train.modes.assemble import EXCHANGES, check_ranks, make_free_trainer
from mpicoll.train.modes.loop import AsynchronousLoop
from mpicoll.train.modes.saving import ChiefSaver
from mpicoll.train.monitor import Callback, Monitor
from mpicoll.train.plot import check_drawable, draw
from mpicoll.train.saving import Saver
from mpicoll.train.trace import Trace

Loop = SynchronousLoop | AsynchronousLoop
Source = Callable[[TrainConfig, MPI.Intracomm], tuple[Dataset, Model]]


def named(config: TrainConfig, comm: MPI.Intracomm) -> tuple[Dataset, Model]:
    """Return the data set and the model that the options name. Collective."""
    dataset = load(config, comm)
    return dataset, build_model(config, dataset)


def run(
    config: TrainConfig,
    comm: MPI.Intracomm,
    source: Source = named,
    *,
    begun: Callable[[Loop], Any] = lambda loop: loop,
    ended: Callable[[Loop, Model], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train as `config` says, print and write what it asks for, and return the results.

    Collective over `comm`. The result is the same on every rank, and is what ``--json`` writes.

    Parameters
    ----------
    source
        Returns data set and model; collective.
    begun
        Called with the loop before the first step; returns what callbacks get as their trainer.
    ended
        Called with the loop and the model after the last step, on all ranks.
    callbacks
        Called on rank 0.

    Raises
    ------
    TrainingError
        On every rank, with the same one-line message.
    """
    clock = Clock()
    rank = comm.Get_rank()
    check_ranks(config, comm.Get_size())
    _check_same_config(config, comm)
    events = all_succeed(comm, lambda: _prepare_outputs(config) if rank == 0 else None)
    with contextlib.ExitStack() as stack, np.errstate(all="ignore"):  # a loss that is not finite is found by us
        begin = _begin_asynchronous if config.mode in EXCHANGES else _begin_synchronous
        running = begin(config, comm, clock, stack, source)
        comm.Barrier()
        trace = stack.enter_context(contextlib.closing(Trace(config, comm)))
        clock.seconds["start-up"] = process_age()
        follow = Following(events, callbacks, begun(running.trainer))
        result = _train(config, comm, running, follow)
        if ended is not None:
            ended(running.trainer, running.model)
        trace.write()
    _publish(config, result, running.trainer, rank)
    return result


class Following(NamedTuple):
    """Receivers of progress: event files, and callbacks with the trainer that is given to them."""

    events: EventLog | None
    callbacks: Sequence[Callback]
    trainer: Any


class Running(NamedTuple):
    """A run that can begin.

    Attributes
    ----------
    train
        Takes all steps that are left.
    told
        Steps whose loss the trainer knows already.
    model
        What is trained.
    """

    trainer: Loop
    train: Callable[[Monitor], None]
    told: int
    model: Model


def _begin_synchronous(
    config: TrainConfig, comm: MPI.Intracomm, clock: Clock, stack: contextlib.ExitStack, source: Source
) -> Running:
    mesh = make_mesh(comm, config)
    saver = stack.enter_context(contextlib.closing(Saver(config, mesh)))
    dataset, model = _load(config, comm, source)
    trainer = make_trainer(config, mesh, dataset, model, clock)
    _tell_of_resuming(config, comm, trainer, saver.resume(trainer), saver.anew)
    return Running(trainer, lambda monitor: trainer.train(monitor, saver), trainer.first_step, model)


def _begin_asynchronous(
    config: TrainConfig, comm: MPI.Intracomm, clock: Clock, stack: contextlib.ExitStack, source: Source
) -> Running:
    saver = stack.enter_context(contextlib.closing(ChiefSaver(config, comm)))
    dataset, model = _load(config, comm, source)
    found = saver.resume()
    trainer = make_free_trainer(config, comm, dataset, model, clock, saver)
    _tell_of_resuming(config, comm, trainer, found, saver.anew)
    return Running(trainer, lambda monitor: trainer.train(monitor, saver), 0, model)


def _load(config: TrainConfig, comm: MPI.Intracomm, source: Source) -> tuple[Dataset, Model]:
    dataset, model = source(config, comm)
    compile_kernels(model, dataset, comm, config.compression)
    return dataset, model


def _prepare_outputs(config: TrainConfig) -> EventLog | None:
    """Refuse outputs that could not be written, before hours of training; begin those that grow meanwhile."""
    report.check_writable([config.json, config.log_steps, config.plot, config.trace])
    if config.plot is not None:
        check_drawable(config.plot)
    return None if config.tensorboard is None else EventLog(config.tensorboard, config.run)


def _tell_of_resuming(
    config: TrainConfig,
    comm: MPI.Intracomm,
    trainer: Loop,
    found: Checkpoint | None,
    anew: str | None,
) -> None:
    if comm.Get_rank() or config.quiet or config.resume == "no":
        return
    if found is None:
        report.say(f"{config.checkpoint}: no checkpoint yet, training begins")
        return
    for rejected in found.rejected:
        report.complain(f"passed over: {rejected.reason}")
    report.say(f"going on after step {trainer.first_step} of {trainer.course.total_steps}, from {config.checkpoint}")
    if anew is not None:
        report.say(f"begun anew: {anew}")


@contextlib.contextmanager
def _stopping_on_sigterm(trainer: Loop) -> Iterator[None]:
    """Let SIGTERM end the run after the step at hand; a second one ends the process."""

    def stop(number: int, frame: object) -> None:
        trainer.ask_to_stop()
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


def _train(config: TrainConfig, comm: MPI.Intracomm, running: Running, follow: Following) -> dict[str, Any]:
    trainer = running.trainer
    steps, rank = trainer.course.total_steps, comm.Get_rank()
    monitor = Monitor(config, steps, rank, trainer.first_step, running.told, follow.events)
    if rank == 0:
        monitor.call(follow.callbacks, follow.trainer)
    began = time.perf_counter()
    try:
        with _stopping_on_sigterm(trainer):
            running.train(monitor)
    finally:
        monitor.close()
    seconds = time.perf_counter() - began
    tested = _last_test(trainer, comm)
    clock = trainer.clock.mean(comm)
    first_step = np.array([trainer.seconds_to_first_step])
    comm.Allreduce(MPI.IN_PLACE, first_step, MPI.MAX)
    return {
        "test_accuracy": tested[1] if tested else None,
        "test_loss": tested[0] if tested else None,
        "train_loss": _train_loss(trainer),
        "epochs": [record._asdict() for record in trainer.epochs],
        "samples_per_second": trainer.samples_per_second,
        "seconds_to_first_step": float(first_step[0]),
        "communication_share": clock.communication_share,
        "ranks": comm.Get_size(),
        "threads": threads(),
        "steps": len(trainer.records),
        "stopped": trainer.stopped,
        "resumed_after": trainer.first_step,
        **trainer.facts(),
        "parameters_sha256": trainer.check_replicas(),
        "training_seconds": seconds,
        "seconds": clock.seconds,
        "seconds_by_rank": trainer.clock.by_rank(comm),
        "parameter_count": running.model.parameter_count,
        "config": asdict(config),
        "versions": _versions(),
    }


def _train_loss(trainer: Loop) -> float | None:
    if trainer.epochs and trainer.epochs[-1].train_loss is not None:
        return trainer.epochs[-1].train_loss
    return trainer.records[-1].loss if trainer.records else None


def _last_test(trainer: Loop, comm: MPI.Intracomm) -> tuple[float, float] | None:
    """Return loss and accuracy of the model as it is now. Collective."""
    last = trainer.epochs[-1] if trainer.epochs else None
    if isinstance(trainer, AsynchronousLoop):  # the chief knows
        known = np.array([math.nan, math.nan])
        if comm.Get_rank() == 0:
            known[:] = trainer.evaluate() or math.nan
        comm.Bcast(known)
        return None if math.isnan(known[0]) else (float(known[0]), float(known[1]))
    if last is None or last.steps != len(trainer.records) or last.test_loss is None or last.test_accuracy is None:
        return trainer.evaluate()
    return last.test_loss, last.test_accuracy


def _versions() -> dict[str, str]:
    return {
        "mpi_library": MPI.Get_library_version().strip("\0 \n").partition("\n")[0],
        "mpicoll": mpicoll.__version__,
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
    }


def _publish(config: TrainConfig, result: dict[str, Any], trainer: Loop, rank: int) -> None:
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
