"""Aggregatable compressors, whose payloads can be added: their allreduce consists of shorter allreduces, the rounds.

The vector of a round may depend on the sums of earlier rounds. All ranks end with the same sums and compute the result
from these sums alone, by kernels that give the same bits on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.payload_checks import into_vector, memory, require, vector
from mpicoll.kernels import reduce as kernels

Memory = dict[str, np.ndarray]
"""State that compressors keep from one vector to the next, each under a name of its own."""


@dataclass(frozen=True)
class AggregationRound:
    """One vector that is reduced over the ranks: `count` elements of `dtype`, and the name of the operation."""

    count: int
    dtype: np.dtype[Any]
    op: str = "SUM"

    @property
    def carrier(self) -> np.dtype[Any]:
        """The type in which kernels see the elements."""
        return kernels.carrier(self.dtype)


class AggregationSession(ABC):
    """One rank's part in sums of float32 vectors of shape (count,): begin, fill each round, finish.

    Parameters
    ----------
    vectors
        Memory for the rounds, of their counts and carriers, which the caller reduces over the ranks. Its contents are
        not kept from one sum to the next.
    """

    def __init__(self, vectors: Sequence[np.ndarray]) -> None:
        self.vectors = vectors
        self.key, self.memory = Key(), Memory()

    def begin(self, key: Key, memory: Memory) -> None:
        """Start a sum. The keys of all ranks are equal but for the field `rank`."""
        self.key, self.memory = key, memory

    @abstractmethod
    def fill(self, number: int, x: np.ndarray) -> None:
        """Write this rank's contribution to round `number`; earlier rounds hold their sums. `x` is the same in all."""

    @abstractmethod
    def own(self, out: np.ndarray) -> None:
        """Write this rank's contribution to the result, after the last round is filled and before it is reduced."""

    @abstractmethod
    def finish(self, y: np.ndarray) -> None:
        """Write the result, after all rounds are reduced. It depends on the contents of `vectors` and the key only."""

    def problem(self) -> str:
        """Return an error text if no compressor can have written the contents of `vectors`, else ""."""
        return ""


class Aggregatable(ABC):
    """Interface of a compressor whose payloads can be added.

    Attributes
    ----------
    in_two_shots
        Whether the two-shot allreduce is possible too; it is then the default algorithm.
    """

    in_two_shots: ClassVar[bool] = False

    @abstractmethod
    def rounds(self, count: int, size: int) -> tuple[AggregationRound, ...]:
        """Return the rounds for vectors of `count` elements on `size` ranks.

        Raises
        ------
        ValueError
            If the compressor cannot do it; the message names the setting or the number of ranks.
        """

    @abstractmethod
    def session(self, count: int, size: int, vectors: Sequence[np.ndarray]) -> AggregationSession:
        """Return one rank's part; see :class:`AggregationSession`."""


class AggregatableCompressor(Aggregatable, Compressor):
    """A compressor whose payload is its rounds on a single rank, each padded to a multiple of 4 bytes."""

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes of all rounds."""
        return sum(_padded(each) for each in self.rounds(count, 1))

    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Write all rounds."""
        x, nbytes = vector(x, "x"), self.wire_nbytes(x.size)
        out = memory(out, "out", nbytes)
        session = self.session(x.size, 1, self._carve(out[:nbytes], x.size))
        out[:nbytes] = 0
        session.begin(key, {})
        for number in range(len(session.vectors)):
            session.fill(number, x)
        return nbytes

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Decode all rounds."""
        into_vector(out, lambda room: self._finish(memory(payload, "payload", payload.size), room))

    def _finish(self, payload: np.ndarray, out: np.ndarray) -> None:
        require(payload.size == self.wire_nbytes(out.size), payload, out, "its length is another")
        session = self.session(out.size, 1, self._carve(payload, out.size))
        problem = session.problem()
        require(not problem, payload, out, problem)
        session.finish(out)

    def _carve(self, payload: np.ndarray, count: int) -> list[np.ndarray]:
        vectors, start = [], 0
        for each in self.rounds(count, 1):
            nbytes = each.count * each.carrier.itemsize
            vectors.append(payload[start : start + nbytes].view(each.carrier))
            start += _padded(each)
        return vectors


def _padded(vector: AggregationRound) -> int:
    return -(-vector.count * vector.carrier.itemsize // 4) * 4
