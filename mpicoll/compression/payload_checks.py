"""Checks of settings and payloads before kernels use them."""

from __future__ import annotations

import numpy as np

from mpicoll.errors import CorruptPayload

ROUNDINGS = ("nearest", "stochastic")
_LONGEST_BLOCK = 1 << 16


def require(condition: bool, payload: np.ndarray, out: np.ndarray, what: str) -> None:
    """Raise CorruptPayload with the text `what` unless the condition holds."""
    if not condition:
        raise CorruptPayload(f"payload of {payload.size} bytes for {out.size} elements: {what}")


def require_block(name: str, block: int, unit: int) -> None:
    """Raise ValueError unless setting `name` is a multiple of `unit` from `unit` to 65536."""
    if block < unit or block % unit or block > _LONGEST_BLOCK:
        raise ValueError(f"{name}: {block} is not a multiple of {unit} from {unit} to {_LONGEST_BLOCK}")


def require_rounding(rounding: str) -> None:
    """Raise ValueError unless `rounding` is one of :data:`ROUNDINGS`."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding: {rounding!r} is not one of {', '.join(ROUNDINGS)}")
