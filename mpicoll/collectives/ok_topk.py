"""Ok-Topk allreduce: the k largest elements of the sum of all ranks' k largest elements.

The volume that a rank sends does not grow with the number of ranks::

    local      each rank selects its k largest elements
    split      they are sent to the owners of their regions, which add them up
    global     the threshold of the k largest elements of the sum is found: three histograms of 2048 bins are added over
               the ranks, then the numbers of elements that equal the threshold, of which the first ones are taken
    gather     the owners send the elements found to all ranks

A rank sends about (P-1)/P k entries for the split and as many for the rest, if all regions hold equally many entries,
and the histograms, of 32 KB together, log2 P times: more than a dense allreduce of a short vector, on 8 ranks of 60 KB.
With :class:`~mpicoll.compression.ErrorFeedback`, regions are divided anew every 64th time, at the mean over the ranks
of the positions that divide a rank's entries evenly. Thresholds are found exactly every 32nd time; in between they are
reused, and changed by about 1 % if too few or too many elements pass. An element leaves the residual of a rank if the
rank has sent it and it is in the result. Without error feedback every operation is exact and regions are even. (Li and
Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022; in the paper all candidates are
gathered in place of the histograms.)
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.collectives.composite import CompositePlan
from mpicoll.collectives.ok_topk_regions import Regions, Selection
from mpicoll.collectives.plan_feedback import PlanFeedback
from mpicoll.collectives.sparse_allreduce import to_all
from mpicoll.compression import ErrorFeedback, Key
from mpicoll.compression.sparsifiers import OkTopk
from mpicoll.kernels import reducer
from mpicoll.kernels.codecs import sparse_encoding, sparse_vectors, topk
from mpicoll.messages.calls import Allocate
from mpicoll.messages.lowering import Phase
from mpicoll.messages.sparse_memory import SparsePayload
from mpicoll.schedules import chunk_bounds

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel

_LOCAL_STEP, _GLOBAL_STEP = 1.012, 1.008
_SPARE = 2
"""With reused thresholds, up to `_SPARE` times k elements may pass; if more do, the next operation is exact."""
_INT64 = np.dtype(np.int64)
_ABSOLUTE = 0x7FFFFFFF
_NAME = "ok_topk"
VARIANTS = CUT, EXACT, AGAIN = "cut", "exact", "again"
"""New regions and exact thresholds; exact thresholds; thresholds of the last operation."""


def _field(place: int) -> property:
    """Return an attribute of :class:`ThresholdState` that is one number of its array."""

    def get(memory: ThresholdState) -> int:
        return int(memory._array[place])

    def put(memory: ThresholdState, value: int) -> None:
        memory._array[place] = value

    return property(get, put)


class ThresholdState:
    """State kept between operations, in an array of int64; all but `local` is equal on all ranks.

    Attributes
    ----------
    local, common : int
        Thresholds, as bits of |x|, for the rank's own vector and for the sum.
    steps : int
        Number of operations so far.
    variant : str
        The variant of the next operation, one of :data:`VARIANTS`.
    bounds : (size + 1,) int64
        First element of each region, and the number of elements.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.bounds = array[4:]

    def is_in(self, feedback: PlanFeedback) -> bool:
        """Return whether this is the state of an error feedback."""
        return feedback.memory.get(_NAME) is self._array

    def check(self, count: int, size: int) -> None:
        """Raise ValueError unless this is a valid state for vectors of `count` elements on `size` ranks."""
        bounds, limits = self.bounds, self._array[:3]
        right = bounds.shape == (size + 1,) and bounds[0] == 0 and bounds[-1] == count and (np.diff(bounds) >= 0).all()
        if not (right and (limits >= 0).all() and (limits[:2] <= _ABSOLUTE).all() and 0 <= self._array[3] < 3):
            raise ValueError(f"error feedback: its state of Ok-Topk is not for {count} elements on {size} ranks")

    local, common, steps = (_field(place) for place in range(3))

    @property
    def variant(self) -> str:
        """See the class."""
        return VARIANTS[int(self._array[3])]

    @variant.setter
    def variant(self, name: str) -> None:
        self._array[3] = VARIANTS.index(name)


def variant(feedback: ErrorFeedback | PlanFeedback | None) -> str:
    """Return the variant of the next operation, which determines its plan."""
    if feedback is None:
        return EXACT
    return ThresholdState(feedback.memory[_NAME]).variant if _NAME in feedback.memory else CUT


