"""Types of arguments, as texts that need no Numba: `"int64"`, `"float32[1C]"`, `"readonly float64[2F]"`.

Brackets hold the number of dimensions and the layout of an array: C, F, or A for any other.
"""

from typing import Any

import numpy as np

_SHAPE = 0x1 | 0x2 | 0x100 | 0x400
"""Of an array's flags: C-contiguous, Fortran-contiguous, aligned, writeable."""


def kind_of(value: Any) -> Any:
    """Return what values of one type have in common: quicker than `type_of`."""
    kind = type(value)
    if kind is np.ndarray:
        return value.dtype, value.ndim, value.flags.num & _SHAPE
    if kind is int and not -(1 << 63) <= value < 1 << 63:
        return "uint64"
    return type_of(value) if isinstance(value, np.ndarray) else kind


def type_of(value: Any) -> str:
    """Return the type of an argument as Numba sees it; "" for those that only Numba knows."""
    if isinstance(value, np.ndarray):
        return _array_type(value)
    if isinstance(value, bool | np.bool_):
        return "bool"
    if type(value) is int:
        return "int64" if -(1 << 63) <= value < 1 << 63 else ""
    if type(value) is float:
        return "float64"
    is_scalar = isinstance(value, np.number) and value.dtype.kind in "iufc" and value.itemsize <= 16
    return value.dtype.name if is_scalar and value.dtype.name not in ("float16", "longdouble", "float128") else ""


def _array_type(array: np.ndarray) -> str:
    flags = array.flags
    if type(array) is not np.ndarray or not (flags.aligned and array.dtype.isnative and array.dtype.kind in "biufc"):
        return ""
    if array.dtype.name in ("float16", "float128", "complex256"):
        return ""
    layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    return f"{'' if flags.writeable else 'readonly '}{array.dtype.name}[{array.ndim}{layout}]"


def fits(given: str, wanted: str) -> bool:
    """Return whether an argument may be given for a parameter: one that is only read may be writable."""
    return given != "" and given in (wanted, wanted.removeprefix("readonly "))
