"""Pipeline parallelism: every stage has some of the layers, and micro-batches pass through the stages in order.

Forward (0, 1, ...) and backward (a, b, ...) passes of 6 micro-batches on 4 stages, one-forward-one-backward; both are
drawn with equal length::

    stage 0   0 1 2 3       a 4 b 5 c   d   e   f
    stage 1     0 1 2     a 3 b 4 c 5 d   e   f
    stage 2       0 1   a 2 b 3 c 4 d 5 e   f
    stage 3         0 a 1 b 2 c 3 d 4 e 5 f

Stage s starts with as many forward passes as there are stages after it, then alternates forward and backward passes, so
that at most ``stages - s`` micro-batches are in flight in it. Fill-drain makes all forward passes, then all backward
ones; it takes as long, but all micro-batches are in flight at once. Both are idle in ``stages - 1`` of
``micro-batches + stages - 1`` passes, and both make the backward passes in order, so that sums of gradients are equal
bit for bit.

(Fill-drain: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism", NeurIPS
2019, section 2. One-forward-one-backward with a flush: Narayanan et al., "Memory-efficient pipeline-parallel DNN
training", ICML 2021, and "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021,
section 2.2.)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.communicator.topology import meet_on_nodes
from mpicoll.errors import CollectiveTimeout
from mpicoll.models.layers import Shape, Workspace
from mpicoll.models.micro_batches import GradientStore, MicroBatch
from mpicoll.models.sequential import Model
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS, wait_until

_FORWARD, _BACKWARD = 1, 2
"""Tags of activations and of their gradients."""


def stage_bounds(counts: Sequence[int], stages: int) -> list[int]:
    """Return the first layer of each stage, and the number of layers; the largest stage is as small as possible.

    Parameters
    ----------
    counts
        Number of parameters of each layer; there are at least `stages` layers.
    """
    ends = list(itertools.accumulate(counts, initial=0))
    # Of the first layers, their number the key, in so many stages: the size of the largest, and where they begin.
    best = {layers: (end, [0]) for layers, end in enumerate(ends) if layers > 0}
    for _ in range(1, stages):
        best = {
            layers: min((max(best[cut][0], end - ends[cut]), [*best[cut][1], cut]) for cut in best if cut < layers)
            for layers, end in enumerate(ends)
            if layers > min(best)
        }
    return [*best[len(counts)][1], len(counts)]


def turns(schedule: str, stage: int, stages: int, count: int) -> Iterator[tuple[bool, int]]:
    """Yield the passes of a stage over `count` micro-batches: True for a forward pass, and the micro-batch's number.

    Parameters
    ----------
    schedule
        ``"1f1b"`` or ``"gpipe"``.
    """
    ahead = min(most_in_flight(schedule, stage, stages, count) - 1, count)
    yield from ((True, number) for number in range(ahead))
    for number in range(count):
        if number + ahead < count:
            yield True, number + ahead
        yield False, number


def most_in_flight(schedule: str, stage: int, stages: int, count: int) -> int:
    """Return the largest number of micro-batches of which a stage has made the forward but not the backward pass."""
    return count if schedule == "gpipe" else min(stages - stage, count)


class _Sent(NamedTuple):
    """A message in flight, and its destination."""

    request: MPI.Request
    peer: int
    what: str


class _Link:
    """Messages between stages; raises CollectiveTimeout after waiting `timeout` seconds for one."""

    def __init__(self, comm: MPI.Intracomm, timeout: float) -> None:
        self._comm, self._timeout, self.waited = comm, timeout, 0.0
        self._polls = comm.channel.polls if isinstance(comm, Intracomm) else meet_on_nodes(comm).polls

    def receive(self, into: np.ndarray, peer: int, tag: int, what: str) -> np.ndarray:
        request = self._comm.Irecv(into, peer, tag)
        try:
            self._wait(request, peer, f"for {what} from stage {peer}")
        except CollectiveTimeout:
            request.Cancel()
            raise
        return into

    def send(self, array: np.ndarray, peer: int, tag: int, what: str) -> _Sent:
        return _Sent(self._comm.Isend(array, peer, tag), peer, what)

    def finish(self, sent: list[_Sent]) -> None:
        while sent:
            request, peer, what = sent[0]
            self._wait(request, peer, f"until stage {peer} took {what}")
            del sent[0]

    def _wait(self, request: MPI.Request, peer: int, what: str) -> None:
        def look(waited: float) -> float:
            if waited >= self._timeout:
                here = self._comm.Get_rank()
                raise CollectiveTimeout(f"stage {here} waited {waited:.3g} s in vain {what}", (peer,))
            return min(waited + LOOK_AFTER_SECONDS, self._timeout)

        began = time.perf_counter()
        wait_until(request.Test, self._polls, look)
        self.waited += time.perf_counter() - began


class _Slot:
    """State of a micro-batch in flight on a stage."""

    def __init__(self, model: Model) -> None:
        self.tape, self.received = model.tape(), Workspace()
        self.delta = np.empty((0, 0))
        self.sent: list[_Sent] = []


class PipelineStage:
    """One stage of a pipeline; a :class:`~mpicoll.models.micro_batches.StepExecutor`.

    The constructor and every method are collective over `comm`, with micro-batches of equally many rows on all stages.
    The first stage uses the features, the last stage the labels. The last stage returns loss and hits, the others
    zeros.

    Parameters
    ----------
    model
        This stage's layers.
    inputs
        Shape of a sample's input of the first of them.
    comm
        A communicator with one rank for each stage, in their order.
    schedule
        ``"1f1b"`` or ``"gpipe"``.
    timeout
        Seconds that a stage waits for another one's message.

    Raises
    ------
    CollectiveTimeout
        By the methods, if a message does not arrive in time; it names both stages. The stage cannot be used afterwards.
    """

    def __init__(self, model: Model, inputs: Shape, comm: MPI.Intracomm, schedule: str, timeout: float) -> None:
        self._model, self._inputs, self._schedule = model, inputs, schedule
        self._stage, self._stages = comm.Get_rank(), comm.Get_size()
        self._link, self._slots = _Link(comm, timeout), [_Slot(model)]

    @property
    def waited(self) -> float:
        """See :class:`~mpicoll.models.micro_batches.StepExecutor`."""
        return self._link.waited + sum(layer.waited for layer in self._model.layers)

    @property
    def tapes(self) -> int:
        """Largest number of micro-batches in flight at once."""
        return len(self._slots)

    def gradients(
        self, strategy: GradientStore, parts: Sequence[tuple[Any, ...]], scale: float, *, compress: bool
    ) -> tuple[float, int]:
        """See :class:`~mpicoll.models.micro_batches.StepExecutor`; each part is a micro-batch."""
        last = len(parts) - 1
        rooms = most_in_flight(self._schedule, self._stage, self._stages, len(parts))
        self._slots += [_Slot(self._model) for _ in range(rooms - len(self._slots))]
        loss, correct = 0.0, 0
        for forward, number in turns(self._schedule, self._stage, self._stages, len(parts)):
            slot, part = self._slots[number % rooms], MicroBatch(*parts[number])
            if forward:
                found = self._forward(strategy, slot, part, number)
                loss, correct = loss + found[0], correct + found[1]
            else:
                strategy.begin(scale, last=number == last, compress=compress)
                self._backward(strategy, slot, len(part.x), number)
        for slot in self._slots:
            self._link.finish(slot.sent)
        return loss, correct

    def loss(self, strategy: GradientStore, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """See :class:`~mpicoll.models.micro_batches.StepExecutor`."""
        found = self._forward(strategy, self._slots[0], MicroBatch(x, y), 0)
        self._link.finish(self._slots[0].sent)
        return found

    def _forward(self, strategy: GradientStore, slot: _Slot, part: MicroBatch, number: int) -> tuple[float, int]:
        x: np.ndarray = part.x
        self._link.finish(slot.sent)
        what = f"the activations of micro-batch {number}"
        if self._stage > 0:
            room = slot.received.rows("x", len(x), self._inputs, self._model.dtype)
            x = self._link.receive(room, self._stage - 1, _FORWARD, what)
        out = self._model.forward(strategy, x, slot.tape, part.key)
        if self._stage < self._stages - 1:
            slot.sent.append(self._link.send(out, self._stage + 1, _FORWARD, what))
            return 0.0, 0
        slot.delta = self._model.place_of_gradient(out)
        return self._model.loss_function(slot.delta, part.y)

    def _backward(self, strategy: GradientStore, slot: _Slot, rows: int, number: int) -> None:
        what, first = f"the gradients of micro-batch {number}", self._stage == 0
        if self._stage < self._stages - 1:
            room = slot.received.rows("delta", rows, self._model.layers[-1].output, self._model.dtype)
            slot.delta = self._link.receive(room, self._stage + 1, _BACKWARD, what)
        into = self._model.backward(strategy, slot.delta, slot.tape, below=not first, add=number > 0)
        if into is not None:
            slot.sent.append(self._link.send(into, self._stage - 1, _BACKWARD, what))
