"""Counts of a Gatherv or Scatterv on shared memory, which the root tells all ranks where an algorithm needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpicoll.buffers.flat import from_array
from mpicoll.collectives import on_shared_memory, select
from mpicoll.collectives.call_context import CallContext, ToldCounts
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.kernels.reduce import DTYPES
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS


def broadcast(
    scope: CallContext, counts: Sequence[int] | None, dtype: np.dtype, root: int, collective: str
) -> ToldCounts:
    """Broadcast the root's counts and element type, and return what the root has told.

    Parameters
    ----------
    counts, dtype
        The root's counts, None on other ranks; the element type of this rank.
    collective
        ``"gather"`` or ``"scatter"``.

    Raises
    ------
    MismatchError, RemoteError, CollectiveTimeout
        The communicator is broken after them.
    """
    channel = scope.channel
    words = np.zeros(channel.size + 1, np.int64)
    if counts is not None:
        words[: channel.size], words[channel.size] = counts, DTYPE_NUMBERS[dtype]
    part = VectorPart(from_array(words, "counts", writable=True), 0, words.size)
    given, result = (part, None) if channel.rank == root else (None, part)
    task = CheckedOperation(
        channel, "bcast", "Bcast", select.SHARED, words.size, words.dtype, given, result, target=part.buffer,
        root=root, tells=collective,
    )  # fmt: skip
    if not on_shared_memory.run(task, scope.timeout):
        replace(task, algorithm="tree").run(scope.timeout)
    return ToldCounts(words[: channel.size].tolist(), DTYPES[int(words[channel.size])])
