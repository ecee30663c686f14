"""Local SGD for PyTorch: ranks take steps of their own, and average their parameters every few steps.

::

    rank 0   step step step step -+-            -+- step step ...
    rank 1   step step step step -+-  average   -+- step step ...    every=4: a quarter of the messages
    rank 2   step step step step -+-            -+- step step ...

Between two averages each rank's parameters move from a common anchor `w`. The average of the ways, `d`, is a gradient
of the outer step ``v = outer_momentum * v + d; w = w - outer_lr * v``. With the defaults that is the mean of all ranks'
parameters (Stich, "Local SGD converges fast and communicates little", ICLR 2019). With momentum it is that of Wang et
al., "SlowMo", ICLR 2020; with Nesterov's, an outer step of Douillard et al., "DiLoCo", 2023.
"""

from __future__ import annotations

from typing import Any

import torch

from mpicoll.compression import Compressor, ErrorFeedback, compressor
from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.flat_parameters import FlatParameters


class OuterStep:
    """Averages of the ways that ranks have gone from common parameters.

    Parameters
    ----------
    flat
        The parameters; those of rank 0 are broadcast.
    lr, momentum, nesterov, compression
        As for :func:`LocalSGD`.
    """

    def __init__(
        self, flat: FlatParameters, lr: float, momentum: float, nesterov: bool, compression: str | Compressor | None
    ) -> None:
        self._flat, self._lr, self._momentum, self._nesterov = flat, lr, momentum, nesterov
        self._compression = None if compression is None else _with_feedback(compression)
        self._anchor = communicator.broadcast_(flat.read(), 0).clone()
        self._velocity = torch.zeros_like(self._anchor) if momentum else None
        flat.write(self._anchor)

    @torch.no_grad()
    def take(self) -> None:
        """Average the ways and move the parameters of all ranks to the new anchor; collective."""
        way = self._flat.read()
        torch.sub(self._anchor, way, out=way)
        communicator.allreduce_(way, op=communicator.Average, compression=self._compression)
        if self._velocity is not None:
            self._velocity.mul_(self._momentum).add_(way)
            way = way.add_(self._velocity, alpha=self._momentum) if self._nesterov else self._velocity
        self._anchor.sub_(way, alpha=self._lr)
        self._flat.write(self._anchor)


def _with_feedback(given: str | Compressor) -> Compressor | ErrorFeedback:
    made = compressor(given)
    return ErrorFeedback(made) if made.needs_feedback else made


class _Local:
    """Methods of an optimizer whose parameters are averaged; they are mixed into its class."""

    _outer: OuterStep
    _every = 1
    _taken = 0

    def average(self) -> None:
        """Average the parameters of all ranks now, for instance before an evaluation; collective."""
        self._outer.take()
        self._taken = 0

    def step(self, closure: Any = None) -> Any:
        """Take the optimizer's step, and average the parameters if it is time; collective then."""
        result = super().step(closure)  # type: ignore[misc]
        self._taken += 1
        if self._taken >= self._every:
            self.average()
        return result


def LocalSGD(
    optimizer: torch.optim.Optimizer,
    every: int = 8,
    *,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    nesterov: bool = False,
    compression: str | Compressor | None = None,
) -> Any:
    """Return an optimizer that averages the parameters of all ranks every few steps, and communicates nothing else.

    It is of a class derived from the optimizer's, and shares its parameter groups and its state. Call
    :func:`mpicoll.torch.init` first. Every rank must construct it with the same arguments, for the same model, and take
    as many steps. The parameters of rank 0 are broadcast. Buffers, such as the statistics of batch normalisation, stay
    each rank's own; :func:`~mpicoll.torch.broadcast_parameters` makes them equal.

    Parameters
    ----------
    optimizer
        An optimizer of PyTorch.
    every
        Number of steps between two averages.
    outer_lr, outer_momentum, nesterov
        Of the outer step; the defaults take the mean of the parameters.
    compression
        Compressor of the averages of float32, or its specification such as ``"int8"``, with error feedback if it needs
        that.

    Raises
    ------
    RuntimeError
        If :func:`mpicoll.torch.init` was not called.
    ValueError
        If an argument is out of range, or parameters are of several dtypes.

    Examples
    --------
    >>> optimizer = mpicoll.torch.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=8)
    """
    communicator.world()
    if every < 1:
        raise ValueError(f"every: {every} is less than 1")
    if not outer_lr > 0:
        raise ValueError(f"outer_lr: {outer_lr} is not positive")
    if not 0 <= outer_momentum < 1:
        raise ValueError(f"outer_momentum: {outer_momentum} is not in [0, 1)")
    if nesterov and not outer_momentum:
        raise ValueError("nesterov: it needs outer_momentum")
    flat = FlatParameters(each for group in optimizer.param_groups for each in group["params"])
    kind = type(optimizer)
    made: Any = object.__new__(type(f"Local{kind.__name__}", (_Local, kind), {}))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._outer, made._every = OuterStep(flat, outer_lr, outer_momentum, nesterov, compression), every
    return made
