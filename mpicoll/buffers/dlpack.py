"""Memory of objects with ``__dlpack__``, such as tensors, read from the capsule as mpi4py does.

NumPy's own ``from_dlpack`` consumes the capsule and frees it much later, which not every exporter supports, and takes
all memory of exporters before DLPack 1.0 for read-only. Source: dlpack.h of DLPack 1.0.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np

HOST_DEVICES = (1, 3, 11)
"""Device types whose memory the CPU can read: CPU, and pinned memory of CUDA and ROCm."""
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_FLOAT, _BFLOAT = 2, 4


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _dtype(tensor: _Tensor) -> np.dtype:
    nbytes = tensor.bits // 8
    if (tensor.code, tensor.lanes) == (_FLOAT, 2):
        return np.dtype(f"c{2 * nbytes}")  # mpi4py's way with long double, whose bits are too many for a complex number
    if tensor.lanes != 1 or tensor.code not in (*_KINDS, _BFLOAT):
        raise TypeError(f"no dtype for DLPack type code {tensor.code} with {tensor.lanes} lanes of {tensor.bits} bits")
    return np.dtype("bfloat16" if tensor.code == _BFLOAT else f"{_KINDS[tensor.code]}{nbytes}")


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Memory:
    """Bytes of a tensor, which stay alive as long as an array of them."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self._owner = owner
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def array_of_tensor(data: Any) -> np.ndarray:
    """Return the memory of an object with ``__dlpack__`` as an array, which keeps the object alive.

    The memory must be of one of :data:`HOST_DEVICES`.

    Raises
    ------
    TypeError
        For an element type that NumPy does not have.
    Exception
        Any exception of the object's own method.
    """
    capsule = data.__dlpack__()
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor") or 0)
    dtype = _dtype(tensor)
    shape = tuple(tensor.shape[: tensor.ndim])
    if 0 in shape:
        return np.empty(shape, dtype)
    strides = np.empty(shape, np.uint8).strides if not tensor.strides else tuple(tensor.strides[: tensor.ndim])
    steps = [dtype.itemsize * stride for stride in strides]
    spans = [(count - 1) * step for count, step in zip(shape, steps, strict=True)]
    low = sum(span for span in spans if span < 0)
    nbytes = sum(map(abs, spans)) + dtype.itemsize
    memory = np.asarray(_Memory((tensor.data or 0) + tensor.byte_offset + low, nbytes, data))
    return np.ndarray(shape, dtype, memory, -low, steps)
