"""LARS and LAMB where ranks hold parts of arrays, against one rank that holds all of them."""

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.train.options import parse
from mpicoll.train.training_run import run
from tests import extent

pytestmark = pytest.mark.mpi
COMMON = "--hidden 20,10 --dataset synthetic:200x12x3 --epochs 2 --batch 16 --quiet --warmup 2"
OPTIMIZERS = pytest.mark.parametrize("optimizer", extent.first(1, ["lamb", "lars"]))


def trained(comm: MPI.Intracomm, *words: str) -> list[float]:
    result = run(parse([*COMMON.split(), *words]), comm)
    return [epoch[f"{part}_loss"] for epoch in result["epochs"] for part in ("train", "test")]


@functools.cache
def alone(optimizer: str) -> list[float]:
    return trained(Intracomm(MPI.COMM_SELF), "--optimizer", optimizer, "--dtype", "float64")


CASES = [("sharded", "100", "lars"), ("sharded_gradients", "1M", "lamb")]
CASES += itertools.product(("sharded_optimizer", "sharded_gradients", "sharded"), ("100", "1M"), ("lars", "lamb"))


@pytest.mark.parametrize(("strategy", "bucket", "optimizer"), extent.first(2, CASES))
def test_losses_do_not_depend_on_the_parts(comm: Intracomm, strategy: str, bucket: str, optimizer: str) -> None:
    words = ["--optimizer", optimizer, "--dtype", "float64", "--strategy", strategy, "--bucket-bytes", bucket]
    assert trained(comm, *words) == pytest.approx(alone(optimizer), rel=1e-9)


@OPTIMIZERS
def test_stages_of_a_pipeline_have_norms_of_their_own_arrays(comm: Intracomm, optimizer: str) -> None:
    if comm.size % 2:
        pytest.skip("two stages need an even number of ranks")
    words = ["--optimizer", optimizer, "--dtype", "float64", "--strategy", "sharded", "--pipeline", "2"]
    assert trained(comm, *words) == pytest.approx(alone(optimizer), rel=1e-9)


@OPTIMIZERS
def test_16_bits_change_losses_by_rounding(comm: Intracomm, optimizer: str) -> None:
    words = ["--optimizer", optimizer, "--precision", "float16", "--loss-scale", "1024", "--strategy", "sharded"]
    assert trained(comm, *words) == pytest.approx(alone(optimizer), rel=5e-3)


def test_a_run_goes_on_with_its_bits(comm: Intracomm, shared_folder: Path) -> None:
    words = ["--optimizer", "lamb", "--strategy", "sharded", "--schedule", "constant"]
    whole: dict[str, Any] = run(parse([*COMMON.split(), *words]), comm)
    words += ["--checkpoint", str(shared_folder / "run")]
    trained(comm, *words, "--steps", "7")
    again = run(parse([*COMMON.split(), *words, "--resume"]), comm)
    assert again["resumed_after"] == 7
    assert again["parameters_sha256"] == whole["parameters_sha256"]
