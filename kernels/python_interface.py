"""Functions of CPython's C interface that kernels call while they hold the interpreter lock.

Objects are addresses. Functions that make an object return a new reference, or 0 with an exception set.
"""

from collections.abc import Callable

from .decorators import primitive

functions: list[tuple[Callable, str, tuple[str, ...]]] = []
"""Primitives, with the names of the C functions and the types of result and arguments; for `intrinsics`."""


def _function(name: str, *kinds: str) -> Callable[[Callable], Callable]:
    def register(function: Callable) -> Callable:
        made = primitive(function)
        functions.append((made, name, kinds))
        return made

    return register


@_function("PyLong_AsLongLong", "int64", "int64")
def int_of(thing):
    """Return the value of an int, or of what has ``__index__``; -1 and an exception is set for anything else."""


@_function("PyLong_FromLongLong", "int64", "int64")
def int_object(number):
    """Return an int."""


@_function("PyFloat_FromDouble", "int64", "float64")
def float_object(number):
    """Return a float."""


@_function("PyComplex_FromDoubles", "int64", "float64", "float64")
def complex_object(real, imaginary):
    """Return a complex number."""


@_function("PyBytes_FromStringAndSize", "int64", "int64", "int64")
def bytes_object(address, nbytes):
    """Return bytes with a copy of memory."""


@_function("PyBytes_AsString", "int64", "int64")
def bytes_data(thing):
    """Return the address of the data of bytes; 0 and an exception is set for another type."""


@_function("PyBytes_Size", "int64", "int64")
def bytes_size(thing):
    """Return the number of bytes; -1 and an exception is set for another type."""


@_function("PyUnicode_DecodeUTF8", "int64", "int64", "int64", "int64")
def str_object(address, nbytes, errors):
    """Return the text that is encoded in UTF-8; `errors` is the address of the name of an error handler."""


@_function("PyUnicode_GetLength", "int64", "int64")
def str_length(thing):
    """Return the number of characters."""


@_function("PyUnicode_AsUTF8AndSize", "int64", "int64", "int64")
def str_data(thing, nbytes):
    """Return the address of a text in UTF-8 and write its length to address `nbytes`; 0 if it cannot be encoded."""


@_function("PyList_New", "int64", "int64")
def list_object(size):
    """Return a list of this size, whose items are to be set."""


@_function("PyList_SetItem", "int32", "int64", "int64", "int64")
def set_item(list_, place, thing):
    """Set an item of a new list, which takes over the reference; return 0."""


@_function("PyList_Size", "int64", "int64")
def list_size(list_):
    """Return the number of items."""


@_function("PyList_GetItem", "int64", "int64", "int64")
def list_item(list_, place):
    """Return an item, a borrowed reference."""


@_function("PyTuple_New", "int64", "int64")
def tuple_object(size):
    """Return a tuple of this size, whose items are to be set."""


@_function("PyTuple_SetItem", "int32", "int64", "int64", "int64")
def set_tuple_item(tuple_, place, thing):
    """Set an item of a new tuple, which takes over the reference; return 0."""


@_function("PyTuple_Size", "int64", "int64")
def tuple_size(tuple_):
    """Return the number of items."""


@_function("PyTuple_GetItem", "int64", "int64", "int64")
def tuple_item(tuple_, place):
    """Return an item, a borrowed reference."""


@_function("PyDict_New", "int64")
def dict_object():
    """Return a dictionary without items."""


@_function("PyDict_SetItem", "int32", "int64", "int64", "int64")
def set_dict_item(dict_, key, value):
    """Set an item, which gets references of its own; return 0, or -1 with an exception set."""


@_function("PyDict_Size", "int64", "int64")
def dict_size(dict_):
    """Return the number of items."""


@_function("PyDict_Next", "int32", "int64", "int64", "int64", "int64")
def dict_next(dict_, place, key, value):
    """Write the next key and value, borrowed references, to addresses; return 0 at the end.

    The word at address `place` is 0 before the first; the dictionary must not change meanwhile.
    """


@_function("PyObject_CallOneArg", "int64", "int64", "int64")
def call_object(function, argument):
    """Call a function with one argument."""


@_function("Py_IncRef", "void", "int64")
def keep(thing):
    """Add a reference."""


@_function("Py_DecRef", "void", "int64")
def drop(thing):
    """Give up a reference."""


@_function("PyErr_Occurred", "int64")
def error():
    """Return the type of the exception that is set, 0 if there is none."""


@_function("PyErr_ExceptionMatches", "int32", "int64")
def error_is(kind):
    """Return whether the exception that is set is of this kind."""


@_function("PyErr_Clear", "void")
def forget_error():
    """Clear the exception that is set, if there is one."""


@primitive
def new_array(function, ndim, shape, dtype):
    """Call `PyArray_Empty` of NumPy, which takes over the reference to the element type, by its address."""


@primitive
def new_scalar(function, data, dtype):
    """Call `PyArray_Scalar` of NumPy by its address."""
