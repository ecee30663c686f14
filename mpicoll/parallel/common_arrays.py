"""Common arrays: parameters of which all ranks of a tensor-parallel group hold the same copy, such as biases of rows.

The ranks of a group compute equal gradients of them. Sums of these over the replicas may still differ in their bits:
compressors encode an array together with its neighbours, which differ between the ranks of a group, and the order of a
sum may depend on an element's place in the vector, and on which replicas share a node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpicoll.models.sequential import ParameterStore
from mpicoll.parallel.gradient_norm import Gradients
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.tensor import Divided

Span = tuple[int, int]


class CommonArrays:
    """The common arrays of a rank's part of the model; there are none without tensor parallelism.

    Parameters
    ----------
    spans
        By layer and array, the first element and the end, in the vector of this rank's part.
    divided
        The layers of this rank's part.
    aligned
        True if the vectors of all ranks of the group have the same layout.
    """

    def __init__(
        self, spans: Sequence[Sequence[Span]], divided: Sequence[Divided], mesh: Mesh, *, aligned: bool
    ) -> None:
        self._tensor, self._data, self._aligned = mesh.tensor, mesh.data, aligned
        self._flags = [part.common if mesh.tensor is not None else (False,) * len(part.common) for part in divided]
        layers = zip(spans, self._flags, strict=True)
        self._spans = [span for layer, flags in layers for span, same in zip(layer, flags, strict=True) if same]

    def unify(self, own: Gradients) -> None:
        """Replace sums of whole vectors with those of the group's first rank, in common arrays; collective over it.

        Parameters
        ----------
        own
            All elements of the vector, of any type.
        """
        pieces = self._pieces(own)
        if self._tensor is not None and self._spans:
            data = np.concatenate([piece for _, piece in pieces])
            self._tensor.Bcast([data, MPI.BYTE], 0)
            _write(pieces, data)

    def unify_chunks(self, own: Gradients) -> None:
        """Do as :meth:`unify`, for the chunks that this rank holds; collective over all ranks with these layers."""
        if self._tensor is None or not self._spans:
            return
        pieces = self._pieces(own)
        if self._aligned:
            data = np.concatenate([np.empty(0, np.uint8), *(piece for _, piece in pieces)])
        else:  # the group's first rank holds other elements: all of them are collected
            count = sum(end - begin for begin, end in self._spans)
            data = np.zeros(count * own[0][1].itemsize, np.uint8)
            for place, piece in pieces:
                data[place : place + piece.size] = piece
            if self._tensor.Get_rank() == 0:
                self._data.Allreduce(MPI.IN_PLACE, data, MPI.BOR)
        self._tensor.Bcast([data, MPI.BYTE], 0)
        _write(pieces, data, packed=self._aligned)

    def _pieces(self, own: Gradients) -> list[tuple[int, np.ndarray]]:
        """Return the bytes of common elements in `own`, each piece with its place among the bytes of all of them."""
        found, place = [], 0
        for begin, end in self._spans:
            for start, array in own:
                low, high = max(begin, start), min(end, start + array.size)
                if low < high:
                    piece = array[low - start : high - start].view(np.uint8)
                    found.append(((place + low - begin) * array.itemsize, piece))
            place += end - begin
        return found

    def all_finite(self, store: ParameterStore, comm: MPI.Intracomm) -> bool:
        """Return whether all parameters of all ranks of `comm` are finite; collective over them."""
        finite = np.ones(1, np.int8)
        for layer in range(len(self._flags)):
            finite &= np.int8(all(np.isfinite(array).all() for array in store.parameters(layer)))
            store.release(layer)
        comm.Allreduce(MPI.IN_PLACE, finite, MPI.MIN)
        return bool(finite[0])

    def digest(self, store: ParameterStore) -> bytes:
        """Return the SHA-256 of the common arrays; collective over the data-parallel ranks."""
        whole = hashlib.sha256()
        for layer, flags in enumerate(self._flags):
            if any(flags):
                for array, same in zip(store.parameters(layer), flags, strict=True):
                    if same:
                        whole.update(np.ascontiguousarray(array).view(np.uint8).data)
                store.release(layer)
        return whole.digest()


def _write(pieces: Sequence[tuple[int, np.ndarray]], data: np.ndarray, *, packed: bool = True) -> None:
    """Write bytes back to the pieces, which follow each other in `data`, or lie at their places."""
    after = 0
    for place, piece in pieces:
        first = after if packed else place
        piece[:] = data[first : first + piece.size]
        after += piece.size
