"""Data-parallel training on top of the collectives: ``mpirun -n 8 python -m mpicoll.train``, and :class:`Trainer`.

The package imports its modules when one of its names is first used: the command line sets the number of threads before
NumPy is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll.errors import (
        CheckpointFailed,
        DataError,
        ModelTooLarge,
        NonFiniteLoss,
        ReplicasDiffer,
        TrainingError,
        UsageError,
    )
    from mpicoll.models.own_model import TrainableModel
    from mpicoll.train.metrics import EpochRecord, StepRecord
    from mpicoll.train.model_choice import DataDescription
    from mpicoll.train.strategies import LocalSGD, ParameterServer
    from mpicoll.train.trainer import ArrayDataset, Callback, EarlyStopping, Trainer

_MODULES = {
    "ArrayDataset": "train.trainer",
    "Callback": "train.trainer",
    "CheckpointFailed": "errors",
    "DataDescription": "train.model_choice",
    "DataError": "errors",
    "EarlyStopping": "train.trainer",
    "EpochRecord": "train.metrics",
    "LocalSGD": "train.strategies",
    "ModelTooLarge": "errors",
    "NonFiniteLoss": "errors",
    "ParameterServer": "train.strategies",
    "ReplicasDiffer": "errors",
    "StepRecord": "train.metrics",
    "TrainableModel": "models.own_model",
    "Trainer": "train.trainer",
    "TrainingError": "errors",
    "UsageError": "errors",
}
__all__ = [
    "ArrayDataset",
    "Callback",
    "CheckpointFailed",
    "DataDescription",
    "DataError",
    "EarlyStopping",
    "EpochRecord",
    "LocalSGD",
    "ModelTooLarge",
    "NonFiniteLoss",
    "ParameterServer",
    "ReplicasDiffer",
    "StepRecord",
    "TrainableModel",
    "Trainer",
    "TrainingError",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mpicoll.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
