"""A model of the user's own trains by every strategy, on all ranks."""

from __future__ import annotations

import errno
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import RemoteError
from mpicoll.train import (
    Callback,
    DataError,
    EarlyStopping,
    LocalSGD,
    ParameterServer,
    Trainer,
    TrainingError,
    UsageError,
    chrome_trace,
)
from mpicoll.train.metrics import EpochRecord
from mpicoll.train.strategies import STRATEGIES
from tests.own_models import Softmax, samples

pytestmark = pytest.mark.mpi
WORLD = MPI.COMM_WORLD
OPTIONS: dict[str, Any] = {"epochs": 4, "batch": 40, "lr": 0.05, "warmup": 0}


def trained(comm: MPI.Intracomm, **options: Any) -> tuple[Trainer, dict[str, Any]]:
    made = Trainer(Softmax(), samples(500), test_data=samples(203, seed=5), comm=comm, **{**OPTIONS, **options})
    return made, made.fit()


@pytest.fixture(scope="module")
def alone() -> tuple[Trainer, dict[str, Any]]:
    return trained(MPI.COMM_SELF)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns(strategy: str, alone: tuple[Trainer, dict[str, Any]]) -> None:
    if strategy == "parameter_server" and WORLD.size == 1:
        pytest.skip("no worker is left")
    made, result = trained(WORLD, strategy=strategy)
    assert result["ranks"] == WORLD.size
    assert result["test_accuracy"] > 0.95
    everywhere = WORLD.allgather([array.tobytes() for array in made.parameters])
    assert everywhere.count(everywhere[0]) == WORLD.size
    if strategy.startswith(("replicated", "sharded")):
        assert result["test_loss"] == pytest.approx(alone[1]["test_loss"], rel=1e-3)
        for array, wanted in zip(made.parameters, alone[0].parameters, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=1e-3, atol=1e-5)


def test_shards_have_the_digest_of_the_whole() -> None:
    found = [trained(WORLD, strategy=name) for name in ("sharded", "sharded_optimizer", "replicated")]
    for made, result in found:
        whole = np.concatenate([array.reshape(-1) for array in made.parameters])
        assert result["parameters_sha256"] == hashlib.sha256(whole.data).hexdigest()


@pytest.mark.parametrize(
    "strategy",
    [ParameterServer(servers=1, staleness=8), ParameterServer(push="direct"), LocalSGD(4, "elastic")],
    ids=str,
)
def test_strategies_may_have_options_of_their_own(strategy: ParameterServer | LocalSGD) -> None:
    if strategy.name == "parameter_server" and WORLD.size == 1:
        with pytest.raises(UsageError, match=r"^servers 1: 1 rank leaves no worker"):
            trained(WORLD, strategy=strategy)
        return
    _, result = trained(WORLD, strategy=strategy)
    assert result["test_accuracy"] > 0.95
    kept = {name: result["config"][name] for name in strategy.options() if name != "backup"}
    assert kept == {name: value for name, value in strategy.options().items() if name != "backup"}


def test_with_fewer_samples_a_step_than_ranks() -> None:
    made, result = trained(WORLD, batch=1, steps=20)
    other, _ = trained(MPI.COMM_SELF, batch=1, steps=20)
    assert result["steps"] == 20
    for array, wanted in zip(made.parameters, other.parameters, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-3, atol=1e-5)


def test_gradients_may_be_compressed() -> None:
    _, result = trained(WORLD, compression="int8")
    assert result["test_accuracy"] > 0.95


def test_a_communicator_of_ones_own_is_used() -> None:
    comm = Intracomm(WORLD.Split(WORLD.rank % 2, WORLD.rank))
    _, result = trained(comm)
    assert result["ranks"] == comm.size
    comm.Free()


def test_options_say_how_a_communicator_of_ones_own_is_used() -> None:
    comm = Intracomm(MPI.Intracomm(WORLD), algorithm="tree", timeout=33.0)
    _, result = trained(comm, steps=2)
    assert (result["config"]["algorithm"], result["config"]["timeout"]) == ("tree", 33.0)
    _, result = trained(comm, steps=2, algorithm="ring")
    assert result["config"]["algorithm"] == "ring"
    with pytest.raises(UsageError, match="algorithm: 'nonsense' is not one of"):
        trained(comm, algorithm="nonsense")


