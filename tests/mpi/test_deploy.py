"""Compression of models on all ranks: equal masks, ranges and models, and errors on every rank."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import all_succeed, share
from mpicoll.data.datasets import Dataset, load
from mpicoll.deploy.deploy_options import parse_deploy
from mpicoll.deploy.deploy_run import run
from mpicoll.deploy.deployed_file import stored, write_model
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.magnitude_selection import largest
from mpicoll.deploy.model_sources import load_model, new_model
from mpicoll.deploy.quantization import calibrate
from mpicoll.errors import CheckpointFailed, DataError, UsageError
from mpicoll.train.config import TrainConfig
from mpicoll.train.options import parse
from mpicoll.train.training_run import run as train

pytestmark = pytest.mark.mpi
WORLD = MPI.COMM_WORLD
DATA: dict[str, Any] = {"dataset": "synthetic:600x16x4", "labels": None, "target": (), "test_fraction": 0.2, "seed": 1}
QUIET = ["--quiet", "--no-progress", "--timeout", "20"]


def same_everywhere(model: DeployedModel) -> bool:
    arrays, described = stored(model)
    digest = hashlib.sha256(repr(described).encode() + b"".join(arrays[name].tobytes() for name in sorted(arrays)))
    mine = np.frombuffer(digest.digest(), np.uint8)
    table = np.empty((WORLD.size, mine.size), np.uint8)
    WORLD.Allgather(mine.copy(), table)
    return bool((table == table[0]).all())


@pytest.fixture
def folder(comm: Intracomm, tmp_path: Path) -> Path:
    """Return a folder that all ranks share."""
    return Path(share(comm, {"path": str(tmp_path)} if comm.rank == 0 else None)["path"])


def dataset(comm: Intracomm) -> Dataset:
    return load(TrainConfig(**DATA), comm)


@pytest.fixture
def trained(comm: Intracomm, folder: Path) -> Path:
    """Return checkpoints of a small model."""
    words = ["--dataset", DATA["dataset"], "--seed", "1", "--hidden", "24,16", "--epochs", "4", "--quiet"]
    train(parse([*words, "--checkpoint", str(folder / "runs")]), comm)
    return folder / "runs"


@pytest.mark.parametrize("count", [1, 300, 1999])
def test_all_ranks_choose_the_same_largest(comm: Intracomm, count: int) -> None:
    values = np.abs(np.random.default_rng(count).standard_normal(2000)).astype(np.float32)
    values[100:900] = values[100]
    expected = sorted(np.argsort(-values, kind="stable")[:count].tolist())
    assert np.flatnonzero(largest(values, count, comm)).tolist() == expected


@pytest.mark.parametrize("percentile", [100.0, 99.0])
def test_ranges_are_those_of_all_samples(comm: Intracomm, percentile: float) -> None:
    config, data = TrainConfig(**DATA, hidden=(8,)), dataset(comm)
    model = new_model(config, data)
    codes = calibrate(model, data, comm, 200, percentile, 5)
    alone = calibrate(model, data, Intracomm(MPI.COMM_SELF), 200, percentile, 5)
    assert [code.zero for code in codes] == [code.zero for code in alone]
    np.testing.assert_allclose([code.scale for code in codes], [code.scale for code in alone], rtol=1e-5)
    everything = np.concatenate([data.train.batch(np.arange(data.train.count))[0].ravel()])
    width = codes[0].scale * 255
    assert width <= np.ptp(everything) * 1.001
    assert len({tuple(row) for row in comm.allgather(codes)}) == 1


COMMANDS = {
    "prune": ["--sparsity", "0.8", "--epochs", "2"],
    "prune by layer": ["--sparsity", "0.8", "--scope", "layer", "--schedule", "constant", "--epochs", "1"],
    "prune channels": ["--sparsity", "0.5", "--structured", "channels", "--epochs", "2"],
    "prune at once": ["--sparsity", "0.5", "--epochs", "0"],
    "quantize": ["--weights", "int8", "--calibrate", "100"],
    "quantize again": ["--weights", "int4", "--qat", "1", "--percentile", "99.9"],
    "lowrank": ["--rank", "4", "--epochs", "1"],
    "distill": ["--hidden", "6", "--epochs", "8"],
    "distill with few labels": ["--hidden", "6", "--epochs", "8", "--labeled", "60"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_make_one_model_on_all_ranks(comm: Intracomm, trained: Path, folder: Path, name: str) -> None:
    command, path = name.split()[0], folder / "made.safetensors"
    source = ["--teacher", str(trained)] if command == "distill" else [str(trained)]
    rows = run(parse_deploy([command, *source, *COMMANDS[name], "-o", str(path), *QUIET]), comm)
    made = load_model(str(path), {}, comm)
    assert same_everywhere(made)
    assert made.data == DATA
    assert made.history[-1].startswith(command)
    assert rows[1].nbytes < rows[0].nbytes
    assert rows[0].accuracy is not None
    assert rows[1].accuracy is not None
    assert rows[1].accuracy > (0.6 if command == "prune" else rows[0].accuracy - 0.1)
    if name == "prune":
        weights = sum(layer.weight.size for layer in made.layers)
        assert rows[1].nonzero_operations == weights - round(weights * 0.8)
    if name == "prune channels":
        assert sum(layer.weight.shape[1] for layer in made.layers[:-1]) == 20


def test_an_evaluation_does_not_depend_on_the_ranks(comm: Intracomm, trained: Path) -> None:
    words = ["evaluate", str(trained), *QUIET]
    together, alone = run(parse_deploy(words), comm)[0], run(parse_deploy(words), MPI.COMM_SELF)[0]
    assert together[:5] == alone[:5]


@pytest.mark.parametrize("at", [0, -1])
def test_a_wrong_file_is_refused_on_all_ranks(comm: Intracomm, folder: Path, at: int) -> None:
    path = folder / "m.safetensors"
    model = new_model(TrainConfig(**DATA, hidden=(8,)), dataset(comm))
    all_succeed(comm, lambda: write_model(path, model) if comm.rank == 0 else None)
    if comm.rank == 0:
        data = bytearray(path.read_bytes())
        data[at or 20] ^= 255
        path.write_bytes(bytes(data[:-1]) if at else bytes(data))
    comm.Barrier()
    with pytest.raises(CheckpointFailed, match=r"m\.safetensors: "):
        run(parse_deploy(["evaluate", str(path), "--dataset", DATA["dataset"], *QUIET]), comm)
    comm.Barrier()


def test_what_does_not_fit_is_refused_on_all_ranks(comm: Intracomm, trained: Path, folder: Path) -> None:
    quantised = str(folder / "q.safetensors")
    run(parse_deploy(["quantize", str(trained), "-o", quantised, *QUIET]), comm)
    with pytest.raises(UsageError, match=r"q\.safetensors: is quantised already; prune comes before"):
        run(parse_deploy(["prune", quantised, "--sparsity", "0.5", "-o", f"{folder}/x.safetensors", *QUIET]), comm)
    with pytest.raises(DataError, match="64 features and 10 classes do not fit the model's 16 and 4"):
        run(parse_deploy(["evaluate", quantised, "--dataset", "digits", *QUIET]), comm)
    with pytest.raises(UsageError, match="cannot write this file"):
        run(parse_deploy(["evaluate", quantised, "--json", f"{folder}/none/x.json", *QUIET]), comm)


@pytest.mark.skipif(WORLD.size == 1, reason="needs several ranks")
def test_other_options_on_one_rank_are_refused(comm: Intracomm) -> None:
    words = ["evaluate", "somewhere" if comm.rank else "elsewhere", *QUIET]
    with pytest.raises(UsageError, match="differ from those of the other ranks"):
        run(parse_deploy(words), comm)
