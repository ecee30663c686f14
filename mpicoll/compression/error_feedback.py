"""Error feedback: the residual of a compressed vector is added to the next vector."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from mpicoll.compression.aggregatable import AggregatableCompressor, Memory
from mpicoll.compression.base import Compressor
from mpicoll.compression.compressor_specs import compressor
from mpicoll.kernels.codecs import residuals as kernels

_MEMORY = "memory."
_PART = re.compile(r"part\.(\d+)\.(\d+)\.(\d+)\.(.+)")
"""Name of an array of a part: first element, the one after the last, the count of the whole, and the array's name."""
_STEPS = "steps"
_ARRAYS = ("residual", "result_residual")
_UNBIASED = "is unbiased, its errors average out and must not be fed back"


class ErrorFeedback:
    """Error feedback around a compressor: the error of one vector is added to the next one.

    The residual e follows ``e' = (e + x) - decoded(encoded(e + x))``. Pass one object, in place of the compressor, to
    all calls that sum the same vector, such as a gradient:

    >>> feedback = mpicoll.ErrorFeedback("sign")
    >>> comm.Allreduce(gradient, total, compression=feedback)

    Every rank has its own object. In a two-shot allreduce a rank also owns a shard of the sum, which is compressed
    again: the error of that is kept in a second residual and added to the next sum. (Seide et al., "1-bit SGD",
    Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019; Tang et al., "1-bit Adam", ICML
    2021, for the second residual.)

    Parameters
    ----------
    spec
        A compressor or its specification.

    Raises
    ------
    TypeError, UnknownCompressor
        If `spec` is not a compressor.
    ValueError
        If the compressor is unbiased: its errors average out, and with feedback they may grow without bound.

    Attributes
    ----------
    residual : (count,) float32, or None
        The residual, in the units of the vectors; None before the first vector.
    result_residual : (count,) float32, or None
        The residual of the sum; zero but for the elements that this rank owns. None if the algorithm does not compress
        sums.
    steps : int
        Number of vectors so far.
    memory : dict of str to array
        State of the compressor or algorithm between vectors, by its name (`powersgd`, `ok_topk`).

    Notes
    -----
    ``residual_new == (residual_old + x) - sent`` holds to the bit in float32, where `sent` is the decoded vector, equal
    on all ranks. The difference is exact, so that ``sent + residual_new == residual_old + x``, if an element is sent
    unchanged or not at all (sparsifiers), or is rounded to nearest without overflow (integers, shorter floats): the two
    numbers are then within a factor of two of each other, or one of them is zero (Sterbenz' lemma). With signs or
    stochastic rounding the difference has an error of at most half a unit in the last place.

    Elements of a residual that are not finite become zero, before the next vector at the latest. NaN and inf in a
    vector, and sums beyond float32, thus affect one result, as the compressor's docstring says, and no later one. The
    residual of these elements (of their block, if all of it arrives as NaN) is lost.

    If the vectors are gradients and the learning rate falls, the residual is applied at the later, lower rate; multiply
    gradients with the rate before the sum where that matters.

    After a call that failed, the residuals may contain half of a step: call :meth:`reset` or :meth:`load` before the
    next call.
    """

    def __init__(self, spec: str | Compressor) -> None:
        self.compressor = compressor(spec)
        if self.compressor.unbiased:
            raise ValueError(f"spec: {spec!r} {_UNBIASED}")
        self.residual: np.ndarray | None = None
        self.result_residual: np.ndarray | None = None
        self.steps = 0
        self.memory: Memory = {}
        self._busy = False
        self._parts: dict[tuple[int, int, int], ErrorFeedback] = {}

    def check(self, count: int) -> None:
        """Raise ValueError unless a vector of `count` elements can be compressed with this object now.

        Raises
        ------
        ValueError
            If the first vector had another count, or another call with this object is not complete.
        """
        if self._busy or any(part._busy for part in self._parts.values()):
            raise ValueError(
                "compression: this ErrorFeedback is in use by a call that is not complete; "
                "after one that failed, reset() it"
            )
        if self.residual is not None and self.residual.size != count:
            raise ValueError(
                f"compression: this ErrorFeedback is for {self.residual.size} elements, not {count}; use one a vector"
            )

    def begin(self, x: np.ndarray) -> np.ndarray:
        """:meth:`check`, then :meth:`compensate`; until :meth:`end` no other call may use this object."""
        residual = self.open(x.size)
        kernels.add()(residual, residual, x)
        return residual

    def open(self, count: int) -> np.ndarray:
        """Begin as :meth:`begin` does, but return the residual as it is; the caller adds the vector to it."""
        self.check(count)
        self._busy = True
        self.steps += 1
        return self._memory("residual", count)

    def end(self) -> None:
        """Note that the call is complete."""
        self._busy = False

    def compensate(self, x: np.ndarray) -> np.ndarray:
        """Add float32 `x` of shape (count,) to the residual, and return the residual itself, not a copy.

        The caller compresses it and then subtracts the decoded vector with :meth:`update`.

        Raises
        ------
        ValueError
            If the count is not that of the first vector.
        """
        if self.residual is not None and self.residual.size != x.size:
            raise ValueError(
                f"error feedback: this object is for {self.residual.size} elements, not {x.size}; use one a vector"
            )
        residual = self._memory("residual", x.size)
        kernels.add()(residual, residual, x)
        self.steps += 1
        return residual

    def update(self, sent: np.ndarray, start: int = 0) -> None:
        """Subtract the decoded vector `sent` from elements ``start`` to ``start + sent.size - 1`` of the residual."""
        assert self.residual is not None
        part = self.residual[start : start + sent.size]
        kernels.subtract()(part, part, sent)

    def open_result(self) -> np.ndarray:
        """Return the residual of the sum, of the shape of the residual; zeros at first."""
        assert self.residual is not None
        return self._memory("result_residual", self.residual.size)

    def part(self, start: int, stop: int, count: int) -> ErrorFeedback:
        """Return the error feedback of elements ``start`` to ``stop - 1`` of a vector of `count` elements.

        It is a view of this one's residuals with `steps` of its own. Equal arguments return the same object, so that
        cached plans stay valid.
        """
        key = (start, stop, count)
        if key not in self._parts:
            self._parts[key] = _Part(self, start, stop, count)
        return self._parts[key]

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of this rank's arrays for a checkpoint, by name; an empty dict before the first vector.

        They are for the same number of ranks. For another number add the residuals of all ranks and give the sum to
        one of them, or start without.
        """
        there = [name for name in _ARRAYS if getattr(self, name) is not None]
        found = {name: np.nan_to_num(getattr(self, name), nan=0.0, posinf=0.0, neginf=0.0) for name in there}
        found |= {_MEMORY + name: array for name, array in self._own_memory().items()}
        return {**found, "steps": np.array(self.steps, np.int64)} if found else {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what :meth:`state` returned; the arrays are copied.

        Raises
        ------
        ValueError
            If `state` is not valid, or is for vectors of another count than this object. Nothing is changed then.
        """
        self.check_state(state)
        self.reset()
        for name in _ARRAYS:
            if name in state:
                setattr(self, name, state[name].copy())
        self._load_memory({name[len(_MEMORY) :]: state[name] for name in state if name.startswith(_MEMORY)})
        self.steps = int(state["steps"]) if state else 0

    def _own_memory(self) -> dict[str, np.ndarray]:
        """Return copies of what the compressor keeps, here and in parts, with the parts' numbers of steps."""
        found = {name: array.copy() for name, array in self.memory.items()}
        for (start, stop, count), part in self._parts.items():
            steps = {_STEPS: np.array(part.steps, np.int64)} if part.steps else {}
            for name, array in (part._own_memory() | steps).items():
                found[f"part.{start}.{stop}.{count}.{name}"] = array
        return found

    def _load_memory(self, arrays: Mapping[str, np.ndarray]) -> None:
        parts: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            if (found := _PART.fullmatch(name)) is None:
                self.memory[name] = array.copy()
            else:
                start, stop, count = map(int, found.groups()[:3])
                parts.setdefault((start, stop, count), {})[found[4]] = array
        for place, own in parts.items():
            part = self.part(*place)
            part.steps = int(own.pop(_STEPS, 0))
            part._load_memory(own)

    def check_state(self, state: Mapping[str, np.ndarray], count: int | None = None) -> None:
        """Raise ValueError if `state` is not valid, or is not for vectors of `count` elements."""
        if count is None and self.residual is not None:
            count = self.residual.size
        _check_state(state, count)

    def reset(self) -> None:
        """Clear the residuals and all other state, as before the first vector; no call may be in flight."""
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
        raise ValueError(
            f"state: {', '.join(sorted(state))} are not residual, steps and, optionally, result_residual and memory.*"
        )
    for name in _ARRAYS:
        array = state.get(name)
        if array is None:
            continue
        count = array.size if count is None else count
        if array.dtype != np.float32 or array.shape != (count,):
            raise ValueError(f"state: {name} is {array.dtype} of shape {array.shape}, not float32 of ({count},)")
        if not np.isfinite(array).all():
            raise ValueError(f"state: {name} has elements that are not finite")
    for name in state:
        _check_part(name.removeprefix(_MEMORY), state[name], count)
    steps = state.get("steps", np.array(0))
    if steps.shape != () or steps.dtype.kind != "i" or steps < 0:
        raise ValueError(f"state: steps is {steps!r}, not a whole number of at least 0")


