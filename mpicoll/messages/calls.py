"""Calls between the messages of a plan: kernels, copies and codecs, each as a Python function and as an instruction.

Where a call has an instruction (:class:`Instruction`), the executor does it without the interpreter; everywhere else,
and to find out why it failed, the Python function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpicoll.kernels import instructions
from mpicoll.kernels.reduce import native_address

Allocate = Callable[[int, "np.dtype[Any]"], np.ndarray]
"""``allocate(count, dtype)`` returns working memory that lives as long as the plan."""


class MovableVector:
    """Memory of a plan that may be elsewhere in each run, such as a residual, which is replaced when it is loaded."""

    def __init__(self) -> None:
        self.array = np.empty(0, np.float32)
        self._words: list[tuple[np.ndarray, int]] = []

    def move(self, array: np.ndarray) -> None:
        """Let the memory be `array`, which stays there until the end of the run."""
        if array is self.array:
            return
        self.array = array
        for word, start in self._words:
            word[0] = array.ctypes.data + start

    def note(self, word: np.ndarray, start: int) -> None:
        """Note a word, int64 of shape (1,), that shall always hold the address of byte `start`."""
        self._words.append((word, start))

    def part(self, start: int, stop: int) -> MovablePart:
        """Return elements ``start`` to ``stop - 1``."""
        return MovablePart(self, start, stop)


class MovablePart(NamedTuple):
    """A slice of a movable vector."""

    vector: MovableVector
    start: int
    stop: int

    @property
    def present(self) -> np.ndarray:
        """The elements, where they are now."""
        return self.vector.array[self.start : self.stop]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


Memory = np.ndarray | MovablePart


def present(memory: Any) -> Any:
    """Return memory where it is now, and everything else as it is."""
    return memory.present if type(memory) is MovablePart else memory


class Instruction(NamedTuple):
    """An instruction for the executor.

    Attributes
    ----------
    kind
        One of :mod:`mpicoll.kernels.instructions`.
    places
        Operands that are addresses, by their names there, in lower case and without ``BOUND_``.
    numbers
        All other operands.
    writes, reads
        The caller's memory or messages that it writes and reads, for the verifier; None if it writes neither.
    part
        Numbers that say which part of what it reads it takes, for the verifier; none if it takes all.
    """

    kind: int
    places: Mapping[str, Memory]
    numbers: Mapping[str, int]
    writes: Memory | None = None
    reads: tuple[Memory, ...] = ()
    part: tuple[int, ...] = ()


class Call(Protocol):
    """A call between the messages of a plan."""

    def __call__(self) -> Any:
        """Make the call from Python."""
        ...

    def instruction(self) -> Instruction | None:
        """Return the instruction that does the same; None if only the interpreter can do it."""
        ...


class KernelCall(NamedTuple):
    """A kernel with its arguments, or a copy; `reduces` is true for a reducer."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    reduces: bool = False

    def __call__(self) -> Any:
        """Make the call from Python."""
        return self.function(*map(present, self.arguments))

    def instruction(self) -> Instruction | None:
        """Return the instruction of a compiled reducer or of a plain copy; None for other calls."""
        arguments, address = self.arguments, 0
        if self.reduces:
            address = native_address(self.function, present(arguments[0]).dtype)
        if not address and not self._is_plain_copy():
            return None
        kind = instructions.REDUCE_BOUND if address else instructions.COPY_BOUND
        numbers = {"count": arguments[0].size, "itemsize": present(arguments[0]).itemsize, "function": address}
        places = dict(zip(("out", "left", "right"), arguments, strict=False))
        return Instruction(kind, places, numbers, arguments[0], arguments[1:])

    def _is_plain_copy(self) -> bool:
        if self.function is not np.copyto:
            return False
        to, source = self.arguments
        return (
            isinstance(source, np.ndarray)
            and (to.dtype, to.size) == (source.dtype, source.size)
            and to.flags.c_contiguous
            and source.flags.c_contiguous
        )


class CallSequence(NamedTuple):
    """Calls that only the interpreter can do, made together."""

    calls: Sequence[Callable[[], Any]]

    def __call__(self) -> None:
        """Make all calls."""
        for call in self.calls:
            call()

    def instruction(self) -> None:
        """Return None."""
