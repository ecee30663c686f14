"""Counts of a Gatherv or Scatterv on shared memory, which the root tells all ranks, on the general path.

:mod:`mpicoll.kernels.told_counts` makes the same calls. The root of the general path never attaches the parts of a
Scatterv to its counts, but other ranks get them so from a root on the compiled path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from mpicoll.buffers.flat import from_array
from mpicoll.collectives import on_shared_memory, select
from mpicoll.collectives.call_context import CallContext, ToldCounts
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.communicator.channel import Channel
from mpicoll.errors import CorruptPayload, MismatchError
from mpicoll.kernels.attached_parts import ATTACHED, take_part
from mpicoll.kernels.operation_words import COLLECTIVES
from mpicoll.kernels.reduce import DTYPES
from mpicoll.kernels.told_counts import told_words
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
    MismatchError, RemoteError, CollectiveTimeout, CorruptPayload
        The communicator is broken after them.
    """
    channel = scope.channel
    words = np.zeros(told_words(COLLECTIVES.index(collective), channel.size), np.int64)
    if counts is not None:
        words[: channel.size], words[channel.size] = counts, DTYPE_NUMBERS[dtype]
    part = VectorPart(from_array(words, "counts", writable=True), 0, words.size)
    given, result = (part, None) if channel.rank == root else (None, part)
    task = CheckedOperation(
        channel, "bcast", "Bcast", select.SHARED, words.size, words.dtype, given, result, target=part.buffer,
        root=root, tells=collective if scope.is_blocking else "",  # a persistent one gets no parts: it starts later
    )  # fmt: skip
    if not on_shared_memory.run(task, scope.timeout):
        replace(task, algorithm="tree").run(scope.timeout)
    return read(channel, words, root)


def read(channel: Channel, words: np.ndarray, root: int) -> ToldCounts:
    """Return what the words that a root has told say; before this rank's next operation.

    Raises
    ------
    CorruptPayload
        If parts are attached and the words are not their counts.
    """
    code, node = int(words[channel.size]), channel.node
    told = ToldCounts(words[: channel.size].tolist(), DTYPES[code % ATTACHED])
    if code < ATTACHED or node is None:
        return told
    memory, itemsize = np.empty(node.slot_nbytes, np.uint8), told.dtype.itemsize
    if not take_part.run(node.blocking_address, words.ctypes.data, root, itemsize, memory.ctypes.data):
        raise CorruptPayload(f"collective {channel.dispatch.number}: rank {root} has told counts {list(told.counts)}")
    return told._replace(part=memory[: told.counts[channel.rank] * itemsize].view(told.dtype))


def raise_difference(channel: Channel, told: ToldCounts, dtype: np.dtype, root: int) -> NoReturn:
    """Raise MismatchError since elements of this rank have another type than those that the root has attached.

    The communicator is broken, and the other ranks are told.
    """
    calls = {f"Scatterv(dtype={told.dtype}, root={root})": [root]}
    calls[f"Scatterv(dtype={dtype}, root={root})"] = [channel.rank]
    try:
        channel.watchdog.raise_difference(channel.dispatch.number, calls)
    except MismatchError as error:
        channel.break_off(error)
        raise
