"""Long objects of scatter and alltoall on a node, copied from where they lie on the rank that sends them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.objects import records
from mpicoll.objects.encoding import Payload
from mpicoll.objects.long_objects import EMPTY, to_send
from mpicoll.objects.records import Description


def memory_for(found: Description) -> np.ndarray:
    """Return memory for the object of a record, none if it is not long."""
    return np.empty(found.nbytes, np.uint8) if found.data is None else EMPTY


def parts(payloads: Sequence[Payload], size: int) -> list[np.ndarray]:
    """Return the memory of long payloads, for each rank; without payloads nothing for all.

    An object that consists of several buffers is put together.
    """
    found = [_memory(each) if records.is_long(each) else EMPTY for each in payloads]
    return found or [EMPTY] * size


def _memory(payload: Payload) -> np.ndarray:
    if len(payload.parts) == 1:
        return np.frombuffer(payload.parts[0], np.uint8)
    memory = to_send(payload.nbytes)
    payload.write(memory.data)
    return memory
