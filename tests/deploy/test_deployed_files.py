"""Files of deployed models: what is written is read, and wrong files are refused with file and reason."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mpicoll import Intracomm
from mpicoll.checkpoint import tensor_file
from mpicoll.deploy import model_sources
from mpicoll.deploy.deployed_file import FORMAT, stored, stored_nbytes, write_model
from mpicoll.deploy.deployed_model import ActivationCode, DeployedModel
from mpicoll.deploy.inference import Runtime
from mpicoll.deploy.model_sources import load_model, read_model
from mpicoll.deploy.weight_encoding import decode, encode, smallest
from mpicoll.errors import CheckpointFailed
from mpicoll.train.config import TrainConfig
from tests.deployed_models import convolution, dense, quantised

DATA = {"dataset": "digits", "labels": None, "target": (), "test_fraction": 0.2, "seed": 3}


MODELS = {
    "real": (dense(7, 5, relu=True), dense(5, 3, relu=False)),
    "sparse": (dense(41, 15, relu=True, zeros=0.9), dense(15, 3, relu=False)),
    "convolution": (convolution(3), dense(12, 3, relu=False)),
    "int8": quantised([dense(7, 5, relu=True), dense(5, 3, relu=False)], 8, ActivationCode(0.25, 7)),
    "int4": quantised([dense(7, 5, relu=True), dense(5, 3, relu=False)], 4, None),
    "sparse int4": quantised([dense(41, 15, relu=True, zeros=0.9), dense(15, 3, relu=False)], 4, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    model, path = DeployedModel(MODELS[name], dict(DATA), ("first", "second")), tmp_path / "m.safetensors"
    nbytes = write_model(path, model)
    assert path.stat().st_size == nbytes > stored_nbytes(model)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    again = read_model(path)
    assert (again.data, again.history) == (DATA, ("first", "second"))
    for one, other in zip(model.layers, again.layers, strict=True):
        assert one.weight.dtype == other.weight.dtype
        assert (one.weight == other.weight).all()
        assert (one.bias == other.bias).all()
        assert (one.real_weight == other.real_weight).all()
        assert (one.relu, one.image, one.bits) == (other.relu, other.image, other.bits)
        assert one.activation == other.activation
    x = np.random.default_rng(0).standard_normal((6, model.input_count)).astype(np.float32)
    assert (Runtime(model).logits(x) == Runtime(again).logits(x)).all()
    assert set(load_file(path)) == set(stored(model)[0])  # the library reads it


def test_a_target_is_kept_and_left_out_where_there_is_none(tmp_path: Path) -> None:
    """Files without a target are those of earlier versions, which refuse entries that they do not know."""
    path = tmp_path / "m.safetensors"
    for target in ((), ("a", "b")):
        write_model(path, DeployedModel(MODELS["real"], {**DATA, "target": target}))
        with safe_open(path, "numpy") as file:
            said = json.loads(file.metadata()["model"])["data"]
        assert said.get("target", "none") == (list(target) or "none")
        assert read_model(path).data == {**DATA, "target": target}


class InMemory:
    """Arrays of an encoding."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def size(self, name: str) -> int:
        return self._arrays[name].size

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._arrays[name][start:stop]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_every_code_survives(bits: int, count: int) -> None:
    top = 127 if bits == 8 else 7
    weight = np.random.default_rng(count).integers(-top, top + 1, (count, 3)).astype(np.int8)
    for each in (weight, np.where(np.arange(count * 3).reshape(count, 3) % 20, 0, weight).astype(np.int8)):
        encoding, arrays = encode(each, bits)
        nonzero = int(np.count_nonzero(each))
        assert smallest(each.size, nonzero, bits) == (encoding, sum(array.nbytes for array in arrays.values()))
        for start, stop in itertools.combinations(range(0, each.size + 1, 1 + count // 9), 2):
            part = decode(encoding, InMemory(arrays), each.size, bits, start, stop)
            assert (part == each.reshape(-1)[start:stop]).all()


def test_sparse_and_narrow_weights_take_fewer_bytes() -> None:
    weight = dense(100, 80, relu=True, zeros=0.9).weight
    sizes = {bits: sum(array.nbytes for array in encode(weight.astype(np.int8), bits)[1].values()) for bits in (8, 4)}
    kept = np.count_nonzero(weight.astype(np.int8))
    assert sizes == {8: 1000 + kept, 4: 1000 + -(-kept // 2)}


def changed(change: Callable[[dict[str, Any], dict[str, np.ndarray]], object], path: Path, kind: str = "int8") -> None:
    """Write a model's file after `change` has been made to its description and tensors."""
    arrays, layers = stored(DeployedModel(MODELS[kind], dict(DATA)))
    said: dict[str, Any] = json.loads(json.dumps({"layers": layers, "data": DATA, "history": []}))
    change(said, arrays)
    tensor_file.write(path, arrays, {"format": FORMAT, "version": "1", "model": json.dumps(said)})


def first(said: dict[str, Any], **values: Any) -> None:
    said["layers"][0].update(values)


def resized(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name] = arrays[name][:-1].copy()


def filled(arrays: dict[str, np.ndarray], name: str, value: float) -> None:
    arrays[name] = np.full_like(arrays[name], value)


WRONG = {
    "shape is": lambda said, arrays: first(said, shape=[0, 5]),
    "out of range|other entries": lambda said, arrays: said["data"].update(seed=-1),
    "data: target is": lambda said, arrays: said["data"].update(target="label"),
    "data: target is .1": lambda said, arrays: said["data"].update(target=[1]),
    "weight: ": lambda said, arrays: first(said, shape=[8, 5]),
    "layer 1: takes 5 features, gets 4": lambda said, arrays: (
        first(said, shape=[7, 4]),
        arrays.update({"0.weight": np.ones(28, np.int8)}),
        resized(arrays, "0.bias"),
        resized(arrays, "0.scales"),
    ),
    "'0.bias' is missing": lambda said, arrays: arrays.pop("0.bias"),
    "'0.scales' has dtype": lambda said, arrays: resized(arrays, "0.scales"),
    "scales are not finite and above 0": lambda said, arrays: filled(arrays, "0.scales", 0),
    "biases are not finite": lambda said, arrays: filled(arrays, "1.bias", np.nan),
    "a code is below -127": lambda said, arrays: filled(arrays, "0.weight", -128),
    "activation is": lambda said, arrays: first(said, activation=[0.0, 3]),
    "activation is .0.5, 256": lambda said, arrays: first(said, activation=[0.5, 256]),
    "relu, bits or encoding": lambda said, arrays: first(said, bits=7),
    "kind is": lambda said, arrays: first(said, kind="conv"),
    "does not fit a convolution": lambda said, arrays: first(said, kind="conv", image=[4, 4, 1]),
    "other entries": lambda said, arrays: first(said, code="import os"),
    "belongs to no layer": lambda said, arrays: arrays.update({"2.weight": np.zeros(3, np.float32)}),
    "no list of 1 to": lambda said, arrays: said.update(layers=[]),
}


@pytest.mark.parametrize("reason", WRONG)
def test_wrong_descriptions_are_refused(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.safetensors"
    changed(WRONG[reason], path)
    with pytest.raises(CheckpointFailed, match=rf"wrong\.safetensors: wrong model: .*({reason})"):
        read_model(path)


def test_a_mask_that_does_not_fit_its_values_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.safetensors"
    changed(lambda said, arrays: resized(arrays, "0.values"), path, "sparse")
    with pytest.raises(CheckpointFailed, match=r"values: .* weights of 32 bits in the mask"):
        read_model(path)


def test_a_code_of_four_bits_that_is_never_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.safetensors"
    changed(lambda said, arrays: filled(arrays, "0.weight", 0x88), path, "int4")
    with pytest.raises(CheckpointFailed, match="a code is below -7"):
        read_model(path)


def test_a_file_of_another_kind_is_refused_in_these_words(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text("sepal,petal,kind\n1,2,0\n")
    with pytest.raises(CheckpointFailed, match=r"some.csv: not a safetensors file$"):
        read_model(path)


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (0, "0 bytes are too few"),
        (7, "7 bytes are too few"),
        (8, "a header of"),
        (40, "a header of"),
        (300, "header"),
        (-1, "header"),
    ],
)
def test_files_cut_short_are_refused(length: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_model(path, DeployedModel(MODELS["real"]))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointFailed, match=rf"m\.safetensors: .*{reason}"):
        load_model(str(path), {}, Intracomm(MPI.COMM_SELF))


# ---- files of other programs ----------------------------------------------------------------------------------------


def torch_like() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    return {
        "net.10.weight": random.standard_normal((3, 4)).astype(np.float32),
        "net.10.bias": random.standard_normal(3).astype(np.float32),
        "net.2.weight": random.standard_normal((4, 6)).astype(np.float16),
    }


def test_dense_layers_of_other_programs_are_read(tmp_path: Path) -> None:
    arrays, path = torch_like(), tmp_path / "other.safetensors"
    save_file(arrays, path, {"format": "pt"})
    model = load_model(str(path), {}, Intracomm(MPI.COMM_SELF))
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    hidden = np.maximum(x @ arrays["net.2.weight"].T.astype(np.float32), 0)
    expected = hidden @ arrays["net.10.weight"].T + arrays["net.10.bias"]
    np.testing.assert_allclose(Runtime(model).logits(x), expected, rtol=1e-5, atol=1e-6)


OTHER = {
    "is not the weight or bias": {"conv.weight": np.zeros((2, 2, 3, 3), np.float32)},
    "does not fit its bias or the one before": {"net.11.weight": np.zeros((2, 9), np.float32)},
    "holds no real numbers": {"net.2.weight": np.zeros((4, 6), np.int8)},
    "is not finite": {"net.2.weight": np.full((4, 6), np.inf, np.float32)},
    "is missing": {"net.3.bias": np.zeros(3, np.float32)},
}


@pytest.mark.parametrize("reason", OTHER)
def test_other_files_that_are_no_dense_layers_are_refused(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({**torch_like(), **OTHER[reason]}, path)
    with pytest.raises(CheckpointFailed, match=rf"other\.safetensors: .*{reason}"):
        load_model(str(path), {}, Intracomm(MPI.COMM_SELF))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "transformer"}, "model 'transformer' of dtype 'float32'; those that can be deployed are mlp"),
        ({"model": "own.models:make"}, "those that can be deployed are mlp, logistic, conv"),
        ({"task": "regression"}, "only classifiers can be deployed"),
    ],
)
def test_checkpoints_of_other_models_are_refused(options, says):
    facts = {"config": {**dataclasses.asdict(TrainConfig()), **options}}
    with pytest.raises(CheckpointFailed, match=says):
        model_sources._config_of(facts, Path("runs"))
