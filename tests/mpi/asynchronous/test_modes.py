"""Training in which ranks go on without each other."""

from __future__ import annotations

import errno
import functools
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import CheckpointStore
from mpicoll.consensus import wait_politely
from mpicoll.errors import CheckpointFailed, NonFiniteLoss, UsageError
from mpicoll.models.builders import perceptron
from mpicoll.train import saver
from mpicoll.train.asynchronous import replica
from mpicoll.train.asynchronous.asynchronous_strategy import AsynchronousStrategy
from mpicoll.train.asynchronous.decentralized_exchange import AllToAllExchange, distances
from mpicoll.train.asynchronous.gradient_exchange import Exchange
from mpicoll.train.asynchronous.server_exchange import ServerExchange
from mpicoll.train.config import TrainConfig
from mpicoll.train.loop import Loop
from mpicoll.train.training_run import Observer, run
from tests import extent

pytestmark = pytest.mark.mpi
CONFIG = TrainConfig(
    dataset="synthetic:1600x6x4",
    hidden=(12,),
    batch=48,
    epochs=6,
    warmup=5,
    lr=0.05,
    schedule="constant",
    timeout=20.0,
    progress=False,
    quiet=True,
)
# Signs are as long where a gradient has become small, so that steps of the same rate end further from the optimum.
MODES: dict[str, dict[str, Any]] = {
    "ps": {"mode": "ps", "servers": 1},
    "bounded": {"mode": "ps", "servers": 2, "staleness": 2, "compression": "int8", "damping": True},
    "synchronous": {"mode": "ps", "servers": 1, "staleness": 0},
    "backup": {"mode": "ps", "servers": 1, "staleness": 0, "backup": 1},
    "direct": {"mode": "ps", "servers": 1, "push": "direct"},
    "feedback": {"mode": "ps", "servers": 1, "compression": "topk:0.1"},
    "pulls": {"mode": "ps", "servers": 1, "compression": "topk:0.1", "pull_compression": "topk:0.1"},
    "bounded pulls": {"mode": "ps", "servers": 2, "staleness": 2, "compression": "int8", "pull_compression": "int8"},
    "synchronous pulls": {"mode": "ps", "servers": 1, "staleness": 0, "pull_compression": "topk:0.1"},
    "adam": {"mode": "ps", "servers": 1, "optimizer": "adam", "lr": 0.01, "clip": 1.0},
    "p2p": {"mode": "p2p"},
    "p2p signs": {"mode": "p2p", "compression": "sign", "lr": 0.02},
    "gossip": {"mode": "gossip", "nesterov": True},
    "local": {"mode": "local", "sync_every": 4},
    "elastic": {"mode": "local", "sync_every": 4, "averaging": "elastic", "compression": "int8"},
    "final": {"mode": "local", "averaging": "final"},
    "ring": {"mode": "gossip", "graph": "ring"},
    "complete": {"mode": "gossip", "graph": "complete"},
}


def configured(name: str, comm: Intracomm, **more: Any) -> TrainConfig:
    config = replace(CONFIG, **{**MODES[name], **more})
    workers = comm.size - config.servers
    if workers < 1 or config.backup >= workers:
        pytest.skip("too few ranks")
    return config


@functools.cache
def alone() -> dict[str, Any]:
    """The same run on one rank, step by step."""
    return run(CONFIG, Intracomm(MPI.COMM_SELF))


@pytest.mark.parametrize("name", MODES)
def test_every_mode_learns(comm: Intracomm, name: str) -> None:
    result = run(configured(name, comm), comm)
    assert result["test_accuracy"] > alone()["test_accuracy"] - 0.1
    assert result["epochs"][-1]["train_loss"] < 0.7 * result["epochs"][0]["train_loss"]
    assert result["steps"] == alone()["steps"]
    assert [epoch["epoch"] for epoch in result["epochs"]] == list(range(6))
    told = comm.allgather(result["parameters_sha256"])
    assert len(set(told)) == 1
    if "staleness" in (result["mode"] or {}) and comm.size > 2:
        assert result["mode"]["staleness"]["mean"] <= 4 * comm.size
    if name.startswith("synchronous"):
        assert result["mode"]["staleness"]["most"] == 0
    if name == "synchronous pulls":
        assert result["mode"]["read_nbytes_per_step"] < 0.5 * 4 * result["parameter_count"]


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_no_staleness_is_synchronous_training(comm: Intracomm, shared_folder: Path, compression: str | None) -> None:
    """The curve is that of one rank, and the same to the bit in every run."""
    config = configured("synchronous", comm, compression=compression, steps=81)
    curves = []
    for number in range(2):
        path = shared_folder / f"{number}.csv"
        run(replace(config, log_steps=str(path), jitter=0.001 * number), comm)
        wait_politely(comm)
        curves.append(np.loadtxt(path, delimiter=",", skiprows=1)[:, 3])
    assert np.array_equal(*curves)
    losses = np.array([epoch["train_loss"] for epoch in alone()["epochs"]])[:3]
    steps = alone()["steps"] // 6
    means = [curves[0][first : first + steps].mean() for first in range(0, 3 * steps, steps)]
    # The last batch of an epoch is short: means over steps are not those over samples.
    np.testing.assert_allclose(means, losses, rtol=0.05)


