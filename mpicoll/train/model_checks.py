"""Checks of the options of data set, model and task, and defaults that depend on the model. No MPI, no NumPy."""

from __future__ import annotations

from typing import Any

from mpicoll.errors import UsageError
from mpicoll.quantities import alternatives, counted
from mpicoll.train.config import (
    ASYNCHRONOUS,
    MODELS,
    SYNTHETIC_TEXT,
    is_idx,
    is_parts,
    is_text,
    parse_synthetic,
    parse_synthetic_text,
)

HIDDEN = (256, 128)
FILTERS = 16
LAYERS, HEADS, WIDTH, CONTEXT = 2, 4, 64, 64
DROPOUT = {"alexnet": 0.5, "transformer": 0.1}
_OF_MODELS: dict[str, tuple[tuple[str, ...], Any, Any]] = {
    "hidden": (("mlp",), HIDDEN, ()),
    "filters": (("conv", "alexnet"), FILTERS, 0),
    "layers": (("transformer",), LAYERS, 0),
    "heads": (("transformer",), HEADS, 0),
    "width": (("transformer",), WIDTH, 0),
}
"""Options that some models alone have: these models, the default, and the value for other models."""


def check_model(options: dict[str, Any]) -> None:
    """Check the model's options, and fill in defaults, in place.

    Raises
    ------
    UsageError
        If an option is not for the model.
    """
    model = options["model"]
    for name, (models, default, none) in _OF_MODELS.items():
        if options[name] is not None and model not in models:
            raise UsageError(f"--{name} is for --model {alternatives(models)}, not {model}")
        options[name] = options[name] or (default if model in models else none)
    if options["dropout"] is not None and model not in DROPOUT:
        raise UsageError(f"--dropout is for --model {alternatives(DROPOUT)}, not {model}")
    options["dropout"] = DROPOUT.get(model, 0.0) if options["dropout"] is None else options["dropout"]
    _check_batch_norm(options)
    if model == "transformer" and options["width"] % options["heads"]:
        raise UsageError(f"--heads {options['heads']} does not divide --width {options['width']}")


def _check_batch_norm(options: dict[str, Any]) -> None:
    kind, model = options["batch_norm"], options["model"]
    if kind == "none":
        return
    if model not in ("mlp", "alexnet"):
        raise UsageError(f"--batch-norm is for --model mlp or alexnet, not {model}")
    if options["tensor"] > 1:
        raise UsageError("--batch-norm is not for --tensor, which divides dense layers that follow each other")


def check_data(options: dict[str, Any]) -> None:
    """Check data set and task, and fill in defaults, in place.

    Raises
    ------
    UsageError
        If data set, task and model do not fit each other.
    """
    model = options["model"]
    dataset = options["dataset"] = options["dataset"] or (SYNTHETIC_TEXT if model == "transformer" else "digits")
    _check_files(options)
    if dataset.startswith("synthetic:") or dataset == "synthetic":
        classes = parse_synthetic(dataset).classes
        if classes < 2 and options["task"] != "regression":
            raise UsageError(f"--dataset {dataset} has {classes} class; 2 at least, or --task regression")
    if dataset.startswith(SYNTHETIC_TEXT):
        parse_synthetic_text(dataset)
    _check_task(options)
    mapped = dataset.endswith(".npy") and not is_parts(dataset)
    if options["share_data"] and (is_text(dataset) or dataset.startswith("synthetic:") or mapped):
        raise UsageError(f"--share-data has no meaning for --dataset {dataset}, of which no rank holds a copy")
    if options["prefetch"] and options["balance"] == "auto":
        raise UsageError("--prefetch is not for --balance auto, which decides at each step what a rank reads")
    if options["prefetch"] and options["mode"] in ASYNCHRONOUS:
        raise UsageError("--prefetch is for ranks that take steps together: others learn at each step what to read")


def _check_files(options: dict[str, Any]) -> None:
    """Check the options of files of samples."""
    dataset, labels = options["dataset"], options["labels"]
    of_arrays = not is_text(dataset) and (dataset.endswith(".npy") or is_idx(dataset))
    if of_arrays and labels is None:
        raise UsageError(f"--dataset {dataset} needs --labels FILE{'.npy' if dataset.endswith('.npy') else ''}")
    if labels is not None and not of_arrays:
        raise UsageError(f"--labels is for a --dataset FILE.npy or an IDX file, not {dataset}")
    if options["target"] and (is_text(dataset) or not dataset.endswith((".csv", ".parquet"))):
        raise UsageError(f"--target is for a --dataset FILE.csv or FILE.parquet, not {dataset}")


def _check_task(options: dict[str, Any]) -> None:
    dataset, model = options["dataset"], options["model"]
    text = is_text(dataset)
    task = options["task"] = options["task"] or ("language_modeling" if text else "classification")
    if (task == "language_modeling") != text:
        kind = "a text" if text else "not a text, see text:FILE"
        raise UsageError(f"--task {task} is not for --dataset {dataset}, which is {kind}")
    if model == "transformer" and not text:
        raise UsageError(f"--model transformer is for texts, not for --dataset {dataset}")
    if text and model in MODELS and model != "transformer":
        raise UsageError(f"--dataset {dataset} is for --model transformer or a model of your own, not {model}")
    if options["context"] is not None and not text:
        raise UsageError(f"--context is for texts, not for --dataset {dataset}")
    options["context"] = options["context"] or (CONTEXT if text else 0)


def check_tensor_and_pipeline(options: dict[str, Any]) -> None:
    """Check that the model can be divided as the options say.

    Raises
    ------
    UsageError
        If it cannot.
    """
    model, pipeline = options["model"], options["pipeline"]
    if model in ("logistic", "conv") and options["tensor"] > 1:
        raise UsageError(f"--tensor is for --model mlp, alexnet or transformer, not {model}")
    if model == "transformer" and options["heads"] < options["tensor"]:
        raise UsageError(f"--tensor {options['tensor']} needs a head for each rank; --heads is {options['heads']}")
    if model == "mlp" and pipeline > len(options["hidden"]) + 1:
        layers = len(options["hidden"]) + 1
        raise UsageError(
            f"--pipeline {pipeline} needs a layer for each stage; --hidden gives {counted(layers, 'layer')}"
        )
