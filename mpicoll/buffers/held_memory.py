"""References that keep the memory of a call's arguments alive and in its place while the call is waited for."""

from __future__ import annotations

import array
from typing import Any

_RESIZABLE = (bytearray, array.array)


def held(spec: Any) -> Any:
    """Return an object that keeps the memory of an argument alive and in its place as long as it lives.

    Another thread may replace an item of a list, and an object that can be resized moves its memory.
    """
    if type(spec) in (list, tuple):
        return tuple(memoryview(item) if type(item) in _RESIZABLE else item for item in spec)
    return memoryview(spec) if type(spec) in _RESIZABLE else spec
