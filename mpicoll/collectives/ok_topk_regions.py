"""First exchange of Ok-Topk: entries that a rank selects are sent to the owners of regions, which add them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.collectives.plan_feedback import PlanFeedback
from mpicoll.collectives.sparse_allreduce import exchanged
from mpicoll.compression import Key
from mpicoll.messages.calls import Allocate
from mpicoll.messages.codec_calls import SHOTS
from mpicoll.messages.lowering import Message
from mpicoll.messages.sparse_memory import SparsePayload

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel


class Selection:
    """One rank's entries, `capacity` at most, selected from `x`, or from `x` plus the residual.

    Attributes
    ----------
    indices, values
        The entries, in increasing order of indices.
    """

    def __init__(
        self,
        channel: Channel,
        feedback: PlanFeedback | None,
        x: np.ndarray,
        capacity: int,
        allocate: Allocate,
        counter: np.ndarray | None,
    ) -> None:
        self.channel, self.feedback, self._x, self.capacity = channel, feedback, x, capacity
        self._indices = allocate(self.capacity, np.dtype(np.uint32))
        self._values = allocate(self.capacity, np.dtype(np.float32))
        self._found, self._counter = 0, channel.compression_counter if counter is None else counter

    @property
    def indices(self) -> np.ndarray:
        """See the class."""
        return self._indices[: self._found]

    @property
    def values(self) -> np.ndarray:
        """See the class."""
        return self._values[: self._found]

    def compensated(self) -> np.ndarray:
        """Number the operation and return the vector to select from; to be called once in each operation."""
        self._counter += 1
        return self._x if self.feedback is None else self.feedback.begin(self._x)

    def take(self, x: np.ndarray, select: Callable[..., int]) -> None:
        """Fill `indices` and `values` by ``select(x, key, indices, values)``, which returns the number of entries."""
        key = Key(0, self.channel.identity, SHOTS * int(self._counter[0]))
        self._found = select(x, key, self._indices, self._values)

    def end(self) -> None:
        """Release the error feedback, since the operation is complete."""
        if self.feedback is not None:
            self.feedback.end()


class Regions:
    """The first exchange: each rank's entries are sent to the owners of their regions, which add them up.

    `bounds` has the first element of each region, and the number of elements; it may change between operations.
    """

    def __init__(self, selection: Selection, bounds: np.ndarray, allocate: Allocate, longest: int) -> None:
        channel = selection.channel
        self.selection, self.bounds, self._rank = selection, bounds, channel.rank
        self._outgoing = [SparsePayload(selection.capacity, longest, allocate) for _ in range(channel.size)]
        self._incoming = [SparsePayload(selection.capacity, longest, allocate) for _ in range(channel.size)]
        self._incoming[channel.rank] = self._outgoing[channel.rank]

    def own(self) -> slice:
        """Return this rank's region."""
        return self.of(self._rank)

    def of(self, rank: int) -> slice:
        """Return the region of a rank."""
        return slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))

    def messages(self) -> tuple[Message, ...]:
        """Return the messages to be exchanged after :meth:`encode`."""
        return exchanged(self.selection.channel, self._outgoing, self._incoming)

    def encode(self) -> None:
        """Encode the entries of each region."""
        indices, values = self.selection.indices, self.selection.values
        cuts = np.searchsorted(indices, self.bounds.astype(np.uint32))
        for rank, payload in enumerate(self._outgoing):
            part, region = slice(cuts[rank], cuts[rank + 1]), self.of(rank)
            payload.write(indices[part], values[part], region.start, region.stop - region.start)

    def add_up(self, out: np.ndarray) -> None:
        """Add up this rank's region, in rank order, in `out`."""
        for rank, payload in enumerate(self._incoming):
            payload.decompress(out, add=rank > 0)
