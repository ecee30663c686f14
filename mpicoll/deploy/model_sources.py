"""Models from the trainer's checkpoints, from files of deployed models, and from other safetensors files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import open_checkpoint
from mpicoll.checkpoint.collective_reads import attempt
from mpicoll.communicator.topology import node_ids
from mpicoll.consensus import all_succeed
from mpicoll.data.datasets import Dataset, load
from mpicoll.deploy.checkpoint_layers import checkpoint_layers, flat_layers
from mpicoll.deploy.dense_files import dense_model
from mpicoll.deploy.deploy_options import DATA_FIELDS, DEPLOYABLE, TABLES
from mpicoll.deploy.deployed_file import FORMAT, described_model
from mpicoll.deploy.deployed_model import DeployedModel, ModelProperties
from mpicoll.deploy.layer_sources import ModelSource, OpenFile, opened_file
from mpicoll.errors import CheckpointFailed, DataError, named_ranks
from mpicoll.quantities import counted
from mpicoll.train.config import BATCH_NORMS, DTYPES, TrainConfig
from mpicoll.train.model_choice import build_model


def load_model(path: str, given: dict[str, Any], comm: MPI.Intracomm) -> DeployedModel:
    """Return the model in a folder of checkpoints or in a safetensors file. Collective over `comm`.

    Parameters
    ----------
    path, given
        See :func:`opened_model`.

    Raises
    ------
    CheckpointFailed, DataError
        On every rank, naming the file and the reason.
    """
    with opened_model(path, given, comm) as source:
        return attempt(comm, source.whole)


@contextlib.contextmanager
def opened_model(path: str, given: dict[str, Any], comm: MPI.Intracomm) -> Iterator[ModelSource]:
    """Open a folder of checkpoints or a safetensors file, and yield the model there. Collective over `comm`.

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
        On every rank, naming the file and the reason; and if the file differs between nodes.
    """
    place = Path(path).expanduser().absolute()
    if place.is_dir():
        yield _from_checkpoint(place, given, comm)
        return
    with contextlib.ExitStack() as stack:
        file: OpenFile = all_succeed(comm, lambda: stack.enter_context(opened_file(place)))
        _check_same_file(file, comm)
        yield all_succeed(comm, lambda: _source(file))


def _check_same_file(file: OpenFile, comm: MPI.Intracomm) -> None:
    """Refuse files that differ between nodes, of which the first ranks read all bytes. Collective."""
    ids = node_ids(MPI.Intracomm(comm)).tolist()
    reads = ids.index(ids[comm.Get_rank()]) == comm.Get_rank()
    digest = all_succeed(comm, lambda: file.digest() if reads else "")
    table = np.zeros((comm.Get_size(), 64), np.uint8)
    comm.Allgather(np.frombuffer(digest.ljust(64).encode(), np.uint8).copy(), table)
    digests = [table[ids.index(each)].tobytes() for each in ids]
    if differing := [rank for rank, found in enumerate(digests) if found != digests[0]]:
        raise DataError(f"{file.path}: on {named_ranks(differing)} the file differs from that of rank 0")


def _source(file: OpenFile) -> ModelSource:
    return described_model(file) if file.metadata.get("format") == FORMAT else dense_model(file)


def read_model(path: Path) -> DeployedModel:
    """Return the model in a file; see :func:`opened_model`. Not collective.

    Raises
    ------
    CheckpointFailed
        If the file is missing, damaged or of another format.
    """
    with opened_file(path) as file:
        return _source(file).whole()


def load_data(model: ModelProperties, given: dict[str, Any], comm: MPI.Intracomm) -> Dataset:
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
            f"{data_config(model, given).dataset}: {counted(dataset.feature_count, 'feature')} and "
            f"{counted(dataset.class_count, 'class', 'classes')} "
            f"do not fit the model's {model.input_count} and {model.class_count}"
        )
    return dataset


def data_config(model: ModelProperties, given: dict[str, Any]) -> TrainConfig:
    """Return options of a run on the model's data set, with those that were given on the command line."""
    return TrainConfig(**_data_options(model.data, given))


def _data_options(known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the data options of a model, replaced by those of the command line.

    A data set that is named anew has the same split, so that the model has not seen its test samples if it is the one
    of the training. It has labels of its own, but a table has them in a column of the same name.
    """
    if "dataset" in given:
        columns = known.get("target", ()) if given["dataset"].endswith(TABLES) else ()
        known = {**known, "labels": None, "target": columns}
    return {**known, **given}


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _from_checkpoint(folder: Path, given: dict[str, Any], comm: MPI.Intracomm) -> ModelSource:
    found = open_checkpoint(folder, comm)
    config: TrainConfig = all_succeed(comm, lambda: _config_of(found.facts, folder))
    data = {name: getattr(config, name) for name in DATA_FIELDS}
    model = build_model(config, load(replace(config, **_data_options(data, given)), comm))
    if "parameters" not in found.vectors:
        raise CheckpointFailed(f"{folder}: has no vector parameters; models of --tensor and --pipeline are not read")
    layers = attempt(comm, lambda: checkpoint_layers(found, model, str(folder)))
    return ModelSource(str(folder), layers, data, (f"trained for {counted(found.step, 'step')}",))


def _config_of(facts: Any, folder: Path) -> TrainConfig:
    """Return the options of the run that wrote a checkpoint, as far as they tell of model and data."""
    said = facts.get("config") if isinstance(facts, dict) else None
    if not isinstance(said, dict):
        raise CheckpointFailed(f"{folder}: the checkpoint is not of python -m mpicoll.train")
    names = ("model", "task", "hidden", "filters", "batch_norm", "dtype", *DATA_FIELDS)
    default = TrainConfig()
    found = {name: said.get(name, getattr(default, name)) for name in names}
    found |= {name: tuple(value) for name, value in found.items() if isinstance(value, list)}  # JSON has no tuples
    _check_types(found, folder)
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


def _check_types(options: dict[str, Any], folder: Path) -> None:
    default = TrainConfig()
    for name, value in options.items():
        is_right = type(value) is type(getattr(default, name))
        if name == "labels":
            is_right = value is None or isinstance(value, str)
        elif name == "target":
            is_right = is_right and all(isinstance(column, str) for column in value)
        if not is_right:
            raise CheckpointFailed(f"{folder}: option {name} is {value!r:.60}")


def new_model(config: TrainConfig, dataset: Dataset) -> DeployedModel:
    """Return a model of the shape that `config` names with initial parameters, determined by its seed."""
    model = build_model(config, dataset)
    flat = model.initial(config.seed)
    layers = flat_layers(model, lambda start, stop: flat[start:stop].astype(np.float32))
    return ModelSource("", layers, {}, ()).whole()
