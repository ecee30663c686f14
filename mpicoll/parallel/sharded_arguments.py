"""Checks of the arguments of :class:`mpicoll.ShardedOptimizer`, and the agreement of the ranks on a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.compression import compressor
from mpicoll.errors import MismatchError, named_ranks
from mpicoll.models.layers import Shape
from mpicoll.optim.optimizers import OPTIMIZERS, checked_settings
from mpicoll.parallel.compressed_chunks import refusal
from mpicoll.train.config import LAYERWISE, SHARDINGS, TrainConfig

NAME = "sharded optimizer"
FACTS = "units, stage, optimizer, settings, weight_decay, clip, compression, overlap or offload"
_RECORD = np.dtype([("calls", np.uint8, 32), ("samples", np.float64)])


def config_of(
    stage: Any, optimizer: Any, weight_decay: Any, clip: Any, compression: Any, offload: Any, settings: dict[str, Any]
) -> TrainConfig:
    """Return the options of the strategy, in which each unit is a parameter group.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it.
    """
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(f"stage: {stage!r} is not 1, 2 or 3")
    names = [name for name in OPTIMIZERS if name not in LAYERWISE]
    if optimizer not in names:
        raise ValueError(f"optimizer: {optimizer!r} is not one of {', '.join(names)}")
    if clip is not None and not number(clip, "clip"):
        raise ValueError("clip: 0 leaves no gradients; None is for no limit")
    found: dict[str, Any] = dict(checked_settings(optimizer, settings))
    found["nesterov"] = bool(found.get("nesterov", False))
    return TrainConfig(
        shard=SHARDINGS[stage],
        optimizer=optimizer,
        weight_decay=number(weight_decay, "weight_decay"),
        clip=None if clip is None else number(clip, "clip"),
        bucket_bytes=1,
        compression=compression,
        offload=None if offload is None else str(offload),
        **found,
    )


def checked_compression(given: Any, dtype: np.dtype) -> Any:
    """Return what is given as `compression`; raise TypeError or ValueError if gradients of `dtype` cannot have it."""
    if given is None:
        return None
    made = compressor(given)
    if dtype != np.float32:
        raise ValueError(f"compression: {given!r} is for float32, not {dtype}")
    if reason := refusal(made):
        raise ValueError(f"compression: {given!r} {reason}")
    return given


def number(value: Any, name: str) -> float:
    """Return a finite number of at least 0 as a float; raise TypeError or ValueError if it is another."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: {value!r} is not a number")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: {value!r} is not a finite number of at least 0")
    return float(value)


def gradients_of(given: Any, unit: int, shapes: list[Shape], dtype: np.dtype) -> list[Any]:
    """Return what is given as gradients of a unit as a list of arrays; numbers for None, which stands for zeros.

    Raises
    ------
    TypeError, ValueError
        If it does not fit `shapes`, or is not of floating-point numbers.
    """
    if given is None:
        return [dtype.type(0)] * len(shapes)
    if isinstance(given, np.ndarray) or not isinstance(given, Iterable):
        raise TypeError(f"gradients: unit {unit} needs a list of arrays, not {type(given).__name__}")
    arrays = [np.asarray(gradient) for gradient in given]
    if [array.shape for array in arrays] != shapes:
        raise ValueError(f"gradients: unit {unit} has shapes {shapes}, not {[array.shape for array in arrays]}")
    for array in arrays:
        if array.dtype.kind != "f":
            raise TypeError(f"gradients: unit {unit} is of {dtype}, not of {array.dtype}")
    return arrays


def agreed_samples(comm: MPI.Intracomm, calls: bytes, samples: float) -> float:
    """Return the sum of the ranks' samples. Collective.

    Parameters
    ----------
    calls
        Digest of 32 bytes of the calls that this rank has made in the step.

    Raises
    ------
    MismatchError, ValueError
        On every rank, if ranks have made other calls than others, or none has samples.
    """
    own, table = np.zeros(1, _RECORD), np.zeros(comm.Get_size(), _RECORD)
    own["calls"], own["samples"] = np.frombuffer(calls, np.uint8), samples
    comm.Allgather(own.view(np.uint8), table.view(np.uint8))
    digests = [row.tobytes() for row in table["calls"]]
    common = max(digests, key=digests.count)
    if differing := [rank for rank, each in enumerate(digests) if each != common]:
        raise MismatchError(f"{NAME}: units gathered or completed in this step, their order, or lr on "
                            f"{named_ranks(differing)} differ from those of the other ranks")  # fmt: skip
    total = math.fsum(table["samples"].tolist())
    if not total:
        raise ValueError("samples: 0 on every rank")
    return total
