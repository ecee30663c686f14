"""Reduce_scatter of a parameter group's gradients with compressed messages."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicoll.collectives.compressed import algorithms
from mpicoll.collectives.select import TWO_SHOT
from mpicoll.compression import Compressor, Key, compressor
from mpicoll.parallel.parameter_groups import ParameterGroup, ParameterGroups

_PARTS = 1 << 20
"""Largest number of parts of a step's batch, each of which is reduced."""


def refusal(made: Compressor) -> str:
    """Return why gradients cannot be compressed so where ranks hold chunks of them; empty if they can."""
    if made.needs_feedback:
        return "needs error feedback, and ranks that hold chunks keep no residuals of whole gradients"
    if TWO_SHOT not in algorithms(made) or not made.fixed:
        return "does not encode each rank's chunk by itself, with a length that the number of elements decides"
    return ""


class CompressedReduceScatter:
    """Sum of a group's gradients in chunks, one for each rank, which travel as payloads of a compressor.

    It is the first shot of a two-shot allreduce (Alistarh et al., "QSGD", NIPS 2017). Three ranks, a group in chunks
    A B C, ``c(x)`` a payload::

        all to all   rank 0 sends c(B0) to 1, c(C0) to 2; rank 1 sends c(A1) to 0, c(C1) to 2; ...
        decode       owner of A: A = c(A0) + c(A1) + c(A2), in rank order, its own chunk decoded, too

    A rank sends (P - 1) / P of the compressed group, and needs memory for two payloads of the longest group.

    Parameters
    ----------
    spec
        A compressor for which :func:`refusal` has no reason, or its specification.

    Attributes
    ----------
    is_active
        Whether gradients are compressed now.
    """

    def __init__(self, division: ParameterGroups, spec: str | Compressor) -> None:
        self._division, self._compressor = division, compressor(spec)
        longest = max(self._row_nbytes(unit) for unit in division.units)
        self._outgoing, self._incoming = (np.zeros(division.size * longest, np.uint8) for _ in range(2))
        self._operation = 0
        self.is_active = True

    def begin(self, step: int, part: int, *, compress: bool) -> None:
        """Note which part of the batch of which step comes; random choices differ between them.

        Parameters
        ----------
        compress
            True if its gradients are compressed.
        """
        self._operation, self.is_active = step * _PARTS + part, compress

    def reduce(self, number: int, data: np.ndarray, into: np.ndarray) -> None:
        """Sum a group over the ranks into this rank's chunk, and count bytes and time. Collective.

        Parameters
        ----------
        number
            The group's number.
        data : (length,) float32 or longer
            Its gradients on this rank.
        into : (block,) float32, or this rank's part of it
            Memory for the sum, which may lie in `data`; elements after the chunk's become zero.
        """
        unit = self._division.units[number]
        with self._division.meter.waiting(self.sent_nbytes(unit), number):
            self._reduce(unit, data, into)

    def _reduce(self, unit: ParameterGroup, data: np.ndarray, into: np.ndarray) -> None:
        division, nbytes = self._division, self._row_nbytes(unit)
        rows, received = (
            room[: division.size * nbytes].reshape(-1, nbytes) for room in (self._outgoing, self._incoming)
        )
        for rank, row in enumerate(rows):
            chunk = unit.chunk(rank)
            if chunk.stop > chunk.start:
                key = Key(0, division.rank, self._operation, chunk.start)
                self._compressor.compress(data[chunk.start - unit.start : chunk.stop - unit.start], row, key)
        division.comm.Alltoall([rows, MPI.BYTE], [received, MPI.BYTE])
        own = unit.chunk(division.rank)
        count = own.stop - own.start
        into[count:] = 0
        if count:
            self._add(received[:, : self._compressor.wire_nbytes(count)], into[:count])

    def _add(self, payloads: np.ndarray, into: np.ndarray) -> None:
        self._compressor.decompress(payloads[0], into)
        for payload in payloads[1:]:
            self._compressor.decompress_add(payload, into)

    def _row_nbytes(self, unit: ParameterGroup) -> int:
        return self._compressor.wire_nbytes(unit.block)

    def sent_nbytes(self, unit: ParameterGroup) -> int:
        """Return the bytes that a rank sends to reduce a group."""
        return (self._division.size - 1) * self._row_nbytes(unit)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory for payloads."""
        return self._outgoing.nbytes + self._incoming.nbytes
