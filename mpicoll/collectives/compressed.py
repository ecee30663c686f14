"""Choice of the protocol for an allreduce with compressed messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.buffers import reduction_ops
from mpicoll.collectives import select
from mpicoll.compression import Aggregatable, Compressor, ErrorFeedback, compressor
from mpicoll.schedules import ALGORITHMS

Compression = Compressor | ErrorFeedback


def choose(
    given: Any, op: Any, dtype: np.dtype[Any], count: int, wanted: str, size: int, nodes: int
) -> tuple[str, Compression]:
    """Return the algorithm and the compressor of an allreduce.

    Parameters
    ----------
    given
        The ``compression=`` of the call.
    wanted
        The algorithm asked for, or ``"auto"``.
    size, nodes
        The number of ranks, and of nodes if there is a hierarchy of them, else 0.

    Raises
    ------
    TypeError, ValueError, UnknownCompressor
        If the call cannot be compressed as asked for.
    """
    made = given if isinstance(given, ErrorFeedback) else compressor(given)
    if dtype != np.float32:
        raise TypeError(f"compression: {given!r} is for float32, not {dtype}")
    if reduction_ops.name_of(op) != "SUM":
        raise ValueError(f"compression: {given!r} is for SUM, not {reduction_ops.name_of(op) or op!r}")
    there = algorithms(made)
    if wanted not in (select.AUTO, select.HIERARCHY, *there):
        raise ValueError(
            f"algorithm: {wanted!r} does not compress with {given!r}; choose {select.HIERARCHY} or {', '.join(there)}"
        )
    if wanted == select.HIERARCHY and not nodes:
        raise ValueError(f"algorithm: {wanted!r} needs several nodes, at least one of them with several ranks")
    name = wanted if wanted in there else select.HIERARCHY if nodes else there[0]
    if isinstance(made, ErrorFeedback):
        made.check(count)
    codec = plain(made)
    if isinstance(codec, Aggregatable):
        codec.rounds(count, nodes if name == select.HIERARCHY else size)
    return name, made


def plain(compression: Compression) -> Compressor:
    """Return the compressor without its error feedback."""
    return compression.compressor if isinstance(compression, ErrorFeedback) else compression


def algorithms(compression: Compression) -> tuple[str, ...]:
    """Return the algorithms that a compressor can be used with between all ranks; first that of ``"auto"``."""
    codec = plain(compression)
    if not isinstance(codec, Aggregatable):
        from mpicoll.compression.sparsifiers import Sparsifier  # programs that do not compress start without it

        return (select.SPARSE,) if isinstance(codec, Sparsifier) else (select.TWO_SHOT,)
    dense = (select.SUMMED, *ALGORITHMS["allreduce"])
    return (select.TWO_SHOT, *dense) if codec.in_two_shots else dense


def cut(compression: Compression | None, start: int, stop: int, count: int) -> Compression | None:
    """Return the compression of elements ``start`` to ``stop - 1`` of a vector of `count`."""
    if isinstance(compression, ErrorFeedback):
        return compression.part(start, stop, count)
    return None if compression is None else compression.part(start, stop)
