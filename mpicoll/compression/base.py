"""Compressor interface: encoding of float32 vectors as bytes, and decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from mpicoll.compression.payload_checks import into_vector, memory, require, vector
from mpicoll.kernels.codecs import counter_random
from mpicoll.kernels.codecs.codec_kernels import Codec


class Key(NamedTuple):
    """Key of random choices: the same key and element give the same choice, in every run.

    Attributes
    ----------
    seed, rank, step
        Seed of the user; rank whose data are compressed; number of the operation.
    first
        Index of the vector's first element within the whole vector.
    """

    seed: int = 0
    rank: int = 0
    step: int = 0
    first: int = 0

    def words(self) -> np.ndarray:
        """Return the key for kernels, uint32 of shape (2,)."""
        return counter_random.key(self.seed, self.rank, self.step)


class Compressor(ABC):
    """Interface of compressors, which encode float32 vectors as fewer bytes.

    A subclass is a frozen dataclass of its settings with the methods :meth:`wire_nbytes`, :meth:`compress` and
    :meth:`decompress`. :func:`mpicoll.compression.register` gives it a name; the contract test in ``tests/compression``
    then covers it.

    Attributes
    ----------
    unbiased
        Whether the mean of the decoded vector over all keys is the vector that was encoded.
    granularity
        Number of elements: dividing a vector at multiples of it does not change the decoded elements.
    cuttable
        False if any division changes the decoded elements, as where the largest of all elements are sent.
    fixed
        Whether the length of the payload depends on the count only.
    needs_feedback
        Whether training needs :class:`~mpicoll.ErrorFeedback` to converge with it.
    """

    unbiased: ClassVar[bool] = False
    fixed: ClassVar[bool] = True
    cuttable: ClassVar[bool] = True
    needs_feedback: ClassVar[bool] = False

    @property
    def granularity(self) -> int:
        """See the class."""
        return 1

    @property
    def codec(self) -> Codec | None:
        """Compiled functions that encode and decode, which plans call without the interpreter; None without them."""
        return None

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> Compressor:
        """Return the compressor for a vector of arrays of these shapes, which more elements may follow."""
        return self

    def part(self, start: int, stop: int) -> Compressor:
        """Return the compressor for elements ``start`` to ``stop - 1`` of a vector that is divided."""
        return self

    @abstractmethod
    def wire_nbytes(self, count: int) -> int:
        """Return the largest payload of `count` elements in bytes, a multiple of 4; the exact length if `fixed`."""

    @abstractmethod
    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Encode a vector and return the length of the payload in bytes.

        Parameters
        ----------
        x : (count,) float32
            The vector. NaN and inf do not raise; the docstring of the compressor states how they are decoded.
        out : (wire_nbytes(count),) uint8 or longer
            Memory for the payload, aligned to 4 bytes.
        key
            Key of random choices.
        """

    @abstractmethod
    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Decode a payload to float32 `out` of shape (count,).

        Raises
        ------
        CorruptPayload
            If it cannot be a payload of `count` elements; `out` is then undefined.
        """

    def decompress_add(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Decode a payload and add it to `out`; compressors that can do so in one pass override this."""
        room = np.empty_like(out)
        self.decompress(payload, room)
        out += room


class CodecCompressor(Compressor):
    """Interface of compressors that encode and decode by compiled functions; a subclass has :attr:`codec`.

    Attributes
    ----------
    problems
        Error texts for the numbers that the codec's decoder returns, from 1 on.
    """

    problems: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """The compiled functions and their settings; see :mod:`mpicoll.kernels.codecs.codec_kernels`."""

    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Encode a vector and return the length of the payload in bytes."""
        codec, x = self.codec, vector(x, "x")
        payload = memory(out, "out", self.wire_nbytes(x.size))
        return int(codec.encode(x, payload, codec.settings, key.words(), key.first))

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Decode a payload."""
        into_vector(out, lambda room: self._decode(payload, room, False))

    def decompress_add(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Decode a payload and add it to `out`, in one pass."""
        into_vector(out, lambda room: self._decode(payload, room, True))

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        if self.fixed:
            require(payload.size == self.wire_nbytes(out.size), payload, out, "its length is another")
        payload = memory(payload, "payload", payload.size)
        codec = self.codec
        problem = codec.decode(payload, out, codec.settings, add)
        require(problem == 0, payload, out, self.problems[problem - 1] if problem else "")
