"""Phases of the plans that sum vectors with compressed messages; imported by the first such call."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.collectives import compressed, ok_topk, select
from mpicoll.collectives.aggregated_rounds import AggregatedAllreduce, operation_keys
from mpicoll.collectives.checked_arguments import CheckedArguments
from mpicoll.collectives.composite import CompositePlan
from mpicoll.collectives.plan_feedback import PlanFeedback, feedback_of
from mpicoll.collectives.sparse_allreduce import SparseAllreduce
from mpicoll.collectives.two_shot import TwoShot
from mpicoll.compression import ErrorFeedback
from mpicoll.compression.sparsifiers import OkTopk, Sparsifier
from mpicoll.kernels.reduce import reducer

if TYPE_CHECKING:
    from mpicoll.communicator.channel import Channel
    from mpicoll.messages.calls import Allocate
    from mpicoll.messages.lowering import Phase


def stages(task: CheckedArguments, x: np.ndarray, y: np.ndarray, allocate: Allocate) -> tuple[Phase, ...]:
    """Return the phases of a plan that sums float32 `x` over the ranks into `y`, with compressed messages."""
    assert task.compression is not None
    channel, compression = task.channel, task.compression
    made, feedback = compressed.plain(compression), feedback_of(compression)
    if x.size == 0:
        return _of_nothing(channel, feedback, y, allocate)
    if task.algorithm == select.TWO_SHOT:
        return TwoShot(channel, compression, x, y, allocate, task.counter).stages()
    if task.algorithm == select.SPARSE and isinstance(made, Sparsifier):
        if isinstance(made, OkTopk):
            return ok_topk.stages(channel, made, feedback, x, y, allocate, task.counter)
        return SparseAllreduce(channel, made, feedback, x, y, allocate, task.counter).stages()
    keys = task.keys or operation_keys(channel, apart=task.persistent)
    summed = AggregatedAllreduce(channel, compression, task.algorithm, x, y, allocate, keys=keys)
    return summed.stages()


def _of_nothing(
    channel: Channel, feedback: PlanFeedback | None, y: np.ndarray, allocate: Allocate
) -> tuple[Phase, ...]:
    """Return the phases for a vector without elements: empty messages, so that another length elsewhere is found."""
    program, reduce = CompositePlan(), reducer("SUM", y.dtype)
    assert reduce is not None
    if feedback is not None:
        program.call(partial(feedback.open, 0))
    program.add_allreduce(y, reduce, "recursive_doubling", channel.size, channel.rank, allocate)
    if feedback is not None:
        program.call(feedback.end)
    return program.stages()


def variant(compression: compressed.Compression | None) -> str:
    """Return the variant of the plan that the state of an ErrorFeedback asks for; "" if there is only one."""
    if isinstance(compression, ErrorFeedback) and isinstance(compression.compressor, OkTopk):
        return ok_topk.variant(compression)
    return ""
