"""Compiler of kernels by Numba, for kernels that `machine_code` does not have.

Only this module, `address_calls`, `intrinsics`, `overloads` and `user_functions`, which it or its callers import, need
Numba. Importing Numba takes half a second and 50 MB of each process. Compiled kernels are stored as machine code that
can be loaded without Numba, or, where that is not possible, in Numba's own cache.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba import njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.runtime import nrtdynmod, rtsys
from numba.core.sigutils import normalize_signature
from numba.extending import register_jitable

from . import address_calls, decorators, intrinsics, machine_code, object_file, overloads  # noqa: F401 (for Numba)
from .decorators import FLAGS, Kernel, Native
from .machine_code import Entry, Loaded
from .source_stamps import entry_name, stamp_of

_warned: set[str] = set()


def numba_type(text: str) -> types.Type:
    """Return Numba's type for an argument type such as ``"float32[1C]"`` or ``"readonly int64[2C]"``."""
    name, _, shape = text.removeprefix("readonly ").partition("[")
    if name == "void":
        return types.void
    scalar = numba.from_dtype(np.dtype(name))
    if not shape:
        return scalar
    return types.Array(scalar, int(shape[:-2]), shape[-2], readonly=text.startswith("readonly "))


def _tell_numba() -> None:
    """Register the helpers that have been defined since the last time."""
    while decorators.helpers:
        function, inline = decorators.helpers.pop(0)
        flags = {**FLAGS, "no_cfunc_wrapper": True, **({"forceinline": True} if inline else {})}
        register_jitable(**flags)(function)
    while decorators.links:
        _tell_linked(decorators.links.pop(0))


def _tell_linked(native: Native) -> None:
    """Register a linked function, which is compiled when a kernel calls it."""
    result, *arguments = map(numba_type, native.signature)
    symbol = decorators.symbol_of(native)

    def define() -> None:
        llvmlite.binding.add_symbol(symbol, native.address)

    intrinsics.external(native.function, symbol, result, *arguments, before=define)
    if machine_code.obstacle():
        define()  # Numba may find the kernel in its own cache


def _flags_of(kernel: Kernel) -> dict[str, Any]:
    return {**FLAGS, "nogil": kernel.nogil}


def uncached(function: Callable) -> Callable:
    """Return Numba's dispatcher of a function that exists only in this process."""
    _tell_numba()
    return njit(**FLAGS)(function)


def dispatcher(kernel: Kernel) -> Any:
    """Return Numba's dispatcher of a kernel, with Numba's cache on disk if the kernel belongs to this package.

    Warns
    -----
    RuntimeWarning
        If neither Numba's cache nor ours can be written, once in a process.
    """
    _tell_numba()
    made = njit(**_flags_of(kernel), no_cfunc_wrapper=True)(kernel.function)
    if kernel.name and kernel.function.__closure__ is None:  # Numba takes closures of one function for the same
        try:
            made._cache = _KernelCache(kernel.function)
        except RuntimeError as error:
            if machine_code.obstacle() or machine_code.folder_to_write() is None:
                text = "kernels are compiled in each process again, since they cannot be cached on disk"
                _warn_once(f"{text}: {error}")
    return made


def compiled(kernel: Kernel, signature: tuple[str, ...]) -> Loaded:
    """Compile a kernel for argument types, store it on disk and return it."""
    made, wanted = dispatcher(kernel), tuple(map(numba_type, signature))
    cache = made._cache if isinstance(made._cache, _KernelCache) else None
    if cache is not None:
        cache.waits = True
    made.compile(wanted)
    made.disable_compile()
    (result,) = made.overloads.values()
    wrapper, native = result.fndesc.llvm_cpython_wrapper_name, result.fndesc.llvm_func_name
    if cache is None or cache.waiting is not None:
        ours = _kept(kernel, signature, result.library, wrapper, native, result)
        if ours is not None:
            return ours
        if cache is not None:
            cache.save_now()
    return Loaded(made, int(result.library.get_pointer_to_function(native)))


def compiled_native(native: Native) -> Loaded:
    """Compile a function with a C interface, store it on disk and return it."""
    _tell_numba()
    flags = {**FLAGS, "nopython": True}
    del flags["nogil"]  # the caller decides on the GIL
    result, *arguments = map(numba_type, native.signature)
    wanted = normalize_signature(result(*arguments))
    made = CFunc(native.function, wanted, {}, flags)
    if machine_code.obstacle():
        with contextlib.suppress(RuntimeError):  # no folder can be written to
            made._cache = _KernelCache(native.function)
    made.compile()
    decorators.keep_alive(made)
    ours = _kept(native, native.signature, made._library, "", made._wrapper_name)
    return ours or Loaded(None, int(made.address))