def stages(
    channel: Channel,
    sparsifier: OkTopk,
    feedback: PlanFeedback | None,
    x: np.ndarray,
    y: np.ndarray,
    allocate: Allocate,
    counter: np.ndarray | None = None,
) -> tuple[Phase, ...]:
    """Return the phases of a plan that writes the k largest elements of the sum of float32 `x` to `y`, maybe `x`."""
    work = _Sum(channel, sparsifier, feedback, x, y, allocate, counter)
    how = variant(feedback)
    return _again(work) if how == AGAIN else _exact(work, cut=how == CUT)


class _Sum:
    """One rank's memory for the operation, and its steps."""

    def __init__(
        self,
        channel: Channel,
        sparsifier: OkTopk,
        feedback: PlanFeedback | None,
        x: np.ndarray,
        y: np.ndarray,
        allocate: Allocate,
        counter: np.ndarray | None,
    ) -> None:
        self.channel, self.sparsifier, self.feedback, self.y = channel, sparsifier, feedback, y
        self.k, self.allocate = sparsifier.capacity(y.size), allocate
        self.memory = self._state()
        self.most = min(_SPARE * self.k, y.size)
        self.selection = Selection(channel, feedback, x, self.most, allocate, counter)
        self.regions = Regions(self.selection, self.memory.bounds, allocate, y.size)
        self.results = [SparsePayload(self.most, y.size, allocate) for _ in range(channel.size)]
        self._indices = allocate(self.most, np.dtype(np.uint32))
        self._values = allocate(self.most, np.dtype(np.float32))

    def _state(self) -> ThresholdState:
        """Return the state that the error feedback holds, if need be a new one; without it the plan holds the state."""
        count, size = self.y.size, self.channel.size
        fresh = np.array([0, 0, 0, 0, *chunk_bounds(count, size)], np.int64)
        found = ThresholdState(fresh if self.feedback is None else self.feedback.memory.setdefault(_NAME, fresh))
        found.check(count, size)
        return found

    def select(self, *, exactly: bool) -> None:
        """Select this rank's elements."""
        if self.feedback is not None and not self.memory.is_in(self.feedback):
            self.memory = self._state()  # which was reset, or loaded, since the plan was made
            self.regions.bounds = self.memory.bounds
        self.vector = self.selection.compensated()
        self.selection.take(self.vector, self._select_exactly if exactly else self._select_again)

    def _select_exactly(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        found = self.sparsifier.select(x, key, indices[: self.k], values[: self.k])
        self.memory.local = _least(values[:found])
        return found

    def _select_again(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        memory = self.memory
        found = int(sparse_vectors.select(x, max(memory.local, 1) - 1, 0, indices, values))
        if not self.k // 2 <= found <= indices.size:
            return self._select_exactly(x, key, indices, values)
        if found > 5 * self.k // 4:
            memory.local = _moved(memory.local, _LOCAL_STEP)
        elif found < 2 * self.k // 3:
            memory.local = _moved(memory.local, 1 / _LOCAL_STEP)
        return found

    def add_up(self) -> None:
        """Add up this rank's region."""
        self.regions.add_up(self.region())

    def region(self) -> np.ndarray:
        """Return this rank's region of the result."""
        return self.y[self.regions.own()]

    def give(self, threshold: int, ties: int) -> None:
        """Encode the elements of this rank's region above a threshold, and the first `ties` elements equal to it."""
        region, own = self.region(), self.regions.own()
        found = int(sparse_vectors.select(region, threshold, ties, self._indices, self._values))
        if found > self.most:  # what does not fit stays in the residuals of those who have sent it
            found = self.most
            topk.largest(region, found, self._indices, self._values)
        self.results[self.channel.rank].write(self._indices[:found], self._values[:found], 0, own.stop - own.start)

    def finish(self) -> int:
        """Write the result, subtract it from the residual, and return its number of entries."""
        total = 0
        for rank, result in enumerate(self.results):
            region = self.y[self.regions.of(rank)]
            result.decompress(region, add=False)
            total += result.entries(region.size)
        if self.feedback is not None:
            sparse_encoding.clear_common(self.selection.indices, self.y, self.vector)
        self.selection.end()
        return total

    def remember(self, total: int) -> None:
        """Choose the variant of the next operation; `total` elements are in this one's result."""
        memory, k = self.memory, self.k
        memory.steps += 1
        exact = memory.steps % self.sparsifier.every == 0 or not k // 2 <= total <= _SPARE * k
        memory.variant = CUT if memory.steps % (2 * self.sparsifier.every) == 0 else EXACT if exact else AGAIN
        if total > 4 * k // 3:
            memory.common = _moved(memory.common, _GLOBAL_STEP)
        elif total < 2 * k // 3:
            memory.common = _moved(memory.common, 1 / _GLOBAL_STEP)


def _least(values: np.ndarray) -> int:
    """Return the least |x| as bits."""
    return int((values.view(np.uint32) & _ABSOLUTE).min(initial=_ABSOLUTE))


def _moved(threshold: int, factor: float) -> int:
    """Return a threshold times `factor`; all are bits of |x|."""
    return int((np.uint32(threshold).view(np.float32) * np.float32(factor)).view(np.uint32)) & _ABSOLUTE


def _again(work: _Sum) -> tuple[Phase, ...]:
    """Return the phases with the thresholds of the last operation."""
    program = CompositePlan()
    program.exchange(work.regions.messages(), partial(work.select, exactly=False), work.regions.encode)

    def give() -> None:
        work.add_up()
        work.give(max(work.memory.common, 1) - 1, 0)

    program.exchange(to_all(work.channel, work.results), give)
    program.call(lambda: work.remember(work.finish()))
    return program.stages()


class _Exact:
    """The search for the global threshold."""

    def __init__(self, work: _Sum) -> None:
        self.work, channel = work, work.channel
        self.cuts = work.allocate(max(channel.size - 1, 1), _INT64)
        self.bins = [work.allocate(bins, _INT64) for bins in topk.BINS]
        self.ties = work.allocate(channel.size, _INT64)
        self._prefix, self._left = 0, work.k

    def propose(self) -> None:
        """Propose bounds between which regions hold equally many of this rank's entries."""
        size, indices = self.work.channel.size, self.work.selection.indices
        for number in range(1, size):
            even = self.work.y.size * number // size
            self.cuts[number - 1] = indices[indices.size * number // size] if indices.size >= size else even

    def cut(self) -> None:
        """Set the bounds to the mean of those that all ranks proposed."""
        size = self.work.channel.size
        self.work.regions.bounds[1:size] = self.cuts[: size - 1] // size

    def count(self, digit: int) -> None:
        """Evaluate the histogram of the digit before, and make that of `digit` for this rank's region."""
        if digit == 0:
            self._prefix, self._left = 0, self.work.k
        else:
            self._note(digit - 1)
        self.bins[digit][:] = 0
        topk.histogram(self.work.region().view(np.uint32), self._prefix, digit, self.bins[digit])

    def _note(self, digit: int) -> None:
        bin_, self._left = topk.pick(self.bins[digit], self._left)
        self._prefix = int(self._prefix * topk.BINS[digit] + bin_)

    def count_ties(self) -> None:
        """Count the elements that equal the threshold."""
        self._note(len(self.bins) - 1)
        self.ties[:] = 0
        patterns = self.work.region().view(np.uint32) & np.uint32(_ABSOLUTE)
        self.ties[self.work.channel.rank] = np.count_nonzero(patterns == self._prefix)

    def give(self) -> None:
        """Encode this rank's part of the k largest: of elements equal to the threshold the first, but no zeros."""
        rank, ties = self.work.channel.rank, self.ties
        own = int(min(max(self._left - ties[:rank].sum(), 0), ties[rank])) if self._prefix else 0
        self.work.memory.common = self._prefix
        self.work.give(self._prefix, own)


def _exact(work: _Sum, *, cut: bool) -> tuple[Phase, ...]:
    """Return the phases that find both thresholds exactly, with new regions if `cut`."""
    search, program, channel = _Exact(work), CompositePlan(), work.channel
    size, rank, add = channel.size, channel.rank, reducer("SUM", _INT64)
    assert add is not None

    def total(x: np.ndarray) -> None:
        program.add_allreduce(x, add, "recursive_doubling", size, rank, work.allocate)

    program.call(partial(work.select, exactly=True))
    if cut:
        program.call(search.propose)
        total(search.cuts)
        program.call(search.cut)
    program.exchange(work.regions.messages(), work.regions.encode)
    program.call(work.add_up)
    for digit, bins in enumerate(search.bins):
        program.call(partial(search.count, digit))
        total(bins)
    program.call(search.count_ties)
    total(search.ties)
    program.exchange(to_all(channel, work.results), search.give)
    program.call(lambda: work.remember(work.finish()))
    return program.stages()