class StopAfter(Callback):
    """Callback that asks for a stop when an epoch has ended; the run stops at the end of the next one."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.epoch == self.epoch:
            trainer.stop()


@pytest.mark.parametrize("strategy", ["replicated", LocalSGD(4)], ids=["replicated", "local"])
def test_a_stop_at_the_end_of_an_epoch_changes_nothing(strategy: str | LocalSGD, shared_folder: Path) -> None:
    folder = str(shared_folder)
    options = {"strategy": strategy, "epochs": 4, "batch": 200, "schedule": "constant"}
    _, whole = trained(WORLD, **options)
    _, first = trained(WORLD, **options, checkpoint=folder, callbacks=[StopAfter(1)])
    assert (first["steps"], first["stopped"]) == (9, True)
    assert [record["epoch"] for record in first["epochs"]] == [0, 1, 2]
    _, second = trained(WORLD, **options, checkpoint=folder, resume="yes")
    losses = [[record["test_loss"] for record in result["epochs"]] for result in (whole, second)]
    assert losses[0] == losses[1]
    assert second["parameters_sha256"] == whole["parameters_sha256"]


def test_a_folder_with_checkpoints_is_refused_without_resume(shared_folder: Path) -> None:
    folder = str(shared_folder)
    trained(WORLD, steps=17, checkpoint=folder)
    with pytest.raises(UsageError, match="holds checkpoints already, the newest of step 17; add resume"):
        trained(WORLD, steps=17, checkpoint=folder)


def test_a_run_goes_on_from_its_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("run")) if WORLD.rank == 0 else None)
    trained(WORLD, schedule="constant", steps=17, checkpoint=folder, checkpoint_every=17)
    made, result = trained(WORLD, schedule="constant", checkpoint=folder, resume="yes")
    whole, _ = trained(WORLD, schedule="constant")
    assert result["resumed_after"] == 17
    for array, wanted in zip(made.parameters, whole.parameters, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_a_trace_takes_no_message_of_the_program_and_leaves_none(shared_folder: Path) -> None:
    comm, found = WORLD.Dup(), np.zeros(1)
    pending = comm.Irecv(found, MPI.ANY_SOURCE, MPI.ANY_TAG)
    trained(comm, steps=4, trace=str(shared_folder / "trace.json"))
    assert not pending.Test()
    WORLD.Barrier()
    comm.Send(np.array([7.0]), (comm.rank + 1) % comm.size, 77)
    pending.Wait()
    assert found[0] == 7.0
    comm.Free()
    there = json.loads((shared_folder / "trace.json").read_text())
    assert {event["pid"] for event in there["traceEvents"]} == set(range(WORLD.size))


@pytest.mark.parametrize("after", [0, 1, 40])
def test_all_ranks_hear_of_a_trace_that_cannot_be_written(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The disk is full after so many pieces of the file."""

    class Full:
        def __init__(self, path: str) -> None:
            self.written = 0

        def __enter__(self) -> Full:
            return self

        def write(self, text: str) -> None:
            self.written += 1
            if self.written > after:
                raise OSError(errno.ENOSPC, "No space left on device")

        def __exit__(self, *_: object) -> None:
            pass

    if WORLD.rank == 0:
        monkeypatch.setattr(chrome_trace, "Replacing", Full)
    path = shared_folder / "trace.json"
    with pytest.raises(TrainingError, match=f"^trace {path}: cannot write this file: No space left on device$"):
        trained(WORLD, steps=20, trace=str(path))


def test_all_ranks_stop_early() -> None:
    class Worse(Softmax):
        def forward(self, parameters: Any, x: Any, y: Any) -> tuple[float, float, Any]:
            loss, hits, saved = super().forward(parameters, x, y)
            return (loss, hits, saved) if len(x) < 41 else (1.0, 0, saved)  # the test loss stays the same

    made = Trainer(
        Worse(), samples(500), test_data=samples(500, seed=5), epochs=40, batch=40, callbacks=[EarlyStopping(2)]
    )
    result = made.fit()
    assert result["stopped"]
    assert set(WORLD.allgather(len(result["epochs"]))) == {len(result["epochs"])}
    assert len(result["epochs"]) < 40


def test_data_that_differ_between_ranks_are_refused_on_all() -> None:
    if WORLD.size == 1:
        pytest.skip("one rank")
    with pytest.raises(DataError, match=r"rank 1: samples, their number, or shapes of parameters differ"):
        Trainer(Softmax(), samples(300 + (WORLD.rank == 1)), epochs=1).fit()
    with pytest.raises(DataError, match=r"rank 1: samples, their number, or shapes of parameters differ"):
        Trainer(Softmax(), samples(300, seed=int(WORLD.rank == 1)), epochs=1).fit()


