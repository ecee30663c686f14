"""Functions of NumPy's C interface by their addresses, for compiled code that makes arrays and scalars."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from mpicoll.objects.encoding import DTYPES

_NEW_SCALAR, _NEW_ARRAY = 60, 184
"""Places of `PyArray_Scalar` and `PyArray_Empty` in NumPy's table of functions, which are part of its binary interface:
they are the same in all versions."""


@functools.cache
def addresses() -> tuple[int, int]:
    """Return the addresses of the functions that make an array and a scalar, 0 and 0 where they cannot be used.

    Both are tried, and the memory of scalars is looked at, before compiled code relies on them.
    """
    table = _table()
    if not table or not all(map(_is_laid_out, DTYPES)):
        return 0, 0
    new_array, new_scalar = table[_NEW_ARRAY], table[_NEW_SCALAR]
    return (new_array, new_scalar) if _makes_arrays(new_array) and _makes_scalars(new_scalar) else (0, 0)


def _table() -> ctypes.Array | None:
    """Return NumPy's table of functions."""
    umath = getattr(np, "_core", None) or np.core
    capsule = getattr(umath._multiarray_umath, "_ARRAY_API", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return (ctypes.c_size_t * (_NEW_ARRAY + 1)).from_address(pointer(capsule, None))


def _is_laid_out(dtype: np.dtype) -> bool:
    """Return whether a scalar's bytes come after the header of the object."""
    scalar = np.frombuffer(bytes(range(1, dtype.itemsize + 1)), dtype)[0] if dtype.kind != "b" else np.True_
    return ctypes.string_at(id(scalar) + object.__basicsize__, dtype.itemsize) == scalar.tobytes()


def _makes_arrays(address: int) -> bool:
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int)
    dtype, shape = np.dtype(np.float32), (ctypes.c_ssize_t * 2)(3, 5)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dtype))  # the function takes it over
    made = kind(address)(2, ctypes.addressof(shape), dtype, 0)
    return type(made) is np.ndarray and made.shape == (3, 5) and made.dtype is dtype and made.flags.c_contiguous


def _makes_scalars(address: int) -> bool:
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    given = np.array([2.5])
    made = kind(address)(given.ctypes.data, given.dtype, None)
    return type(made) is np.float64 and made == 2.5
