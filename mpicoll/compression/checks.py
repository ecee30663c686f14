"""Refuse payloads that nobody can have sent, before a kernel sees them."""

from __future__ import annotations

import numpy as np

from mpicoll.errors import CorruptPayload


def require(condition: bool, payload: np.ndarray, out: np.ndarray, what: str) -> None:
    """Raise CorruptPayload, saying `what` is wrong, unless the condition holds."""
    if not condition:
        raise CorruptPayload(f"payload of {payload.size} bytes for {out.size} elements: {what}")
