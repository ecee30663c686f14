"""Local SGD: every rank trains its own replica, and the replicas are averaged periodically."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Tensors, Whole
from mpicoll.models.sequential import FlatParameters, Model
from mpicoll.parallel.gradient_norm import Squares, clipping, norm_of, squares_of
from mpicoll.parallel.strategy import FlatVectorStrategy, optimizer_for
from mpicoll.train.config import TrainConfig

_ELASTICITY = 0.9
"""Fraction of the distance to the mean of the replicas that the centre moves at each averaging."""


class LocalSteps(FlatVectorStrategy):
    """Local SGD: each rank takes steps of its own; a :class:`~mpicoll.parallel.strategy.Strategy`.

    After every ``--sync-every`` steps the ranks send the difference between their replica and the *centre*, a point
    that is equal on all ranks; the centre moves by the mean difference. *Periodic* averaging sets every replica to the
    centre. (McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017;
    Stich, "Local SGD converges fast and communicates little", ICLR 2019.) *Elastic* averaging moves each replica
    towards the centre by the fraction ``0.9 / size`` of its difference, and the centre by the same fraction of the sum
    of the differences, so that replicas may differ. (Zhang et al., "Deep learning with elastic averaging SGD", NIPS
    2015, the synchronous form.)

    At the end of an epoch all replicas are set to the centre, so that there is one model to evaluate. With *final*
    averaging they get their own values back for the next step: nothing is synchronised while training goes on, and the
    mean of the replicas is the model in the end. (Zinkevich et al., "Parallelized stochastic gradient descent", NIPS
    2010.) The optimizers' vectors are not averaged, except when a run resumes on another number of ranks. Parameters
    are those of :class:`~mpicoll.parallel.strategy.Replicated`.

    A checkpoint between two averages has the centre as the model's parameters, and each rank's replica besides.
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
        super().__init__(model, parameters, comm, config, average=True)
        self._center, self._gradient = parameters.copy(), np.zeros_like(parameters)
        is_final = config.averaging == "final"
        self._every, self._squares = None if is_final else config.sync_every, squares
        self._kept, self._at_center = parameters.copy() if is_final else None, False
        self._pull = _ELASTICITY / self._size if config.averaging == "elastic" else None
        self._optimizer = optimizer_for(config, parameters, self._spans)
        self._flat = FlatParameters(model.layout, parameters, self._gradient)
        self._scale, self._compress = 1.0, True
        self._steps = np.zeros(1, np.int64)

    @property
    def replica(self) -> np.ndarray:
        """Replica of this rank, from which its next step starts; not a copy."""
        return self._vector if self._kept is None or not self._at_center else self._kept

    def fetch(self) -> None:
        """Continue from this rank's own replica after an evaluation of the mean."""
        if self._kept is not None and self._at_center:
            self._vector[:] = self._kept
        self._at_center = False

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`Strategy`; gradients are means over this rank's samples only."""
        self._scale, self._compress = scale * self._size, compress

    def reduce(self) -> None:
        """Do nothing: replicas are averaged after the update."""

    def update(self, rate: float, clip: float | None) -> float:
        """Take a step of this rank alone, then average the replicas if that is due; see :class:`Strategy`.

        Gradients are clipped on each rank, to the norm `clip` of its own gradients.
        """
        norm = self._scale * norm_of(self._squares([(0, self._gradient)])) if clip is not None else math.nan
        self._optimizer.apply(self._gradient, rate, scale=self._scale * clipping(norm, clip))
        self._steps += 1
        if self._steps[0] == self._every:
            self._average()
        return norm

    def meet(self) -> None:
        """Set every replica to the centre, with final averaging until the next step, and average running statistics."""
        if self._kept is not None and not self._at_center:
            self._kept[:] = self._vector
        self._at_center = True
        if self._steps[0]:
            self._average()
        self._vector[:] = self._center
        self._statistics.meet()

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
        """Return the SHA-256 of the centre, and of running statistics if there are any."""
        return self._statistics.digest(hashlib.sha256(self._center.data).digest())

    def tensors(self) -> Tensors:
        """See :class:`Strategy`; returns the centre, from which any number of ranks can continue."""
        return {"parameters": Whole(self._center), **self._statistics.tensors()}

    def own_state(self) -> dict[str, np.ndarray]:
        """See :class:`Strategy`."""
        return {name: array.copy() for name, array in self._own().items()} | self._residuals()

    def _own(self) -> dict[str, np.ndarray]:
        return {"replica": self.replica, **self._optimizer.shared_state(), "steps": self._steps}

    def load_own_state(self, state: dict[str, np.ndarray]) -> bool:
        """See :class:`Strategy`."""
        for name, array in self._own().items():
            array[...] = state[name]
        return self._load_residuals(state)

    def adopt(self, states: dict[str, list[np.ndarray]], ranks: int) -> None:
        """See :class:`Strategy`; replicas and centre continue from the mean of the replicas, optimizers likewise."""
        for name, vector in {"replica": self.replica, **self._optimizer.state}.items():
            vector[:] = sum(states[name], np.zeros_like(vector))
            self.sync.comm.Allreduce(MPI.IN_PLACE, vector, MPI.SUM)
            vector /= vector.dtype.type(ranks)
        self._center[:] = self.replica
        steps = np.array([max((int(each[0]) for each in states.get("optimizer_steps", ())), default=0)])
        self.sync.comm.Allreduce(MPI.IN_PLACE, steps, MPI.MAX)
        self._optimizer.steps = int(steps[0])

    def nbytes(self) -> dict[str, int]:
        """See :class:`Strategy`."""
        return {
            "parameters": self._vector.nbytes + self._center.nbytes + (0 if self._kept is None else self._kept.nbytes),
            "gradients": self._gradient.nbytes + self.sync.flat.nbytes,
            "optimizer": self._optimizer.nbytes,
        }
