"""Decorators of kernels; nothing is compiled, and Numba is not imported, before a kernel is used that is not on disk.

`kernel` is for functions that Python calls: one compiled function for each combination of argument types, made when it
is first needed, and kept on disk. `helper` is for the scalar functions and loops inside them: compiled into each kernel
that uses them, never kept by themselves. `primitive` is for functions that are LLVM instructions, see `intrinsics`.
`kernel_for` is a kernel that `python -m mpicoll.kernels.precompile` compiles.
`short_kernel` is a kernel that does not let go of the interpreter lock, for calls that take less time than that would.
`native` is for functions that C code calls by their address.
`linked` is for functions that several kernels call, and that are compiled once instead of into each of them.
`uncached_kernel` is for functions that are made while the program runs.

Types are texts: `"int64"`, `"float32[1C]"` for a contiguous vector, `"readonly float32[1C]"` for one that is not
written to. Where a kernel is on disk `machine_code` loads it, else `compiler` makes it with Numba. With
NUMBA_DISABLE_JIT=1 kernels run as they are written.
"""

import ctypes
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from . import machine_code
from .argument_types import fits, kind_of, type_of
from .compile_turn import turn
from .machine_code import Loaded
from .source_stamps import entry_name, stamp_of

FLAGS = {"nogil": True, "fastmath": False, "error_model": "numpy"}
"""Of Numba, for all kernels. `fastmath` stays off: a reducer must give the same bits in a vector loop and in its scalar
remainder, and NaN must survive. `error_model="numpy"` lets a division by zero give inf as in NumPy, without a branch
that stops vectorisation. Bounds checks are left to NUMBA_BOUNDSCHECK."""

FLOATS, BYTES, HALVES, WORDS = "float32[1C]", "uint8[1C]", "uint16[1C]", "uint32[1C]"
INT, FLOAT, BOOL = "int64", "float64", "bool"
"""What compressors give their kernels."""


def _is_disabled() -> bool:
    if "numba" in sys.modules or Path(".numba_config.yaml").exists():
        from numba import config

        return bool(config.DISABLE_JIT)
    return os.environ.get("NUMBA_DISABLE_JIT", "0").strip() not in ("", "0")


DISABLED = _is_disabled()
"""Whether kernels run as they are written."""
helpers: list[tuple[Callable, bool]] = []
"""Helpers that Numba has not been told of yet, and whether they are always inlined."""
links: list["Native"] = []
"""Linked functions that Numba has not been told of yet."""
typed_kernels: list["Kernel"] = []
"""Kernels with a signature: what can be compiled beforehand."""
_making = threading.RLock()
"""A signal handler may need a kernel while one is being made."""


def compiler() -> ModuleType:
    """Return the module that compiles, which imports Numba."""
    return importlib.import_module(f"{__package__}.compiler")


def kernel(function: Callable) -> Any:
    """Compile `function` when it is called with types for which it is not there, and keep the result on disk.

    Where no folder can be written to, it is compiled in each process, after one RuntimeWarning.
    """
    return function if DISABLED else Kernel(function)


def short_kernel(*signature: str) -> Callable[[Callable], Any]:
    """Make a kernel with this signature that runs for microseconds: other threads of the process wait meanwhile."""
    return lambda function: without_types(function) if DISABLED else Kernel(function, signature, nogil=False)


def kernel_for(*signature: str) -> Callable[[Callable], Any]:
    """Make a `kernel` that `compile_beforehand` compiles for these types; for others it compiles when called."""
    return lambda function: without_types(function) if DISABLED else Kernel(function, signature)


def without_types(function: Any) -> Any:
    """Return a function that stays as it is written, with the attribute `run` of kernels."""
    function.run = function
    return function


def compile_beforehand(module: str = "") -> int:
    """Make every kernel that has a signature, of one module or all that are imported; return their number."""
    kernels = [each for each in typed_kernels if module in ("", each.function.__module__)]
    for each in kernels:
        each.load()
    return len(kernels)


class Kernel:
    """A function that is called with any types, and compiled for each.

    Attributes
    ----------
    run
        The function for the kernel's signature. It does not look at types, and is the fastest way to call it.
    """

    __slots__ = ("__dict__", "run")  # CPython finds a slot in half the time

    def __init__(self, function: Callable, signature: tuple[str, ...] = (), *, nogil: bool = True) -> None:
        functools.update_wrapper(self, function)
        self.function, self.signature, self.nogil = function, signature, nogil
        self._ready: dict[tuple, Callable] = {}
        self._variants: dict[tuple[str, ...], Loaded] = {}
        self.run: Callable = self._first_run
        if signature:
            typed_kernels.append(self)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function for the types of the arguments."""
        key = tuple(map(kind_of, arguments))
        run = self._ready.get(key)
        if run is None:
            run = self._ready[key] = self._made_for(arguments)
        return run(*arguments)

    def _first_run(self, *arguments: Any) -> Any:
        self.run = self.variant(self.signature).call
        return self.run(*arguments)

    def _made_for(self, arguments: tuple) -> Callable:
        signature = tuple(map(type_of, arguments))
        if "" in signature:
            return compiler().dispatcher(self)
        return self.variant(signature).call

    def load(self) -> None:
        """Load or compile the function for the kernel's signature."""
        self.variant(self.signature)

    def variant(self, signature: tuple[str, ...]) -> Loaded:
        """Return the function for these types, from disk or compiled."""
        found = self._variants.get(signature)
        if found is None:
            with _making:
                found = self._variants.get(signature) or loaded(self, signature) or self._compiled(signature)
                self._variants[signature] = found
        return found

    def _compiled(self, signature: tuple[str, ...]) -> Loaded:
        with turn(self.function, lambda: loaded(self, signature)) as found:
            return found or compiler().compiled(self, signature)

    @property
    def name(self) -> str:
        """Name of the kernel's entries on disk; "" if it has none, being a function that is made at run time."""
        return entry_name(self.function)

    @property
    def made(self) -> list[tuple[str, ...]]:
        """The types for which it is there."""
        return list(self._variants)


