"""Run of a command: read models and data, change or compare them, write and report."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.consensus import all_succeed
from mpicoll.data.datasets import Dataset
from mpicoll.deploy import onnx_export, tradeoff_report
from mpicoll.deploy.deploy_commands import CHANGES, check_real, data_of, distill, paths_of
from mpicoll.deploy.deploy_options import DeployOptions
from mpicoll.deploy.deploy_output import check_outputs, publish, short_name
from mpicoll.deploy.deployed_file import write_model
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.evaluation import Evaluation, evaluate
from mpicoll.deploy.model_sources import data_config, load_data, load_model
from mpicoll.deploy.sharded_model import ShardedModel, facts_of
from mpicoll.deploy.teacher_placement import load_teacher
from mpicoll.errors import UsageError, named_ranks
from mpicoll.gradients import differing_ranks
from mpicoll.quantities import counted

_COMPARED = 1024
"""Largest number of samples whose outputs are compared."""
Named = list[tuple[str, DeployedModel]]


def run(options: DeployOptions, world: MPI.Intracomm) -> list[Evaluation]:
    """Run a command, and return the properties of its models, the same on all ranks. Collective over `world`.

    Raises
    ------
    TrainingError
        On every rank, with the same one-line message.
    """
    comm = Intracomm(world, timeout=options.chosen["timeout"])
    rank = comm.Get_rank()
    if differing := differing_ranks(comm, hashlib.sha256(repr(options).encode()).digest()):
        raise UsageError(f"options of {named_ranks(differing)} differ from those of the other ranks")
    all_succeed(comm, lambda: _check_outputs(options) if rank == 0 else None)
    if options.command == "distill":
        return _distill(options, comm)
    models = [(short_name(path), load_model(path, options.data, comm)) for path in paths_of(options)]
    dataset = load_data(models[0][1], options.data, comm)
    _check_same_shape(models)
    more: dict[str, Any] = {}
    if options.command in CHANGES:
        models.append(_changed(models[0][1], dataset, options, comm))
        more = _written(models[-1][1], options, comm)
    elif options.command == "export":
        more = all_succeed(comm, lambda: _export(models[0][1], dataset, options) if rank == 0 else {})
    rows = evaluate(models, dataset, comm)
    all_succeed(comm, lambda: _publish(options, rows, models, more) if rank == 0 else None)
    return rows


def _distill(options: DeployOptions, comm: Intracomm) -> list[Evaluation]:
    """Train a new model on the logits of a teacher, and return the properties of both. Collective."""
    path = options.chosen["teacher"]
    teacher = load_teacher(path, options.data, comm, options.chosen["shard_teacher"])
    dataset = load_data(teacher, options.data, comm)
    made = distill(teacher, dataset, options, comm)
    more = _written(made, options, comm)
    if isinstance(teacher, ShardedModel):
        more["sharded_teacher"] = facts_of(teacher)
    rows = evaluate([(short_name(path), teacher), (short_name(str(options.output)), made)], dataset, comm)
    all_succeed(comm, lambda: publish(options, rows, more) if comm.Get_rank() == 0 else None)
    return rows


def _written(model: DeployedModel, options: DeployOptions, comm: Intracomm) -> dict[str, Any]:
    """Write a model on rank 0, and return the facts for the report. Collective."""
    path = Path(str(options.output)).expanduser().absolute()
    written = all_succeed(comm, lambda: write_model(path, model) if comm.Get_rank() == 0 else 0)
    return {"file": str(options.output), "file_nbytes": written}


def _check_outputs(options: DeployOptions) -> None:
    check_outputs(options)
    if options.command == "export":
        onnx_export.check_exportable()
    if options.chosen.get("html") is not None:
        tradeoff_report.check_reportable()


def _publish(options: DeployOptions, rows: list[Evaluation], models: Named, more: dict[str, Any]) -> None:
    publish(options, rows, more)
    if options.chosen.get("html") is not None:
        dataset = data_config(models[0][1], options.data).dataset
        tradeoff_report.write_page(options.chosen["html"], rows, [model for _, model in models], dataset)


def _export(model: DeployedModel, dataset: Dataset, options: DeployOptions) -> dict[str, Any]:
    """Write an ONNX file, compare its outputs, and return the facts for the report."""
    path = Path(str(options.output)).expanduser().absolute()
    facts: dict[str, Any] = {"file": str(options.output), "file_nbytes": onnx_export.write_onnx(path, model)}
    samples = dataset.test if dataset.test.count else dataset.train
    found = onnx_export.compare(path, model, samples.batch(np.arange(min(_COMPARED, samples.count)))[0].copy())
    if found is None:
        return {**facts, "onnxruntime": "not installed; outputs were not compared"}
    return {**facts, "onnxruntime": found._asdict()}


def _changed(
    model: DeployedModel, dataset: Dataset, options: DeployOptions, comm: MPI.Intracomm
) -> tuple[str, DeployedModel]:
    """Return the model that a command makes of another one, with the name of its file."""
    check_real(model, paths_of(options)[0], options.command)
    made = CHANGES[options.command](model, dataset, options, comm)
    if options.data:
        made = replace(made, data=data_of(model, options))
    return short_name(str(options.output)), made


def _check_same_shape(models: Named) -> None:
    """Refuse to compare models of other samples or classes than the first one's.

    Raises
    ------
    UsageError
        Naming the model.
    """
    first = models[0][1]
    for name, model in models:
        if (model.input_count, model.class_count) != (first.input_count, first.class_count):
            raise UsageError(
                f"{name}: {counted(model.input_count, 'feature')} and "
                f"{counted(model.class_count, 'class', 'classes')}, {models[0][0]} has "
                f"{first.input_count} and {first.class_count}"
            )
