"""Identity of a user's function: a digest of all that its machine code depends on.

Equal digests mean equal machine code, for the same types and versions, so that a function that was compiled by one
process can be loaded by others.
"""

import builtins
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_MODULES = ("math", "cmath", "numpy")
"""Modules of which a function may use what it likes: their versions are part of every entry on disk."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class _Unknown(Exception):
    """Raised for a value that may change, or of which nothing is known."""


def identity_of(function: Any) -> str:
    """Return the digest of a Python function; "" if it depends on more than its code and plain constants."""
    if type(function) is not FunctionType:
        return ""
    try:
        text = repr(list(_parts(function)))
    except (_Unknown, ValueError):  # ValueError: an empty cell
        return ""
    import hashlib  # loads OpenSSL

    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _parts(function: FunctionType) -> Iterator[Any]:
    code = function.__code__
    yield code.co_code, code.co_argcount, code.co_kwonlyargcount, code.co_flags, code.co_varnames, code.co_names
    yield code.co_freevars, code.co_cellvars, getattr(code, "co_exceptiontable", b"")
    yield [_plain(const) for const in code.co_consts]
    yield [_plain(default) for default in function.__defaults__ or ()]
    yield sorted((name, _plain(value)) for name, value in (function.__kwdefaults__ or {}).items())
    yield [_plain(cell.cell_contents) for cell in function.__closure__ or ()]
    # Names of attributes are among them, too; one that is also a global does no harm.
    yield [(name, _plain_global(function, name)) for name in code.co_names]


def _plain(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_plain, value))
    if isinstance(value, CodeType) or type(value) not in _PLAIN:
        raise _Unknown
    return type(value).__name__, value


def _plain_global(function: FunctionType, name: str) -> Any:
    if name not in function.__globals__:
        return "builtin" if hasattr(builtins, name) else "attribute"
    value = function.__globals__[name]
    if type(value) is ModuleType:
        if value.__name__ not in _MODULES:
            raise _Unknown
        return "module", value.__name__
    return _plain(value)
