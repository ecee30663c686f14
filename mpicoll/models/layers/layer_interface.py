"""Layer interface, workspaces, and the initial values of parameter arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

Shape = tuple[int, ...]
Arrays = Sequence[np.ndarray]


class RandomKey(NamedTuple):
    """Key of the random numbers of a training step; they depend on nothing else, such as the number of ranks.

    Attributes
    ----------
    seed, step
        Seed of the run, and number of the step.
    samples : (rows,) of int64
        Numbers of the samples in the data set, one for each row.
    """

    seed: int
    step: int
    samples: np.ndarray


class Normal(NamedTuple):
    """Initial values of an array: normal with mean 0 and standard deviation `deviation`."""

    deviation: float


class Constant(NamedTuple):
    """Initial values of an array: `value` everywhere."""

    value: float


Initial = Normal | Constant


class Workspace:
    """State of a layer between forward and backward pass; its arrays are reused from step to step.

    Attributes
    ----------
    x : (rows, ...) array
        Input of the layer.
    key : RandomKey or None
        Key of random numbers in training; None in an evaluation, in which nothing is random.
    again : bool
        True if the forward pass computes activations of this step once more: statistics must not count them twice.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._inner: list[Workspace] = []
        self.x = np.empty((0, 0))
        self.key: RandomKey | None = None
        self.again = False

    def clear(self) -> None:
        """Release the arrays."""
        self._arrays, self._inner, self.x = {}, [], np.empty((0, 0))

    def rows(self, name: str, rows: int, tail: Shape, dtype: np.dtype) -> np.ndarray:
        """Return the first `rows` rows of the array `name`, contents undefined, shape ``(rows, *tail)``."""
        kept = self._arrays.get(name)
        if kept is None or len(kept) < rows:
            kept = self._arrays[name] = np.empty((rows, *tail), dtype)
        return kept[:rows]

    def inner(self, number: int) -> Workspace:
        """Return the workspace of layer `number` within the layer, of the same step."""
        while len(self._inner) <= number:
            self._inner.append(Workspace())
        inner = self._inner[number]
        inner.key, inner.again = self.key, self.again
        return inner

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are kept, also for layers within the layer."""
        return sum(array.nbytes for array in self._arrays.values()) + sum(room.nbytes for room in self._inner)


class Layer(Protocol):
    """Layer interface.

    A layer whose `backward` neither reads nor writes the memory of its output may say so by an attribute `needs_output`
    that is False: as a model's last layer it saves a copy of the outputs.

    Attributes
    ----------
    shapes
        Shapes of the parameter arrays.
    decays
        For each of them, True if weight decay applies.
    initials
        For each of them, its initial values.
    output
        Shape of the layer's output for one sample.
    waited
        Seconds spent so far on messages to ranks that share the layer.
    """

    shapes: tuple[Shape, ...]
    decays: tuple[bool, ...]
    initials: tuple[Initial, ...]
    output: Shape

    @property
    def waited(self) -> float:
        """See above."""

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """Return the layer's output for `x`, of shape (rows, ...).

        `x` is not changed; the output may be a view of it, and `room` may keep references to both.
        """

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """Write the sum of the samples' gradients to `gradients`, or add it if `add`.

        Parameters
        ----------
        delta : array of the output's shape
            Derivative of the loss with respect to the output; may be overwritten.
        below
            True to return the derivative with respect to `x`, False to return None.
        """


class WithoutParameters:
    """Base of layers that have no parameters."""

    waited = 0.0
    shapes: tuple[Shape, ...] = ()
    decays: tuple[bool, ...] = ()
    initials: tuple[Initial, ...] = ()


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, room: Workspace, *, add: bool, name: str = "") -> None:
    """Write ``a @ b`` to `out`, or add it; several products of one layer need different names."""
    if add:
        scratch = room.rows(f"product{name}", len(out), out.shape[1:], out.dtype)
        out += np.matmul(a, b, out=scratch)
    else:
        np.matmul(a, b, out=out)


def sum_of_rows(delta: np.ndarray, out: np.ndarray, *, add: bool) -> None:
    """Write the sum over rows to `out`, or add it."""
    if add:
        out += np.sum(delta, axis=0)
    else:
        np.sum(delta, axis=0, out=out)


def relu_backward(delta: np.ndarray, output: Shape, room: Workspace) -> None:
    """Multiply `delta` by the derivative of a ReLU, in place; the array ``"out"`` of `room` is the ReLU's result."""
    out = room.rows("out", len(delta), output, delta.dtype)
    passed = room.rows("passed", len(delta), output, np.dtype(bool))
    np.multiply(delta, np.greater(out, 0, out=passed), out=delta)
