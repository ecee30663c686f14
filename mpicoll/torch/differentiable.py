"""Collectives that autograd can differentiate, with the gradients that Horovod gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether autograd records what is done with a tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def with_gradient(tensor: torch.Tensor, forward: Function, backward: Function) -> torch.Tensor:
    """Return ``forward(tensor)``; in the backward pass ``backward`` makes its gradient that of the tensor.

    Both are collective. A `backward` of differentiable functions can be differentiated again.
    """
    made: torch.Tensor = _Collective.apply(tensor, forward, backward)
    return made


class _Collective(torch.autograd.Function):
    """A function of a tensor, with a function that makes the gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, forward: Function, backward: Function) -> torch.Tensor:
        context.gradient_of = backward
        return forward(tensor)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return context.gradient_of(gradients[0]), None, None
