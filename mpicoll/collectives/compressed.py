"""How an allreduce with compressed messages is done: which calls can be, and by which protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.collectives import ok_topk, select, sparse
from mpicoll.collectives.two_shot import TwoShot
from mpicoll.compression import Compressor, ErrorFeedback, Sparsifier, compressor
from mpicoll.compression.sparse import OkTopk
from mpicoll.runtime import ops

if TYPE_CHECKING:
    from mpicoll.collectives.program import Allocate
    from mpicoll.collectives.task import Task
    from mpicoll.runtime.lowering import Stage

Compression = Compressor | ErrorFeedback


def choose(
    given: Any, op: Any, dtype: np.dtype[Any], count: int, wanted: str, has_hierarchy: bool
) -> tuple[str, Compression]:
    """Return the algorithm and the compressor of a call: between nodes only, where there are several.

    Raises
    ------
    TypeError, ValueError, UnknownCompressor
        If it cannot be compressed so.
    """
    made = given if isinstance(given, ErrorFeedback) else compressor(given)
    if dtype != np.float32:
        raise TypeError(f"compression: {given!r} is for float32, not {dtype}")
    if ops.name_of(op) != "SUM":
        raise ValueError(f"compression: {given!r} is for SUM, not {ops.name_of(op) or op!r}")
    if wanted not in (select.AUTO, select.TWO_SHOT, select.HIERARCHY):
        raise ValueError(f"algorithm: {wanted!r} does not compress; there are {select.TWO_SHOT}, {select.HIERARCHY}")
    if wanted == select.HIERARCHY and not has_hierarchy:
        raise ValueError(f"algorithm: {wanted!r} needs several nodes with several ranks")
    if isinstance(made, ErrorFeedback):
        made.check(count)
    return (select.HIERARCHY if has_hierarchy and wanted != select.TWO_SHOT else select.TWO_SHOT), made


def stages(task: Task, x: np.ndarray, y: np.ndarray, allocate: Allocate) -> tuple[Stage, ...]:
    """Return what a plan is made of: the sum of float32 `x` over the ranks, compressed on the way, goes to `y`."""
    feedback = task.compression if isinstance(task.compression, ErrorFeedback) else None
    made = task.compression if feedback is None else feedback.compressor
    assert task.compression is not None
    assert isinstance(made, Compressor)
    channel = task.channel
    if isinstance(made, OkTopk):
        return ok_topk.stages(channel, made, feedback, x, y, allocate)
    if isinstance(made, Sparsifier):
        return sparse.stages(channel, made, feedback, x, y, allocate)
    return TwoShot(channel, task.compression, x, y, allocate).stages()


def variant(compression: Compression | None) -> str:
    """Return what decides, besides the call itself, what a plan consists of."""
    if isinstance(compression, ErrorFeedback) and isinstance(compression.compressor, OkTopk):
        return ok_topk.variant(compression)
    return ""


def cut(compression: Compression | None, start: int, stop: int, count: int) -> Compression | None:
    """Return what compresses elements ``start`` to ``stop - 1`` of a vector of `count`."""
    return compression.part(start, stop, count) if isinstance(compression, ErrorFeedback) else compression
