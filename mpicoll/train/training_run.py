"""Training run: load, build, train, evaluate, report; called by the command line and :class:`mpicoll.train.Trainer`."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from typing import Any, NamedTuple

import mpi4py
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.checkpoint import Checkpoint
from mpicoll.consensus import all_succeed
from mpicoll.data.datasets import Dataset, load
from mpicoll.errors import MpicollError, UsageError, named_ranks
from mpicoll.gradients import differing_ranks
from mpicoll.models.sequential import Model
from mpicoll.parallel.mesh import Mesh, make_mesh
from mpicoll.quantities import counted
from mpicoll.train import rank_failures, run_report
from mpicoll.train.assembly import check_ranks, make_loop
from mpicoll.train.asynchronous.asynchronous_state import ResumedState
from mpicoll.train.chrome_trace import Trace
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.loop import Loop, LoopCallback
from mpicoll.train.metrics import perplexity
from mpicoll.train.model_choice import build_model
from mpicoll.train.plot_run import check_drawable, draw
from mpicoll.train.process_facts import process_age, threads
from mpicoll.train.progress_reports import ProgressBar, ProgressReport, Scalars
from mpicoll.train.run_status import RunStatus
from mpicoll.train.saver import Saver
from mpicoll.train.spare_ranks import SpareRanks
from mpicoll.train.strategies import strategy_name
from mpicoll.train.tensorboard import EventLog
from mpicoll.train.warm_kernels import compile_kernels

Source = Callable[[TrainConfig, MPI.Intracomm], tuple[Dataset, Model]]


def named(config: TrainConfig, comm: MPI.Intracomm) -> tuple[Dataset, Model]:
    """Return the data set and the model that the options name. Collective."""
    dataset = load(config, comm)
    return dataset, model_for(config, dataset, comm)


def model_for(config: TrainConfig, dataset: Dataset, comm: MPI.Intracomm) -> Model:
    """Return the model that the options name; see :func:`~mpicoll.train.model_choice.build_model`. Collective."""
    model: Model = all_succeed(comm, lambda: build_model(config, dataset))
    return model


class Observer(ProgressReport):
    """Receiver of a run's events on rank 0; this one does nothing."""

    def began(self, loop: Loop) -> None:
        """Called on all ranks before the first step."""

    def ended(self, loop: Loop) -> None:
        """Called on all ranks after the last step."""


