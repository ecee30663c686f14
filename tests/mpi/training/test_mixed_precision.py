"""Training with 16-bit parameters and gradients: losses, bytes, overflow on one rank, and checkpoints."""

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.errors import NonFiniteLoss
from mpicoll.gradients import GradientSynchronizer
from mpicoll.models.sequential import Model
from mpicoll.train.options import parse
from mpicoll.train.training_run import run
from tests import extent

pytestmark = pytest.mark.mpi
STRATEGIES = ("replicated", "sharded_optimizer", "sharded_gradients", "sharded")
COMMON = "--hidden 20,10 --dataset synthetic:200x12x3 --lr 0.05 --epochs 2 --batch 16 --bucket-bytes 400 --quiet"
PARTS, ADAM = "--accumulate 3 --clip 0.5", "--optimizer adam --lr 0.01 --overlap on"
CASES = [
    ("replicated", PARTS, "float16"),
    ("sharded_optimizer", PARTS, "bfloat16"),
    ("sharded_gradients", PARTS, "float16"),
    ("sharded", ADAM, "bfloat16"),
    *itertools.product(STRATEGIES, ("", PARTS, ADAM), ("float16", "bfloat16")),
]
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}
SCALE = {"bfloat16": [], "float16": ["--loss-scale", "1024"]}
"""Options with which no step overflows, so that none is skipped."""


def trained(comm: MPI.Intracomm, *words: str) -> dict[str, Any]:
    return run(parse([*COMMON.split(), *words]), comm)


@functools.cache
def exact(*words: str) -> dict[str, Any]:
    return trained(Intracomm(MPI.COMM_SELF), *words)


def losses(result: dict[str, Any]) -> list[float]:
    return [epoch[f"{part}_loss"] for epoch in result["epochs"] for part in ("train", "test")]


@pytest.mark.parametrize(("strategy", "more", "precision"), extent.first(4, CASES))
def test_losses_are_those_of_full_precision_up_to_rounding(
    comm: Intracomm, precision: str, strategy: str, more: str
) -> None:
    found = trained(comm, "--precision", precision, *SCALE[precision], "--strategy", strategy, *more.split())
    wanted = exact(*more.split())
    assert losses(found) == pytest.approx(losses(wanted), rel=TOLERANCE[precision])
    assert losses(found) != losses(wanted)
    assert (found["loss_scale"] is None) == (precision == "bfloat16")


@pytest.mark.parametrize("strategy", extent.first(1, ["sharded", "replicated"]))
def test_ranks_send_half_of_the_bytes(comm: Intracomm, strategy: str) -> None:
    if comm.size == 1:
        pytest.skip("one rank sends nothing")
    words = ["--strategy", strategy, "--steps", "20", "--epochs", "9", "--evaluate-every", "9"]
    sent = [trained(comm, *words, "--precision", each)["sent_nbytes_per_step"] for each in ("full", "bfloat16")]
    # At the end of an epoch, and in evaluations, parameters are gathered: some bytes more.
    assert 0.49 < sent[1] / sent[0] < 0.56


DIVIDED = [
    ("--pipeline 2 --microbatches 2", "replicated"),
    ("--tensor 2", "sharded"),
    *itertools.product(("--pipeline 2 --microbatches 2", "--tensor 2"), STRATEGIES),
]


@pytest.mark.parametrize(("words", "strategy"), extent.first(2, DIVIDED))
def test_a_model_in_parts_gives_the_same_losses(comm: Intracomm, words: str, strategy: str) -> None:
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    found = trained(comm, "--precision", "float16", *SCALE["float16"], "--strategy", strategy, *words.split())
    assert losses(found) == pytest.approx(losses(exact()), rel=TOLERANCE["float16"])


def overflowing(monkeypatch: pytest.MonkeyPatch, here: bool, steps: tuple[int, ...]) -> None:
    """Make one gradient of some steps too large for float16 on this rank."""
    whole, calls = Model.loss_and_gradient, [0]

    def changed(self: Model, storage: Any, *given: Any, **more: Any) -> tuple[float, int]:
        class Larger:
            """Store whose last layer gets a large gradient."""

            def __getattr__(self, name: str) -> Any:
                return getattr(storage, name)

            def complete(self, layer: int) -> None:
                if layer == 0:
                    storage.gradients(layer)[1][0] = 1e30 if calls[0] - 1 in steps and here else 0.0
                storage.complete(layer)

        if more.get("key") is not None and more["key"].samples.size and type(storage).__name__.startswith("Mixed"):
            calls[0] += 1
            return whole(self, Larger(), *given, **more)
        return whole(self, storage, *given, **more)

    monkeypatch.setattr(Model, "loss_and_gradient", changed)


