"""Sparsifiers, which send some elements unchanged and no others; those of this module send the largest."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import into_vector, memory, require, vector
from mpicoll.kernels.codecs import sparse_codec, sparse_encoding
from mpicoll.kernels.codecs.codec_kernels import settings_of
from mpicoll.kernels.codecs.sparse_codec import ENTRY_NBYTES, Selector

_MOST_ELEMENTS = (1 << 32) - 1
_SAMPLED_SHARE, _SAMPLED_ENTRIES = 0.01, 64


class Sparsifier(Compressor):
    """Interface of sparsifiers, which send some elements with their indices; the others arrive as zero.

    An *entry* is an element with its index. The payload (:mod:`mpicoll.kernels.codecs.sparse_encoding`) has six bytes
    an entry, or is the whole vector if that is shorter. A subclass has the methods :meth:`capacity` and :meth:`select`.
    """

    cuttable: ClassVar[bool] = False

    @abstractmethod
    def capacity(self, count: int) -> int:
        """Return the largest number of entries of a vector of `count` elements; the exact one if `fixed`.

        Raises
        ------
        ValueError
            If `count` is 2**32 or more, since indices have 32 bits.
        """

    @abstractmethod
    def select(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        """Select the entries of float32 `x` of shape (count,), and return their number.

        Parameters
        ----------
        indices, values : uint32 and float32 arrays of shape (capacity(count),)
            Written; indices increase strictly.
        """

    def selector(self, count: int) -> Selector | None:
        """Return a compiled function that selects, which plans call without the interpreter; None without one.

        All ranks have it, or none has.
        """
        return None

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes of a payload with the largest number of entries."""
        return sparse_encoding.wire_nbytes(self.capacity(count), count)

    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Write the entries."""
        x = vector(x, "x")
        out = memory(out, "out", self.wire_nbytes(x.size))
        most = self.capacity(x.size)
        indices, values = np.empty(most, np.uint32), np.empty(most, np.float32)
        number = self.select(x, key, indices, values)
        return int(sparse_encoding.encode(indices[:number], values[:number], 0, x.size, out))

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Write the entries, and zeros for all other elements."""
        into_vector(out, lambda room: self._decode(payload, room, False))

    def decompress_add(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Add the entries."""
        into_vector(out, lambda room: self._decode(payload, room, True))

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        payload = memory(payload, "payload", payload.size)
        require(payload.size % 4 == 0 and payload.size > 0, payload, out, "its length is another")
        whole = payload.size == sparse_encoding.length_of(payload, out.size) <= self.wire_nbytes(out.size)
        require(whole, payload, out, "its counts or indices are invalid")
        sparse_encoding.decode(payload, out, add)


class CompiledSparsifier(Sparsifier):
    """Interface of sparsifiers that select by a compiled function; a subclass has :meth:`capacity` and `selector`."""

    @abstractmethod
    def selector(self, count: int) -> Selector:
        """Return the compiled function, and its settings for vectors of `count` elements.

        See :mod:`mpicoll.kernels.codecs.sparse_codec`.
        """

    def select(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        """Select the entries of `x`, and return their number."""
        selector, room = self.selector(x.size), np.empty(ENTRY_NBYTES * indices.size, np.uint8)
        nbytes = int(selector.select(x, room, selector.settings, key.words(), key.first))
        number, half = nbytes // indices.itemsize, room.size // 2
        indices[:number] = room[:nbytes].view(np.uint32)
        values[:number] = room[half : half + nbytes].view(np.float32)
        return number


def check_density(density: float) -> None:
    """Raise ValueError unless `density` is above 0 and at most 1."""
    if not 0 < density <= 1:
        raise ValueError(f"density: {density} is not above 0 and at most 1")


def entries_for(count: int, density: float, k: int = 0) -> int:
    """Return `k` or, if that is 0, the fraction `density` of `count`, rounded up; at least 1 and at most `count`.

    Raises
    ------
    ValueError
        If `count` is 2**32 or more, since indices have 32 bits.
    """
    if count > _MOST_ELEMENTS:
        raise ValueError(f"count: {count} elements cannot be numbered with 32 bits; at most {_MOST_ELEMENTS}")
    # 0.07 * 100 is a little above 7: what is a whole number but for rounding shall be that.
    wanted = k if k > 0 else math.ceil(density * count * (1 - 1e-12))
    return min(count, max(1, wanted))


@enter("topk")
@dataclass(frozen=True)
class TopK(CompiledSparsifier):
    """A fixed number of elements with the largest |x|; biased, to be used with error feedback.

    ``density`` is the fraction of elements sent, rounded up; ``k``, if it is not 0, their number instead. Among equal
    elements those with the lowest indices are sent. NaN counts as largest, then inf; they are sent unchanged. (Aji and
    Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017.)
    """

    density: float = 0.01
    k: int = 0
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.k < 0:
            raise ValueError(f"k: {self.k} is negative")

    def capacity(self, count: int) -> int:
        """Return the number of elements sent."""
        return entries_for(count, self.density, self.k)

    def selector(self, count: int) -> Selector:
        """Return what selects the largest."""
        return Selector(sparse_codec.largest, settings_of())


@enter("sampled")
@dataclass(frozen=True)
class Sampled(CompiledSparsifier):
    """The elements above a threshold that is estimated from a sample; biased, to be used with error feedback.

    The fraction of elements sent is between 2/3 and 4/3 of ``density``. The sample is 1 % of the vector, or more, so
    that it has about 64 elements to be sent. A threshold that passes too many or too few elements is corrected by
    bisection, up to 10 times. If that fails, or the sample would be a quarter of the vector or more, the largest
    elements are found exactly, as ``topk`` does. NaN and inf are above every threshold. (Lin et al., "Deep gradient
    compression", ICLR 2018, section 3.)
    """

    density: float = 0.01
    fixed: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_density(self.density)

    def capacity(self, count: int) -> int:
        """Return 4/3 of the number of elements that ``density`` asks for."""
        return min(count, entries_for(count, self.density) * 4 // 3)

    def selector(self, count: int) -> Selector:
        """Return what selects by a sample, if one is worth taking."""
        size = max(math.ceil(_SAMPLED_SHARE * count), math.ceil(_SAMPLED_ENTRIES / self.density))
        size = 0 if size >= count // 4 else size
        numbers = (entries_for(count, self.density), size, entries_for(size, self.density))
        return Selector(sparse_codec.above_sampled, settings_of(*numbers))


@enter("oktopk")
@dataclass(frozen=True)
class OkTopk(TopK):
    """The k largest elements of the sum of all ranks' k largest; the volume does not grow with the number of ranks.

    With error feedback, thresholds are found exactly in every `every`-th operation and reused in between; about k
    elements are then sent, at most 2 k. A single vector is compressed as by ``topk``. (Li and Hoefler, "Near-optimal
    sparse allreduce for distributed deep learning", PPoPP 2022; see :mod:`mpicoll.collectives.ok_topk`.)
    """

    every: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise ValueError(f"every: {self.every} is not at least 1")
