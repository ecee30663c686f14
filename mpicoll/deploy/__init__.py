"""Compression of trained models for deployment: ``python -m mpicoll.deploy``.

Quantisation, pruning, distillation and low-rank factors of the trainer's models, an inference runtime in NumPy, export
to ONNX, and reports. :func:`load` is the programming interface of files that the commands write.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicoll.deploy.inference import Runtime

__all__ = ["load"]


def load(path: str | Path) -> Runtime:
    """Return the runtime of a deployed model. Not collective.

    Parameters
    ----------
    path
        File that a command of ``python -m mpicoll.deploy`` wrote, or a safetensors file of dense layers, see
        :func:`mpicoll.deploy.model_sources.opened_model`.

    Returns
    -------
    mpicoll.deploy.inference.Runtime
        ``logits(x)`` and ``predict(x)`` for samples (rows, features) of float32.

    Raises
    ------
    mpicoll.errors.CheckpointFailed
        Naming the file and the reason, if it is missing, damaged or of another format.
    """
    from mpicoll.deploy.inference import Runtime
    from mpicoll.deploy.model_sources import read_model

    return Runtime(read_model(Path(path).expanduser().absolute()))
