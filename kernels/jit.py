"""The one place for Numba flags, and for what happens to a kernel on disk.

`kernel` is for functions that Python calls: compiled once a signature and cached on disk. `helper` is for the scalar
functions and loops inside them: compiled into each kernel that uses them, never cached by themselves.
`kernel_for` is a kernel that `python -m mpicoll.kernels.warmup` compiles.
`short_kernel` is a kernel that does not let go of the interpreter lock, for calls that take less time than that would.
`native` is for functions that C code calls by their address.
`uncached_kernel` is for functions that are made while the program runs.

`fastmath` stays off: a reducer must give the same bits in a vector loop and in its scalar remainder, and NaN must
survive. `error_model="numpy"` lets a division by zero give inf as in NumPy, without a branch that stops vectorisation.
Bounds checks are left to NUMBA_BOUNDSCHECK. With NUMBA_DISABLE_JIT=1 all of them return the plain function.
"""

import ctypes
import functools
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature
from numba.extending import register_jitable

from .turns import Turn, in_turn

_FLAGS = {"nogil": True, "fastmath": False, "error_model": "numpy"}

# Files with helpers, or constants, that kernels of other files use: a change here makes those kernels stale.
_SHARED_FILES = (
    "atomics.py",
    "bits.py",
    "elementwise.py",
    "jit.py",
    "masks.py",
    "norms.py",
    "planes.py",
    "quantize.py",
    "random.py",
    "sparse.py",
)
"""Used by any kernel."""
_PLAN_FILES = (
    "arguments.py",
    "executor.py",
    "job.py",
    "known.py",
    "messages.py",
    "movement.py",
    "operands.py",
    "plan.py",
    "records.py",
    "table.py",
)
"""Used by the kernels of `_PLAN_USERS` only."""
_PLAN_USERS = ("calls", "executor", "withdrawal")

FLOATS, BYTES, HALVES, WORDS = types.float32[::1], types.uint8[::1], types.uint16[::1], types.uint32[::1]
INT, FLOAT, BOOL = types.int64, types.float64, types.boolean
"""What compressors give their kernels."""

_beforehand: list[tuple[Callable, tuple]] = []
_compile_lock = threading.Lock()
_warned: set[str] = set()


def kernel(function: Callable) -> Callable:
    """Compile `function` when it is first called or `compile_for` asks for it, and cache the result on disk.

    Where no cache folder can be written, the kernel is compiled in each process, after one RuntimeWarning.
    """
    return _cached(function, _FLAGS)


def short_kernel(function: Callable) -> Callable:
    """Do so for a function that runs for microseconds: other threads of the process wait meanwhile."""
    return _cached(function, {**_FLAGS, "nogil": False})


def kernel_for(*signature: Any) -> Callable[[Callable], Callable]:
    """Make a `kernel` that `compile_beforehand` compiles for these Numba types; for others it compiles when called."""

    def make(function: Callable) -> Callable:
        dispatcher = kernel(function)
        _beforehand.append((dispatcher, signature))
        return dispatcher

    return make


def compile_beforehand() -> int:
    """Compile every `kernel_for` of the modules that are imported, or load it from the cache; return their number."""
    if config.DISABLE_JIT:
        return 0
    for dispatcher, signature in _beforehand:
        with _compile_lock:
            dispatcher.compile(signature)
    return len(_beforehand)


def _cached(function: Callable, flags: dict[str, Any]) -> Callable:
    if config.DISABLE_JIT:
        return function
    try:
        dispatcher = njit(cache=True, **flags)(function)
        dispatcher._cache = _KernelCache(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _warn_once(f"kernels are compiled anew in each process, because none can be cached on disk: {error}")
        return njit(**flags)(function)
    return dispatcher


def native(signature: Any) -> Callable[[Callable], Any]:
    """Compile a function with a C interface at once, when its `address` is asked for; see `Native`."""
    return lambda function: Native(function, signature)


class Native:
    """A function for C code. It is never freed: C code may call it while the interpreter ends."""

    def __init__(self, function: Callable, signature: Any) -> None:
        self._function, self._signature = function, signature

    @functools.cached_property
    def address(self) -> int:
        """Address of the compiled function; 0 without a JIT."""
        if config.DISABLE_JIT:
            return 0
        flags = {**_FLAGS, "nopython": True}
        del flags["nogil"]  # who calls knows whether it holds the lock
        wanted = normalize_signature(self._signature)
        compiled = CFunc(self._function, wanted, {}, flags)
        try:
            cache = _Cache(self._function)
            with in_turn(_lock_file(cache)):
                compiled._cache = cache
                compiled.compile()
        except (RuntimeError, OSError, EOFError, ValueError):
            compiled = CFunc(self._function, wanted, {}, flags)
            compiled.compile()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(compiled))
        return int(compiled.address)


