"""Error feedback: the residual of one compression is added to the next vector."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpicoll.compression.aggregatable import Memory
from mpicoll.compression.base import Compressor
from mpicoll.compression.compressor_specs import compressor
from mpicoll.kernels.codecs import residuals as kernels

_MEMORY = "memory."
_ARRAYS = ("residual", "result_residual")


class ErrorFeedback:
    """Remember what compression lost of one vector and add it to the next: e' = (e + x) - decoded(encoded(e + x)).

    Give one object to every call that sums the same vector again, such as a gradient, in place of the compressor:

    >>> feedback = mpicoll.ErrorFeedback("sign")
    >>> comm.Allreduce(gradient, total, compression=feedback)

    Every rank has its own. In two shots a rank also owns a shard of the sum, which is compressed again: what that loses
    is kept in a second residual and comes with the next sum. (Seide et al., "1-bit SGD", Interspeech 2014; Karimireddy
    et al., "Error feedback fixes SignSGD", ICML 2019; Tang et al., "1-bit Adam", ICML 2021, for the second one.)

    Parameters
    ----------
    spec
        A compressor or its specification.

    Attributes
    ----------
    residual : (count,) float32, or None
        The residual, in the units of the vectors; None before the first.
    result_residual : (count,) float32, or None
        The same for the sum; zero but for the elements that this rank owns. None where nothing compresses sums.
    steps : int
        How many vectors have come.
    memory : dict of str to array
        What the way of summing keeps from one vector to the next, each under a name of its own.

    Notes
    -----
    To the bit, ``residual_new == (residual_old + x) - sent`` in float32, with what every rank decodes as `sent`. The
    difference is exact, so that ``sent + residual_new == residual_old + x``, where an element is sent as it is or not
    at all (sparsifiers), and where it is rounded to the nearest of whole numbers or shorter floating-point numbers
    without overflow: the two are then within a factor of two of each other, or one of them is zero (Sterbenz' lemma).
    With signs or stochastic rounding it is off by at most half a unit in the last place.

    Elements of a residual that are not finite become zero, before the next vector at the latest. NaN and inf in a
    vector, or sums beyond float32, thus arrive once, as the compressor says, and do not come back with every later
    vector; the residual of their elements (those of their block, where that arrives as NaN) is lost.

    The residual has the units of the vectors. If they are gradients and the learning rate falls, the
    residual is applied at the later, lower rate; multiply gradients with the rate before the sum where that matters.
    Unbiased compressors need no feedback, and one whose relative variance is above 1 diverges with it unless what it
    sends is scaled down: a residual grows until what it adds no longer fits.

    After a call that failed, half of a step may be in the residuals: :meth:`reset` or :meth:`load` has to come before
    the next call.
    """

    def __init__(self, spec: str | Compressor) -> None:
        self.compressor = compressor(spec)
        self.residual: np.ndarray | None = None
        self.result_residual: np.ndarray | None = None
        self.steps = 0
        self.memory: Memory = {}
        self._busy = False
        self._parts: dict[tuple[int, int, int], ErrorFeedback] = {}

    def check(self, count: int) -> None:
        """Refuse a vector of `count` elements that cannot be compressed with this object now.

        Raises
        ------
        ValueError
            If the first vector had another count, or another call is on its way with this object.
        """
        if self._busy or any(part._busy for part in self._parts.values()):
            raise ValueError(
                "compression: this ErrorFeedback is in use by a call that is not complete; "
                "after one that failed, reset() it"
            )
        if self.residual is not None and self.residual.size != count:
            raise ValueError(
                f"compression: this ErrorFeedback has seen {self.residual.size} elements, not {count}; one a vector"
            )

    def begin(self, x: np.ndarray) -> np.ndarray:
        """Check and :meth:`compensate`; until :meth:`end` no other call may use this object."""
        self.check(x.size)
        self._busy = True
        return self.compensate(x)

    def end(self) -> None:
        """Note that the call is complete."""
        self._busy = False

    def compensate(self, x: np.ndarray) -> np.ndarray:
        """Add float32 `x` of shape (count,) to the residual and return that, the memory itself.

        It is what has to be compressed; :meth:`update` then takes away what was sent of it.

        Raises
        ------
        ValueError
            If the count is not that of the first vector.
        """
        if self.residual is not None and self.residual.size != x.size:
            raise ValueError(f"error feedback: {x.size} elements came after {self.residual.size}; one object a vector")
        residual = self._memory("residual", x.size)
        kernels.add(x, residual)
        self.steps += 1
        return residual

    def update(self, sent: np.ndarray, start: int = 0) -> None:
        """Take what was sent, as decoded, away from elements ``start`` to ``start + sent.size - 1``."""
        assert self.residual is not None
        kernels.subtract(sent, self.residual[start : start + sent.size])

    def compensate_result(self, total: np.ndarray, start: int) -> np.ndarray:
        """Add the sum of elements ``start`` to ``start + total.size - 1`` to the second residual; return that part."""
        assert self.residual is not None
        part = self._memory("result_residual", self.residual.size)[start : start + total.size]
        kernels.add(total, part)
        return part

    def update_result(self, sent: np.ndarray, start: int) -> None:
        """Take what was sent of the sum, as decoded, away again."""
        assert self.result_residual is not None
        kernels.subtract(sent, self.result_residual[start : start + sent.size])

    def part(self, start: int, stop: int, count: int) -> ErrorFeedback:
        """Return the feedback of elements ``start`` to ``stop - 1`` of a vector of `count`: same memory, own steps.

        The same object each time, so that plans made with it are found again.
        """
        key = (start, stop, count)
        if key not in self._parts:
            self._parts[key] = _Part(self, start, stop, count)
        return self._parts[key]

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of what a checkpoint needs, by name; nothing before the first vector.

        It is this rank's. On another number of ranks residuals have no owners: add all ranks' residuals up and give
        the sum to one of them, or begin anew.
        """
        there = [name for name in _ARRAYS if getattr(self, name) is not None]
        found = {name: np.nan_to_num(getattr(self, name), nan=0.0, posinf=0.0, neginf=0.0) for name in there}
        found |= {_MEMORY + name: array.copy() for name, array in self.memory.items()}
        return {**found, "steps": np.array(self.steps, np.int64)} if found else {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from what :meth:`state` returned; copies it.

        Raises
        ------
        ValueError
            If it is no such state, or of vectors of another count than came here. Nothing is changed then.
        """
        self.check_state(state)
        self.reset()
        for name in _ARRAYS:
            if name in state:
                setattr(self, name, state[name].copy())
        self.memory = {name[len(_MEMORY) :]: state[name].copy() for name in state if name.startswith(_MEMORY)}
        self.steps = int(state["steps"]) if state else 0

    def check_state(self, state: Mapping[str, np.ndarray], count: int | None = None) -> None:
        """Raise ValueError if `state` could not be loaded, or is not of vectors of `count` elements."""
        if count is None and self.residual is not None:
            count = self.residual.size
        _check_state(state, count)

    def reset(self) -> None:
        """Owe nothing, as before the first vector; no call may be on its way."""
        self.residual = self.result_residual = None
        self.memory, self.steps, self._busy = {}, 0, False
        for part in self._parts.values():
            part.reset()

    def _memory(self, name: str, count: int) -> np.ndarray:
        """Return the residual of that name, zeros at first."""
        found: np.ndarray | None = getattr(self, name)
        if found is None:
            found = np.zeros(count, np.float32)
            setattr(self, name, found)
        return found

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.compressor!r})"


class _Part(ErrorFeedback):
    """A slice of another one; looks for its memory each time, since that may have been loaded or reset."""

    def __init__(self, whole: ErrorFeedback, start: int, stop: int, count: int) -> None:
        super().__init__(whole.compressor.part(start, stop))
        self._whole, self._start, self._stop, self._count = whole, start, stop, count

    def _memory(self, name: str, count: int) -> np.ndarray:
        assert count == self._stop - self._start
        found = self._whole._memory(name, self._count)[self._start : self._stop]
        setattr(self, name, found)
        return found


def _check_state(state: Mapping[str, np.ndarray], count: int | None) -> None:
    unknown = {name for name in state if not name.startswith(_MEMORY)} - {*_ARRAYS, "steps"}
    if unknown or (state and not {"residual", "steps"} <= set(state)):
        raise ValueError(f"state: {', '.join(sorted(state))} are not residual, steps and maybe result_residual")
    for name in _ARRAYS:
        array = state.get(name)
        if array is None:
            continue
        count = array.size if count is None else count
        if array.dtype != np.float32 or array.shape != (count,):
            raise ValueError(f"state: {name} is {array.dtype} of shape {array.shape}, not float32 of ({count},)")
        if not np.isfinite(array).all():
            raise ValueError(f"state: {name} has elements that are not finite")
    steps = state.get("steps", np.array(0))
    if steps.shape != () or steps.dtype.kind != "i" or steps < 0:
        raise ValueError(f"state: steps is {steps!r}, not a whole number of at least 0")


def chosen(
    given: str | Compressor | None, error_feedback: bool | None, dtype: np.dtype
) -> tuple[Compressor | None, bool]:
    """Return the compressor for vectors of a type, and whether with error feedback.

    Parameters
    ----------
    error_feedback
        None for: where the compressor needs it.

    Raises
    ------
    TypeError, ValueError
        Naming `compression` or `error_feedback`, if that cannot be.
    """
    if error_feedback not in (None, True, False):
        raise TypeError(f"error_feedback: {error_feedback!r} is not True, False or None")
    if given is None:
        if error_feedback:
            raise ValueError("error_feedback: True has no meaning without compression")
        return None, False
    made = compressor(given)
    if dtype != np.float32:
        raise ValueError(f"compression: {given!r} is for float32, not {dtype}")
    if error_feedback and made.unbiased:
        raise ValueError(f"error_feedback: {given!r} is unbiased, its errors average out and must not be fed back")
    return made, made.needs_feedback if error_feedback is None else bool(error_feedback)
