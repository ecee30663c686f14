"""Collectives that autograd can differentiate, with the gradients that Horovod gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = list[torch.Tensor]
Function = Callable[[torch.Tensor], torch.Tensor]
GroupFunction = Callable[[Tensors], Tensors]


def is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether autograd records what is done with a tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def has_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is real or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def with_gradient(tensor: torch.Tensor, forward: Function, backward: Function) -> torch.Tensor:
    """Return ``forward(tensor)``; in the backward pass ``backward`` makes its gradient that of the tensor.

    Both are collective. A `backward` of differentiable functions can be differentiated again.
    """
    (made,) = with_gradients([tensor], lambda given: [forward(given[0])], lambda given: [backward(given[0])])
    return made


def with_gradients(tensors: Tensors, forward: GroupFunction, backward: GroupFunction) -> Tensors:
    """Return ``forward(tensors)``; in the backward pass ``backward`` makes their gradients those of the tensors.

    `backward` gets the gradients of real and complex tensors only, in the order of the tensors.
    """
    return list(_Collective.apply(forward, backward, *tensors))


class _Collective(torch.autograd.Function):
    """A function of tensors, with a function that makes the gradients."""

    @staticmethod
    def forward(context: Any, forward: GroupFunction, backward: GroupFunction, *tensors: torch.Tensor) -> Any:
        context.gradients_of = backward
        context.have_gradients = [has_gradient(tensor) for tensor in tensors]
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        given = [each for each, has_one in zip(gradients, context.have_gradients, strict=True) if has_one]
        made = iter(context.gradients_of(given))
        return None, None, *(next(made) if has_one else None for has_one in context.have_gradients)
