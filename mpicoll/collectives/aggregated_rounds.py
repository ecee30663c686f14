"""Allreduce with an aggregatable compressor, whose payloads can be added: in rounds, each a shorter allreduce.

Two rounds of integers with a shared scale::

    fill 0       allreduce        fill 1       allreduce        finish
    x -> maxima  MAX of uint32    x -> codes   SUM of int8      codes, maxima -> y

Every rank ends with the same bits, since it computes the result from the same sums. Each round uses the algorithm that
``"auto"`` takes for its length, or the one that the caller names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.collectives import select
from mpicoll.collectives.composite import CompositePlan
from mpicoll.collectives.compressed import Compression, plain
from mpicoll.collectives.plan_feedback import feedback_of
from mpicoll.compression import Aggregatable, Key
from mpicoll.compression.aggregatable import AggregationRound
from mpicoll.kernels.reduce import reducer
from mpicoll.messages.calls import Allocate

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel
    from mpicoll.messages.lowering import Phase

Keys = Callable[[], Key]
_VALUES = np.dtype(np.float32)


class AggregatedAllreduce:
    """One rank's memory for the operation, and its phases.

    Parameters
    ----------
    algorithm
        The algorithm of each round; ``"summed"`` selects one by its length.
    x, y : (count,) float32
        The input and the memory for the sum; may be the same.
    allocate
        ``allocate(count, dtype)`` returns working memory.
    keys
        Returns the key of the operation that starts now; see :func:`operation_keys`.
    """

    def __init__(
        self,
        channel: Channel,
        compression: Compression,
        algorithm: str,
        x: np.ndarray,
        y: np.ndarray,
        allocate: Allocate,
        *,
        keys: Keys,
    ) -> None:
        self._feedback, compressor = feedback_of(compression), plain(compression)
        assert isinstance(compressor, Aggregatable)
        self._x, self._y, self._given = x, y, x
        self._channel, self._wanted, self._allocate = channel, algorithm, allocate
        self._rounds = compressor.rounds(x.size, channel.size)
        self._vectors = [allocate(each.count, each.carrier) for each in self._rounds]
        self._session = compressor.session(x.size, channel.size, self._vectors)
        self._own = allocate(x.size if self._feedback else 0, _VALUES)
        self._next_key = keys

    def stages(self) -> tuple[Phase, ...]:
        """Return the phases of a plan."""
        program, channel = CompositePlan(), self._channel
        program.call(self._begin)
        for number, (each, vector) in enumerate(zip(self._rounds, self._vectors, strict=True)):
            program.call(partial(self._fill, number))
            reduce, algorithm = reducer(each.op, each.dtype), self._algorithm(each)
            assert reduce is not None
            program.add_allreduce(vector, reduce, algorithm, channel.size, channel.rank, self._allocate)
        program.call(self._finish)
        return program.stages()

    def _algorithm(self, each: AggregationRound) -> str:
        if self._wanted != select.SUMMED:
            return self._wanted
        means = select.means_of(self._channel).without_memory()
        return select.choose("allreduce", each.count * each.carrier.itemsize, means)

    def _begin(self) -> None:
        feedback = self._feedback
        self._given = self._x if feedback is None else feedback.begin(self._x)
        self._session.begin(self._next_key(), {} if feedback is None else feedback.memory)

    def _fill(self, number: int) -> None:
        self._session.fill(number, self._given)
        if self._feedback is not None and number == len(self._rounds) - 1:
            self._session.own(self._own)
            self._feedback.update(self._own)

    def _finish(self) -> None:
        self._session.finish(self._y)
        if self._feedback is not None:
            self._feedback.end()


def operation_keys(channel: Channel, *, apart: bool) -> Keys:
    """Return a function that makes the key of the operation that starts now.

    Seed and step are equal on all ranks, and no two operations have both in common. See also
    :func:`mpicoll.communicator.random_choices.begin_anew`.

    Parameters
    ----------
    apart
        True for nonblocking and persistent operations, which ranks may start later, in any order: each has the number
        of the collective that made it, and counts its own starts.
    """

    def present() -> Key:
        return Key(channel.random_seed, channel.identity, channel.dispatch.number - channel.numbered_from)

    if not apart:
        return present
    made, starts = present(), 0

    def next_key() -> Key:
        nonlocal starts
        starts += 1
        return made._replace(step=made.step + (starts << 32))

    return next_key
