"""Strategy interface: where parameters, gradients and optimizer state live and when they are synchronised.

A step has three stages: gradients, of which each rank computes those of its samples, in one or several parts; their sum
over the ranks; the update of the parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Tensors, Whole
from mpicoll.comm import Intracomm
from mpicoll.communicator.random_choices import begin_anew
from mpicoll.gradients import GradientSynchronizer
from mpicoll.models.layers import Arrays
from mpicoll.models.sequential import FlatParameters, Model, ParameterStore
from mpicoll.optim.local_momentum import LocalMomentum
from mpicoll.optim.loss_scale import LossScale
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.optim.update_rule import Optimizer, ParameterSpan
from mpicoll.parallel.gradient_norm import Squares, Unify, already_equal, clipping, norm_of, squares_of
from mpicoll.parallel.running_statistics import RunningStatistics
from mpicoll.train.config import FEEDBACK, TrainConfig

RESIDUAL = "residual."
"""Prefix of the names of residuals in a rank's own state."""


class CommunicationStatistics(NamedTuple):
    """Communication statistics of a rank so far.

    Attributes
    ----------
    sent, dense
        Bytes sent, and bytes that uncompressed allreduces of the same gradients would have sent.
    under_way, waited
        Seconds from the first message of a step to the last, and seconds of these without computation.
    """

    sent: float = 0.0
    dense: float = 0.0
    under_way: float = 0.0
    waited: float = 0.0


