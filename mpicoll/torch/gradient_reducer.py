"""Gradients in buckets, each reduced over the ranks as soon as the backward pass has computed it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from mpicoll.compression import Compressor, ErrorFeedback, compressor
from mpicoll.quantities import counted
from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.call_queue import QueuedWork
from mpicoll.torch.tensor_allreduce import reduce_in_place
from mpicoll.torch.tensor_memory import empty
from mpicoll.torch.uneven_inputs import Attendance, Mark
from mpicoll.torch.world import size, start

DENSE_BYTES = 4 << 10


class GradientBucket:
    """Gradients of several parameters of one dtype, in one vector that is reduced by one call.

    Parameters
    ----------
    parameters
        The parameters, in the order in which their gradients are expected.
    compression
        As for :func:`~mpicoll.torch.DistributedOptimizer`.
    """

    def __init__(self, parameters: list[torch.Tensor], compression: Any) -> None:
        self.parameters = parameters
        count = sum(parameter.numel() for parameter in parameters)
        self._vector = empty(count, dtype=parameters[0].dtype)
        parts = self._vector.split([parameter.numel() for parameter in parameters])
        self._parts = [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]
        self._compression = _compression(compression, parameters) if self._vector.nbytes >= DENSE_BYTES else None
        self.missing = len(parameters)

    def start(self, op: Any) -> QueuedWork:
        """Start to reduce the gradients; one that is None counts as zeros, a sparse one is made dense."""
        for part, parameter in zip(self._parts, self.parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.detach().to_dense())
        return self._reduce(op)

    def start_with_zeros(self, op: Any) -> QueuedWork:
        """Start to reduce zeros in place of gradients of this rank."""
        self._vector.zero_()
        return self._reduce(op)

    def _reduce(self, op: Any) -> QueuedWork:
        arguments = self._vector, op, self._compression
        return start("gradients", self._vector, reduce_in_place, *arguments)

    @property
    def compression(self) -> Compressor | ErrorFeedback | None:
        """The compressor, with error feedback if it needs that; None if the bucket is not compressed."""
        return self._compression

    @property
    def count(self) -> int:
        """Number of elements."""
        return self._vector.numel()

    def finish(self, scale: float) -> None:
        """Write the result times `scale` to the gradients, which are dense from then on.

        One that is None, as this rank did not use the parameter, is made. That of a frozen parameter stays None: with
        zeros, weight decay and momentum would move it.
        """
        if scale != 1.0:
            self._vector.mul_(scale)
        for part, parameter in zip(self._parts, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                parameter.grad.detach().copy_(part)
            elif parameter.grad is not None or parameter.requires_grad:
                parameter.grad = part.clone()


def _compression(given: str | Compressor | None, parameters: list[torch.Tensor]) -> Compressor | ErrorFeedback | None:
    """Return the compressor of a bucket, with error feedback if it needs that."""
    if given is None:
        return None
    made = compressor(given).shaped([tuple(parameter.shape) for parameter in parameters])
    return ErrorFeedback(made) if made.needs_feedback else made


class GradientReducer:
    """Buckets of gradients that are reduced as they become complete, in the same order on all ranks.

    Parameters
    ----------
    parameters
        The parameters, in the order of the forward pass.
    op, compression, bucket_bytes, passes
        As for :func:`~mpicoll.torch.DistributedOptimizer`.

    Attributes
    ----------
    buckets
        The buckets, in the order in which they are reduced.
    is_on
        Whether backward passes count; otherwise they only accumulate.
    is_synchronized
        Whether the gradients of this step have been reduced, as all ranks know. No bucket is started by a backward
        pass then, since :meth:`synchronize` first asks whether any rank has made one.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], op: Any, compression: Any, bucket_bytes: int, passes: int
    ) -> None:
        self._op, self._compression, self._bucket_bytes, self._passes = op, compression, bucket_bytes, passes
        self.buckets: list[GradientBucket] = []
        self._bucket_of: dict[int, GradientBucket] = {}  # by id of the parameter
        self._works: list[QueuedWork] = []
        self._seen: dict[torch.Tensor, int] = {}
        self._attendance: Attendance | None = None
        self._by_initial_size = True
        self.is_on, self.is_synchronized, self._is_changed, self._is_retired = True, False, False, False
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self.cover(parameters)

    def cover(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make buckets of the parameters that need a gradient and are in none yet; they are reduced after the others.

        The call is local, but all ranks must make it for the same parameters before they reduce the next gradients.
        """
        found = {id(each): each for each in parameters if id(each) not in self._bucket_of and each.requires_grad}
        self._is_changed = self._is_changed or bool(found)  # their gradients came without a hook
        # The hook must not keep this object alive: it would reduce gradients for an optimizer that is gone.
        hook = partial(_note, weakref.ref(self))
        for each in _cut(found.values(), self._bucket_bytes):
            self.buckets.append(GradientBucket(each, self._compression))
            for parameter in each:
                self._bucket_of[id(parameter)] = self.buckets[-1]
                self._take(parameter, hook)

    def _take(self, parameter: torch.Tensor, hook: Any) -> None:
        """Be told of a parameter's gradients, in place of the reducer that was made for it before."""
        before = _reducer_of.pop(id(parameter), None)
        other = None if before is None or before[0]() is not parameter else before[1]()
        if other is not None and other is not self:
            other.retire()
        self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        key = id(parameter)
        _reducer_of[key] = weakref.ref(parameter, lambda _: _reducer_of.pop(key, None)), weakref.ref(self)

    def retire(self) -> None:
        """Reduce nothing more, since another optimizer has some of the parameters."""
        self.is_on, self._is_retired = False, True
        _remove(self._hooks)

    def note(self, parameter: torch.Tensor) -> None:
        """Note that a gradient has been accumulated; start what is complete."""
        self._is_changed = True
        if not self.is_on:
            return
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if self._seen[parameter] > self._passes:
            passes = counted(self._passes, "backward pass", "backward passes")
            raise RuntimeError(
                f"gradients: more than {passes} since the last step; call step(), or give backward_passes_per_step"
            )
        if self._seen[parameter] == self._passes:
            self._bucket_of[id(parameter)].missing -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        if self.is_synchronized:
            return
        while len(self._works) < len(self.buckets) and self.buckets[len(self._works)].missing == 0:
            self._start_next()

    def _start_next(self) -> None:
        if self._attendance is not None and not self._works:
            self._attendance.send(Mark.REDUCES)
        self._works.append(self.buckets[len(self._works)].start(self._op))

    def synchronize(self) -> None:
        """Reduce what is left, wait for all, and write the results to the gradients; collective.

        Nothing is reduced again if no rank has made a backward pass since the last call in the same step.
        """
        if self._is_retired:
            raise RuntimeError("gradients: another DistributedOptimizer was made for parameters of this one")
        if self.is_synchronized and not self._is_any_changed():
            return
        while len(self._works) < len(self.buckets):
            self._start_next()
        works, self._works = self._works, []
        self._seen.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        scale = self._scale_of_present()
        for bucket, work in zip(self.buckets, works, strict=True):
            work.wait()
            bucket.finish(scale)
        self.is_synchronized, self._is_changed = True, False

    def _is_any_changed(self) -> bool:
        """Return whether any rank has made a backward pass since the gradients were reduced; collective.

        A rank cannot answer that by itself: a pass may reach parameters on some of the ranks only.
        """
        attendance = self._attendance or Attendance()
        attendance.send(Mark.CHANGED if self._is_changed else Mark.UNCHANGED)
        attendance.receive()
        return Mark.CHANGED in attendance.marks

    def _scale_of_present(self) -> float:
        """Return the factor that makes an average over all ranks one over those that take part."""
        if self._attendance is None or not self.buckets:
            return 1.0
        present = len(self._attendance.receive())
        by_present = self._op == communicator.Average and not self._by_initial_size
        return size() / present if by_present else 1.0

    @property
    def is_uneven(self) -> bool:
        """True inside :meth:`begin_uneven` and :meth:`end_uneven`."""
        return self._attendance is not None

    def begin_uneven(self, by_initial_size: bool) -> None:
        """Let ranks run out of samples from now on; collective."""
        if self._attendance is not None:
            raise RuntimeError("join: it is inside another join")
        self._attendance, self._by_initial_size = Attendance(), by_initial_size

    def end_uneven(self) -> None:
        """Let every rank have samples again; local."""
        self._attendance, self.is_synchronized = None, False  # not all ranks have synchronised last

    def shadow(self) -> int:
        """Take part with zeros until no rank has samples; return the highest of the ranks that stopped last.

        Collective over ranks that call this, or reduce their gradients.
        """
        attendance = self._attendance
        assert attendance is not None
        while True:
            attendance.send(Mark.ABSENT)
            if not attendance.receive():
                return attendance.present[-1]
            if Mark.REDUCES in attendance.marks:
                for work in [bucket.start_with_zeros(self._op) for bucket in self.buckets]:
                    work.wait()


def _note(reducer: weakref.ref[GradientReducer], parameter: torch.Tensor) -> None:
    """Tell a reducer, if it still exists, that a gradient has been accumulated."""
    found = reducer()
    if found is not None:
        found.note(parameter)


_reducer_of: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[GradientReducer]]] = {}
"""By id of a parameter: the parameter, and the reducer that is told of its gradients."""


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _cut(parameters: Iterable[torch.Tensor], nbytes: int) -> list[list[torch.Tensor]]:
    """Return parameters, last ones first, in lists of one dtype and of about `nbytes` bytes."""
    lists: list[list[torch.Tensor]] = []
    room = 0
    for parameter in reversed(list(parameters)):
        if not lists or room < parameter.nbytes or lists[-1][0].dtype != parameter.dtype:
            lists.append([])
            room = max(nbytes, parameter.nbytes)
        lists[-1].append(parameter)
        room -= parameter.nbytes
    return lists