def test_samples_that_change_at_random_are_not_compared() -> None:
    data, numbers = samples(300), np.random.default_rng(WORLD.rank)

    class Augmented:
        def __len__(self) -> int:
            return len(data)

        def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            x, y = data.batch(indices)
            return x + numbers.normal(0, 0.01, x.shape).astype(x.dtype), y

    result = Trainer(Softmax(), Augmented(), epochs=1).fit()
    assert result["strategy"] == "replicated"


class StopsAt(Callback):
    """A callback that stops the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, record: Any) -> None:
        if record.step >= self.step:
            trainer.stop()


@pytest.mark.skipif(WORLD.size < 3, reason="needs two workers")
def test_workers_in_step_stop_after_whole_steps_and_resume_with_the_same_bits(shared_folder: Path) -> None:
    options = {"strategy": ParameterServer(staleness=0), "epochs": 2}
    whole, _ = trained(WORLD, **options)
    for step in (3, 6, 7, 10, 14):
        folder = str(shared_folder / str(step))
        trained(WORLD, **options, checkpoint=folder, callbacks=[StopsAt(step)])
        resumed, result = trained(WORLD, **options, checkpoint=folder, resume="yes")
        assert result["total_steps"] == 26
        for one, other in zip(whole.parameters, resumed.parameters, strict=True):
            np.testing.assert_array_equal(one, other)


class Raises(Callback):
    """A callback that raises in a step."""

    def on_step(self, trainer: Trainer, record: Any) -> None:
        raise ZeroDivisionError("of the user's")


class RaisesOnRankOne(Softmax):
    """A model that raises in a forward pass on one rank."""

    def forward(self, *arguments: Any) -> Any:
        if WORLD.rank == 1:
            raise ZeroDivisionError("of the user's")
        return super().forward(*arguments)


@pytest.mark.skipif(WORLD.size < 2, reason="one rank has nobody to tell")
@pytest.mark.parametrize("strategy", ["replicated", "sharded", "local", "parameter_server", "peer_to_peer", "gossip"])
@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_hear_of_an_exception(strategy: str, rank: int) -> None:
    if strategy == "parameter_server" and WORLD.size == 2 and rank == 1:
        pytest.skip("rank 1 is the server")
    model, callbacks = (RaisesOnRankOne(), []) if rank else (Softmax(), [Raises()])
    plain = WORLD.Dup()
    made = Trainer(model, samples(500), comm=plain, strategy=strategy, callbacks=callbacks, timeout=60, **OPTIONS)
    began = time.monotonic()
    with pytest.raises(
        ZeroDivisionError if WORLD.rank == rank else (RemoteError, TrainingError), match="of the user's"
    ):
        made.fit()
    assert time.monotonic() - began < 30
    WORLD.Barrier()
    plain.Free()


class ShortOnRankOne:
    """A data set of the user's that returns a row too few on one rank."""

    def __init__(self) -> None:
        self._whole = samples(500)

    def __len__(self) -> int:
        return len(self._whole)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = self._whole.batch(indices)
        short = WORLD.rank == 1 and len(indices) > 1 and 0 < indices[0] < len(self) - 1
        return (x[1:], y[1:]) if short else (x, y)


@pytest.mark.skipif(WORLD.size < 2, reason="one rank has nobody to tell")
def test_other_ranks_hear_of_wrong_data_on_one() -> None:
    plain = WORLD.Dup()
    made = Trainer(Softmax(), ShortOnRankOne(), comm=plain, timeout=60, **OPTIONS)
    began = time.monotonic()
    with pytest.raises(DataError if WORLD.rank == 1 else RemoteError, match="rows"):
        made.fit()
    assert time.monotonic() - began < 30
    WORLD.Barrier()
    plain.Free()


class LastGradientIsWrong(Softmax):
    """A model whose gradient is NaN in the last step."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def backward(self, parameters: Any, saved: Any) -> Any:
        self.left -= 1
        return [array * (np.nan if self.left == 0 else 1) for array in super().backward(parameters, saved)]


@pytest.mark.parametrize("strategy", ["replicated", "sharded", "local"])
def test_parameters_that_are_not_finite_after_the_last_step_are_an_error(strategy: str) -> None:
    model = LastGradientIsWrong(13 if WORLD.rank == 0 else 10**6)
    with pytest.raises(TrainingError, match="parameters became infinite or NaN within 13 steps"):
        Trainer(model, samples(500), comm=WORLD, strategy=strategy, **{**OPTIONS, "epochs": 1}).fit()
