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
from mpicoll.deploy.deploy_commands import CHANGES, check_real, data_of, paths_of
from mpicoll.deploy.deploy_options import DeployOptions
from mpicoll.deploy.deploy_output import check_outputs, publish, short_name
from mpicoll.deploy.deployed_file import write_model
from mpicoll.deploy.deployed_model import DeployedModel
from mpicoll.deploy.evaluation import Evaluation, evaluate
from mpicoll.deploy.model_sources import data_config, load_data, load_model
from mpicoll.errors import UsageError
from mpicoll.gradients import differing_ranks

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
        raise UsageError(f"rank {', '.join(map(str, differing))} was started with other options than the rest")
    all_succeed(comm, lambda: _check_outputs(options) if rank == 0 else None)
    models = [(short_name(path), load_model(path, options.data, comm)) for path in paths_of(options)]
    dataset = load_data(models[0][1], options.data, comm)
    _check_same_shape(models)
    more: dict[str, Any] = {}
    if options.command in CHANGES:
        models.append(_changed(models[0][1], dataset, options, comm))
        made, path = models[-1][1], Path(str(options.output)).expanduser().absolute()
        written = all_succeed(comm, lambda: write_model(path, made) if rank == 0 else 0)
        more = {"file": str(options.output), "file_nbytes": written}
    elif options.command == "export":
        more = all_succeed(comm, lambda: _export(models[0][1], dataset, options) if rank == 0 else {})
    rows = evaluate(models, dataset, comm)
    all_succeed(comm, lambda: _publish(options, rows, models, more) if rank == 0 else None)
    return rows


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
    if options.command != "distill":
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
                f"{name}: {model.input_count} features and {model.class_count} classes, {models[0][0]} has "
                f"{first.input_count} and {first.class_count}"
            )
