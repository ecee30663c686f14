"""Memory for sparse vectors, between the messages of a plan and in them: entries, and payloads of entries."""

from __future__ import annotations

import numpy as np

from mpicoll.compression import Key, Sparsifier
from mpicoll.errors import CorruptPayload
from mpicoll.kernels.codecs import sparse_codec, sparse_encoding
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of
from mpicoll.kernels.codecs.sparse_codec import ENTRY_NBYTES, Selector
from mpicoll.messages.calls import Allocate
from mpicoll.messages.codec_calls import EncodedMemory


class SparseEntries(EncodedMemory):
    """Memory for at most `capacity` entries; decoding it sets the elements at their indices to zero.

    Parameters
    ----------
    selector
        What selects the entries; None if only the interpreter can.
    """

    def __init__(self, selector: Selector | None, capacity: int, allocate: Allocate) -> None:
        codec = None if selector is None else Codec(selector.select, sparse_codec.take_out, selector.settings)
        super().__init__(codec, ENTRY_NBYTES * capacity, True, allocate)

    @property
    def words(self) -> np.ndarray:
        """All of it, as the encoder of payloads takes it."""
        return self.memory.view(np.float32)

    def decompress(self, out: np.ndarray, *, add: bool) -> None:
        """Set the elements of `out` at the indices to zero."""
        sparse_codec.take_out(self.written(), out, settings_of(), add)


class SelectedEntries(SparseEntries):
    """Memory for the entries that a sparsifier selects of a vector of `count` elements."""

    def __init__(self, sparsifier: Sparsifier, count: int, allocate: Allocate) -> None:
        super().__init__(sparsifier.selector(count), sparsifier.capacity(count), allocate)
        self._sparsifier = sparsifier

    def encode(self, x: np.ndarray, key: Key) -> int:
        """Select the entries of `x`, and return the bytes of their indices."""
        half = self.body.size // 2
        indices, values = self.body[:half].view(np.uint32), self.body[half:].view(np.float32)
        number = self._sparsifier.select(x, key, indices, values)
        if not 0 <= number <= indices.size:
            raise ValueError(f"select: it returned {number} entries, where there is room for {indices.size}")
        found = indices[:number]
        if number and (found[-1] >= x.size or (found[1:] <= found[:-1]).any()):  # compiled code relies on it
            raise ValueError(f"select: its indices do not increase strictly, or reach the count {x.size}: {found}")
        return number * indices.itemsize


class SparsePayload(EncodedMemory):
    """Memory for a payload of at most `most` entries of `length` elements, encoded from :class:`SparseEntries`."""

    def __init__(self, most: int, length: int, allocate: Allocate) -> None:
        nbytes = sparse_encoding.wire_nbytes(min(most, length), length)
        super().__init__(sparse_codec.payloads_of(length), nbytes, True, allocate)
        self._length = length

    def part(self, first: int) -> tuple[int, ...]:
        """Return the first element whose entry is written, and the number of elements."""
        return first, self._length

    def write(self, indices: np.ndarray, values: np.ndarray, first: int, length: int) -> None:
        """Write the payload of entries of elements ``first`` to ``first + length - 1``, from Python."""
        assert self.prefixed is not None
        self.prefixed.length[0] = sparse_encoding.encode(indices, values, first, length, self.body)

    def entries(self, length: int) -> int:
        """Return the number of entries of a payload for `length` elements that was decoded."""
        number = int(self.body[:4].view(np.uint32)[0])
        return length if number == sparse_encoding.DENSE else number

    def decompress(self, out: np.ndarray, *, add: bool) -> None:
        """Write the entries to `out`, and zeros elsewhere, or add them.

        Raises
        ------
        CorruptPayload
            If the payload cannot be one for ``out.size`` elements; `out` is then unchanged.
        """
        assert self.codec is not None
        if self.codec.decode(self.written(), out, self.codec.settings, add):
            raise CorruptPayload(f"sparse payload for {out.size} elements: its counts or indices are invalid")