def test_one_local_step_at_a_time_is_synchronous_training(comm: Intracomm) -> None:
    """Without momentum the mean of replicas that took a step is the step with the mean of gradients."""
    more: dict[str, Any] = {"momentum": 0.0, "dtype": "float64", "batch": 4 * comm.size, "dataset": "synthetic:320x6x4"}
    if 256 % (4 * comm.size):
        pytest.skip("parts of the last batch would differ")
    found = [run(replace(CONFIG, steps=30, **more, **mode), comm) for mode in ({}, {"mode": "local", "sync_every": 1})]
    assert found[1]["test_loss"] == pytest.approx(found[0]["test_loss"], rel=1e-12)


def test_replicas_that_are_averaged_at_the_end_are_those_of_runs_alone(comm: Intracomm) -> None:
    """Evaluations of the mean in between change nothing; the final model is the mean of what ranks get alone."""
    more: dict[str, Any] = {"dtype": "float64", "steps": 70, "mode": "local"}
    often, once = (
        run(replace(CONFIG, **more, averaging="final", evaluate_every=every), comm) for every in (1, 1 << 30)
    )
    apart = run(replace(CONFIG, **more, sync_every=1000), comm)
    assert often["test_loss"] == pytest.approx(once["test_loss"], rel=1e-9)
    assert [epoch["test_loss"] for epoch in often["epochs"]][-1] == often["test_loss"]
    if comm.size > 1:  # periodic averaging begins each epoch with the mean
        assert abs(apart["test_loss"] - once["test_loss"]) > 1e-6 * once["test_loss"]


@pytest.mark.parametrize(
    ("graph", "size", "expected"),
    [
        ("exponential", 1, []), ("exponential", 2, [1]), ("exponential", 5, [1, 2, 4]), ("exponential", 8, [1, 2, 4]),
        ("ring", 1, []), ("ring", 5, [1]), ("complete", 1, []), ("complete", 4, [1, 2, 3]),
    ],
)  # fmt: skip
def test_distances_of_gossip_graphs(graph: str, size: int, expected: list[int]) -> None:
    assert distances(graph, size) == expected


@pytest.mark.parametrize("name", ["synchronous", "synchronous pulls", "local", "elastic", "final"])
def test_a_resumed_run_ends_with_the_same_bits(comm: Intracomm, shared_folder: Path, name: str) -> None:
    config = configured(name, comm, steps=24, compression=None)
    wanted = run(config, comm)["parameters_sha256"]
    saved = replace(config, checkpoint=str(shared_folder / "run"), checkpoint_every=7)
    if name.startswith("synchronous"):
        run(replace(saved, steps=14), comm)
    else:  # in the midst of local steps: the end of a run is a place where replicas meet
        run(saved, comm)
        if comm.rank == 0:
            newest = max((shared_folder / "run").glob("step-*"))
            assert newest.name == "step-00000024"
            shutil.rmtree(newest)
        wait_politely(comm)
    result = run(replace(saved, resume="yes"), comm)
    assert result["resumed_after"] == (14 if name.startswith("synchronous") else 21)
    assert result["parameters_sha256"] == wanted


