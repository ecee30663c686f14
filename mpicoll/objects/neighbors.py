"""Neighbourhood collectives of Python objects: an exchange of the pickles' lengths, then one of the pickles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.collectives import neighborhood_calls
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.neighborhood_calls import Neighborhood
from mpicoll.messages.call_agreement import announced
from mpicoll.objects import pickling
from mpicoll.objects.moves import as_many


def allgather(scope: CallContext, around: Neighborhood, obj: Any) -> list[Any]:
    """Return the objects of the ranks in `around.sources`; None for a source that is MPI.PROC_NULL. Collective."""
    (data,) = _pickled(scope, (obj,))
    lengths = np.zeros(len(around.sources), np.int64)
    neighborhood_calls.run(scope, "neighbor_allgather", around, np.array([data.size]), lengths)
    (memory,) = _memory(scope, lengths)
    neighborhood_calls.run(scope, "neighbor_allgatherv", around, data, [memory, lengths])
    return _unpickled(memory, lengths)


def alltoall(scope: CallContext, around: Neighborhood, destinations: int, objects: Any) -> list[Any]:
    """Return the object that each rank in `around.sources` sends to this one, None for MPI.PROC_NULL. Collective.

    Parameters
    ----------
    destinations
        Number of destinations.
    objects
        A sequence with an object for each destination; otherwise an error on this rank, which the other ranks learn of.
    """
    with announced(scope.channel):
        given = as_many(objects, destinations, "sendobj")
    parts = _pickled(scope, given)
    counts, lengths = np.array([part.size for part in parts], np.int64), np.zeros(len(around.sources), np.int64)
    neighborhood_calls.run(scope, "neighbor_alltoall", around, counts, lengths)
    memory, data = _memory(scope, lengths, parts)
    neighborhood_calls.run(scope, "neighbor_alltoallv", around, [data, counts], [memory, lengths])
    return _unpickled(memory, lengths)


def _pickled(scope: CallContext, objects: Sequence[Any]) -> list[np.ndarray]:
    """Return pickles, an empty one for None; announces an object that cannot be pickled to the other ranks."""
    with announced(scope.channel):
        return [np.frombuffer(b"" if obj is None else pickling.dumps(obj), np.uint8) for obj in objects]


def _memory(scope: CallContext, lengths: np.ndarray, parts: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
    """Return memory for pickles of these lengths, and `parts` one behind the other; announces that there is none."""
    with announced(scope.channel):
        memory = np.empty(int(lengths.sum()), np.uint8)
        return [memory] if parts is None else [memory, np.concatenate([np.empty(0, np.uint8), *parts])]


def _unpickled(memory: np.ndarray, lengths: np.ndarray) -> list[Any]:
    ends = np.cumsum(lengths)
    parts = zip(ends - lengths, ends, strict=True)
    return [pickling.loads(memory[begin:end].tobytes()) if begin < end else None for begin, end in parts]
