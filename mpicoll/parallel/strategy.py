"""Strategy interface: where parameters, gradients and optimizer state live and when they are synchronised.

A step is: the gradients of the batch, of which each rank takes some samples, in one part or several; their sum over the
ranks; an update. A strategy says where parameters, gradients and the optimiser's state live, and when they are sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Tensors, Whole
from mpicoll.gradients import GradientSynchronizer
from mpicoll.models.layers import Arrays
from mpicoll.models.sequential import FlatParameters, Model, ParameterStore
from mpicoll.optim.local_momentum import LocalMomentum
from mpicoll.optim.optimizers import OPTIMIZERS, Optimizer, ParameterSpan
from mpicoll.train.config import FEEDBACK, TrainConfig

RESIDUAL = "residual."
"""Begins the names of residuals among a rank's own state."""


class CommunicationStatistics(NamedTuple):
    """Communication statistics of a rank: bytes sent so far, and seconds that this took.

    Attributes
    ----------
    sent, dense
        Bytes sent, and those of plain allreduces of the same gradients.
    under_way, waited
        From the first message of a step to the last, and the part of it in which nothing was computed.
    """

    sent: float = 0.0
    dense: float = 0.0
    under_way: float = 0.0
    waited: float = 0.0


Gradients = Sequence[tuple[int, np.ndarray]]
"""Pieces of a vector of gradients, each with the number of its first element."""
Squares = Callable[[Gradients], float]
"""Adds up the squares of all gradients of the model, given this rank's; collective over the ranks that share a replica.

What several of these ranks hold is counted once.
"""


class Strategy(ParameterStore, Protocol):
    """One rank's part; the model uses it as its :class:`~mpicoll.models.sequential.ParameterStore`.

    Where ranks take every step together, construction and every method but `nbytes` and `traffic` are collective over
    the ranks that hold the same model between them.
    """

    def fetch(self) -> None:
        """Bring the parameters up to date for the next step, where others change them meanwhile."""

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """Say that the gradients of a part of the step's samples come; they count `scale` times.

        With `last` they complete the step's own ones and may be sent, compressed or as they are.
        """

    def reduce(self) -> None:
        """Add the gradients up over the ranks, or wait until that is done."""

    def update(self, rate: float, clip: float | None) -> float:
        """Take the step; return the norm of all gradients.

        Parameters
        ----------
        clip
            Gradients whose norm is larger are scaled down to it; None leaves them, and the norm may then be NaN.
        """

    def meet(self) -> None:
        """Bring replicas that may have gone apart together again, before they are looked at."""

    def digest(self) -> bytes:
        """Return 32 bytes that are the same on all ranks if all is well."""

    def nbytes(self) -> dict[str, int]:
        """Return bytes that this rank holds for ``"parameters"``, ``"gradients"``, ``"optimizer"`` and others."""

    def traffic(self) -> CommunicationStatistics:
        """Return what was sent so far."""


class SynchronousStrategy(Strategy, Protocol):
    """Strategy of ranks that take every step together, whose state all of them save."""

    def tensors(self) -> Tensors:
        """Return the state, for a checkpoint or to be filled from one: the arrays in use."""

    def own_state(self) -> dict[str, np.ndarray]:
        """Return what belongs to this rank alone, such as residuals; copies."""

    def load_own_state(self, state: dict[str, np.ndarray]) -> bool:
        """Go on from what `own_state` returned; return False if the residuals do not fit, and are left as they are."""

    def adopt(self, states: dict[str, list[np.ndarray]], ranks: int) -> None:
        """Go on from what so many other ranks had of their own: this rank takes the place of some of them, or of none.

        Residuals are not taken over.
        """

    def clear_residuals(self) -> None:
        """Let residuals begin anew."""


def norm_of(squares: float) -> float:
    """Return the square root; inf and NaN stay what they are."""
    return math.sqrt(squares) if squares >= 0 else math.nan


def sum_of_squares(x: np.ndarray) -> float:
    """Return the sum of squares of a vector, added up in float64."""
    return float(np.einsum("i,i->", x, x, dtype=np.float64))


def squares_of(own: Gradients) -> float:
    """Return the sum of squares: :data:`Squares` where nobody shares the model."""
    return sum(sum_of_squares(piece) for _, piece in own)


