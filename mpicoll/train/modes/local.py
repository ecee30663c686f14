"""Local steps: every rank trains a replica of its own, and now and then they are averaged."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from mpi4py import MPI

from mpicoll.gradients import GradientSynchronizer
from mpicoll.train.checkpoints import Tensors, Whole
from mpicoll.train.config import FEEDBACK, TrainConfig
from mpicoll.train.layers import Arrays
from mpicoll.train.models import Flat, Model
from mpicoll.train.optimizer import MomentumSGD
from mpicoll.train.strategy import Squares, Traffic, clipping, norm_of, squares_of


class LocalSteps:
    """Each rank takes steps of its own; a :class:`~mpicoll.train.strategy.Strategy`.

    After every ``--sync-every`` steps the ranks send how far they have come from the point that all of them know, the
    centre, which moves by the mean of that. *Periodic* averaging lets every replica go on from there. (McMahan et al.,
    "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017; Stich, "Local SGD
    converges fast and communicates little", ICLR 2019.) *Elastic* averaging draws each replica towards the centre by a
    part of its way, ``0.9 / size``, and the centre by the same part of the sum of their ways, so that they may explore.
    (Zhang et al., "Deep learning with elastic averaging SGD", NIPS 2015, its synchronous form.)

    At the end of an epoch all replicas go on from the centre, so that there is one model to look at. Velocities are
    never averaged. Parameters as for :class:`~mpicoll.train.strategy.Replicated`.
    """

    def __init__(
        self,
        model: Model,
        parameters: np.ndarray,
        comm: MPI.Intracomm,
        config: TrainConfig,
        *,
        squares: Squares = squares_of,
    ) -> None:
        self._vector, self._center, self._gradient = parameters, parameters.copy(), np.zeros_like(parameters)
        self._size, self._every, self._squares = comm.Get_size(), config.sync_every, squares
        self._pull = _ELASTICITY / self._size if config.averaging == "elastic" else None
        self.sync = GradientSynchronizer(
            model.shapes,
            comm=comm,
            compression=config.compression,
            error_feedback=FEEDBACK[config.error_feedback],
            bucket_bytes=config.bucket_bytes,
            dtype=model.dtype,
        )
        self._optimizer = MomentumSGD(
            parameters,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            spans=model.layout.decayed(0, model.parameter_count),
        )
        self._flat = Flat(model.layout, parameters, self._gradient)
        self._scale, self._compress = 1.0, True
        self._steps = np.zeros(1, np.int64)

    # ---- Storage ----------------------------------------------------------------------------------------------------

    def parameters(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.train.models.Storage`."""
        return self._flat.parameters(layer)

    def release(self, layer: int) -> None:
        """See :class:`~mpicoll.train.models.Storage`."""

    def gradients(self, layer: int) -> Arrays:
        """See :class:`~mpicoll.train.models.Storage`."""
        return self._flat.gradients(layer)

    def complete(self, layer: int) -> None:
        """See :class:`~mpicoll.train.models.Storage`."""

    # ---- Strategy ---------------------------------------------------------------------------------------------------

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """Take the mean over this rank's samples, which are as many as those of the others, or one fewer."""
        self._scale, self._compress = scale * self._size, compress

    def reduce(self) -> None:
        """Send nothing: that comes behind the update."""

    def update(self, rate: float, clip: float | None) -> float:
        """Take a step of this rank alone, then perhaps meet the others; see :class:`Strategy`."""
        norm = self._scale * norm_of(self._squares([(0, self._gradient)])) if clip is not None else math.nan
        self._optimizer.step(self._gradient, rate, self._scale * clipping(norm, clip))
        self._steps += 1
        if self._steps[0] == self._every:
            self._average()
        return norm

    def meet(self) -> None:
        """Let every replica go on from the centre."""
        if self._steps[0]:
            self._average()
        self._vector[:] = self._center

    def _average(self) -> None:
        way = np.subtract(self._vector, self._center, out=self.sync.flat)
        if self._pull is None:
            self.sync.synchronize(compress=self._compress)
            self._center += way
            self._vector[:] = self._center
        else:
            self._vector -= self._vector.dtype.type(self._pull) * way
            self.sync.synchronize(compress=self._compress)
            self._center += way.dtype.type(self._pull * self._size) * way
        self._steps[:] = 0

    def digest(self) -> bytes:
        """Return the SHA-256 of the centre."""
        return hashlib.sha256(self._center.data).digest()

    def tensors(self) -> Tensors:
        """See :class:`Strategy`: the centre, from which another number of ranks goes on."""
        return {"parameters": Whole(self._center)}

    def own_state(self) -> dict[str, np.ndarray]:
        """See :class:`Strategy`."""
        owed = {f"owed.{name}": array for name, array in self.sync.state().items()}
        return {name: array.copy() for name, array in self._own().items()} | owed

    def _own(self) -> dict[str, np.ndarray]:
        return {"replica": self._vector, "velocity": self._optimizer.velocity, "steps": self._steps}

    def load_own_state(self, state: dict[str, np.ndarray]) -> None:
        """See :class:`Strategy`."""
        self.sync.load({name[len("owed.") :]: array for name, array in state.items() if name.startswith("owed.")})
        for name, array in self._own().items():
            array[...] = state[name]

    def nbytes(self) -> dict[str, int]:
        """See :class:`Strategy`."""
        return {
            "parameters": self._vector.nbytes + self._center.nbytes,
            "gradients": self._gradient.nbytes + self.sync.flat.nbytes,
            "optimizer": self._optimizer.nbytes,
        }

    def traffic(self) -> Traffic:
        """See :class:`Strategy`."""
        sync, size = self.sync, self._size
        return Traffic(sync.sent_nbytes, 2 * (size - 1) * sync.nbytes / size, sync.under_way_seconds, sync.seconds)


_ELASTICITY = 0.9
"""How far the centre goes towards the mean of the replicas."""
