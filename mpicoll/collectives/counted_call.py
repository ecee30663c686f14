"""Gatherv and Scatterv on shared memory in one round, on the general path; see :mod:`mpicoll.kernels.counted_parts`.

Compiled code makes the same calls from ordinary arrays (:mod:`mpicoll.kernels.counted_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.communicator.channel import Channel
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.counted_calls import begin_counted, counted_call, lengths_number
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS
from mpicoll.shared_memory.packed_calls import signature_of
from mpicoll.shared_memory.shared_operation import SharedOperation


@dataclass
class CountedCall:
    """A Gatherv or Scatterv with checked arguments, of whose counts only the root knows all.

    Attributes
    ----------
    collective
        ``"gather"`` or ``"scatter"``.
    dtype
        Type of this rank's elements; at the root that of all.
    part
        This rank's part; None for IN_PLACE.
    whole, counts
        All parts, one after the other, and their lengths; None on ranks other than the root.
    """

    channel: Channel
    collective: str
    root: int
    dtype: np.dtype
    part: Buffer | None
    whole: Buffer | None
    counts: Sequence[int] | None
    _lengths: np.ndarray = field(init=False, repr=False)  # counts and displacements, while the operation runs

    def run(self, timeout: float) -> None:
        """Execute the operation.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            The communicator is broken after them.
        """
        channel, node = self.channel, self.channel.node
        assert node is not None
        collective, is_root = words.COLLECTIVES.index(self.collective), self.whole is not None
        job, call = node.blocking, counted_call(collective, self.root)
        number = channel.enter(signature_of(call, 0))
        for word, value in self._words(call).items():
            job[word] = value
        job[words.METHOD] = node.method
        job[words.PLAN] = plan = node.counted_plan(self.collective, is_root)
        channel.dispatch.learn_counted_plan(collective, is_root, plan)
        buffers = [each for each in (self.part, self.whole) if each is not None]
        nbytes = max(each.nbytes for each in buffers)
        if channel.check == "default":
            lengths = int(lengths_number.run(node.blocking_address, nbytes))
            job[words.CAREFUL] = channel.dispatch.is_new(call, lengths)
        status = int(begin_counted.run(node.blocking_address, nbytes))
        SharedOperation(channel, job, number, status, patient=True).finish(timeout)
        result = self.part if self.collective == "scatter" else self.whole
        if result is not None:
            result.give_back()

    def _words(self, call: int) -> dict[int, int]:
        """Return the words that describe the operation."""
        counts = np.array(self.counts if self.counts is not None else [], np.int64)
        self._lengths = np.concatenate([counts, np.cumsum(counts) - counts])
        part, whole = (0 if each is None else each.address for each in (self.part, self.whole))
        gathers = self.collective == "gather"
        return {
            words.COLLECTIVE: words.COLLECTIVES.index(self.collective),
            words.CALL: call,
            words.COUNT: 0,
            words.ITEMSIZE: self.dtype.itemsize,
            words.REDUCER: 0,
            words.ROOT: self.root,
            words.SEND: part if gathers else whole,
            words.RECV: whole if gathers else part,
            words.BOUNDS: self._lengths.ctypes.data,
            words.CAREFUL: 0,
            words.TIME_NEXT: 0,
            words.PART_NBYTES: 0 if self.whole is not None or self.part is None else self.part.nbytes,
            words.PART_DTYPE: DTYPE_NUMBERS[self.dtype],
            words.WRONG_PART: 0,
        }
