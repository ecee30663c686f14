"""Kernels that Python calls with objects: built-in functions whose code is compiled by Numba.

A wrapper of Numba's takes numbers in a tuple. A caller would have to ask for the `id` of each array, and the wrapper
would make a number of it again: half the time of a short collective. A built-in function gets the addresses of its
arguments in a vector (`METH_FASTCALL` of CPython), and compiled code reads what it needs from the objects.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from .atomics import load
from .decorators import DISABLED, Native, helper, linked, without_types
from .python_interface import int_object, int_of

_FASTCALL = 0x0080
_making = threading.Lock()
made: list["ObjectKernel"] = []
"""All of them, for `precompile`."""
_definitions: list[Any] = []
"""Structures and texts that built-in functions point to; kept for as long as the process lives."""


@helper
def object_at(arguments, place):
    """Return the address of an argument."""
    return load(arguments + 8 * place)


@helper
def int_at(arguments, place):
    """Return the value of an argument that is an int; see `int_of`."""
    return int_of(load(arguments + 8 * place))


_NAMES = {"int_at": int_at, "object_at": object_at, "int_object": int_object}


class _Definition(ctypes.Structure):
    """`PyMethodDef` of CPython."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


class ObjectKernel:
    """Compiled function that is called with objects; see `object_kernel`.

    Attributes
    ----------
    run
        The built-in function, which does not look at the number or the types of its arguments.
    native
        The compiled function.
    """

    __slots__ = ("function", "native", "run")

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.native = Native(function, "int64", ("int64", "int64", "int64"))
        self.run: Callable[..., Any] = self._first_run
        made.append(self)

    def load(self) -> None:
        """Load or compile the function."""
        self.native.address  # noqa: B018

    def _first_run(self, *arguments: Any) -> Any:
        with _making:
            if self.run == self._first_run:
                self.run = _built_in(self.function.__name__, self.native.address)
        return self.run(*arguments)


def object_kernel(function: Callable) -> Any:
    """Make a function of `(module, arguments, count)` a built-in function for Python.

    `arguments` is the address of a vector of the addresses of `count` objects, which live until it returns. It returns
    a new reference, or 0 with an exception set. It runs with the interpreter lock, so it should take microseconds.
    """
    return without_types(function) if DISABLED else ObjectKernel(function)


def takes_objects(*kinds: str) -> Callable[[Callable], Any]:
    """Make a function of words a kernel that Python calls with ints and objects.

    Parameters
    ----------
    kinds
        "int64" or "object" for each argument; the function gets the address of an object.
    """

    def make(function: Callable) -> Any:
        if DISABLED:
            return without_types(function)
        name = f"{function.__name__}_with_objects"
        given = ", ".join(
            f"{'object_at' if kind == 'object' else 'int_at'}(arguments, {place})" for place, kind in enumerate(kinds)
        )
        text = f"def {name}(module, arguments, count):\n"
        text += f"    return int_object(function({given})) if count == {len(kinds)} else 0\n"
        made_here = {**_NAMES, "function": linked("int64", *["int64"] * len(kinds))(function)}
        exec(compile(text, function.__code__.co_filename, "exec"), made_here)
        wrapper = made_here[name]
        wrapper.__module__, wrapper.__doc__ = function.__module__, function.__doc__
        return ObjectKernel(wrapper)

    return make


def _built_in(name: str, address: int) -> Callable[..., Any]:
    definition = _Definition(name.encode(), address, _FASTCALL, None)
    _definitions.append(definition)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function: Callable[..., Any] = make(ctypes.addressof(definition), None, None)
    return function