class Strategy(ParameterStore, Protocol):
    """Strategy of one rank; the model uses it as its :class:`~mpicoll.models.sequential.ParameterStore`.

    In synchronous training, the constructor and every method but :meth:`nbytes` and :meth:`traffic` are collective over
    the data-parallel ranks.
    """

    def begin_step(self, step: int) -> None:
        """Begin step number `step` of the run, to which the random choices of compressors belong; not collective."""

    def fetch(self) -> None:
        """Read the newest parameters for the next step, if other ranks change them."""

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """Start the gradients of a part of the step's samples.

        Parameters
        ----------
        scale
            Factor of the part's gradients.
        last
            True for the last part of the step, whose gradients may be sent as soon as they are ready.
        compress
            True if gradients are compressed in this step.
        """

    def reduce(self) -> None:
        """Sum the gradients over the ranks, or wait until they are summed."""

    def update(self, rate: float, clip: float | None) -> float:
        """Update the parameters with learning rate `rate`; return the norm of all gradients.

        Parameters
        ----------
        clip
            Largest norm, to which larger gradients are scaled down; None for no clipping, the norm may then be NaN.
        """

    def meet(self) -> None:
        """Make all replicas equal, before an evaluation or checkpoint."""

    def digest(self) -> bytes:
        """Return a digest of 32 bytes, which is equal on all ranks unless their parameters differ."""

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by purpose: ``"parameters"``, ``"gradients"``, ``"optimizer"``, ..."""

    def traffic(self) -> CommunicationStatistics:
        """Return the communication statistics so far."""


class SynchronousStrategy(Strategy, Protocol):
    """Strategy of synchronous training, in which all ranks save the state together.

    Attributes
    ----------
    loss_scale
        The loss scale; None for gradients that need none.
    """

    loss_scale: LossScale | None

    def tensors(self) -> Tensors:
        """Return the arrays of the state, not copies, for a checkpoint to save or restore."""

    def own_state(self) -> dict[str, np.ndarray]:
        """Return copies of the state of this rank alone, such as residuals."""

    def load_own_state(self, state: dict[str, np.ndarray]) -> bool:
        """Restore the state of :meth:`own_state`; return False, without restoring residuals, if those do not fit."""

    def adopt(self, states: dict[str, list[np.ndarray]], ranks: int) -> None:
        """Restore from the own states of another number of ranks, `ranks`; residuals are not restored.

        Parameters
        ----------
        states
            By name, the arrays of the former ranks that this rank replaces, of which there may be none.
        """

    def clear_residuals(self) -> None:
        """Clear the residuals."""


def optimizer_for(config: TrainConfig, parameters: np.ndarray, spans: Sequence[ParameterSpan]) -> Optimizer:
    """Return the optimizer of the options for a vector of parameters that consists of `spans`."""
    kind = OPTIMIZERS[config.optimizer]
    return kind(parameters, config.optimizer_settings, weight_decay=config.weight_decay, spans=spans)


class FlatVectorStrategy:
    """Base of strategies whose ranks hold the whole model and synchronise by a GradientSynchronizer.

    Attributes
    ----------
    sync
        The GradientSynchronizer, which sums or averages a vector over the ranks.
    """

    loss_scale: LossScale | None = None

    def __init__(
        self,
        model: Model,
        parameters: np.ndarray,
        comm: MPI.Intracomm,
        config: TrainConfig,
        *,
        average: bool,
        dtype: np.dtype | None = None,
    ) -> None:
        self._vector, self._size = parameters, comm.Get_size()
        self._statistics = RunningStatistics(model, comm)
        self.sync = GradientSynchronizer(
            model.shapes,
            comm=comm,
            compression=config.compression,
            error_feedback=FEEDBACK[config.error_feedback],
            bucket_bytes=config.bucket_bytes,
            average=average,
            dtype=dtype or model.dtype,
        )
        joined = not OPTIMIZERS[config.optimizer].layerwise
        self._spans = model.layout.decayed(0, model.parameter_count, joined=joined)
        self._flat: FlatParameters

    def parameters(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""
        return self._flat.parameters(layer)

    def release(self, layer: int) -> None:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""

    def gradients(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""
        return self._flat.gradients(layer)

    def complete(self, layer: int) -> None:
        """See :class:`~mpicoll.models.sequential.ParameterStore`."""

    def fetch(self) -> None:
        """Do nothing: no other rank changes the parameters."""

    def begin_step(self, step: int) -> None:
        """See :class:`Strategy`."""
        if isinstance(self.sync.comm, Intracomm):
            begin_anew(self.sync.comm.channel, step)

    def _residuals(self) -> dict[str, np.ndarray]:
        return {RESIDUAL + name: array for name, array in self.sync.state().items()}

    def _load_residuals(self, state: dict[str, np.ndarray]) -> bool:
        try:
            self.sync.load({name[len(RESIDUAL) :]: array for name, array in state.items() if name.startswith(RESIDUAL)})
        except ValueError:
            return False
        return True

    def clear_residuals(self) -> None:
        """See :class:`Strategy`."""
        self.sync.load({})

    def traffic(self) -> CommunicationStatistics:
        """See :class:`Strategy`."""
        sync, size = self.sync, self._size
        return CommunicationStatistics(
            sync.sent_nbytes, 2 * (size - 1) * sync.nbytes / size, sync.under_way_seconds, sync.seconds
        )


class Replicated(FlatVectorStrategy):
    """Replicated data parallelism: gradients are summed in buckets by Allreduce; a :class:`Strategy`.

    With ``overlap`` a bucket is summed while the gradients of lower layers are computed. With error feedback and the
    optimizer momentum, each rank's velocity is sent in place of its gradients
    (:class:`~mpicoll.optim.local_momentum.LocalMomentum`). Clipping then applies to each rank's gradients before they
    enter the velocity, at ``clip / sqrt(size)``, and turns overlap off. (Lin et al., "Deep gradient compression", ICLR
    2018, section 3.2.)

    Parameters
    ----------
    parameters : (model.parameter_count,) of model.dtype
        Initial parameters, equal on all ranks of `comm`; updated in place.
    overlap
        True to sum gradients over the ranks while others are computed.
    squares, unify
        Functions that compute the squared norm for clipping, and make sums equal on ranks with the same arrays.
    """

    def __init__(
        self,
        model: Model,
        parameters: np.ndarray,
        comm: MPI.Intracomm,
        config: TrainConfig,
        *,
        overlap: bool,
        squares: Squares = squares_of,
        unify: Unify = already_equal,
    ) -> None:
        super().__init__(model, parameters, comm, config, average=False)
        self._bounds, self._clip, self._squares = model.layout.bounds, config.clip, squares
        self._unify = unify
        compressor = self.sync.compression
        is_lossy = self.sync.error_feedback or (compressor is not None and compressor.needs_feedback)
        self._local = is_lossy and config.optimizer == "momentum"
        self._overlap = overlap and not (self._local and config.clip is not None)
        self._optimizer: LocalMomentum | Optimizer = (
            LocalMomentum(
                parameters,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
                spans=self._spans,
            )
            if self._local
            else optimizer_for(config, parameters, self._spans)
        )
        self._flat = FlatParameters(model.layout, parameters, self.sync.flat)
        self._scale, self._last, self._compress = 1.0, True, True

    def complete(self, layer: int) -> None:
        """See :class:`~mpicoll.models.sequential.ParameterStore`; with overlap, starts buckets that are complete."""
        if self._overlap and self._last:
            start, stop = self._bounds[layer], self._bounds[layer + 1]
            self._take_velocity(start, stop)
            self.sync.start(start, compress=self._compress)

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`Strategy`."""
        self._scale, self._last, self._compress = scale, last, compress

    def reduce(self) -> None:
        """See :class:`Strategy`."""
        if self._overlap:
            self.sync.wait()
        else:
            if self._local and self._clip is not None:
                self._scale *= clipping(self._own_norm(), self._clip / math.sqrt(self._size))
            self._take_velocity(0, self._vector.size)
            self.sync.synchronize(compress=self._compress)
        self._unify([(0, self.sync.flat)])

    def _own_norm(self) -> float:
        return self._scale * norm_of(self._squares([(0, self.sync.flat)]))

    def _take_velocity(self, start: int, stop: int) -> None:
        if isinstance(self._optimizer, LocalMomentum):
            self._optimizer.local(self.sync.flat[start:stop], self._scale, start)

    def update(self, rate: float, clip: float | None) -> float:
        """See :class:`Strategy`."""
        if isinstance(self._optimizer, LocalMomentum):
            self._optimizer.step(self.sync.flat, rate)
            return math.nan
        norm = self._own_norm() if clip is not None else math.nan
        self._optimizer.apply(self.sync.flat, rate, scale=self._scale * clipping(norm, clip))
        return norm

    def meet(self) -> None:
        """Make running statistics equal; the replicas' parameters always are."""
        self._statistics.meet()

    def digest(self) -> bytes:
        """Return the SHA-256 of the parameters, and of running statistics if there are any."""
        return self._statistics.digest(hashlib.sha256(self._vector.data).digest())

    def tensors(self) -> Tensors:
        """See :class:`Strategy`."""
        shared = self._optimizer.shared_state()
        state = {name: Whole(array) for name, array in shared.items()}
        return {"parameters": Whole(self._vector), **state, **self._statistics.tensors()}

    def own_state(self) -> dict[str, np.ndarray]:
        """See :class:`Strategy`."""
        own = {f"optimizer.{name}": array.copy() for name, array in self._optimizer.own_state().items()}
        return own | self._residuals()

    def load_own_state(self, state: dict[str, np.ndarray]) -> bool:
        """See :class:`Strategy`."""
        for name, array in self._optimizer.own_state().items():
            array[...] = state[f"optimizer.{name}"]
        return self._load_residuals(state)

    def adopt(self, states: dict[str, list[np.ndarray]], ranks: int) -> None:
        """See :class:`Strategy`; the sum of the velocities over the ranks stays the same."""
        for name, array in self._optimizer.own_state().items():
            array[...] = sum(states[f"optimizer.{name}"], np.zeros_like(array))

    def nbytes(self) -> dict[str, int]:
        """See :class:`Strategy`."""
        return {
            "parameters": self._vector.nbytes,
            "gradients": self.sync.flat.nbytes,
            "optimizer": self._optimizer.nbytes,
        }
