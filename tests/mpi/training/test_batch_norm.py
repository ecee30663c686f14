"""Batch normalisation on several ranks, against one rank, over checkpoints, and in deployed models."""

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import open_checkpoint
from mpicoll.consensus import wait_politely
from mpicoll.data.datasets import load
from mpicoll.deploy import evaluation
from mpicoll.deploy.model_sources import load_model
from mpicoll.errors import CheckpointFailed, UsageError
from mpicoll.models.layers import BatchNorm, Dense
from mpicoll.models.sequential import Model
from mpicoll.train.options import parse
from mpicoll.train.training_run import run
from tests import extent

pytestmark = pytest.mark.mpi
RUNS = {
    "mlp": "--hidden 9,7 --dataset synthetic:90x12x3 --lr 0.05",
    "alexnet": "--model alexnet --filters 2 --dataset synthetic:90x64x4 --lr 0.02",
}
COMMON = "--epochs 2 --batch 16 --bucket-bytes 4K --quiet --warmup 1"
EXACT = "--dtype float64 --batch-norm synchronized"


@functools.cache
def alone(name: str) -> dict[str, Any]:
    return run(parse(f"{RUNS[name]} {COMMON} {EXACT}".split()), Intracomm(MPI.COMM_SELF))


def losses(result: dict[str, Any]) -> list[float]:
    return [epoch[f"{part}_loss"] for epoch in result["epochs"] for part in ("train", "test")]


CASES = [("mlp", "replicated"), ("alexnet", "sharded"), ("mlp", "sharded_optimizer"), ("mlp", "sharded_gradients")]
CASES += [
    ("mlp", "sharded"),
    *itertools.product(("alexnet",), ("replicated", "sharded_optimizer", "sharded_gradients")),
]


@pytest.mark.parametrize(("name", "strategy"), extent.first(2, CASES))
def test_synchronised_statistics_give_the_losses_of_one_rank(comm: Intracomm, name: str, strategy: str) -> None:
    found = run(parse(f"{RUNS[name]} {COMMON} {EXACT} --strategy {strategy}".split()), comm)
    assert losses(found) == pytest.approx(losses(alone(name)), rel=1e-9)


def test_a_rank_without_samples_takes_part(comm: Intracomm) -> None:
    words = f"--hidden 5 --dataset synthetic:9x4x2 --epochs 3 --batch 2 {EXACT} --quiet --warmup 1".split()
    found = run(parse([*words, "--overlap", "on"]), comm)
    assert losses(found) == pytest.approx(losses(run(parse(words), Intracomm(MPI.COMM_SELF))), rel=1e-9)


def test_local_statistics_differ_from_those_of_one_rank(comm: Intracomm) -> None:
    if comm.size == 1:
        pytest.skip("needs several ranks")
    words = f"{RUNS['mlp']} {COMMON} --dtype float64 --batch-norm local".split()
    found = run(parse(words), comm)
    assert losses(found)[0] != pytest.approx(losses(alone("mlp"))[0], rel=1e-6)
    assert losses(found)[-2] < losses(found)[0]


RESUMED = [
    "local --strategy sharded_gradients",
    "synchronized --pipeline 2 --microbatches 2",
    "local --strategy local",
    "synchronized",
    "local",
    "synchronized --strategy sharded",
]


@pytest.mark.parametrize("options", extent.first(3, RESUMED))
def test_a_run_goes_on_with_its_bits(comm: Intracomm, shared_folder: Path, options: str) -> None:
    if "pipeline" in options and comm.size % 2:
        pytest.skip("two stages need an even number of ranks")
    words = f"{RUNS['mlp']} {COMMON} --batch-norm {options} --checkpoint-every 4 --schedule constant".split()
    whole = run(parse([*words, "--checkpoint", str(shared_folder / "whole")]), comm)
    words += ["--checkpoint", str(shared_folder / "parts")]
    steps = 5 if "--strategy local" in options else 8  # replicas are averaged at the end of an epoch, or of a run
    run(parse([*words, "--steps", str(steps)]), comm)
    again = run(parse([*words, "--resume"]), comm)
    assert again["resumed_after"] == steps
    assert again["parameters_sha256"] == whole["parameters_sha256"]
    assert losses(again)[-2:] == losses(whole)[-2:]


def test_local_statistics_in_a_checkpoint_are_means_over_the_ranks(comm: Intracomm, shared_folder: Path) -> None:
    words = f"{RUNS['mlp']} {COMMON} --dtype float64 --lr 0 --weight-decay 0 --steps 1 --epochs 1 --checkpoint".split()
    found = []
    for kind in ("local", "synchronized"):
        run(parse([*words, str(shared_folder / kind), "--batch-norm", kind]), comm)
        wait_politely(comm)
        kept = open_checkpoint(shared_folder / kind, MPI.COMM_SELF)
        found.append(kept.read("running_statistics.0"))
    np.testing.assert_allclose(found[0][:9], found[1][:9], rtol=1e-9)  # means of equal parts, or weighted
    assert comm.size == 1 or not np.allclose(found[0][9:], found[1][9:], rtol=1e-9)


@pytest.mark.parametrize("kind", extent.first(1, ["local", "synchronized"]))
def test_a_deployed_model_has_the_statistics_in_its_weights(comm: Intracomm, shared_folder: Path, kind: str) -> None:
    words = f"{RUNS['mlp']} {COMMON} --batch-norm {kind} --checkpoint {shared_folder / 'run'}".split()
    config = parse(words)
    trained = run(config, comm)
    wait_politely(comm)
    model = load_model(str(shared_folder / "run"), {}, comm)
    assert [layer.relu for layer in model.layers] == [True, True, False]
    (found,) = evaluation.evaluate([("deployed", model)], load(config, comm), comm)
    assert found.accuracy == pytest.approx(trained["test_accuracy"], abs=1e-12)


def test_a_checkpoint_without_batch_normalisation_does_not_fit(comm: Intracomm, shared_folder: Path) -> None:
    words = f"{RUNS['mlp']} {COMMON} --steps 2 --checkpoint {shared_folder / 'run'}".split()
    run(parse(words), comm)
    with pytest.raises(CheckpointFailed, match="--batch-norm was none, is local"):
        run(parse([*words, "--resume", "--batch-norm", "local"]), comm)


def with_batch_norm(facts: Any) -> Model:
    """Model of a user's own; the function is named on the command line."""
    layers = [Dense(facts.feature_count, 6), BatchNorm((6,)), Dense(6, facts.output_count)]
    return Model(layers, facts.dtype)


@pytest.mark.parametrize("strategy", ["local", "parameter_server", "peer_to_peer", "gossip"])
def test_strategies_without_common_steps_refuse_it(comm: Intracomm, strategy: str) -> None:
    with pytest.raises(UsageError, match=f"--batch-norm synchronized is not for --strategy {strategy}"):
        parse(f"--batch-norm synchronized --strategy {strategy}".split())
    if comm.size == 1:
        pytest.skip("needs a server and a worker")
    words = f"--model {__name__}:with_batch_norm --dataset synthetic:90x12x3 --quiet --strategy {strategy}".split()
    with pytest.raises(UsageError, match=f"--strategy {strategy} is not for models with synchronized batch norm"):
        run(parse(words), comm)
