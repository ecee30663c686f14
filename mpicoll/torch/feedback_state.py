"""State of error feedback for checkpoints of PyTorch: residuals of this rank, as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpicoll.compression import Compressor, ErrorFeedback

_Compression = Compressor | ErrorFeedback | None


def saved(compressions: Sequence[_Compression]) -> dict[str, Any]:
    """Return copies of what several vectors' error feedback keeps; nothing for those without it."""
    states = [each.state() if isinstance(each, ErrorFeedback) else {} for each in compressions]
    return {"vectors": [{name: torch.from_numpy(array) for name, array in state.items()} for state in states]}


def restore(compressions: Sequence[_Compression], counts: Sequence[int], state: Mapping[str, Any]) -> None:
    """Restore what :func:`saved` returned for vectors of these counts.

    Raises
    ------
    ValueError
        If `state` is for other vectors, or not valid. Nothing is changed then.
    """
    vectors = state.get("vectors") if isinstance(state, Mapping) else None
    if not isinstance(vectors, list) or len(vectors) != len(compressions):
        raise ValueError(f"state: it is not the state of {len(compressions)} vectors")
    found = [{name: np.array(tensor.numpy()) for name, tensor in each.items()} for each in vectors]
    for each, count, arrays in zip(compressions, counts, found, strict=True):
        if isinstance(each, ErrorFeedback):
            each.check_state(arrays, count)
        elif arrays:
            raise ValueError("state: it has residuals, but there is no error feedback for them here")
    for each, arrays in zip(compressions, found, strict=True):
        if isinstance(each, ErrorFeedback):
            each.load(arrays)