def run(
    config: TrainConfig,
    comm: MPI.Intracomm,
    source: Source = named,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Train with the options `config`, print and write the outputs that they name, and return the results.

    Collective over `comm`. The result is the same on every rank; ``--json`` writes it. It is empty on a spare rank that
    was not needed.

    Parameters
    ----------
    source
        Function of `config` and `comm` that returns data set and model; collective.
    observer
        Callback that also receives the beginning and the end of training.

    Raises
    ------
    TrainingError
        On every rank, with the same one-line message.
    """
    with RunStatus(config.checkpoint, comm.Get_rank()) as status:
        return _run(config, comm, source, observer or Observer(), status)


def _run(
    config: TrainConfig, comm: MPI.Intracomm, source: Source, observer: Observer, status: RunStatus
) -> dict[str, Any]:
    """See :func:`run`; the status begins when this run owns the folder of its checkpoints."""
    clock, rank = Clock(), comm.Get_rank()
    check_ranks(config, comm.Get_size())
    _check_same_config(config, comm)
    rank_failures.check_possible(config)
    events = all_succeed(comm, lambda: _prepare_outputs(config) if rank == 0 else None)
    with contextlib.ExitStack() as stack, np.errstate(all="ignore"):  # a loss that is not finite is found by us
        spares = SpareRanks(config, comm)
        stack.callback(spares.dismiss)
        team = spares.team(comm)
        mesh = None if team is None else stack.enter_context(make_mesh(team, config))
        dataset, model = source(config, comm)
        compile_kernels(model, dataset, comm, config)

        def anew(others: MPI.Intracomm, found: ResumedState | None) -> Loop:
            return make_loop(config, make_mesh(others, config), dataset, model, clock, found)

        recovery, outputs = rank_failures.Recovery(config, anew, spares), None
        if mesh is not None:
            comm, parts = mesh.world, (mesh, dataset, model, clock)
            loop, outputs = _begin(config, comm, parts, events, stack)
            status.begin()
        elif (joined := spares.wait(comm)) is not None:
            comm, loop = recovery.join(joined)
        else:
            return {}
        clock.seconds["start-up"] = process_age()
        result, comm, loop = _train_on(config, comm, loop, outputs, observer, recovery, stack)
        result["parameter_count"] = model.parameter_count
        observer.ended(loop)
        if outputs is not None and outputs.trace is not None:
            outputs.trace.write()
    status.rank = comm.Get_rank()
    _publish(config, result, loop, status.rank)
    return result


class Outputs(NamedTuple):
    """Checkpoints of a run and, on rank 0, its event files; the trace, if it was opened when the run began."""

    saver: Saver
    events: EventLog | None
    trace: Trace | None = None


def _begin(
    config: TrainConfig, comm: MPI.Intracomm, parts: tuple[Mesh, Dataset, Model, Clock], events: EventLog | None,
    stack: contextlib.ExitStack,
) -> tuple[Loop, Outputs]:  # fmt: skip
    """Return the loop of the training ranks, which resumes if that is asked for, and their outputs. Collective."""
    saver = stack.enter_context(contextlib.closing(Saver(config, comm)))
    found = saver.find()
    loop = make_loop(config, *parts, found)
    _tell_of_resuming(config, comm, loop, found)
    comm.Barrier()
    return loop, Outputs(saver, events, stack.enter_context(contextlib.closing(Trace(config, comm))))


def _train_on(
    config: TrainConfig, comm: MPI.Intracomm, loop: Loop, outputs: Outputs | None, observer: Observer,
    recovery: rank_failures.Recovery, stack: contextlib.ExitStack,
) -> tuple[dict[str, Any], MPI.Intracomm, Loop]:  # fmt: skip
    """Train to the end, with ``--on-failure shrink`` also without ranks that die on the way.

    Returns the results, and the communicator and the loop of the ranks that are left.

    Parameters
    ----------
    outputs
        Those of the run's begin; None on a rank that was spare, where the others open them anew.
    """
    opened = outputs
    while True:
        try:
            with contextlib.ExitStack() as reports:
                opened = opened or _open_outputs(config, comm, stack)
                observer.began(loop)
                told = _reports(config, comm, loop, opened.events, observer, reports)
                result = _train(config, comm, loop, [*told, opened.saver])
                result["lost_ranks"] = recovery.spares.all_lost(comm)
                if config.goes_on:
                    rank_failures.wait_for_all(comm)
            return result, comm, loop
        except (MPI.Exception, MpicollError) as error:
            if not rank_failures.can_go_on(config, comm, error):
                raise
            before, (comm, loop) = recovery.spares.lost, recovery.go_on(comm, loop, error)
        if opened is not None:
            opened.saver.close()
        opened = None
        if comm.Get_rank() == 0:
            run_report.complain(recovery.spares.describe(before, loop.first_step))


def _open_outputs(config: TrainConfig, comm: MPI.Intracomm, stack: contextlib.ExitStack) -> Outputs:
    """Open checkpoints and event files for the ranks that are left. Collective over these."""
    comm.Barrier()  # the folder of the checkpoints has been unlocked
    saver = stack.enter_context(contextlib.closing(Saver(config, comm)))
    saver.keep_newest()
    return Outputs(saver, all_succeed(comm, lambda: None if comm.Get_rank() else _prepare_outputs(config)))


def _reports(
    config: TrainConfig, comm: MPI.Intracomm, loop: Loop, events: EventLog | None, observer: Observer,
    stack: contextlib.ExitStack,
) -> list[LoopCallback]:  # fmt: skip
    """Return the callbacks that report progress: on rank 0 only, none elsewhere."""
    if comm.Get_rank():
        return []
    told = len(loop.records)
    observer.skip(told)
    reports: list[LoopCallback] = [stack.enter_context(contextlib.closing(ProgressBar(config, loop, told)))]
    if events is not None:
        reports.append(stack.enter_context(contextlib.closing(Scalars(events, told))))
    return [*reports, observer]


def _prepare_outputs(config: TrainConfig) -> EventLog | None:
    """Refuse outputs that could not be written, before training begins; open those written during training."""
    files = {"--json": config.json, "--log-steps": config.log_steps, "--plot": config.plot, "--trace": config.trace}
    run_report.check_writable(files)
    if config.plot is not None:
        check_drawable(config.plot)
    return None if config.tensorboard is None else EventLog(config.tensorboard, config.run)


def _tell_of_resuming(config: TrainConfig, comm: MPI.Intracomm, loop: Loop, found: Checkpoint | None) -> None:
    if comm.Get_rank() or config.quiet or config.resume == "no":
        return
    if found is None:
        run_report.say(f"{config.checkpoint}: no checkpoint yet, training begins")
        return
    for rejected in found.rejected:
        run_report.complain(f"skipped checkpoint: {rejected.reason}")
    first, total = loop.first_step, loop.step_plan.total_steps
    if first >= total:
        run_report.say(f"nothing left to do: the checkpoint in {config.checkpoint} is of step {first} of {total}")
        return
    run_report.say(f"resuming after step {first} of {total}, from {config.checkpoint}")
    if loop.coordination.anew is not None:
        run_report.say(f"not restored: {loop.coordination.anew}")
    before, now = found.facts.get("schedule_steps"), loop.step_plan.schedule_steps  # older checkpoints do not tell
    if config.schedule != "constant" and before not in (None, now):
        run_report.say(f"learning rates follow a schedule of {counted(now, 'step')}, before it was {before}")


@contextlib.contextmanager
def _stopping_on_sigterm(loop: Loop) -> Iterator[None]:
    """Handle SIGTERM as a request to stop; a second SIGTERM ends the process."""

    def stop(number: int, frame: object) -> None:
        loop.ask_to_stop()
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
    """Compare the options of all ranks; those that come wait at most for the timeout for one that does not."""
    names = [field.name for field in fields(config)]
    own = np.array([zlib.crc32(repr(getattr(config, name)).encode()) for name in names], np.uint32)
    if differing := differing_ranks(comm, hashlib.sha256(repr(config).encode()).digest()):
        table = np.empty((comm.Get_size(), own.size), np.uint32)
        comm.Allgather(own, table)
        unequal = ", ".join(name for name, column in zip(names, table.T, strict=True) if len(set(column.tolist())) > 1)
        raise UsageError(f"options of {named_ranks(differing)} differ from those of the other ranks: {unequal}")


def _train(config: TrainConfig, comm: MPI.Intracomm, loop: Loop, callbacks: Sequence[LoopCallback]) -> dict[str, Any]:
    began = time.perf_counter()
    with _stopping_on_sigterm(loop):
        loop.train(callbacks)
    seconds = time.perf_counter() - began
    tested = _last_test(loop) or (None, None)
    clock = loop.clock.mean(comm)
    first_step = np.array([loop.seconds_to_first_step])
    comm.Allreduce(MPI.IN_PLACE, first_step, MPI.MAX)
    return {
        "test_accuracy": tested[1],
        "test_loss": tested[0],
        "test_perplexity": perplexity(tested[0], config),
        "train_loss": _train_loss(loop),
        "epochs": [record._asdict() for record in loop.epochs],
        "samples_per_second": loop.coordination.samples_per_second,
        "seconds_to_first_step": float(first_step[0]),
        "communication_share": clock.communication_share,
        "ranks": comm.Get_size(),
        "threads": threads(),
        "steps": loop.steps,
        "total_steps": loop.step_plan.total_steps,
        "stopped": loop.coordination.stopped,
        "resumed_after": loop.resumed_after,
        **loop.facts(),
        "parameters_sha256": loop.check_replicas(),
        "training_seconds": seconds,
        "seconds": clock.seconds,
        "seconds_by_rank": loop.clock.by_rank(comm),
        "config": asdict(config),
        "strategy": strategy_name(config.mode, config.shard),
        "versions": _versions(),
    }


def _train_loss(loop: Loop) -> float | None:
    if loop.epochs and loop.epochs[-1].train_loss is not None:
        return loop.epochs[-1].train_loss
    return loop.records[-1].loss if loop.records else None


def _last_test(loop: Loop) -> tuple[float, float | None] | None:
    """Return loss and accuracy of the final model over the test samples, None without samples. Collective."""
    last = loop.epochs[-1] if loop.epochs else None
    if last is None or last.steps != loop.steps or last.test_loss is None:
        return loop.evaluate()
    return last.test_loss, last.test_accuracy


def _versions() -> dict[str, str]:
    return {
        "mpi_library": MPI.Get_library_version().strip("\0 \n").partition("\n")[0],
        "mpicoll": mpicoll.__version__,
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "numba": version("numba"),
        "python": platform.python_version(),
    }


def _publish(config: TrainConfig, result: dict[str, Any], loop: Loop, rank: int) -> None:
    if rank:
        return
    if config.json:
        run_report.write_json(config.json, result)
    if config.log_steps:
        run_report.write_steps(config.log_steps, loop.records)
    if config.plot:
        draw(config.plot, result, loop.records)
    if not config.quiet:
        run_report.say(run_report.summary(result))