class Native:
    """A function for C code. It is never freed: C code may call it while the interpreter ends."""

    def __init__(self, function: Callable, result: str, arguments: tuple[str, ...]) -> None:
        self.function, self.signature = function, (result, *arguments)

    @functools.cached_property
    def address(self) -> int:
        """Address of the compiled function; 0 without a JIT."""
        if DISABLED:
            return 0
        with _making:
            return (loaded(self, self.signature) or self._compiled()).address

    @property
    def is_kept(self) -> bool:
        """True if its machine code is on disk or in this process."""
        return "address" in vars(self) or loaded(self, self.signature) is not None

    def _compiled(self) -> Loaded:
        with turn(self.function, lambda: loaded(self, self.signature)) as found:
            return found or compiler().compiled_native(self)


def native(result: str, *arguments: str) -> Callable[[Callable], Native]:
    """Make a function with a C interface, when its `address` is asked for; see `Native`."""
    return lambda function: Native(function, result, arguments)


def linked(result: str, *arguments: str) -> Callable[[Callable], Callable]:
    """Make a function that is compiled once, by itself, and that kernels call by its symbol; from Python it is itself.

    A helper is compiled into each kernel that uses it, which takes long if it is long. A linked function takes and
    returns scalars, and raises nothing.
    """

    def register(function: Callable) -> Callable:
        if not DISABLED:
            made = Native(function, result, arguments)
            links.append(made)
            machine_code.linked[symbol_of(made)] = made
        return function

    return register


def symbol_of(native: Native) -> str:
    """Return the symbol by which machine code refers to a linked function."""
    return f"mpicoll.{entry_name(native.function)}"


class Specialised:
    """A kernel for one combination of types; other arguments are a TypeError, where a kernel would be compiled."""

    def __init__(self, origin: Kernel, signature: tuple[str, ...], found: Loaded | None = None) -> None:
        functools.update_wrapper(self, origin.function)
        self.signature = signature
        self._call, self.address = found or origin.variant(signature)
        self._accepted: set[tuple] = set()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, if the arguments fit."""
        key = tuple(map(kind_of, arguments))
        if key not in self._accepted:
            self._check(arguments)
            self._accepted.add(key)
        return self._call(*arguments)

    def _check(self, arguments: tuple) -> None:
        given = tuple(map(type_of, arguments))
        if len(given) != len(self.signature) or not all(map(fits, given, self.signature)):
            raise TypeError(f"{self.__name__}: it takes ({', '.join(self.signature)}), not ({', '.join(given)})")


def kept(origin: Kernel, signature: tuple[str, ...]) -> Specialised | None:
    """Return a kernel for these types if its machine code is on disk; it is not compiled, nor Numba imported."""
    with _making:
        found = loaded(origin, signature)
        return None if found is None else Specialised(origin, signature, found)


def compile_for(function: Any, signature: tuple[str, ...]) -> Any:
    """Return a kernel for these types alone, compiled or loaded; see `Specialised`.

    What is returned never changes, so that other threads may be calling it meanwhile. Where the JIT is disabled it is
    `function`.
    """
    return function if DISABLED else Specialised(function, signature)


def uncached_kernel(function: Callable) -> Callable:
    """Compile a function that exists only in this process, such as a user's, in which case no cache could find it."""
    return function if DISABLED else compiler().uncached(function)


def helper(function: Callable) -> Callable:
    """Let `function` be compiled into the kernels that call it or hand it on; called from Python it is itself.

    A kernel would not do: handed on as an argument it is an address, which keeps what calls it from being kept.
    """
    return _registered(function, False)


def inline_helper(function: Callable) -> Callable:
    """Do so, and have LLVM inline it wherever it is used: for what a short collective passes through."""
    return _registered(function, True)


def _registered(function: Callable, inline: bool) -> Callable:
    if not DISABLED:
        helpers.append((function, inline))
    return function


def primitive(function: Callable) -> Callable:
    """Make a function that only kernels can call; `intrinsics` says what it does."""

    @functools.wraps(function)
    def refuse(*arguments: Any) -> Any:
        raise NotImplementedError(f"{function.__name__} is for compiled code")

    return refuse


# Entries on disk ------------------------------------------------------------------------------------------------------


def signature_text(kind: Kernel | Native, signature: tuple[str, ...]) -> str:
    """Return types, and whether the interpreter lock is let go, as a text."""
    how = "C" if isinstance(kind, Native) else "nogil" if kind.nogil else "gil"
    return f"{how} {FLAGS} {', '.join(signature)}"


def loaded(kind: Kernel | Native, signature: tuple[str, ...]) -> Loaded | None:
    """Return what is on disk for these types; None if nothing is, or it cannot be loaded here."""
    function = kind.function
    name = entry_name(function)
    if not name or machine_code.obstacle():
        return None
    try:
        entry = machine_code.read(name, signature_text(kind, signature), stamp_of(function.__module__))
        return None if entry is None else machine_code.load(entry, function)
    except (OSError, AttributeError, KeyError, ImportError, ValueError, TypeError):
        return None


def keep_alive(thing: object) -> None:
    """Let an object never be freed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
