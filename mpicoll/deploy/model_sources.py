"""Models from the trainer's checkpoints, from files of deployed models, and from other safetensors files."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import open_checkpoint
from mpicoll.consensus import all_succeed
from mpicoll.data.datasets import Dataset, check_same_data, load
from mpicoll.deploy.deploy_options import DEPLOYABLE
from mpicoll.deploy.deployed_file import FORMAT, model_of, read_tensors, stored
from mpicoll.deploy.deployed_model import DeployedLayer, DeployedModel
from mpicoll.errors import CheckpointFailed, DataError
from mpicoll.models.layers import BatchNorm, Convolution, Dense, Relu, batch_norms
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.parallel.running_statistics import PREFIX
from mpicoll.train.config import BATCH_NORMS, DTYPES, TrainConfig
from mpicoll.train.model_choice import build_model

DATA_FIELDS = ("dataset", "labels", "test_fraction", "seed")
_PAIR = re.compile(r"(?:(.*)\.)?(weight|bias)")


def load_model(path: str, given: dict[str, Any], comm: MPI.Intracomm) -> DeployedModel:
    """Return the model in a folder of checkpoints or in a safetensors file. Collective over `comm`.

    Parameters
    ----------
    path
        Folder of the trainer's checkpoints, of which the newest is read; a file of a deployed model; or a file of
        dense layers, as PyTorch names them: ``NAME.weight``, (outputs, inputs), and ``NAME.bias``, (outputs,), with
        ReLU between the layers. float16, bfloat16 and float64 become float32.
    given
        Data options of the command line that replace those of the model, by name.

    Raises
    ------
    CheckpointFailed, DataError
        On every rank, naming the file and the reason.
    """
    place = Path(path).expanduser().absolute()
    if place.is_dir():
        return _from_checkpoint(place, given, comm)
    model: DeployedModel = all_succeed(comm, lambda: read_model(place))
    arrays, described = stored(model)
    digest = hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays)))
    check_same_data(comm, (described, digest.hexdigest()))
    return model


def load_data(model: DeployedModel, given: dict[str, Any], comm: MPI.Intracomm) -> Dataset:
    """Return the data set of the command line, or else of the model. Collective over `comm`.

    Raises
    ------
    DataError
        On every rank: there is none, it cannot be read, or it does not fit the model.
    """
    if not (model.data or "dataset" in given):
        raise DataError("--dataset: the model's file names no data set; give one")
    dataset = load(data_config(model, given), comm)
    if dataset.feature_count != model.input_count or dataset.class_count > model.class_count:
        raise DataError(
            f"{data_config(model, given).dataset}: {dataset.feature_count} features and {dataset.class_count} classes "
            f"do not fit the model's {model.input_count} and {model.class_count}"
        )
    return dataset


def data_config(model: DeployedModel, given: dict[str, Any]) -> TrainConfig:
    """Return options of a run on the model's data set, with those that were given on the command line."""
    known = {} if "dataset" in given else model.data
    return TrainConfig(**{**known, **given})


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _from_checkpoint(folder: Path, given: dict[str, Any], comm: MPI.Intracomm) -> DeployedModel:
    found = open_checkpoint(folder, comm)
    config: TrainConfig = all_succeed(comm, lambda: _config_of(found.facts, folder))
    model = build_model(config, load(replace(config, **given), comm))
    if "parameters" not in found.vectors:
        raise CheckpointFailed(f"{folder}: has no vector parameters; models of --tensor and --pipeline are not read")

    def read(name: str, count: int) -> np.ndarray:
        if name not in found.vectors:
            raise CheckpointFailed(f"{folder}: has no vector {name}")
        array = found.read(name)
        if array.size != count or array.dtype.kind != "f" or not np.isfinite(array).all():
            raise CheckpointFailed(f"{folder}: {name} are not {count} finite numbers, as the model needs")
        return array

    def read_all() -> np.ndarray:
        for number, layer in enumerate(batch_norms(model.layers)):
            layer.running[:] = read(f"{PREFIX}{number}", layer.running.size)
            if (layer.running[layer.running.size // 2 :] < 0).any():
                raise CheckpointFailed(f"{folder}: {PREFIX}{number} has negative variances")
        return read("parameters", model.parameter_count).astype(np.float32)

    flat = all_succeed(comm, read_all)
    data = {name: getattr(config, name) for name in DATA_FIELDS}
    return DeployedModel(_layers_of(model, flat), data, (f"trained for {found.step} steps",))


def _config_of(facts: Any, folder: Path) -> TrainConfig:
    """Return the options of the run that wrote a checkpoint, as far as they tell of model and data."""
    said = facts.get("config") if isinstance(facts, dict) else None
    if not isinstance(said, dict):
        raise CheckpointFailed(f"{folder}: the checkpoint is not of python -m mpicoll.train")
    names = ("model", "task", "hidden", "filters", "batch_norm", "dtype", *DATA_FIELDS)
    default = TrainConfig()
    found = {name: said.get(name, getattr(default, name)) for name in names}
    if isinstance(found["hidden"], list):
        found["hidden"] = tuple(found["hidden"])
    for name, value in found.items():
        is_text = name == "labels" and (value is None or isinstance(value, str))
        if not is_text and type(value) is not type(getattr(default, name)):
            raise CheckpointFailed(f"{folder}: option {name} is {value!r:.60}")
    widths = (*found["hidden"], found["filters"])
    if found["model"] not in DEPLOYABLE or found["dtype"] not in DTYPES:
        raise CheckpointFailed(
            f"{folder}: model {found['model']!r:.60} of dtype {found['dtype']!r:.60}; those that can be deployed are "
            f"{', '.join(DEPLOYABLE)} of {', '.join(DTYPES)}"
        )
    if found["batch_norm"] not in BATCH_NORMS:
        raise CheckpointFailed(f"{folder}: option batch_norm is {found['batch_norm']!r:.60}")
    if found["task"] != "classification":
        raise CheckpointFailed(f"{folder}: the model is for {found['task']!r:.60}; only classifiers can be deployed")
    if not all(type(width) is int and 0 <= width < 1 << 30 for width in widths) or not (found["dataset"]):
        raise CheckpointFailed(f"{folder}: widths {widths!r:.60} are wrong")
    return TrainConfig(**found)


def _layers_of(model: Model, flat: np.ndarray) -> tuple[DeployedLayer, ...]:
    """Return the layers; a batch normalisation and a ReLU become part of the dense layer before them."""
    store = FlatParameters(model.layout, flat)
    made: list[DeployedLayer] = []
    for number, layer in enumerate(model.layers):
        arrays = [array.copy() for array in store.parameters(number)]
        if isinstance(layer, Convolution):
            made.append(DeployedLayer(arrays[0], arrays[1], True, layer.image))
        elif isinstance(layer, BatchNorm):
            factor, shift = layer.affine(arrays)
            weight, bias = made[-1].weight * factor, made[-1].bias * factor + shift
            made[-1] = replace(made[-1], weight=weight.astype(np.float32), bias=bias.astype(np.float32))
        elif isinstance(layer, Relu):
            made[-1] = replace(made[-1], relu=True)
        else:
            assert isinstance(layer, Dense)
            made.append(DeployedLayer(arrays[0], arrays[1], layer.relu))
    return tuple(made)


def new_model(config: TrainConfig, dataset: Dataset) -> DeployedModel:
    """Return a model of the shape that `config` names with initial parameters, determined by its seed."""
    model = build_model(config, dataset)
    return DeployedModel(_layers_of(model, model.initial(config.seed)))


# ---- files ----------------------------------------------------------------------------------------------------------


def read_model(path: Path) -> DeployedModel:
    """Return the model in a file; see :func:`load_model`.

    Raises
    ------
    CheckpointFailed
        If the file is missing, damaged or of another format.
    """
    arrays, metadata = read_tensors(path)
    if metadata.get("format") == FORMAT:
        return model_of(path, arrays, metadata)
    try:
        return DeployedModel(_dense_layers(arrays), history=(f"from {path.name}",))
    except ValueError as error:
        raise CheckpointFailed(f"{path}: {error}") from None


def _dense_layers(arrays: dict[str, np.ndarray]) -> tuple[DeployedLayer, ...]:
    """Return the layers of a file that names them as PyTorch does, in the natural order of their names.

    Raises
    ------
    ValueError
        If a tensor is of another kind, or layers do not fit each other.
    """
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        match = _PAIR.fullmatch(name)
        if match is None or array.ndim != (2 if match[2] == "weight" else 1) or array.size == 0:
            raise ValueError(f"tensor {name!r:.80} of shape {array.shape} is not the weight or bias of a dense layer")
        pairs.setdefault(match[1] or "", {})[match[2]] = array
    if not pairs:
        raise ValueError("has no tensors")
    layers: list[DeployedLayer] = []
    for number, name in enumerate(sorted(pairs, key=_natural)):
        weight = _real(pairs[name].get("weight"), f"{name}.weight").T
        bias = _real(pairs[name].get("bias", np.zeros(weight.shape[1], np.float32)), f"{name}.bias")
        if bias.shape != weight.shape[1:] or (layers and layers[-1].output_count != len(weight)):
            raise ValueError(f"layer {name!r:.80} of {weight.shape[0]} inputs does not fit its bias or the one before")
        layers.append(DeployedLayer(np.ascontiguousarray(weight), bias, number < len(pairs) - 1))
    return tuple(layers)


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts ``fc2`` before ``fc10``."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _real(array: np.ndarray | None, name: str) -> np.ndarray:
    if array is None:
        raise ValueError(f"tensor {name!r:.80} is missing")
    if array.dtype.kind in "iub":
        raise ValueError(f"tensor {name!r:.80} has dtype {array.dtype}, which holds no real numbers")
    real = array.astype(np.float32)
    if not np.isfinite(real).all():
        raise ValueError(f"tensor {name!r:.80} is not finite in float32")
    return real
