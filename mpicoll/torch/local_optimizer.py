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

from collections.abc import Mapping
from typing import Any

import torch

from mpicoll.compression import Compressor, ErrorFeedback, compressor
from mpicoll.torch import feedback_state
from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.flat_parameters import FlatParameters
from mpicoll.torch.world import world


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
        self.compression = None if compression is None else _with_feedback(compression)
        self._anchor: torch.Tensor | None = None
        self._velocity = torch.zeros_like(flat.vector) if momentum else None
        flat.write(communicator.broadcast_(flat.read(), 0))

    @property
    def count(self) -> int:
        """Number of elements of all parameters."""
        return self._flat.vector.numel()

    def begin(self) -> None:
        """Make the parameters of rank 0 the anchor if there is none yet; collective then.

        It is not done before the first step, since parameters may be loaded until then.
        """
        if self._anchor is None:
            self._anchor = communicator.broadcast_(self._flat.read(), 0).clone()
            self._flat.write(self._anchor)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the anchor, if there is one, and of the velocity, if there is momentum."""
        tensors = {"anchor": self._anchor, "velocity": self._velocity}
        return {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`state` returned; without an anchor the next step takes one.

        Raises
        ------
        ValueError
            If a vector has another length. Nothing is changed then.
        """
        for name, tensor in state.items():
            if tensor.numel() != self.count:
                raise ValueError(f"state: {name} has {tensor.numel()} elements, the parameters have {self.count}")
        self._anchor = state["anchor"].clone() if "anchor" in state else None
        if self._velocity is not None:
            self._velocity.zero_()
            if "velocity" in state:
                self._velocity.copy_(state["velocity"])

    @torch.no_grad()
    def take(self) -> None:
        """Average the ways and move the parameters of all ranks to the new anchor; collective."""
        self.begin()
        assert self._anchor is not None
        way = self._flat.read()
        torch.sub(self._anchor, way, out=way)
        communicator.allreduce_(way, op=communicator.Average, compression=self.compression)
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

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with, as ``local``, that of the averages: anchor, velocity, steps since then.

        Parameters and state differ between ranks, unless :meth:`average` has just been called: let every rank save
        its own. :meth:`compression_state_dict` returns the residuals of error feedback.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return {**state, "local": {**self._outer.state(), "taken": self._taken}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, or the state of a plain optimizer.

        From the latter on, as in the first step, ranks start at the parameters of rank 0.
        """
        state = dict(state_dict)
        local = dict(state.pop("local", {}))
        taken = local.pop("taken", 0)
        self._outer.load(local)
        super().load_state_dict(state)  # type: ignore[misc]
        self._taken = taken

    def compression_state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals of error feedback, for a checkpoint."""
        return feedback_state.saved([self._outer.compression])

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`compression_state_dict` returned.

        Raises
        ------
        ValueError
            If `state` is for other parameters or another compression, or is not valid. Nothing is changed then.
        """
        feedback_state.restore([self._outer.compression], [self._outer.count], state)

    def average(self) -> None:
        """Average the parameters of all ranks now, for instance before an evaluation; collective."""
        self._outer.take()
        self._taken = 0

    def step(self, closure: Any = None) -> Any:
        """Take the optimizer's step, and average the parameters if it is time; collective then."""
        self._outer.begin()
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
    as many steps. The parameters of rank 0 are broadcast here and before the first step, so that a model may be loaded
    in between; the optimizer's ``state_dict()`` has the state of the averages, too. Buffers, such as the statistics of
    batch normalisation, stay each rank's own; :func:`~mpicoll.torch.broadcast_parameters` makes them equal.

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
    world()
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
