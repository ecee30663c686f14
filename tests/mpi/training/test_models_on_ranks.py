"""Losses of convolutional and language models, and of a regression, on several ranks against those of one."""

import functools
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.train.options import parse
from mpicoll.train.training_run import run

pytestmark = pytest.mark.mpi
RUNS = {
    "transformer": "--model transformer --dataset synthetic_text:1200 --context 8 --width 16 --heads 2",
    "alexnet": "--model alexnet --filters 2 --dataset synthetic:90x64x4 --lr 0.02",
    "regression": "--task regression --dataset synthetic:90x12x3 --hidden 9",
}  # fmt: skip
COMMON = "--dtype float64 --epochs 2 --batch 16 --bucket-bytes 4K --quiet --clip 5"
STRATEGIES = ("replicated", "sharded_optimizer", "sharded_gradients", "sharded")


@functools.cache
def alone(name: str) -> dict[str, Any]:
    return run(parse([*RUNS[name].split(), *COMMON.split()]), Intracomm(MPI.COMM_SELF))


def compare(name: str, comm: Intracomm, *words: str) -> None:
    found, wanted = run(parse([*RUNS[name].split(), *COMMON.split(), *words]), comm), alone(name)
    for epoch, other in zip(found["epochs"], wanted["epochs"], strict=True):
        for key in ("loss", "accuracy", "perplexity"):
            for part in ("train", "test"):
                value, expected = epoch[f"{part}_{key}"], other[f"{part}_{key}"]
                assert value == (None if expected is None else pytest.approx(expected, rel=1e-9)), f"{part}_{key}"
    assert (found["test_accuracy"] is None) == (name != "alexnet")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", RUNS)
def test_losses_do_not_depend_on_ranks_or_strategy(comm: Intracomm, name: str, strategy: str) -> None:
    compare(name, comm, "--strategy", strategy)


@pytest.mark.parametrize("name", RUNS)
def test_losses_do_not_depend_on_the_stages_of_a_pipeline(comm: Intracomm, name: str) -> None:
    if comm.size % 2:
        pytest.skip("two stages need an even number of ranks")
    compare(name, comm, "--pipeline", "2", "--microbatches", "3")


@pytest.mark.parametrize("words", ["--tensor 2", "--tensor 2 --strategy sharded", "--tensor 2 --pipeline 2"])
@pytest.mark.parametrize("name", ["transformer", "alexnet"])
def test_losses_do_not_depend_on_ranks_that_share_layers(comm: Intracomm, name: str, words: str) -> None:
    if comm.size % (4 if "pipeline" in words else 2):
        pytest.skip("the number of ranks does not fit the mesh")
    compare(name, comm, *words.split())


@pytest.mark.parametrize("strategy", ["local", "parameter_server", "peer_to_peer", "gossip"])
def test_other_strategies_train_it_too(comm: Intracomm, strategy: str) -> None:
    if comm.size < 2:
        pytest.skip("needs a server and a worker")
    words = [*RUNS["transformer"].split(), "--batch", "16", "--epochs", "2", "--quiet", "--strategy", strategy]
    result = run(parse([*words, "--lr", "0.01"]), comm)
    assert result["test_accuracy"] is None
    assert result["epochs"][-1]["train_accuracy"] is None
    assert 1 < result["test_perplexity"] < 300
    assert result["epochs"][-1]["train_perplexity"] > 1


def test_a_run_goes_on_from_a_checkpoint_without_an_accuracy(comm: Intracomm, shared_folder: Path) -> None:
    words = [*RUNS["transformer"].split(), *COMMON.split(), "--checkpoint", str(shared_folder)]
    whole = run(parse(words[:-2]), comm)
    run(parse([*words, "--steps", "5"]), comm)
    again = run(parse([*words, "--resume"]), comm)
    assert again["resumed_after"] == 5
    assert again["parameters_sha256"] == whole["parameters_sha256"]
    assert again["epochs"][-1]["train_loss"] == pytest.approx(whole["epochs"][-1]["train_loss"], rel=1e-12)
    assert again["epochs"][-1]["train_accuracy"] is None
