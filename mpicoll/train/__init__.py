"""Data-parallel training on top of the collectives: ``mpirun -n 8 python -m mpicoll.train``, and :class:`Trainer`.

Importing this package imports nothing else before one of its names is used: the command line chooses the number of
threads before NumPy starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll.train.failures import (
        CheckpointFailed,
        DataError,
        NonFiniteLoss,
        ReplicasDiffer,
        TrainingError,
        UsageError,
    )
    from mpicoll.train.monitor import Callback
    from mpicoll.train.own_model import TrainableModel
    from mpicoll.train.tally import EpochRecord, StepRecord
    from mpicoll.train.trainer import ArrayDataset, EarlyStopping, Trainer

_MODULES = {
    "ArrayDataset": "trainer",
    "Callback": "monitor",
    "CheckpointFailed": "failures",
    "DataError": "failures",
    "EarlyStopping": "trainer",
    "EpochRecord": "tally",
    "NonFiniteLoss": "failures",
    "ReplicasDiffer": "failures",
    "StepRecord": "tally",
    "TrainableModel": "own_model",
    "Trainer": "trainer",
    "TrainingError": "failures",
    "UsageError": "failures",
}
__all__ = [
    "ArrayDataset",
    "Callback",
    "CheckpointFailed",
    "DataError",
    "EarlyStopping",
    "EpochRecord",
    "NonFiniteLoss",
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
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
