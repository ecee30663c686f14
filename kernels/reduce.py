"""Element-wise reductions, `out[i] = a[i] OP b[i]`.

Every reducer is called as `reduce(out, a, b)` with three C-contiguous arrays of shape `(count,)` whose dtype is the
`carrier` of the elements' dtype, and returns nothing. `out` is overwritten; it may be exactly `a` or exactly `b`, and
must not overlap them otherwise. `a` and `b` may be read-only. Equal counts are the caller's duty: nothing is checked.

========================  ========================================================================================
SUM PROD                  all dtypes but bool. Integers wrap, as in NumPy. A complex product is (ac-bd) + (ad+bc)i.
MAX MIN                   integers and real floats. NaN in either operand gives the NaN whose bits `np.nan` has, and
                          -0.0 counts as less than +0.0, so that the bits do not depend on the order of the operands.
LAND LOR LXOR             bool and integers. Nonzero is true; the result is 0 or 1.
BAND BOR BXOR             integers.
========================  ========================================================================================

float16 and bfloat16 are computed in float32 and rounded to nearest even once per element and call.
The operands keep their order, `a` on the left. What SUM and PROD of two NaNs leave in the payload is undefined.
"""

import functools
import importlib
import threading
from collections.abc import Callable
from types import FunctionType

import ml_dtypes
import numpy as np

from . import decorators
from .decorators import Kernel, Specialised, compile_for
from .elementwise import CONVERSIONS, KERNELS, elementwise, same
from .user_identity import identity_of

OPS = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")

_INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
_BOOL, _FLOAT16, _BFLOAT16 = np.dtype(np.bool_), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
_COMPLEX = (np.dtype(np.complex64), np.dtype(np.complex128))
DTYPES = (_BOOL, *_INTEGERS, _FLOAT16, _BFLOAT16, *_FLOATS, *_COMPLEX)

_FAMILIES = {
    _BOOL: "bool",
    _FLOAT16: "float16",
    _BFLOAT16: "bfloat16",
    **dict.fromkeys(_INTEGERS, "integer"),
    **dict.fromkeys(_FLOATS, "float"),
    **dict.fromkeys(_COMPLEX, "complex"),
}
_CARRIERS = {_BOOL: np.dtype(np.uint8), _FLOAT16: np.dtype(np.uint16), _BFLOAT16: np.dtype(np.uint16)}

Reducer = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


def carrier(dtype: np.dtype) -> np.dtype:
    """Return the dtype as which the elements of `dtype` are handed to a reducer, `array.view(carrier(array.dtype))`.

    It has the same item size: uint8 for bool, uint16 for float16 and bfloat16, otherwise `dtype` itself.

    Raises
    ------
    TypeError
        If `dtype` is not one of `DTYPES`; those are in native byte order.
    """
    dtype = np.dtype(dtype)
    if dtype not in _FAMILIES:
        raise TypeError(f"dtype: no reduction is defined on {dtype}")
    return _CARRIERS.get(dtype, dtype)


_reducers: dict[tuple[str, np.dtype], Reducer | None] = {}
_making = threading.RLock()
"""A signal handler may need a reducer while one is being compiled."""


def reducer(op_name: str, dtype: np.dtype) -> Reducer | None:
    """Return the kernel that reduces elements of `dtype`, compiled or loaded, or None where the op does not apply.

    The first call for a pair compiles it (about 0.2 s) or loads it from the cache (milliseconds); see `warmup`.

    Raises
    ------
    ValueError
        If `op_name` is not one of `OPS`.
    """
    if op_name not in OPS:
        raise ValueError(f"op: {op_name!r} is not one of {', '.join(OPS)}")
    key = op_name, np.dtype(dtype)
    if key not in _reducers:
        with _making:  # one for all threads: others keep its address
            if key not in _reducers:
                _reducers.setdefault(key, _make_reducer(*key))
    return _reducers[key]


def _make_reducer(op_name: str, dtype: np.dtype) -> Reducer | None:
    function = KERNELS.get((op_name, _FAMILIES.get(dtype, "unknown")))
    return None if function is None else _ready(compile_for(function, signature_of(dtype)))


def native_address(function: Reducer, dtype: np.dtype) -> int:
    """Return where the machine code of a reducer for `dtype` is, for `atomics.call_reducer`; 0 without a JIT.

    The address is good as long as `function` lives, and in this process only.
    """
    return function.address if isinstance(function, Specialised) else 0


def user_reducer(function: Callable, dtype: np.dtype) -> Reducer:
    """Return a reducer, `out[i] = function(a[i], b[i])`, compiled for `dtype` at once.

    Parameters
    ----------
    function : callable
        A scalar function `(a, b) -> c` that Numba can compile, or that it has compiled. It gets the elements' own
        type, bool included, but float32 for float16 and bfloat16. Its result is cast to `dtype`: integers wrap,
        floats are rounded. Divisions by zero follow NumPy.
    dtype : np.dtype
        One of `DTYPES`.

    Raises
    ------
    TypeError
        If `dtype` is not one of `DTYPES`, if `function` does not compile, or if its result would lose its kind
        (a float for integers, a complex number for floats, anything but a bool for bool).
    """
    carrier(dtype)
    dtype = np.dtype(dtype)
    if decorators.DISABLED and isinstance(function, FunctionType):
        return _ready(user_loop(function, dtype))
    found = decorators.kept(Kernel(user_loop(function, dtype, identity_of(function))), signature_of(dtype))
    if found is not None:
        return found
    made: Reducer = importlib.import_module(f"{__package__}.user_functions").compiled_loop(function, dtype)
    return made


def user_loop(scalar: Callable, dtype: np.dtype, identity: str = "") -> Reducer:
    """Return a loop over a scalar function, not compiled; with an identity, what is compiled stays on disk."""
    widen, narrow = CONVERSIONS.get(_FAMILIES[dtype], (same, same))

    def reduce_user(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        elementwise(scalar, widen, narrow, out, a, b)

    if identity:
        reduce_user.entry_name = f"user.{identity}-{dtype.name}"  # type: ignore[attr-defined]
    return reduce_user


def signature_of(dtype: np.dtype) -> tuple[str, str, str]:
    """Return the argument types: read-only operands, which also take writable arrays, so that one is enough."""
    vector = f"{carrier(dtype).name}[1C]"
    return vector, f"readonly {vector}", f"readonly {vector}"


def _ready(function: Reducer) -> Reducer:
    """Return `function` as it is, or, where the JIT is disabled, without NumPy's warnings about overflow and NaN."""
    if not decorators.DISABLED:
        return function

    @functools.wraps(function)
    def quiet(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            function(out, a, b)

    return quiet
