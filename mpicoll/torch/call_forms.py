"""Short forms of the calls of a process group: a tensor, a root, an operation and a timeout in place of options.

PyTorch's process groups have both: ``group.reduce([tensor], options)`` and ``group.reduce(tensor, 0, ReduceOp.SUM)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""The attribute of the options for each argument of a short form."""


def with_short_form(options_type: type, *names: str, tensors: int = 1, in_lists: bool = True) -> Callable[[Any], Any]:
    """Return a decorator for a method that takes tensors and options, which makes it take the short form as well.

    Parameters
    ----------
    options_type
        The class of the options, such as ``dist.ReduceOptions``.
    names
        What the short form takes after the tensors, of ``"root"`` and ``"op"``; a timeout may follow.
    tensors
        The number of arguments before the options.
    in_lists
        True to put each of these arguments into a list if one of them is a tensor.
    """
    names = (*names, "timeout")

    def decorate(method: Any) -> Any:
        @wraps(method)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            given, values = arguments[:tensors], arguments[tensors:]
            if "opts" in named or (values and isinstance(values[0], options_type)):
                return method(self, *arguments, **named)
            if len(values) > len(names):
                raise TypeError(f"{method.__name__}: {len(arguments)} arguments; {tensors + len(names)} at most")
            options = _options(options_type, dict(zip(names, values, strict=False)), names, named)
            return method(self, *(_in_lists(given) if in_lists else given), opts=options, **named)

        return call

    return decorate


def _options(options_type: type, values: dict[str, Any], names: Sequence[str], named: dict[str, Any]) -> Any:
    """Return the options that have the values; takes those given by name out of `named`."""
    values |= {name: named.pop(name) for name in names if name in named}
    options = options_type()
    for name, value in values.items():
        if value is not None:
            setattr(options, _FIELDS[name], value)
    return options


def _in_lists(given: Sequence[Any]) -> Sequence[Any]:
    if any(isinstance(each, torch.Tensor) for each in given):
        return [[each] for each in given]
    return given
