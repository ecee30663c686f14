"""Choice of a run's model: a built-in one, or one that a function of the user's returns."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from mpicoll.data.datasets import Dataset, ImageShape
from mpicoll.errors import DataError, TrainingError, UsageError
from mpicoll.models.builders import alexnet, convolutional, perceptron, transformer
from mpicoll.models.layers import batch_norms
from mpicoll.models.own_model import OwnModel
from mpicoll.models.sequential import Model
from mpicoll.models.tasks import LOSSES
from mpicoll.train.config import MODELS, TrainConfig

_METHODS = ("initial", "forward", "backward")


class DataDescription(NamedTuple):
    """Facts of data set and run that a function which returns a model receives.

    Attributes
    ----------
    feature_count, output_count
        Number of features of a sample, which are (rows, feature_count) of `dtype`, or bytes of a text; and number of
        classes, or of targets of a regression.
    image_shape
        Height, width and channels of a sample; None if samples are not images.
    dtype
        ``"float32"`` or ``"float64"``, the type of features and parameters.
    task
        ``"classification"``, ``"regression"`` or ``"language_modeling"``.
    """

    feature_count: int
    output_count: int
    image_shape: ImageShape | None
    dtype: str
    task: str


def build_model(config: TrainConfig, dataset: Dataset) -> Model:
    """Return the model that `config` names, with the data set's numbers of features and classes.

    A Model, built-in or of the user's, is divided into segments as ``--recompute`` says.

    Raises
    ------
    DataError
        If the model needs images and the samples are not images, or a function of the user's fails.
    UsageError
        If there is no such function, or its model does not fit the data set, the task, or other options.
    """
    model = _built_in(config, dataset) if config.model in MODELS else _own_model(config, dataset)
    if config.recompute is not None:
        layers = len(model.layers)
        if isinstance(model, OwnModel):
            raise UsageError(f"--recompute needs a model of layers; that of --model {config.model} has none")
        if config.recompute >= layers:
            raise UsageError(f"--recompute {config.recompute}: the model has {layers} layers, which are one segment")
        model.recompute = config.recompute
    return model


def _built_in(config: TrainConfig, dataset: Dataset) -> Model:
    if config.model == "transformer":
        sizes = config.context, config.width, config.heads, config.layers
        return transformer(*sizes, config.dtype, dropout=config.dropout)
    outputs, loss = dataset.class_count, LOSSES[config.task]
    if config.model not in ("conv", "alexnet"):
        widths = dataset.feature_count, *config.hidden, outputs
        return perceptron(widths, config.dtype, loss, batch_norm=config.batch_norm)
    image = dataset.image_shape
    if image is None or min(image[:2]) < 2:
        raise DataError(f"--model {config.model} needs images of at least 2 x 2, {config.dataset} has none")
    if config.model == "conv":
        return convolutional(image, config.filters, outputs, config.dtype, loss)
    options: dict[str, Any] = {"dropout": config.dropout, "batch_norm": config.batch_norm, "loss_function": loss}
    return alexnet(image, config.filters, outputs, config.dtype, **options)


def _own_model(config: TrainConfig, dataset: Dataset) -> Model:
    name, function = f"--model {config.model}", _factory(config.model)
    facts = DataDescription(dataset.feature_count, dataset.class_count, dataset.image_shape, config.dtype, config.task)
    try:
        found = function(facts)
        missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
        model = found if isinstance(found, Model) or missing else OwnModel(found, config.seed)
    except TrainingError as error:
        raise DataError(f"{name}: {error}") from error
    except Exception as error:
        raise DataError(f"{name}: {_in_one_line(error)}") from error
    if not isinstance(model, Model):
        kind = type(found).__name__
        raise DataError(f"{name}: returns {kind}, which has no {', '.join(missing)}; see mpicoll.train.TrainableModel")
    if model.dtype != config.dtype:
        raise DataError(f"{name}: its parameters are of {model.dtype}; this run is with --dtype {config.dtype}")
    if isinstance(model, OwnModel) and config.tensor * config.pipeline > 1:
        raise UsageError(f"--tensor and --pipeline need a model of layers; that of {name} has none")
    _check_loss(name, model, config, dataset)
    # Running statistics change before a step is applied, so that ranks may differ in them when one dies.
    if config.goes_on and next(batch_norms(model.layers), None) is not None:
        raise UsageError(f"--on-failure shrink is not for batch normalisation, which the model of {name} has")
    return model


def _check_loss(name: str, model: Model, config: TrainConfig, dataset: Dataset) -> None:
    """Refuse a model with a loss of another task, or with outputs that the task's loss cannot take.

    Nothing is known of losses of the user's own.
    """
    task = next((task for task, loss in LOSSES.items() if loss is model.loss_function), None)
    if task is None or type(model).loss_and_gradient is not Model.loss_and_gradient:
        return
    if task != config.task:
        raise UsageError(
            f"--task {config.task}: {name} has the loss of {task}; "
            f'its Model needs loss_function=mpicoll.models.tasks.LOSSES["{config.task}"]'
        )
    needed, each = _needed_outputs(config, dataset)
    found = tuple(getattr(model.layers[-1], "output", needed)) if model.layers else ()
    # More outputs than classes do no harm.
    fits = found[-1:] >= needed[-1:] if task != "regression" else found[-1:] == needed[-1:]
    if found[:-1] != needed[:-1] or not fits:
        raise UsageError(
            f"{name}: its last layer has outputs of shape {found}; --task {task} on --dataset {config.dataset} needs "
            f"{needed}, one for each {each}"
        )


def _needed_outputs(config: TrainConfig, dataset: Dataset) -> tuple[tuple[int, ...], str]:
    """Return the shape of a sample's outputs that the task's loss takes, and what has an output each."""
    if config.task == "language_modeling":
        return (config.context, dataset.class_count), "value of the byte at each position of --context"
    return (dataset.class_count,), "target" if config.task == "regression" else "class"


def _factory(text: str) -> Any:
    """Return the function of ``package.module:factory``."""
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise UsageError(f"--model {text}: no module named {error.name}") from None
    except Exception as error:
        raise UsageError(f"--model {text}: the import of {module} failed: {_in_one_line(error)}") from error
    if not callable(found):
        raise UsageError(f"--model {text}: {module} has no function {name}")
    return found


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
