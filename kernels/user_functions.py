"""Reducers from functions of the user's; needs Numba."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError

from .compiler import uncached
from .decorators import Kernel, Specialised, helper
from .reduce import signature_of, user_loop
from .user_identity import identity_of

_ALLOWED = {
    "b": (types.Boolean,),
    "i": (types.Boolean, types.Integer),
    "u": (types.Boolean, types.Integer),
    "f": (types.Boolean, types.Integer, types.Float),
    "c": (types.Boolean, types.Integer, types.Float, types.Complex),
}
"""Results that become elements of a kind without losing theirs."""


def compiled_loop(function: Any, dtype: np.dtype) -> Callable:
    """Return a reducer for a scalar function; see :func:`mpicoll.kernels.reduce.user_reducer`."""
    what = f"op: {getattr(function, '__name__', function)!s} on {dtype}"
    if not isinstance(function, FunctionType | Dispatcher):
        raise TypeError(f"{what}: a {type(function).__name__} is not a Python function")
    try:
        scalar = function if isinstance(function, Dispatcher) else uncached(function)
        _check_result(scalar, dtype, what)
        if identity := identity_of(function):
            scalar = _compiled_in(function)
        return Specialised(Kernel(user_loop(scalar, dtype, identity)), signature_of(dtype))
    except NumbaError as error:
        raise TypeError(f"{what}: Numba cannot compile it: {error}") from error


def _compiled_in(function: FunctionType) -> FunctionType:
    """Return a copy that is compiled into its callers: one that they call by address keeps them from being kept."""
    same = (function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy = FunctionType(*same)
    copy.__kwdefaults__ = function.__kwdefaults__
    return helper(copy)  # type: ignore[return-value]


def _check_result(scalar: Any, dtype: np.dtype, what: str) -> None:
    """Raise TypeError if the result of `scalar` cannot become a `dtype` without losing its kind."""
    is_half = dtype.itemsize == 2 and dtype.kind in "fV"
    value = types.float32 if is_half else numba.from_dtype(dtype)
    result = numba.typeof(scalar).get_call_type(scalar.typingctx, (value, value), {}).return_type
    if not isinstance(result, _ALLOWED["f" if is_half else dtype.kind]):
        raise TypeError(f"{what}: the result is of type {result}")
