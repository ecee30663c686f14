"""Commands of ``python -m mpicoll.deploy``: functions from a model and options to another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from mpicoll.data.datasets import Dataset, StoredSamples
from mpicoll.data.sample_subsets import labeled_only, subset
from mpicoll.data.sampler import steps_per_epoch
from mpicoll.deploy.deploy_options import DATA_FIELDS, DeployOptions
from mpicoll.deploy.deployed_model import DeployedModel, ModelProperties
from mpicoll.deploy.distillation import DistilledModel
from mpicoll.deploy.fake_quantization import quantisation_aware
from mpicoll.deploy.fine_tuning import PretrainedModel, train
from mpicoll.deploy.low_rank import factorise
from mpicoll.deploy.model_sources import data_config, new_model
from mpicoll.deploy.pruning import ChannelPruning, GradualPruning, WeightPruning, prune_now, without_channels
from mpicoll.deploy.quantization import calibrate, quantise
from mpicoll.deploy.sharded_model import ShardedModel, runtime_of
from mpicoll.errors import UsageError
from mpicoll.train.config import TrainConfig

_BITS = {"int8": 8, "int4": 4}
_LABELED = 0x1ABE1
"""Part of the seed of the choice of labels, which makes its random stream differ from others."""
_TRAINING = ("epochs", "batch", "lr", "momentum", "weight_decay", "timeout")


def training_config(model: ModelProperties, options: DeployOptions) -> TrainConfig:
    """Return the options of training on the model's data set."""
    chosen = {name: options.chosen[name] for name in _TRAINING if name in options.chosen}
    epochs = chosen.get("epochs", options.chosen.get("qat", 0))
    output = {"progress": options.progress, "quiet": options.quiet}
    given = {**chosen, **output, "epochs": epochs, "evaluate_every": max(1, epochs)}
    return replace(data_config(model, options.data), **given)


def description(options: DeployOptions) -> str:
    """Return the text of a command for the history of the model that it makes."""
    left_out = ("timeout", "shard_teacher")  # which change nothing in the model
    words = [f"{name}={value}" for name, value in options.chosen.items() if value is not None and name not in left_out]
    return " ".join([options.command, *words])


def check_real(model: DeployedModel, path: str, command: str) -> None:
    """Refuse a quantised model for a command that trains or changes real numbers.

    Raises
    ------
    UsageError
    """
    if model.is_quantised:
        order = "nothing is left to quantize" if command == "quantize" else f"{command} comes before quantize"
        raise UsageError(f"{path}: is quantised already; {order}")


def quantize(model: DeployedModel, dataset: Dataset, options: DeployOptions, comm: MPI.Intracomm) -> DeployedModel:
    """Return the model with integer weights, and activations if wanted. Collective."""
    chosen, config = options.chosen, training_config(model, options)
    bits, codes = _BITS[chosen["weights"]], None
    if chosen["activations"] == "int8":
        codes = calibrate(model, dataset, comm, chosen["calibrate"], chosen["percentile"], config.seed)
    if chosen["qat"]:
        flat = train(quantisation_aware(model, bits, codes), dataset, comm, config)
        model = replace(model.with_parameters(flat, ""), history=model.history)
    return quantise(model, bits, codes, description(options))


def prune(model: DeployedModel, dataset: Dataset, options: DeployOptions, comm: MPI.Intracomm) -> DeployedModel:
    """Return the pruned model, trained further. Collective.

    Raises
    ------
    UsageError
        On every rank, if there are no hidden channels to remove.
    """
    chosen, config = options.chosen, training_config(model, options)
    sparsity, whole = chosen["sparsity"], chosen["scope"] == "global"
    channels = chosen["structured"] == "channels"
    if channels and len(model.layers) == 1:
        raise UsageError("--structured channels: the model has no hidden layer")
    pruning = ChannelPruning(whole, comm) if channels else WeightPruning(whole, comm)
    if config.epochs:
        steps = config.epochs * steps_per_epoch(dataset.train.count, config.step_batch)
        gradual = GradualPruning(
            pruning, sparsity, chosen["schedule"], layer_count=len(model.layers), total_steps=steps
        )
        flat = train(_network(model, model, options), dataset, comm, config, [gradual])
        made = model.with_parameters(flat, description(options))
    else:
        made = prune_now(pruning, model, sparsity, description(options))
    return without_channels(made, pruning.masks) if channels else made


def lowrank(model: DeployedModel, dataset: Dataset, options: DeployOptions, comm: MPI.Intracomm) -> DeployedModel:
    """Return the model with products of narrower layers, trained further if wanted. Collective."""
    config = training_config(model, options)
    made = factorise(model, options.chosen["rank"], options.chosen["energy"], comm, description(options))
    if config.epochs:
        flat = train(_network(made, model, options), dataset, comm, config)
        made = replace(made.with_parameters(flat, ""), history=made.history)
    return made


def distill(
    teacher: DeployedModel | ShardedModel, dataset: Dataset, options: DeployOptions, comm: MPI.Intracomm
) -> DeployedModel:
    """Return a new model, trained on the logits of `teacher` and the labels. Collective.

    Raises
    ------
    UsageError
        On every rank, if more labels are wanted than there are training samples.
    """
    chosen = options.chosen
    dataset = with_labels(dataset, teacher, options)
    shape = {"model": chosen["model"], "hidden": chosen["hidden"] or (), "filters": chosen["filters"] or 0}
    config = replace(training_config(teacher, options), **shape)
    student = new_model(config, dataset)
    step = description(options)
    made = student.with_parameters(train(_network(student, teacher, options), dataset, comm, config), step)
    return replace(made, data=data_of(teacher, options))


def with_labels(dataset: Dataset, model: ModelProperties, options: DeployOptions) -> Dataset:
    """Return the data set with as many labels as are wanted; without samples that teach nothing.

    Raises
    ------
    UsageError
        If more are wanted than there are training samples.
    """
    count, samples = options.chosen["labeled"], dataset.train
    if count is None:
        return dataset
    if count > samples.count:
        raise UsageError(f"--labeled {count}: there are {samples.count} training samples")
    assert isinstance(samples, StoredSamples)  # as all data sets of features are
    seed = data_config(model, options.data).seed
    rows = np.sort(np.random.default_rng((seed, _LABELED)).permutation(samples.count)[:count])
    view = subset if options.chosen["alpha"] == 0 else labeled_only
    return replace(dataset, train=view(samples, rows))


def _network(model: DeployedModel, teacher: DeployedModel | ShardedModel, options: DeployOptions) -> PretrainedModel:
    """Return the model to train, on the labels and on the logits of `teacher` as far as ``--alpha`` says."""
    alpha, layers = options.chosen["alpha"], [layer.trainable() for layer in model.layers]
    if alpha == 0:
        return PretrainedModel(layers, model.flat())
    temperature = options.chosen["temperature"]
    return DistilledModel(layers, model.flat(), runtime_of(teacher), temperature=temperature, alpha=alpha)


def data_of(model: ModelProperties, options: DeployOptions) -> dict[str, object]:
    """Return the data set of a command, for the file of the model that it makes."""
    config = data_config(model, options.data)
    return {name: getattr(config, name) for name in DATA_FIELDS}


CHANGES = {"quantize": quantize, "prune": prune, "lowrank": lowrank}
"""Commands that make a model of another one."""


def paths_of(options: DeployOptions) -> Sequence[str]:
    """Return the models that a command reads, but for a teacher."""
    original = options.chosen.get("original")
    return options.models if original is None else (original, *options.models)
