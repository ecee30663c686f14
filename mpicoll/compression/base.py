"""Compressor interface: float32 vectors to bytes and back, without ranks or messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from mpicoll.kernels.codecs import counter_random


class Key(NamedTuple):
    """Key of random choices: the same key and element give the same choice, in every run.

    Attributes
    ----------
    seed, rank, step
        Chosen by the user; whose data it is; number of the operation.
    first
        Number of the vector's first element within the whole.
    """

    seed: int = 0
    rank: int = 0
    step: int = 0
    first: int = 0

    def words(self) -> np.ndarray:
        """Return it for kernels: two uint32."""
        return counter_random.key(self.seed, self.rank, self.step)


class Compressor(ABC):
    """Turns float32 vectors into fewer bytes.

    A subclass is a frozen dataclass of its settings with three methods, entered into the registry with
    :func:`mpicoll.compression.compressor_specs.register`; the contract test in ``tests/compression`` then runs over it.

    Attributes
    ----------
    unbiased
        Whether the mean over all keys of what arrives is what was sent.
    granularity
        Vectors may be cut at multiples of so many elements without changing what arrives.
    cuttable
        False if any cut changes what arrives, as where the largest of all elements are sent.
    fixed
        Whether the length of the payload depends on nothing but the count.
    needs_feedback
        Whether so much is lost each time that training goes wrong without
        :class:`~mpicoll.compression.error_feedback.ErrorFeedback`.
    """

    unbiased: ClassVar[bool] = False
    fixed: ClassVar[bool] = True
    cuttable: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = False

    @property
    def granularity(self) -> int:
        """See the class."""
        return 1

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Compressor:
        """Return what compresses a vector that begins with arrays of these shapes, one after the other."""
        return self

    def part(self, start: int, stop: int) -> Compressor:
        """Return what compresses elements ``start`` to ``stop - 1`` of a vector, where the whole is cut."""
        return self

    @abstractmethod
    def wire_nbytes(self, count: int) -> int:
        """Return how many bytes `count` elements become at most, and exactly if `fixed`; a multiple of 4."""

    @abstractmethod
    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Write the payload of float32 `x` of shape (count,) to uint8 `out`, aligned to 4 bytes; return its length.

        NaN and inf do not raise: the docstring of the compressor says what arrives instead.
        """

    @abstractmethod
    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Write what a payload says to float32 `out` of shape (count,).

        Raises
        ------
        CorruptPayload
            If it cannot be the payload of so many elements; `out` is then undefined.
        """

    def decompress_add(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Add it to `out` instead; a compressor that can do so in one pass overrides this."""
        room = np.empty_like(out)
        self.decompress(payload, room)
        out += room
