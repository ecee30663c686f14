"""Data sets of models: the one of the training, as it was split and labelled, unless options say otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.deploy import model_sources
from mpicoll.deploy.deploy_commands import data_of
from mpicoll.deploy.deploy_options import parse_deploy
from mpicoll.deploy.deployed_file import write_model
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.evaluation import accuracy
from mpicoll.deploy.inference import Runtime
from mpicoll.deploy.model_sources import data_config, load_data, load_model
from mpicoll.errors import CheckpointFailed
from mpicoll.train.config import TrainConfig
from mpicoll.train.options import parse
from mpicoll.train.training_run import run as train
from tests.deployed_models import dense

SELF = Intracomm(MPI.COMM_SELF)
DATA: dict[str, Any] = {"dataset": "t.csv", "labels": None, "target": ("label",), "test_fraction": 0.4, "seed": 3}


def table(path: Path, seed: int) -> Path:
    """Write samples whose label, in the first column, is the place of the largest of four features.

    The last column holds numbers that have nothing to do with them.
    """
    random = np.random.default_rng(seed)
    features = random.standard_normal((300, 4)) + 6 * np.eye(4)[random.integers(4, size=300)]
    rows = np.column_stack([features.argmax(axis=1), features, random.integers(4, size=300)])
    np.savetxt(path, rows, "%g", ",", header="label,a,b,c,d,other", comments="")
    return path


def score(path: Path, given: dict[str, Any]) -> float | None:
    model = load_model(str(path), given, SELF)
    return accuracy(Runtime(model), load_data(model, given, SELF), SELF)


def test_labels_are_in_the_column_of_the_training(tmp_path: Path) -> None:
    samples, runs, file = table(tmp_path / "t.csv", 0), tmp_path / "runs", tmp_path / "m.safetensors"
    words = ["--dataset", str(samples), "--target", "label", "--seed", "3", "--test-fraction", "0.4", "--hidden", "8"]
    reached = train(parse([*words, "--epochs", "8", "--quiet", "--checkpoint", str(runs)]), SELF)["test_accuracy"]
    model = load_model(str(runs), {}, SELF)
    assert model.data == {**DATA, "dataset": str(samples)}
    write_model(file, model)
    other = {"dataset": str(table(tmp_path / "other.csv", 1))}
    for place in (runs, file):
        assert reached > 0.9
        assert score(place, {}) == pytest.approx(reached)
        assert score(place, {"dataset": str(samples)}) == pytest.approx(reached)
        assert (score(place, other) or 0) > 0.9
        assert (score(place, {**other, "target": ("other",)}) or 1) < 0.6


def test_another_data_set_keeps_what_is_not_its_own() -> None:
    model = DeployedModel((dense(5, 4, relu=False),), {**DATA, "labels": "y.npy"})
    found = [data_config(model, {"dataset": name}) for name in ("digits", "part-*.parquet")]
    assert [(each.seed, each.test_fraction, each.labels) for each in found] == [(3, 0.4, None)] * 2
    assert [each.target for each in found] == [(), ("label",)]
    given = {"dataset": "x.npy", "labels": "z.npy", "seed": 0, "test_fraction": 0.1}
    assert {name: getattr(data_config(model, given), name) for name in given} == given


def test_test_samples_of_a_data_set_that_is_named_anew_are_those_of_the_model() -> None:
    name = "synthetic:60x5x4"
    model = DeployedModel((dense(5, 4, relu=False),), {**DATA, "dataset": name, "target": ()})
    own, anew = (load_data(model, given, SELF).test for given in ({}, {"dataset": name}))
    assert own.count == anew.count == 24
    for one, other in zip(own.batch(np.arange(24)), anew.batch(np.arange(24)), strict=True):
        assert (one == other).all()


def test_a_command_keeps_the_target_of_its_model() -> None:
    model = DeployedModel((dense(5, 4, relu=False),), dict(DATA))
    words = ["prune", "runs", "--sparsity", "0.5", "-o", "x.safetensors"]
    assert data_of(model, parse_deploy([*words, "--seed", "4"])) == {**DATA, "seed": 4}
    given = ["--dataset", "u.parquet", "--target", "kind"]
    assert data_of(model, parse_deploy([*words, *given])) == {**DATA, "dataset": "u.parquet", "target": ("kind",)}


@pytest.mark.parametrize("target", ["label", [1], None])
def test_a_target_of_a_checkpoint_that_is_no_list_of_names_is_refused(target: Any) -> None:
    facts = {"config": {**dataclasses.asdict(TrainConfig()), "target": target}}
    with pytest.raises(CheckpointFailed, match="runs: option target is "):
        model_sources._config_of(facts, Path("runs"))
