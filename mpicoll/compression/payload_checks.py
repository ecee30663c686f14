"""Refuse settings that no kernel takes, and payloads that nobody can have sent, before a kernel sees them."""

from __future__ import annotations

import numpy as np

from mpicoll.errors import CorruptPayload

ROUNDINGS = ("nearest", "stochastic")
_LONGEST_BLOCK = 1 << 16


def require(condition: bool, payload: np.ndarray, out: np.ndarray, what: str) -> None:
    """Raise CorruptPayload, saying `what` is wrong, unless the condition holds."""
    if not condition:
        raise CorruptPayload(f"payload of {payload.size} bytes for {out.size} elements: {what}")


def require_block(name: str, block: int, unit: int) -> None:
    """Raise ValueError, naming the setting, unless it is a length of blocks that a kernel takes."""
    if block < unit or block % unit or block > _LONGEST_BLOCK:
        raise ValueError(f"{name}: {block} is not a multiple of {unit} up to {_LONGEST_BLOCK}")


def require_rounding(rounding: str) -> None:
    """Raise ValueError unless it is a way of rounding."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding: {rounding!r} is not one of {', '.join(ROUNDINGS)}")
