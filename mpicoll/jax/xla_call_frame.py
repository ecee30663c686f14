"""Call frames of XLA's foreign function interface: the C structures that a handler reads, as ctypes.

The layouts are those of ``xla/ffi/api/c_api.h``, which jaxlib ships (:func:`jax.ffi.include_dir`). The interface is
binary compatible within a major version: new members are added at the end of a structure.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

_MAJOR = 0
"""Major version of the interface that the structures below describe."""
_METADATA, _EXECUTE = 1, 3
"""The extension that asks for the handler's version, and the stage in which a handler does its work."""
_TOKEN = 17
"""Element type of a token."""
INVALID_ARGUMENT, DEADLINE_EXCEEDED, INTERNAL = 3, 4, 13
"""Codes of errors."""


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class _Extension(ctypes.Structure):
    """An extension of a call frame; `metadata` is there if `kind` is _METADATA."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Buffers(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_int), ("value", ctypes.POINTER(ctypes.c_int64)))


class _Attributes(ctypes.Structure):
    """Attributes of a call; those of mpicoll have one, a number."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("names", ctypes.c_void_p),
        ("values", ctypes.POINTER(ctypes.POINTER(_Scalar))),
    )


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class _Api(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version", _Version),
        ("internal", ctypes.c_void_p),
        ("create_error", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))


def handler(
    execute: Callable[[int, Sequence[int], Sequence[int]], None], describe: Callable[[BaseException], tuple[int, str]]
) -> Any:
    """Return a C function for ``jax.ffi.register_ffi_target`` that calls a Python function with addresses.

    XLA calls it on any of its threads. It must be kept as long as the process lives.

    Parameters
    ----------
    execute
        ``execute(number, arguments, results)``: the attribute of the call, and the addresses of its buffers without
        those of tokens. An exception becomes an error of the program.
    describe
        Returns the code and the message of the error for an exception.
    """

    def handle(pointer: Any) -> int | None:
        frame = pointer.contents
        if frame.extension_start and frame.extension_start.contents.kind == _METADATA:
            _tell_version(frame)
            return None
        if frame.stage != _EXECUTE:
            return None
        try:
            number = frame.attributes.values[0].contents.value[0]
            execute(number, _addresses(frame.arguments), _addresses(frame.results))
        except BaseException as error:  # nothing may leave a C function
            return _error(frame, *describe(error))
        return None

    return _HANDLER(handle)


def _tell_version(frame: _CallFrame) -> None:
    """Answer with XLA's own minor version if the major version is the one known here, so that XLA refuses others."""
    metadata = frame.extension_start.contents.metadata.contents
    version = frame.api.contents.version if frame.api else metadata.version
    metadata.version.major = _MAJOR
    metadata.version.minor = version.minor
    metadata.traits = 0


def _addresses(buffers: _Buffers) -> list[int]:
    found = (buffers.buffers[place].contents for place in range(buffers.size))
    return [buffer.data or 0 for buffer in found if buffer.dtype != _TOKEN]


def _error(frame: _CallFrame, code: int, message: str) -> int | None:
    arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, message.encode(), code)
    made: int | None = frame.api.contents.create_error(ctypes.byref(arguments))
    return made
