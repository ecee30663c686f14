"""Sharded data parallelism: the ranks divide optimizer state, gradients and parameters among them.

The stages of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC20,
section 5); the third is also known as fully sharded data parallelism (Zhao et al., "PyTorch FSDP", VLDB 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Tensors, Whole
from mpicoll.models.initial_parameters import InitialParameters
from mpicoll.models.layers import Arrays
from mpicoll.models.sequential import Model
from mpicoll.optim.layerwise import LayerwiseOptimizer
from mpicoll.optim.loss_scale import LossScale
from mpicoll.optim.optimizers import OPTIMIZERS, Optimizer
from mpicoll.parallel.compressed_chunks import CompressedReduceScatter
from mpicoll.parallel.gradient_norm import Squares, Unify, already_equal, clipping, norm_of, squares_of
from mpicoll.parallel.offloaded_state import OffloadedState
from mpicoll.parallel.parameter_groups import ParameterGroups
from mpicoll.parallel.running_statistics import RunningStatistics
from mpicoll.parallel.sharded_parameters import (
    ChunkedGradients,
    ChunkedParameters,
    Gradients,
    Parameters,
    WholeGradients,
    WholeParameters,
    pieces,
)
from mpicoll.parallel.strategy import CommunicationStatistics, optimizer_for
from mpicoll.train.config import TrainConfig


class Sharded:
    """Sharded strategy: each rank updates its chunk of every parameter group.

    A :class:`~mpicoll.parallel.strategy.SynchronousStrategy`.

    Layers form parameter groups (*units*) of at least ``config.bucket_bytes`` bytes; the last one may be shorter. With
    Psi parameters of K bytes, P ranks and U parameters in the largest unit, a rank holds at most, in bytes,

    ==============  ============  ================  ==========
    config.shard    parameters    gradients         optimizer
    ==============  ============  ================  ==========
    ``none``        K Psi         K Psi             K Psi
    ``optimizer``   K Psi         K Psi             K Psi / P
    ``gradients``   K Psi         K (Psi / P + U)   K Psi / P
    ``parameters``  K(Psi/P+2U)   K (Psi / P + U)   K Psi / P
    ==============  ============  ================  ==========

    and up to P - 1 further elements for each unit, since blocks have equal lengths; without overlap U in place of 2U.
    Collectives need further memory while they run: K U / P for ``optimizer`` on one node; some units with overlap, or
    where collectives use messages.

    In a step a rank sends ``2 (P - 1) / P`` of the bytes of the gradients, as in an allreduce; with ``parameters`` up
    to ``3 (P - 1) / P``: units are gathered for the forward pass, and for the backward pass all but the last two, which
    are still in their buffers. With gradient accumulation, sharded gradients are reduced after each part of the batch,
    and sharded parameters are gathered for each. With ``config.compression``, gradients travel as payloads, of which a
    rank holds those of two units, and are not reduced beside the computation; parameters travel as they are.

    Parameters
    ----------
    initial
        Initial parameters, equal on all ranks of `comm`, of which this rank asks for those that it holds.
    config
        Options; `shard` is not ``"none"``.
    overlap
        With ``optimizer``, True to reduce gradients while others are computed; with ``parameters``, True to gather the
        next unit while one is used. No effect with ``gradients``.
    squares, unify
        Functions that compute the squared norm for clipping, and make sums equal on ranks with the same arrays.
    dtype
        Type of the parameters that are gathered and of the gradients that are reduced; None for the model's.
    updated
        Function of a chunk's place and its parameters, which returns the array that the optimizer updates; None for
        the parameters themselves.
    """

    loss_scale: LossScale | None = None

    def __init__(
        self,
        model: Model,
        initial: InitialParameters,
        comm: MPI.Intracomm,
        config: TrainConfig,
        *,
        overlap: bool,
        squares: Squares = squares_of,
        unify: Unify = already_equal,
        dtype: np.dtype | None = None,
        updated: Callable[[slice, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._squares, self._unify, self.model = squares, unify, model
        self._statistics = RunningStatistics(model, comm)
        self._division = division = ParameterGroups(model, comm, config.bucket_bytes, dtype)
        chunked = config.shard == "parameters"
        self._parameters: Parameters = (
            ChunkedParameters(division, initial, ahead=overlap) if chunked else WholeParameters(division, initial)
        )
        self._compressed = None if config.compression is None else CompressedReduceScatter(division, config.compression)
        self._gradients: Gradients = (
            WholeGradients(division, overlap=overlap, compressed=self._compressed)
            if config.shard == "optimizer"
            else ChunkedGradients(division, self._compressed)
        )
        self._arrays = [model.layout.arrays_in(own.start, own.stop) for own in division.own]
        joined = not OPTIMIZERS[config.optimizer].layerwise
        chunks = zip(division.own, self._parameters.own, strict=True)
        vectors = [chunk if updated is None else updated(own, chunk) for own, chunk in chunks]
        self._offloaded: OffloadedState | None = None
        if config.offload is not None:
            sizes, slots = [vector.nbytes for vector in vectors], len(OPTIMIZERS[config.optimizer].slots)
            self._offloaded = OffloadedState(config.offload, sizes, slots, comm)
        self._optimizers = [
            self._placed(optimizer_for(config, vector, model.layout.decayed(own.start, own.stop, joined=joined)))
            for own, vector in zip(division.own, vectors, strict=True)
        ]
        self._scale, self._last, self._steps, self._part = 1.0, True, 0, 0
        self._applied = np.zeros(1, np.int64)  # updates of each chunk, those before a checkpoint included

    def _placed(self, optimizer: Optimizer) -> Optimizer:
        """Return a new optimizer, with its state in the file if there is one."""
        return optimizer if self._offloaded is None else self._offloaded.take(optimizer)

    @property
    def division(self) -> ParameterGroups:
        """Ownership of the flat vector by ranks."""
        return self._division

    @property
    def updates(self) -> int:
        """Number of updates of each chunk, those before a checkpoint included."""
        return int(self._applied[0])

    @updates.setter
    def updates(self, updates: int) -> None:
        self._applied[0] = updates

    def begin_step(self, step: int) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; keys of compressors come from the number of updates."""
        if not self._optimizers[0].depends_on_steps:
            self._applied[0] = step

    # ---- Storage ----------------------------------------------------------------------------------------------------

    def parameters(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""
        return self._parameters.arrays(layer)

    def release(self, layer: int) -> None:
        """See :class:`~mpicoll.models.sequential.ParameterStore`; the buffer is taken when another unit needs it."""

    def gradients(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""
        return self._gradients.arrays(layer)

    def complete(self, layer: int) -> None:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""
        self._gradients.complete(layer, last=self._last)

    # ---- Strategy ---------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Do nothing: no other rank changes the parameters."""

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`."""
        self._scale, self._last = scale, last
        if self._compressed is not None:
            self._compressed.begin(self.updates, self._part, compress=compress)
        self._part += 1

    def reduce(self) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`."""
        self._gradients.finish()
        with self._division.meter.waiting():
            self._unify(self._own_with_starts(self._gradients.own))
        self._steps += 1

    def update(self, rate: float, clip: float | None) -> float:
        """See :class:`~mpicoll.parallel.strategy.Strategy`."""
        norm = self._norm() if clip is not None else math.nan
        scale = self._scale * clipping(norm, clip)
        self._parameters.before_update()
        self._take_step(rate, scale)
        self.discard()
        self._parameters.after_update()
        return norm

    def _take_step(self, rate: float, scale: float) -> None:
        """Update this rank's chunks; collective for optimizers that need norms of whole arrays, one Allreduce."""
        gradients = self._own_gradients()
        for optimizer in self._optimizers:
            optimizer.steps = int(self._applied[0])
        layerwise = [each for each in self._optimizers if isinstance(each, LayerwiseOptimizer)]
        if layerwise:
            squares = np.zeros((self._division.layout.array_count, 2))
            for number, (optimizer, gradient) in enumerate(zip(layerwise, gradients, strict=True)):
                squares[self._arrays[number]] += optimizer.prepare(gradient, scale)
                self._release(number)
            with self._division.meter.waiting():
                self._division.comm.Allreduce(MPI.IN_PLACE, squares, MPI.SUM)
            for number, (optimizer, gradient) in enumerate(zip(layerwise, gradients, strict=True)):
                optimizer.finish(gradient, rate, scale, squares[self._arrays[number]])
                self._release(number)
        else:
            for number, (each, gradient) in enumerate(zip(self._optimizers, gradients, strict=True)):
                each.apply(gradient, rate, scale=scale)
                self._release(number)
        self._applied += 1

    def _release(self, number: int) -> None:
        """Take an updated group's offloaded state out of memory."""
        if self._offloaded is not None:
            self._offloaded.release(number)

    def discard(self) -> None:
        """Discard the gradients of this step, after :meth:`reduce` or before; collective."""
        self._gradients.forget()
        self._part = 0

    def _norm(self) -> float:
        squares = np.array([self._squares(self._own_with_starts(self._own_gradients()))])
        with self._division.meter.waiting():
            self._division.comm.Allreduce(MPI.IN_PLACE, squares, MPI.SUM)
        return self._scale * norm_of(float(squares[0]))

    def _own_gradients(self) -> list[np.ndarray]:
        return self._gradients.own

    def _own_with_starts(self, chunks: list[np.ndarray]) -> list[tuple[int, np.ndarray]]:
        return [(own.start, chunk) for own, chunk in zip(self._division.own, chunks, strict=True)]

    def meet(self) -> None:
        """Make running statistics equal; there is one copy of the parameters."""
        self._statistics.meet()

    def digest(self) -> bytes:
        """Return the SHA-256 of the parameters, for which chunks are gathered, and of running statistics if any."""
        return self._statistics.digest(self._parameters.digest())

    def tensors(self) -> Tensors:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; the names are those of Replicated."""
        first = self._optimizers[0]
        state = {
            name: pieces(self._division, [optimizer.state[name] for optimizer in self._optimizers])
            for name in first.slots
        }
        steps = {"optimizer_steps": Whole(self._applied)} if first.depends_on_steps else {}
        return {"parameters": self._parameters.entry(), **state, **steps, **self._statistics.tensors()}

    def own_state(self) -> dict[str, np.ndarray]:
        """Return an empty dict: all state is in :meth:`tensors`."""
        return {}

    def load_own_state(self, state: dict[str, np.ndarray]) -> bool:
        """Do nothing; return True."""
        return True

    def adopt(self, states: dict[str, list[np.ndarray]], ranks: int) -> None:
        """Do nothing: all state is in :meth:`tensors`."""

    def clear_residuals(self) -> None:
        """Do nothing: there are no residuals."""

    def nbytes(self) -> dict[str, int]:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; peak values, as in the table above."""
        state = sum(optimizer.nbytes for optimizer in self._optimizers)
        payloads = 0 if self._compressed is None else self._compressed.nbytes
        return {
            "parameters": self._parameters.nbytes,
            "gradients": self._gradients.nbytes + payloads,
            **({"optimizer": state} if self._offloaded is None else {"optimizer": 0, "offloaded": state}),
        }

    def traffic(self) -> CommunicationStatistics:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; includes evaluation, which also gathers parameters."""
        division = self._division
        dense = 2 * (division.size - 1) / division.size * division.count * division.dtype.itemsize * self._steps
        return division.meter.traffic(dense)
