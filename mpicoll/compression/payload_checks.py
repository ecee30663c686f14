"""Checks of settings and payloads before kernels use them."""

from __future__ import annotations

from collections.abc import Callable

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


def vector(x: np.ndarray, argument: str) -> np.ndarray:
    """Return a float32 vector as it is if compiled code can use it, else a contiguous copy.

    Raises
    ------
    TypeError, ValueError
        If it is no array of float32 with one dimension.
    """
    if not isinstance(x, np.ndarray) or x.dtype != np.float32:
        raise TypeError(f"{argument}: {getattr(x, 'dtype', type(x).__name__)} is not float32")
    if x.ndim != 1:
        raise ValueError(f"{argument}: an array of shape {x.shape} is not a vector")
    return x if x.flags.c_contiguous and x.flags.aligned else np.array(x)


def memory(out: np.ndarray, argument: str, nbytes: int) -> np.ndarray:
    """Return the first `nbytes` of an array of bytes that a payload is written to or read from.

    Raises
    ------
    TypeError, ValueError
        If it is no contiguous vector of uint8, or shorter.
    """
    if not isinstance(out, np.ndarray) or out.dtype != np.uint8:
        raise TypeError(f"{argument}: {getattr(out, 'dtype', type(out).__name__)} is not uint8")
    if out.ndim != 1 or not out.flags.c_contiguous:
        raise ValueError(f"{argument}: it is not a contiguous vector of bytes")
    if out.size < nbytes:
        raise ValueError(f"{argument}: {out.size} bytes are less than the {nbytes} of a payload")
    return out[:nbytes]


def into_vector(out: np.ndarray, write: Callable[[np.ndarray], None]) -> None:
    """Call `write` with `out` or, if compiled code cannot use it, with a copy that is written back.

    Raises
    ------
    TypeError, ValueError
        If it is no vector of float32, or read-only.
    """
    if not getattr(out.flags, "writeable", False):
        raise ValueError("out: it is read-only")
    room = vector(out, "out")
    write(room)
    if room is not out:
        out[:] = room