@pytest.mark.parametrize("strategy", extent.first(1, ["sharded_optimizer", "replicated"]))
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    comm: Intracomm, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, comm.rank == comm.size - 1, (3, 4))
    words = ["--strategy", strategy, "--precision", "float16", "--loss-scale", "1024", "--optimizer", "adam"]
    found = trained(comm, *words, "--lr", "0.01", "--loss-scale-interval", "8")
    assert found["loss_scale"] == {"factor": 1024.0 / 4 * 2, "skipped_steps": 2}
    assert np.isfinite(losses(found)).all()
    assert len(set(comm.allgather(found["parameters_sha256"]))) == 1


def test_a_run_whose_gradients_always_overflow_ends_on_all_ranks(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflowing(monkeypatch, comm.rank == 0, tuple(range(100)))
    with pytest.raises(NonFiniteLoss, match="gradients overflow at the smallest loss scale"):
        trained(comm, "--precision", "float16", "--loss-scale", "0.001953125")


RESUMED = [
    ("float16", "replicated"),
    ("bfloat16", "sharded"),
    *itertools.product(("float16", "bfloat16"), STRATEGIES[1:]),
    ("bfloat16", "replicated"),
]


@pytest.mark.parametrize(("precision", "strategy"), extent.first(2, RESUMED))
def test_a_run_goes_on_with_its_bits(comm: Intracomm, shared_folder: Path, precision: str, strategy: str) -> None:
    """The loss scale begins too high, so that it changes before and after the checkpoint."""
    words = ["--precision", precision, "--schedule", "constant", "--strategy", strategy]
    words += ["--loss-scale", str(2.0**18), "--loss-scale-interval", "3"] if precision == "float16" else []
    whole = trained(comm, *words)
    words += ["--checkpoint", str(shared_folder / "run")]
    trained(comm, *words, "--steps", "7")
    again = trained(comm, *words, "--resume")
    assert again["resumed_after"] == 7
    assert precision == "bfloat16" or 0 < whole["loss_scale"]["skipped_steps"] < 7
    for name in ("parameters_sha256", "loss_scale", "test_loss"):
        assert again[name] == whole[name]
    assert losses(again)[-2:] == losses(whole)[-2:]


def test_a_checkpoint_holds_the_masters_for_any_strategy(comm: Intracomm, shared_folder: Path) -> None:
    words = ["--precision", "float16", *SCALE["float16"], "--schedule", "constant"]
    words += ["--checkpoint", str(shared_folder / "run")]
    trained(comm, *words, "--steps", "7", "--strategy", "sharded")
    again = trained(comm, *words, "--resume")
    assert losses(again)[-2:] == pytest.approx(losses(exact("--schedule", "constant"))[-2:], rel=4e-3)


OWN: dict[str, Any] = {"epochs": 30, "batch": 12, "lr": 0.05, "warmup": 1}


class Line:
    """Model of a user's own."""

    def initial(self, seed: int) -> list[np.ndarray]:
        return [np.full(3, 0.1, np.float32)]

    def forward(self, parameters: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, float, Any]:
        error = x @ parameters[0] - y
        return float(error @ error), 0.0, (x, error)

    def backward(self, parameters: Any, saved: Any) -> list[np.ndarray]:
        x, error = saved
        return [2 * x.T @ error]


@pytest.mark.parametrize("precision", extent.first(1, ["bfloat16", "float16"]))
def test_a_model_of_ones_own_trains(comm: Intracomm, precision: str) -> None:
    x = np.random.default_rng(0).standard_normal((60, 3)).astype(np.float32)
    data = mpicoll.train.ArrayDataset(x, (x @ np.array([1, -2, 0.5])).astype(np.float32))
    trainer = mpicoll.train.Trainer(Line(), data, comm=comm, precision=precision, **OWN)
    trainer.fit()
    np.testing.assert_allclose(trainer.parameters[0], [1, -2, 0.5], atol=0.02)
    assert trainer.parameters[0].dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_synchronizer_sums_gradients_of_16_bits(comm: Intracomm, dtype: str) -> None:
    sync = GradientSynchronizer([(3, 2), (5,)], comm=comm, dtype=dtype, average=False, bucket_bytes=8)
    sync.flat[:] = np.arange(11) * (comm.rank + 1)
    sync.synchronize()
    np.testing.assert_array_equal(sync.flat.astype(float), np.arange(11) * comm.size * (comm.size + 1) / 2)
    with pytest.raises(ValueError, match="average=True needs float32 or float64"):
        GradientSynchronizer([(3, 2)], comm=comm, dtype=dtype)
    with pytest.raises(TypeError, match=r"need an mpicoll\.Intracomm"):
        GradientSynchronizer([(3, 2)], comm=MPI.COMM_SELF, dtype=dtype, average=False)
