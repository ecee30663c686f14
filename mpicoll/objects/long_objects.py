"""Memory of objects that are too long for their records: how much each takes up, and copies into it and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.kernels.object_words import ALIGNMENT
from mpicoll.objects import records
from mpicoll.objects.encoding import Payload, decode
from mpicoll.objects.records import Description
from mpicoll.shared_memory import numpy_allocator

OWN_MEMORY_NBYTES = 64 << 10
"""Parts up to this length are sent from memory of their own, which a compiled call does in one step."""
_ROUNDED_NBYTES, _PADDED_NBYTES = 1 << 20, 256 << 10
EMPTY = np.empty(0, np.uint8)
"""Memory of what is not long."""


def to_send(nbytes: int) -> np.ndarray:
    """Return memory for what is sent and then freed: shared by the ranks of the node if long, which copy from there.

    Results lie in ordinary memory: they live on, and a forked child must not share them with its parent.
    """
    return numpy_allocator.empty(nbytes, np.uint8) if nbytes > OWN_MEMORY_NBYTES else np.empty(nbytes, np.uint8)


def aligned(nbytes: int) -> int:
    """Return the bytes that a payload takes up beside others."""
    return nbytes + -nbytes % ALIGNMENT


def room_for(found: Description) -> int:
    """Return the bytes of an object that travels apart from its record; 0 if it does not."""
    return 0 if found.data is not None else aligned(found.nbytes)


def rounded(nbytes: int) -> int:
    """Return a length at least as large, of few different ones: a call of a new length takes longer once."""
    if nbytes > _ROUNDED_NBYTES:
        return aligned(nbytes)
    step = max(ALIGNMENT, 1 << (nbytes.bit_length() - 4))
    return nbytes + -nbytes % step


def padded(counts: list[int]) -> list[int]:
    """Return counts for all ranks, equal ones if that is not much more."""
    longest = rounded(max(counts))
    if longest * len(counts) <= max(2 * sum(counts), _PADDED_NBYTES):
        return [longest] * len(counts)
    return counts


def packed(payloads: Sequence[Payload], room: int) -> tuple[np.ndarray, list[int]]:
    """Return the long ones of some payloads, one after the other, and the bytes of each.

    Parameters
    ----------
    room
        Bytes that each payload takes up; 0 if they take up different ones.
    """
    counts = [room or (aligned(each.nbytes) if records.is_long(each) else 0) for each in payloads]
    memory, begin = to_send(sum(counts)), 0
    for payload, count in zip(payloads, counts, strict=True):
        if records.is_long(payload):
            payload.write(memory[begin : begin + count].data)
        begin += count
    return memory, counts


def restored(found: Description, memory: np.ndarray | None) -> Any:
    """Return the object of a record; `memory` has it if it is long."""
    data: Any = found.data
    if data is None:
        assert memory is not None
        data = memory[: found.nbytes].data
    return decode(found.kind, found.dtype, found.flags, found.shape, data)


def taken(found: Sequence[Description], memory: np.ndarray, counts: Sequence[int]) -> list[Any]:
    """Return the objects of records; `memory` has the long ones."""
    objects, begin = [], 0
    for each, count in zip(found, counts, strict=True):
        objects.append(restored(each, memory[begin : begin + count] if count else EMPTY))
        begin += count
    return objects