def _check_part(name: str, array: np.ndarray, count: int | None) -> None:
    """Raise ValueError if an array of a part is of no part of a vector of `count` elements."""
    while (found := _PART.fullmatch(name)) is not None:
        start, stop, of = map(int, found.groups()[:3])
        name = found[4]
        if not start <= stop <= of == count:
            raise ValueError(f"state: {found[0]} is not of a part of {count} elements")
        if name == _STEPS and (array.shape != () or array.dtype.kind != "i" or array < 0):
            raise ValueError(f"state: {found[0]} is {array!r}, not a whole number of at least 0")
        count = stop - start


def delta_refusal(compressor: Compressor) -> str | None:
    """Return why a compressor is not for deltas whose errors are part of later deltas, to follow its name, or None."""
    if isinstance(compressor, AggregatableCompressor):
        return "is for sums of all ranks, and cannot encode the parameters of one"
    if compressor.unbiased:
        return "is unbiased, and its errors must not be fed back: what a delta lacks is part of the next one"
    return None


def chosen(
    given: str | Compressor | None, error_feedback: bool | None, dtype: np.dtype
) -> tuple[Compressor | None, bool]:
    """Return the compressor for vectors of `dtype`, and whether to use error feedback.

    Parameters
    ----------
    error_feedback
        True, False, or None to use it if the compressor needs it.

    Raises
    ------
    TypeError, ValueError
        If `compression` or `error_feedback` is wrong; the message names it.
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
        raise ValueError(f"error_feedback: {given!r} {_UNBIASED}")
    return made, made.needs_feedback if error_feedback is None else bool(error_feedback)
