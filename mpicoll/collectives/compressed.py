"""Choice of the protocol for an allreduce with compressed messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.buffers import reduction_ops
from mpicoll.collectives import ok_topk, select
from mpicoll.collectives.aggregated_rounds import AggregatedAllreduce, operation_numbers
from mpicoll.collectives.checked_arguments import CheckedArguments
from mpicoll.collectives.sparse_allreduce import SparseAllreduce
from mpicoll.collectives.two_shot import TwoShot
from mpicoll.compression import Aggregatable, Compressor, ErrorFeedback, Sparsifier, compressor
from mpicoll.compression.sparsifiers import OkTopk
from mpicoll.schedules import ALGORITHMS

if TYPE_CHECKING:
    from mpicoll.messages.calls import Allocate
    from mpicoll.messages.lowering import Phase

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
        return (select.SPARSE,) if isinstance(codec, Sparsifier) else (select.TWO_SHOT,)
    dense = (select.SUMMED, *ALGORITHMS["allreduce"])
    return (select.TWO_SHOT, *dense) if codec.in_two_shots else dense


def stages(task: CheckedArguments, x: np.ndarray, y: np.ndarray, allocate: Allocate) -> tuple[Phase, ...]:
    """Return the phases of a plan that sums float32 `x` over the ranks into `y`, with compressed messages."""
    assert task.compression is not None
    channel, compression = task.channel, task.compression
    made, feedback = plain(compression), compression if isinstance(compression, ErrorFeedback) else None
    if task.algorithm == select.TWO_SHOT:
        return TwoShot(channel, compression, x, y, allocate).stages()
    if task.algorithm == select.SPARSE and isinstance(made, Sparsifier):
        if isinstance(made, OkTopk):
            return ok_topk.stages(channel, made, feedback, x, y, allocate)
        return SparseAllreduce(channel, made, feedback, x, y, allocate).stages()
    numbers = task.numbers or operation_numbers(channel, task.persistent)
    summed = AggregatedAllreduce(channel, compression, task.algorithm, x, y, allocate, numbers=numbers)
    return summed.stages()


def variant(compression: Compression | None) -> str:
    """Return the variant of the plan that the state of an ErrorFeedback asks for; "" if there is only one."""
    if isinstance(compression, ErrorFeedback) and isinstance(compression.compressor, OkTopk):
        return ok_topk.variant(compression)
    return ""


def cut(compression: Compression | None, start: int, stop: int, count: int) -> Compression | None:
    """Return the compression of elements ``start`` to ``stop - 1`` of a vector of `count`."""
    if isinstance(compression, ErrorFeedback):
        return compression.part(start, stop, count)
    return None if compression is None else compression.part(start, stop)