# Machine code that is kept --------------------------------------------------------------------------------------------


def _kept(
    kind: Kernel | Native, signature: tuple[str, ...], library: Any, wrapper: str, native: str, result: Any = None
) -> Loaded | None:
    """Store compiled code as an entry of `machine_code`, and load it; None if that is not possible."""
    name = entry_name(kind.function)
    if not name or machine_code.obstacle() or not _stands_alone(library, result):
        return None
    try:
        entry = _entry(library, wrapper, native)
        loaded = machine_code.load(entry, kind.function)
    except Exception:  # Numba's internals may change
        return None
    try:
        machine_code.write(name, decorators.signature_text(kind, signature), stamp_of(kind.function.__module__), entry)
    except OSError as error:
        _warn_once(f"a compiled kernel could not be cached on disk: {error}")
    return loaded


def _stands_alone(library: Any, result: Any) -> bool:
    """Return True if compiled code refers to no object of this process."""
    if getattr(library, "has_dynamic_globals", True):
        return False
    if result is None:
        return True
    environments = [result.environment, *(getattr(result, "referenced_envs", None) or ())]
    return not result.lifted and not result.objectmode and not any(each and each.consts for each in environments)


def _entry(library: Any, wrapper: str, native: str) -> Entry:
    """Return machine code as an entry, linked with Numba's reference counting if it needs that.

    Raises
    ------
    ValueError
        If it refers to a symbol that does not exist here.
    """
    wanted = [name for name in (wrapper, native) if name]
    _, _, (code, _) = library.serialize_using_object_code()
    image = object_file.link([code], wanted)
    if not machine_code.is_complete(image):
        image = object_file.link([code, _reference_counts()], wanted)
    if not machine_code.is_complete(image):
        raise ValueError(f"{native or wrapper}: refers to a symbol that does not exist here")
    return Entry(image, wrapper, native)


@functools.cache
def _reference_counts() -> bytes:
    """Return the object code of NRT_incref and NRT_decref, which Numba compiles in each process."""
    module, library = nrtdynmod.create_nrt_module(cpu_target.target_context)
    library.add_ir_module(module)
    library.enable_object_caching()
    code: bytes = library.serialize_using_object_code()[2][0]
    return code


# Numba's own cache ----------------------------------------------------------------------------------------------------


def _warn_once(message: str) -> None:
    kind = message.partition(":")[0]
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, RuntimeWarning, stacklevel=4)


class _KernelCache(FunctionCache):
    """Numba's cache, with these differences.

    - A kernel is compiled again when any file that it uses changes (`source_stamps`); Numba checks its own file only.
    - An entry that cannot be read, or that is for other types, counts as absent. The latter arises where two processes
      write entries of one kernel at the same time; Numba would call the wrong machine code.
    - An entry that cannot be written (disk full) costs a warning, not the program.
    - Loading an entry does not import Numba's compiler. Numba registers its implementations of NumPy, some 250 modules
      and SciPy where it is installed, before it looks for an entry. Machine code needs only Numba's runtime, and
      compiling registers the rest itself.

    Attributes
    ----------
    waits
        True if entries are written only by `save_now`.
    waiting
        The entry that has not been written.
    """

    waits = False
    waiting: tuple[Sequence[Any], Any] | None = None

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        shared = str(stamp_of(function.__module__)) if entry_name(function) else ""
        self._cache_file._source_stamp = (self._cache_file._source_stamp, shared, machine_code.obstacle())

    def load_overload(self, sig: tuple, target_context: Any) -> Any:
        """Return the entry of a signature; None if it has to be compiled."""
        rtsys.initialize(target_context)
        try:
            result = self._load_overload(sig, target_context)
        except Exception:  # unpickling damaged bytes can raise anything
            self._flush()
            return None
        fits = result is not None and tuple(result.signature.args) == tuple(getattr(sig, "args", sig))
        return result if fits else None

    def save_overload(self, sig: tuple, data: Any) -> None:
        self.waiting = sig, data
        if not self.waits:
            self.save_now()

    def save_now(self) -> None:
        """Write the waiting entry; a failure to write is a RuntimeWarning."""
        assert self.waiting is not None
        (sig, data), self.waiting = self.waiting, None
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(f"a compiled kernel could not be cached on disk: {error}")

    def _flush(self) -> None:
        try:
            self.flush()
        except OSError as error:
            _warn_once(f"a damaged kernel cache could not be cleared: {error}")
