"""Mixed precision: parameters and gradients of 16 bits, and float32 masters that optimizers update.

Layers compute in float32 with parameters that are rounded to 16 bits: NumPy has no matrix products of 16-bit numbers.
Gradients are computed in float32 as well, and rounded once, when they are complete, after a multiplication by the loss
scale. The scale is a power of two, so that this equals scaling the loss, as long as float32 does not overflow. The sum
over the ranks has 16 bits, and is divided by the scale in the update. (Micikevicius et al., "Mixed precision training",
ICLR 2018, section 3.)
"""

from __future__ import annotations

import hashlib
import itertools
import math

import ml_dtypes
import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Tensors, Whole
from mpicoll.kernels.codecs.cast_codec import NARROW, WIDEN
from mpicoll.models.initial_parameters import InitialParameters
from mpicoll.models.layers import Arrays
from mpicoll.models.sequential import FlatParameters, Model, ParameterLayout
from mpicoll.optim.loss_scale import INITIAL, INTERVAL, LossScale
from mpicoll.parallel.gradient_norm import Squares, Unify, already_equal, clipping, norm_of, squares_of
from mpicoll.parallel.strategy import FlatVectorStrategy, optimizer_for
from mpicoll.train.config import TrainConfig

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Type of parameters and gradients of each ``--precision`` but ``"full"``."""
LOSS_SCALE = "loss_scale"
"""Name of the loss scale in a checkpoint."""
_BLOCK = 1 << 16


def narrow(wide: np.ndarray, low: np.ndarray) -> None:
    """Round float32 `wide` to nearest even into float16 or bfloat16 `low`, of equal length; both contiguous."""
    NARROW[low.dtype.name](wide.reshape(-1), low.reshape(-1).view(np.uint16))


def widen(low: np.ndarray, wide: np.ndarray, *, add: bool = False) -> None:
    """Write float16 or bfloat16 `low` to float32 `wide`, of equal length, or add it; both contiguous."""
    WIDEN[low.dtype.name](low.reshape(-1).view(np.uint16), wide.reshape(-1), add)


class RoundedParameters:
    """Initial parameters rounded to the type of the vector; an :class:`InitialParameters`.

    Parameters
    ----------
    exact
        The parameters in float32.
    """

    def __init__(self, exact: InitialParameters) -> None:
        self._exact = exact

    def fill(self, start: int, into: np.ndarray) -> None:
        """See :class:`InitialParameters`; in blocks, so that only one block takes memory in float32."""
        for first in range(0, len(into), _BLOCK):
            part = into[first : first + _BLOCK]
            wide = np.empty(len(part), np.float32)
            self._exact.fill(start + first, wide)
            narrow(wide, part)


class WidenedLayer:
    """Copies of one layer's arrays in float32, valid until those of another layer are wanted."""

    def __init__(self, layout: ParameterLayout) -> None:
        self._layout = layout
        largest = max((stop - start for start, stop in itertools.pairwise(layout.bounds)), default=0)
        self._room = np.zeros(largest, np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._room.nbytes

    def arrays(self, layer: int) -> list[np.ndarray]:
        """Return the arrays of a layer, contents undefined."""
        return self._layout.views(layer, self._room)

    def widened(self, layer: int, low: Arrays) -> list[np.ndarray]:
        """Return the arrays of a layer with the values of `low`."""
        found = self.arrays(layer)
        for narrow_array, array in zip(low, found, strict=True):
            widen(narrow_array, array)
        return found


def loss_scale_of(config: TrainConfig) -> LossScale | None:
    """Return a new loss scale for float16; None for bfloat16, which has the range of float32."""
    if config.precision != "float16":
        return None
    return LossScale(config.loss_scale or INITIAL, config.loss_scale_interval or INTERVAL)


def scale_tensors(loss_scale: LossScale | None) -> Tensors:
    """Return the loss scale for a checkpoint to save or restore, if there is one."""
    return {} if loss_scale is None else {LOSS_SCALE: Whole(loss_scale.state)}


class MixedReplicated(FlatVectorStrategy):
    """Replicated data parallelism in mixed precision; a :class:`~mpicoll.parallel.strategy.SynchronousStrategy`.

    Sums of gradients have 16 bits and are equal on all ranks of `comm`; those of a model that is divided among ranks
    enter one sum of squares, `squares`, from which every rank sees whether all of them are finite.

    With Psi parameters a rank holds 2 Psi bytes of parameters, 4 Psi of masters, 4 Psi of float32 gradients, in which
    the parts of a step are added up, 2 Psi of those that are sent, and float32 state of the optimizer.

    Parameters
    ----------
    masters : (model.parameter_count,) of float32
        Initial parameters, equal on all ranks of `comm`; updated in place.
    overlap
        True to sum gradients over the ranks while others are computed.
    squares, unify
        Functions that compute the squared norm for clipping, and make sums equal on ranks with the same arrays.
    """

    def __init__(
        self,
        model: Model,
        masters: np.ndarray,
        comm: MPI.Intracomm,
        config: TrainConfig,
        *,
        overlap: bool,
        squares: Squares = squares_of,
        unify: Unify = already_equal,
    ) -> None:
        super().__init__(model, masters, comm, config, average=False, dtype=DTYPES[config.precision])
        self._bounds, self._squares, self._overlap = model.layout.bounds, squares, overlap
        self._unify = unify
        self._optimizer = optimizer_for(config, masters, self._spans)
        self._low, self._gradient = np.empty_like(self.sync.flat), np.zeros_like(masters)
        self._flat = FlatParameters(model.layout, self._low, self._gradient)
        self._widened = WidenedLayer(model.layout)
        self.loss_scale = loss_scale_of(config)
        self._scale, self._last = 1.0, True
        narrow(self._vector, self._low)

    @property
    def _factor(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.factor

    def parameters(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.models.sequential.ParameterStore`; in float32, valid until those of another layer."""
        return self._widened.widened(layer, self._flat.parameters(layer))

    def complete(self, layer: int) -> None:
        """See :class:`~mpicoll.models.sequential.ParameterStore`; rounds gradients that are complete for this step."""
        if not self._last:
            return
        start, stop = self._bounds[layer], self._bounds[layer + 1]
        part = self._gradient[start:stop]
        part *= np.float32(self._scale * self._factor)
        narrow(part, self.sync.flat[start:stop])
        if self._overlap:
            self.sync.start(start)

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; nothing is compressed."""
        self._scale, self._last = scale, last

    def reduce(self) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`."""
        if self._overlap:
            self.sync.wait()
        else:
            self.sync.synchronize()
        self._unify([(0, self.sync.flat)])
        widen(self.sync.flat, self._gradient)

    def update(self, rate: float, clip: float | None) -> float:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; skips a step whose gradients overflow, on all ranks.

        Raises
        ------
        NonFiniteLoss
            On every rank, if gradients overflow at the smallest loss scale.
        """
        factor, norm = self._factor, math.nan
        if clip is not None or self.loss_scale is not None:
            squares = self._squares([(0, self._gradient)])
            norm = norm_of(squares) / factor
            if self.loss_scale is not None and not self.loss_scale.accept(finite=math.isfinite(squares)):
                return norm
        self._optimizer.apply(self._gradient, rate, scale=clipping(norm, clip) / factor)
        narrow(self._vector, self._low)
        return norm

    def meet(self) -> None:
        """Make running statistics equal, and round the masters, which a checkpoint may have restored."""
        self._statistics.meet()
        narrow(self._vector, self._low)

    def digest(self) -> bytes:
        """Return the SHA-256 of the masters, and of running statistics if there are any."""
        return self._statistics.digest(hashlib.sha256(self._vector.data).digest())

    def tensors(self) -> Tensors:
        """See :class:`~mpicoll.parallel.strategy.SynchronousStrategy`; the parameters are the masters."""
        state = {name: Whole(array) for name, array in self._optimizer.shared_state().items()}
        own = scale_tensors(self.loss_scale)
        return {"parameters": Whole(self._vector), **state, **own, **self._statistics.tensors()}

    def own_state(self) -> dict[str, np.ndarray]:
        """Return an empty dict: all state is in :meth:`tensors`."""
        return {}

    def load_own_state(self, state: dict[str, np.ndarray]) -> bool:
        """Do nothing; return True."""
        return True

    def adopt(self, states: dict[str, list[np.ndarray]], ranks: int) -> None:
        """Do nothing: all state is in :meth:`tensors`."""

    def nbytes(self) -> dict[str, int]:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; masters count as the optimizer's."""
        return {
            "parameters": self._low.nbytes + self._widened.nbytes,
            "gradients": self._gradient.nbytes + self.sync.flat.nbytes,
            "optimizer": self._vector.nbytes + self._optimizer.nbytes,
        }
