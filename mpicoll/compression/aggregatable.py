"""Compressors whose payloads can be added: an allreduce with them is allreduces of shorter vectors, in rounds.

What is written in a round may depend on the sums of those before. Everybody ends with the same sums, and makes the
result from nothing else, by kernels that give the same bits everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.payload_checks import require
from mpicoll.kernels import reduce as kernels

Memory = dict[str, np.ndarray]
"""What a compressor keeps from one vector to the next, under a name of its own."""


@dataclass(frozen=True)
class AggregationRound:
    """One vector that is reduced over the ranks: elements of `dtype`, and the name of the operation."""

    count: int
    dtype: np.dtype[Any]
    op: str = "SUM"

    @property
    def carrier(self) -> np.dtype[Any]:
        """The type in which kernels see the elements."""
        return kernels.carrier(self.dtype)


class AggregationSession(ABC):
    """One rank's part in summing float32 vectors of shape (count,), as often as wanted: begin, fill each round, finish.

    Parameters
    ----------
    vectors
        Memory for the rounds, of their counts and carriers, which whoever runs it reduces over the ranks; nothing is
        kept there from one sum to the next.
    """

    def __init__(self, vectors: Sequence[np.ndarray]) -> None:
        self.vectors = vectors
        self.key, self.memory = Key(), Memory()

    def begin(self, key: Key, memory: Memory) -> None:
        """Begin a sum. All ranks give the same key but for its rank."""
        self.key, self.memory = key, memory

    @abstractmethod
    def fill(self, number: int, x: np.ndarray) -> None:
        """Write what this rank contributes to a round; those before hold their sums. The same `x` in all rounds."""

    @abstractmethod
    def own(self, out: np.ndarray) -> None:
        """Write what this rank contributed to the result, once the last round is filled and before it is reduced."""

    @abstractmethod
    def finish(self, y: np.ndarray) -> None:
        """Write the result, once all rounds are reduced. It depends on what `vectors` hold and on the key only."""

    def problem(self) -> str:
        """Say what no compressor can have left in `vectors`; "" if it is all right."""
        return ""


class Aggregatable(ABC):
    """Interface of a compressor whose payloads can be added.

    Attributes
    ----------
    in_two_shots
        Whether it is a compressor for two shots too, which come first where no algorithm is asked for.
    """

    in_two_shots: ClassVar[bool] = False

    @abstractmethod
    def rounds(self, count: int, size: int) -> tuple[AggregationRound, ...]:
        """Return what is reduced for vectors of `count` elements on `size` ranks.

        Raises
        ------
        ValueError
            If that cannot be; the message names the setting or the number of ranks.
        """

    @abstractmethod
    def session(self, count: int, size: int, vectors: Sequence[np.ndarray]) -> AggregationSession:
        """Return one rank's part; see :class:`AggregationSession`."""


class AggregatableCompressor(Aggregatable, Compressor):
    """A compressor whose payload is what its rounds would be on a single rank, each filled up to 4 bytes."""

    def wire_nbytes(self, count: int) -> int:
        """Return the length of all rounds."""
        return sum(_padded(each) for each in self.rounds(count, 1))

    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Write all rounds."""
        nbytes = self.wire_nbytes(x.size)
        session = self.session(x.size, 1, self._carve(out[:nbytes], x.size))
        out[:nbytes] = 0
        session.begin(key, {})
        for number in range(len(session.vectors)):
            session.fill(number, x)
        return nbytes

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Write the result of all rounds."""
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
