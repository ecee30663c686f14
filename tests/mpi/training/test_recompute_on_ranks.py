"""``--recompute`` in every strategy that has layers: the digests of a run that keeps all activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpicoll import Intracomm
from mpicoll.train.config import TrainConfig
from mpicoll.train.options import parse
from mpicoll.train.training_run import run

pytestmark = pytest.mark.mpi
MODELS = {
    "perceptron": ("--dataset", "synthetic:200x6x4", "--hidden", "7,5,9,6"),
    "transformer": ("--model", "transformer", "--dataset", "synthetic_text:3000", "--context", "8", "--width", "12",
                    "--heads", "2", "--layers", "2"),
    "batch normalisation": ("--dataset", "synthetic:200x6x4", "--hidden", "7,5", "--batch-norm", "synchronized"),
}  # fmt: skip
WAYS: dict[str, tuple[str, ...]] = {
    "replicated": (),
    "overlap": ("--overlap", "on", "--accumulate", "2"),
    "sharded_gradients": ("--strategy", "sharded_gradients", "--bucket-bytes", "64"),
    "sharded": ("--strategy", "sharded", "--bucket-bytes", "64", "--overlap", "on"),
    "sharded, mixed precision": ("--strategy", "sharded", "--bucket-bytes", "64", "--precision", "bfloat16"),
    "local": ("--strategy", "local", "--sync-every", "2"),
    "pipeline": ("--pipeline", "2", "--microbatches", "2"),
    "tensor": ("--tensor", "2"),
}


def result(comm: Intracomm, config: TrainConfig) -> tuple[Any, ...]:
    found = run(config, comm)
    return found["parameters_sha256"], [epoch["train_loss"] for epoch in found["epochs"]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_results_are_the_same_to_the_bit(comm: Intracomm, model: str, way: str) -> None:
    if way in ("pipeline", "tensor") and comm.size % 2:
        pytest.skip("an even number of ranks")
    if model == "batch normalisation" and way in ("local", "tensor"):
        pytest.skip("another kind of batch normalisation")
    config = parse([*MODELS[model], *WAYS[way], "--steps", "4", "--batch", "24", "--quiet", "--no-progress"])
    expected = result(comm, config)
    assert np.isfinite(expected[1]).all()
    for length in (1, 2):
        assert result(comm, replace(config, recompute=length)) == expected
