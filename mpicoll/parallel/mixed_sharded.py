"""Sharded data parallelism in mixed precision: parameters and gradients travel in 16 bits, masters are sharded."""

from __future__ import annotations

import math

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Tensors
from mpicoll.models.initial_parameters import InitialParameters
from mpicoll.models.layers import Arrays
from mpicoll.models.sequential import Model
from mpicoll.parallel.gradient_norm import Squares, Unify, already_equal, clipping, squares_of
from mpicoll.parallel.mixed_precision import (
    DTYPES,
    RoundedParameters,
    WidenedLayer,
    loss_scale_of,
    narrow,
    scale_tensors,
    widen,
)
from mpicoll.parallel.sharded import Sharded
from mpicoll.parallel.sharded_parameters import ChunkedGradients, pieces
from mpicoll.train.config import TrainConfig


class MixedSharded(Sharded):
    """Sharded strategy in mixed precision; see :mod:`mpicoll.parallel.mixed_precision`.

    Each rank holds float32 masters and optimizer state of its chunk of every parameter group, and updates them. The
    parameters that are gathered, and the gradients that are reduced, have 16 bits: a rank sends half of the bytes of
    :class:`~mpicoll.parallel.sharded.Sharded`. Layers get copies of their parameters in float32, one layer at a time.
    With ``gradients`` and ``parameters``, the parts of a step are added up in float32 chunks; with ``optimizer``, in a
    float32 vector of all gradients if there are several parts.

    Parameters are those of :class:`~mpicoll.parallel.sharded.Sharded`.
    """

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
    ) -> None:
        masters = _Masters(initial)
        dtype = DTYPES[config.precision]
        super().__init__(model, RoundedParameters(initial), comm, config, overlap=overlap, squares=squares, unify=unify,
                         dtype=dtype, updated=masters.of)  # fmt: skip
        self._masters = masters.chunks
        self.loss_scale = loss_scale_of(config)
        self._parameter_room, self._gradient_room = WidenedLayer(model.layout), WidenedLayer(model.layout)
        parts = config.accumulate * config.microbatches
        self._sums: np.ndarray | None = None
        if parts > 1 and not isinstance(self._gradients, ChunkedGradients):
            self._sums = np.zeros(model.parameter_count, np.float32)
        self._several = parts > 1

    @property
    def _factor(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def parameters(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.models.sequential.ParameterStore`; in float32, valid until those of another layer."""
        return self._parameter_room.widened(layer, self._parameters.arrays(layer))

    def gradients(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""
        layout = self._division.layout
        if self._sums is not None:
            return layout.views(layer, self._sums[layout.bounds[layer] : layout.bounds[layer + 1]])
        arrays = self._gradient_room.arrays(layer)
        if self._several:  # the model adds all parts but the first, and the sums are elsewhere
            for array in arrays:
                array[...] = 0
        return arrays

    def complete(self, layer: int) -> None:
        """See :class:`~mpicoll.models.sequential.ParameterStore`; rounds the layer's gradients."""
        if self._sums is None or self._last:
            layout = self._division.layout
            wide = self._gradient_room.arrays(layer)
            if self._sums is not None:
                wide = layout.views(layer, self._sums[layout.bounds[layer] : layout.bounds[layer + 1]])
            for array, low in zip(wide, self._gradients.arrays(layer), strict=True):
                array *= np.float32(self._scale * self._factor)
                narrow(array, low)
        super().complete(layer)

    def update(self, rate: float, clip: float | None) -> float:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; skips a step whose gradients overflow, on all ranks.

        Raises
        ------
        NonFiniteLoss
            On every rank, if gradients overflow at the smallest loss scale.
        """
        factor, norm = self._factor, math.nan
        self._scale = 1 / factor  # of the gradients as they are stored
        if clip is not None or self.loss_scale is not None:
            norm = self._norm()
        if self.loss_scale is None or self.loss_scale.accept(finite=math.isfinite(norm)):
            self._apply(rate, clipping(norm, clip) / factor)
        self._gradients.forget()
        return norm

    def _apply(self, rate: float, scale: float) -> None:
        self._parameters.before_update()
        self._take_step(rate, scale)
        for master, low in zip(self._masters, self._parameters.own, strict=True):
            narrow(master, low)
        self._parameters.after_update()

    def _own_gradients(self) -> list[np.ndarray]:
        """Return this rank's chunks of the sums in float32."""
        found = []
        for chunk in self._gradients.own:
            if chunk.dtype == np.float32:
                found.append(chunk)
            else:
                found.append(np.empty(chunk.size, np.float32))
                widen(chunk, found[-1])
        return found

    def meet(self) -> None:
        """Make running statistics equal, and round the masters, which a checkpoint may have restored."""
        super().meet()
        self._parameters.before_update()
        for master, low in zip(self._masters, self._parameters.own, strict=True):
            narrow(master, low)
        self._parameters.after_update()

    def tensors(self) -> Tensors:
        """See :class:`~mpicoll.parallel.strategy.SynchronousStrategy`; the parameters are the masters."""
        masters = pieces(self._division, self._masters)
        return {**super().tensors(), "parameters": masters, **scale_tensors(self.loss_scale)}

    def nbytes(self) -> dict[str, int]:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; masters count as the optimizer's."""
        held, sums = super().nbytes(), 0 if self._sums is None else self._sums.nbytes
        held["parameters"] += self._parameter_room.nbytes
        held["gradients"] += self._gradient_room.nbytes + sums
        held["optimizer"] += sum(master.nbytes for master in self._masters)
        return held


class _Masters:
    """Float32 chunks in place of those that are gathered."""

    def __init__(self, initial: InitialParameters) -> None:
        self._initial = initial
        self.chunks: list[np.ndarray] = []

    def of(self, own: slice, low: np.ndarray) -> np.ndarray:
        """Return a new master of a chunk, with the initial parameters."""
        master = np.empty(low.size, np.float32)
        self._initial.fill(own.start, master)
        self.chunks.append(master)
        return master