def uncached_kernel(function: Callable) -> Callable:
    """Compile a function that exists only in this process, such as a user's, in which case no cache could find it."""
    return njit(**_FLAGS)(function)


def helper(function: Callable) -> Callable:
    """Let `function` be compiled into the kernels that call it or hand it on; called from Python it is itself.

    `njit` would not do: a dispatcher handed on as an argument is an address, which keeps the kernel out of the cache.
    """
    return register_jitable(**_FLAGS)(function)


def inline_helper(function: Callable) -> Callable:
    """Do so, and have LLVM inline it wherever it is used: for what a short collective passes through."""
    return register_jitable(**_FLAGS, forceinline=True)(function)


def compile_for(function: Callable, signature: tuple) -> Callable:
    """Return a dispatcher of its own for a kernel, compiled or loaded from the cache for the Numba types `signature`.

    A call whose arguments do not fit is a TypeError, where Numba would compile for them at once: seconds in which
    other processes wait. What is returned never changes, so that other threads may be calling it meanwhile. Where the
    JIT is disabled it is `function`.
    """
    if config.DISABLE_JIT:
        return function
    own = type(function)(function.py_func, targetoptions=function.targetoptions)
    if isinstance(function._cache, _KernelCache):
        own._cache = _KernelCache(function.py_func)
    with _compile_lock:
        own.compile(signature)
    own.disable_compile()
    return own


def _warn_once(message: str) -> None:
    kind = message.partition(":")[0]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


@functools.cache
def _stamp_of_shared_files(module: str) -> tuple:
    """Return what changes when a file does that kernels of this module use."""
    names = _SHARED_FILES + _PLAN_FILES * (module in _PLAN_USERS)
    stats = [Path(__file__).with_name(name).stat() for name in names]
    return tuple((stat.st_mtime, stat.st_size) for stat in stats)


def _lock_file(cache: FunctionCache) -> Path:
    """Return a file beside the entries of a function; Numba has made the folder."""
    return Path(cache.cache_path) / f"{cache._impl.filename_base}.lock"


class _Cache(FunctionCache):
    """Numba's cache, without the import of Numba's compiler for an entry that is only loaded.

    Numba registers its implementations of NumPy, some 250 modules and SciPy where it is installed, before it looks
    for an entry: 1.1 s of each process's start. Machine code needs Numba's runtime alone, and whatever compiles
    registers the rest itself.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return an entry; None where there is none."""
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)


class _KernelCache(_Cache):
    """Numba's cache, safe where Numba's own is not.

    - A kernel is compiled anew when a file changes that it uses (`_SHARED_FILES`); Numba looks only at its own file.
    - An entry that cannot be read, or that is for other types, counts as absent. The latter arises where two processes
      write entries of one kernel at the same time; Numba would call the wrong machine code.
    - An entry that cannot be written (disk full) costs a warning, not the program.
    - Of processes that miss the same entry one compiles, and the others wait for what it writes: eight ranks on two
      cores would take eight times as long.
    """

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        shared = _stamp_of_shared_files(function.__module__.rpartition(".")[2])
        self._cache_file._source_stamp = (self._cache_file._source_stamp, shared)
        self._turn = Turn(_lock_file(self))

    def load_overload(self, sig: tuple, target_context: Any) -> Any:
        """Return an entry; None if it has to be compiled, by this process, which then calls `save_overload`."""
        found = self._load(sig, target_context)
        if found is None:
            self._turn.take()
            found = self._load(sig, target_context)
            if found is not None:
                self._turn.give()
        return found

    def _load(self, sig: tuple, target_context: Any) -> Any:
        try:
            result = super().load_overload(sig, target_context)
        except Exception:  # unpickling damaged bytes can raise anything
            self._flush()
            return None
        fits = result is not None and tuple(result.signature.args) == tuple(sig)
        return result if fits else None

    def save_overload(self, sig: tuple, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(f"a compiled kernel could not be cached on disk: {error}")
        finally:
            self._turn.give()

    def _flush(self) -> None:
        try:
            self.flush()
        except OSError as error:
            _warn_once(f"a damaged kernel cache could not be cleared: {error}")