@pytest.mark.parametrize("name", ["ps", "bounded", "bounded pulls", "direct", "adam", "p2p", "gossip"])
def test_a_run_goes_on_from_what_was_saved(comm: Intracomm, shared_folder: Path, name: str) -> None:
    """A checkpoint has the very parameters: with a rate of next to nothing they are those of the end."""
    config = configured(name, comm, checkpoint=str(shared_folder / "run"), checkpoint_every=10)
    first = run(replace(config, steps=20), comm)
    again = run(replace(config, steps=40, resume="yes"), comm)
    assert again["resumed_after"] == 20
    assert again["steps"] == 40
    assert again["test_loss"] < 1.2 * first["test_loss"]
    kept = sorted(path.name for path in (shared_folder / "run").glob("step-*")) if comm.rank == 0 else []
    assert comm.rank or len(kept) == 2
    with pytest.raises(CheckpointFailed, match="--batch was 48"):
        run(replace(config, steps=50, resume="yes", batch=25), comm)


@pytest.mark.parametrize("name", ["ps", "synchronous", "pulls", "p2p", "gossip", "local"])
def test_a_loss_that_is_not_finite_ends_the_run_everywhere(comm: Intracomm, name: str) -> None:
    with pytest.raises(NonFiniteLoss):
        run(configured(name, comm, lr=1e30, warmup=0, clip=None), comm)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_everywhere(
    comm: Intracomm, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(store: CheckpointStore, step: int) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = configured("ps", comm, checkpoint=str(shared_folder / "run"), checkpoint_every=5)
    monkeypatch.setattr(CheckpointStore, "_make_temporary", full)
    with pytest.raises(CheckpointFailed, match="No space left on device"):
        run(config, comm)


@pytest.mark.parametrize("name", ["ps", "p2p", "gossip"])
def test_signs_of_life_between_all_layers(comm: Intracomm, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are none at the end, when the last model is evaluated and nobody listens any more."""
    monkeypatch.setattr(replica, "_BEAT_SECONDS", -1)
    assert run(configured(name, comm, steps=20), comm)["test_loss"] is not None


class OneStep:
    """A step of a model with 8 parameters of 2, in which every worker gives its share of a gradient of 1."""

    def __init__(self, comm: Intracomm, config: TrainConfig, kind: type[Exchange], rate: float) -> None:
        model, workers = perceptron((3, 2), np.float32), comm.size - config.servers
        self.parameters, self.norm = np.full(model.parameter_count, 2, np.float32), 0.0
        exchange = kind(config, comm, self.parameters, None)  # type: ignore[call-arg]
        strategy = AsynchronousStrategy(config, model, self.parameters, exchange, workers)
        if comm.rank < workers:
            strategy.fetch()
        comm.Barrier()  # one that fetches after the first update would see more of the step than the others
        if comm.rank < workers:
            strategy.begin(1 / workers, last=True, compress=True)
            for array in strategy.gradients(0):
                array[...] = 1
            self.norm = strategy.update(rate, 100.0)
        exchange.finish()
        exchange.close()


@pytest.mark.parametrize("compression", [None, "topk:0.99"])
def test_a_step_with_backup_workers_is_that_of_the_mean(comm: Intracomm, compression: str | None) -> None:
    """One gradient does not count; with error feedback it does later."""
    rate, decay, workers = 0.5, 0.1, comm.size - 1
    more = {"optimizer": "sgd", "compression": compression, "weight_decay": decay}
    step = OneStep(comm, configured("backup", comm, **more), ServerExchange, rate)
    if comm.rank < workers:
        assert step.norm == pytest.approx(np.sqrt(8), rel=1e-5)  # before weight decay
        part = 1.0 if compression is None else (workers - 1) / workers
        np.testing.assert_allclose(step.parameters[:6], 2 - part * rate * (1 + 2 * decay), rtol=1e-5)
        np.testing.assert_allclose(step.parameters[6:], 2 - part * rate, rtol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("ps", ServerExchange), ("p2p", AllToAllExchange)])
def test_all_shares_of_a_step_move_adam_as_far_as_one_step(comm: Intracomm, name: str, kind: type[Exchange]) -> None:
    """Epsilon is as large as the gradient of a batch, so that one in other units would move them less, or further."""
    config = configured(name, comm, optimizer="adam", weight_decay=0.1, epsilon=1.0)
    step = OneStep(comm, config, kind, 0.5)
    if comm.rank < comm.size - config.servers:
        assert step.norm == pytest.approx(np.sqrt(8), rel=1e-5)  # before weight decay
        np.testing.assert_allclose(step.parameters[:6], 2 - 0.5 * 1.2 / (1.2 + 1), rtol=1e-4)
        np.testing.assert_allclose(step.parameters[6:], 2 - 0.5 / (1 + 1), rtol=1e-4)


def test_the_slow_do_less(comm: Intracomm) -> None:
    """The shares of a batch go to whoever comes for them."""
    if comm.size < 3:
        pytest.skip("somebody else has to be faster")
    config = configured("ps", comm, epochs=2, slow=((1, 8.0),), step_seconds=0.004)
    steps = run(config, comm)["mode"]["steps_by_rank"]
    assert steps[1] == min(steps[:-1])
    assert sum(steps) == (comm.size - 1) * alone()["steps"] // 3


@pytest.mark.parametrize(
    ("options", "says"),
    [({"servers": 99}, "--servers 99"), ({"slow": ((77, 2.0),)}, "--slow 77"), ({"backup": 90}, "--backup 90")],
)
def test_what_the_ranks_cannot_do_is_refused(comm: Intracomm, options: dict[str, Any], says: str) -> None:
    if comm.size < 2:
        pytest.skip("no worker")
    with pytest.raises(UsageError, match=says):
        run(configured("ps", comm, **options), comm)


def test_the_report_tells_of_the_mode(comm: Intracomm, shared_folder: Path) -> None:
    path = shared_folder / "result.json"
    files = {"json": str(path), "plot": str(shared_folder / "run.png"), "trace": str(shared_folder / "trace.json")}
    run(configured("ps", comm, epochs=2, **files), comm)
    if comm.rank == 0:
        mode = json.loads(path.read_text())["mode"]
        assert sum(mode["steps_by_rank"]) == (comm.size - 1) * alone()["steps"] // 3
        assert mode["staleness"]["p99"] >= 0
        assert (shared_folder / "run.png").stat().st_size > 10000
        names = {event["name"] for event in json.loads((shared_folder / "trace.json").read_text())["traceEvents"]}
        assert {"pull", "push", "compute"} <= names


# ---- a slow rank 0 ---------------------------------------------------------------------------------------------------


SLOW = [("ps", False), ("gossip", True), ("synchronous", True), ("p2p", False)]


@pytest.mark.parametrize(("name", "background"), extent.first(2, [*SLOW, *((name, not later) for name, later in SLOW)]))
def test_a_slow_checkpoint_is_no_silence(
    comm: Intracomm, shared_folder: Path, name: str, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes for longer than the timeout, and the others wait for it at the end."""
    save, timeout = CheckpointStore.save, 1.0

    def slowly(*arguments: Any) -> None:
        time.sleep(2 * timeout)
        save(*arguments)

    monkeypatch.setattr(CheckpointStore, "save", slowly)
    more = {"checkpoint": str(shared_folder / "run"), "checkpoint_every": 10**6, "timeout": timeout}
    result = run(configured(name, comm, epochs=1, background_checkpoints=background, **more), comm)
    assert len(result["epochs"]) == 1
    assert len(list((shared_folder / "run").glob("step-*"))) == 1


class Sleeper(Observer):
    """Keeps rank 0 from giving signs of life once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_step(self, loop: Loop, done: int) -> None:
        time.sleep(self._seconds)
        self._seconds = 0.0


def test_rank_0_may_be_dropped(comm: Intracomm, capfd: pytest.CaptureFixture[str]) -> None:
    """The others go on to the end, and the model is theirs."""
    if comm.size < 3:
        pytest.skip("another worker goes on")
    config = configured("ps", comm, epochs=150, timeout=1.5, on_silence="drop")
    result = run(config, comm, observer=Sleeper(4.0))
    assert result["test_accuracy"] > 0.5
    assert len(set(comm.allgather(result["parameters_sha256"]))) == 1
    assert comm.rank or "gave no sign of life for longer than --timeout" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["ps", "gossip"])
def test_a_checkpoint_of_another_model_is_refused(comm: Intracomm, shared_folder: Path, name: str) -> None:
    config = configured(name, comm, epochs=1, checkpoint=str(shared_folder / "run"))
    run(config, comm)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(saver, "_check_same_run", lambda config, facts: None)  # a model of one's own has no width there
        with pytest.raises(CheckpointFailed, match=r"the checkpoint has \d+ of float32 parameters, the model \d+ of"):
            run(replace(config, hidden=(13,), resume="yes"), comm)


def test_more_than_a_thousand_epochs(comm: Intracomm) -> None:
    result = run(configured("gossip", comm, epochs=1100, dataset="synthetic:8x2x2", batch=8, evaluate_every=1100), comm)
    assert len(result["epochs"]) == 1100