def clipping(norm: float, clip: float | None) -> float:
    """Return the factor that brings gradients of that norm down to `clip`; 1 if they are below it, or not finite."""
    return clip / norm if clip is not None and clip < norm < math.inf else 1.0


def optimizer_for(config: TrainConfig, parameters: np.ndarray, spans: Sequence[ParameterSpan]) -> Optimizer:
    """Return the optimizer that the options name, for parameters of which `spans` are the parts."""
    kind = OPTIMIZERS[config.optimizer]
    return kind(parameters, config.optimizer_settings, weight_decay=config.weight_decay, spans=spans)


class FlatVectorStrategy:
    """Base of strategies whose ranks hold the whole model and synchronise by a GradientSynchronizer.

    Attributes
    ----------
    sync
        Adds up a vector over the ranks, or takes its mean.
    """

    def __init__(
        self, model: Model, parameters: np.ndarray, comm: MPI.Intracomm, config: TrainConfig, *, average: bool
    ) -> None:
        self._vector, self._size = parameters, comm.Get_size()
        self.sync = GradientSynchronizer(
            model.shapes,
            comm=comm,
            compression=config.compression,
            error_feedback=FEEDBACK[config.error_feedback],
            bucket_bytes=config.bucket_bytes,
            average=average,
            dtype=model.dtype,
        )
        self._spans = model.layout.decayed(0, model.parameter_count)
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
        """See :class:`Strategy`: nobody else changes the parameters."""

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
    """Every rank holds everything; gradients are added up in buckets by Allreduce; a :class:`Strategy`.

    With ``overlap`` a bucket is on its way while the gradients of lower layers are computed. Where compression loses
    much and the optimizer is momentum, each rank's velocity is sent in place of its gradients
    (:class:`~mpicoll.optim.local_momentum.LocalMomentum`), which are then clipped before, each rank's own at ``clip /
    sqrt(size)``. (Lin et al., "Deep gradient compression", ICLR 2018, section 3.2.)

    Parameters
    ----------
    parameters : (model.parameter_count,) of model.dtype
        The same on all ranks of `comm`; updated in place.
    overlap
        Whether gradients are sent while others are computed.
    squares
        What the norm for clipping is made of.
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
    ) -> None:
        super().__init__(model, parameters, comm, config, average=False)
        self._bounds, self._clip, self._squares = model.layout.bounds, config.clip, squares
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

    # ---- Storage ----------------------------------------------------------------------------------------------------

    def complete(self, layer: int) -> None:
        """Send what is complete now, if this is the time."""
        if self._overlap and self._last:
            start, stop = self._bounds[layer], self._bounds[layer + 1]
            self._take_velocity(start, stop)
            self.sync.start(start, compress=self._compress)

    # ---- Strategy ---------------------------------------------------------------------------------------------------

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`Strategy`."""
        self._scale, self._last, self._compress = scale, last, compress

    def reduce(self) -> None:
        """See :class:`Strategy`."""
        if self._overlap:
            self.sync.wait()
            return
        if self._local and self._clip is not None:
            self._scale *= clipping(self._own_norm(), self._clip / math.sqrt(self._size))
        self._take_velocity(0, self._vector.size)
        self.sync.synchronize(compress=self._compress)

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
        """See :class:`Strategy`: they never go apart."""

    def digest(self) -> bytes:
        """Return the SHA-256 of the parameters."""
        return hashlib.sha256(self._vector.data).digest()

    def tensors(self) -> Tensors:
        """See :class:`Strategy`."""
        shared = self._optimizer.shared_state()
        return {"parameters": Whole(self._vector), **{name: Whole(array) for name, array in shared.items()}}

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
        """See :class:`Strategy`; what counts of velocities is their sum over the ranks, and that stays the same."""
        for name, array in self._optimizer.own_state().items():
            array[...] = sum(states[f"optimizer.{name}"], np.zeros_like(array))

    def nbytes(self) -> dict[str, int]:
        """See :class:`Strategy`."""
        return {
            "parameters": self._vector.nbytes,
            "gradients": self.sync.flat.nbytes,
            "optimizer": self._optimizer.nbytes,
        }
