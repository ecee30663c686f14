"""Machine code of kernels, stored on disk and loaded without Numba.

Importing Numba takes half a second of each process's start and 50 MB of its memory. To load a kernel from disk little
of it is needed: code is copied to memory, addresses are filled in, and a Python function is created. This module does
that, with three C extensions of Numba. `object_file` links the code when `compiler` has compiled the kernel.

An entry is used only with the interpreter, Numba, NumPy, processor and sources with which it was made; any other entry
counts as absent. Entries are stored beside the sources, in NUMBA_CACHE_DIR, or in a folder that only the user can write
to.
"""

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import json
import mmap
import os
import platform
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .object_file import IMAGE, Image

_MAGIC = b"mpicoll1"
"""Identifier of the format; its number changes with the format and with the linker."""
_LENGTHS = struct.Struct("<8sQQI")
_HARMLESS = {
    "NUMBA_CACHE_DIR",
    "NUMBA_CAPTURED_ERRORS",
    "NUMBA_DEBUG_CACHE",
    "NUMBA_DISABLE_JIT",
    "NUMBA_NUM_THREADS",
    "NUMBA_THREADING_LAYER",
    "NUMBA_THREADING_LAYER_PRIORITY",
}
"""Variables of Numba that do not change machine code."""
_EXTENSIONS = ("numba._helperlib", "numba._dynfunc", "numba.core.runtime._nrt_python")
linked: dict[str, Any] = {}
"""By symbol, a `decorators.Native` that kernels call, see `decorators.linked`."""
_FOLDER = Path(__file__).parent
_loading = threading.RLock()


class Entry(NamedTuple):
    """Machine code of a kernel, as stored on disk.

    Attributes
    ----------
    image
        Linked code.
    wrapper, native
        Names of the functions that Python and C call; "" if there is none.
    """

    image: Image
    wrapper: str
    native: str


class Loaded(NamedTuple):
    """Kernel in memory: the function that Python calls, None if there is none, and the address for C code."""

    call: Callable[..., Any] | None
    address: int


@functools.cache
def obstacle() -> str:
    """Return the reason why machine code cannot be loaded here, so that Numba loads all kernels; "" if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return "loading without Numba is supported on Linux x86-64 only"
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "the interpreter is not CPython with the GIL"
    changes = sorted(name for name in os.environ if name.startswith("NUMBA_") and name not in _HARMLESS)
    if changes:
        return f"{changes[0]} is set"
    if Path(".numba_config.yaml").exists():
        return "the current folder has a .numba_config.yaml"
    try:
        _numba_folder()
        _processor()
    except (OSError, ImportError) as error:
        return str(error)
    return ""


# Where and for whom ---------------------------------------------------------------------------------------------------


@functools.cache
def _numba_folder() -> Path:
    """Return the folder of the installed Numba, without importing it; ImportError if there is none."""
    spec = importlib.machinery.PathFinder.find_spec("numba")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("Numba is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _extension_file(name: str) -> Path:
    """Return the file of one of Numba's C extensions; ImportError if it is missing."""
    stem = _numba_folder().joinpath(*name.split(".")[1:])
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = stem.with_name(stem.name + suffix)
        if path.exists():
            return path
    raise ImportError(f"Numba has no extension {stem}")


def _processor() -> list[str]:
    """Return the first processor's vendor, family, model, stepping and flags from /proc/cpuinfo."""
    with Path("/proc/cpuinfo").open() as lines:
        known = {}
        for line in lines:
            name, _, value = line.partition(":")
            if not line.strip():
                break
            known[name.strip()] = value.strip()
    names = ("vendor_id", "cpu family", "model", "stepping", "flags")
    return [known.get(name, "") for name in names]


@functools.cache
def _origin() -> str:
    """Return a text that identifies interpreter, Numba, NumPy and processor."""
    facts = [_MAGIC.decode(), sys.version, sys.implementation.cache_tag, np.__version__, _processor()]
    sizes = [_extension_file(name).stat().st_size for name in _EXTENSIONS]  # several environments may hold equal copies
    return json.dumps([*facts, (_numba_folder() / "_version.py").read_text(), sizes])


def folders() -> list[Path]:
    """Return the folders that may hold entries, the preferred one first."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    name = f"kernels-{zlib.crc32(str(_FOLDER).encode()):08x}"
    if chosen:
        return [Path(chosen) / f"mpicoll-{name}"]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    own = os.environ.get("MPICOLL_CACHE_DIR") or home / "mpicoll"
    return [_FOLDER / "__pycache__", Path(own) / name]


def _is_trusted(folder: Path) -> bool:
    """Return True if no other user can write to a folder; the sources' folder and NUMBA_CACHE_DIR are trusted."""
    if folder.parent == _FOLDER or os.environ.get("NUMBA_CACHE_DIR"):
        return True
    stat = folder.stat()
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


@functools.cache
def folder_to_write() -> Path | None:
    """Return the folder for new entries; None if no folder can be written."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and _is_trusted(folder):
                return folder
    return None


# Entries on disk ------------------------------------------------------------------------------------------------------


def file_name(name: str, signature: str) -> str:
    """Return the file name of the entry of a function for argument types; it differs between processors."""
    key = zlib.crc32(f"{signature} {_origin()}".encode())
    return f"{name}-{key:08x}.code"


def _packed(entry: Entry, facts: str) -> bytes:
    image = entry.image
    header = [facts, image.imports, image.fixups, image.environments, image.symbols, entry.wrapper, entry.native]
    text = json.dumps(header).encode()
    check = zlib.crc32(image.code, zlib.crc32(text))
    return _LENGTHS.pack(_MAGIC, len(text), len(image.code), check) + text + image.code


def _unpacked(data: bytes, facts: str) -> Entry | None:
    """Return the entry in packed bytes; None if they are damaged or made for other facts."""
    if len(data) < _LENGTHS.size:
        return None
    magic, text_nbytes, code_nbytes, check = _LENGTHS.unpack_from(data)
    text, code = data[_LENGTHS.size : _LENGTHS.size + text_nbytes], data[_LENGTHS.size + text_nbytes :]
    if magic != _MAGIC or len(code) != code_nbytes or zlib.crc32(code, zlib.crc32(text)) != check:
        return None
    known, imports, fixups, environments, symbols, wrapper, native = json.loads(text)
    if known != facts:
        return None
    return Entry(Image(code, imports, [tuple(fixup) for fixup in fixups], environments, symbols), wrapper, native)


def read(name: str, signature: str, stamp: list) -> Entry | None:
    """Return the entry of a kernel; None if there is none that fits.

    Parameters
    ----------
    name, signature
        Function and argument types.
    stamp
        Stamps of the source files, of `source_stamps.stamp_of`.
    """
    facts = json.dumps([signature, stamp, _origin()])
    file = file_name(name, signature)
    for folder in folders():
        try:
            if not _is_trusted(folder):
                continue
            entry = _unpacked((folder / file).read_bytes(), facts)
        except OSError:
            continue
        if entry is not None:
            return entry
    return None


def write(name: str, signature: str, stamp: list, entry: Entry) -> None:
    """Store an entry on disk, atomically, so that no process reads a part of it. Parameters as for `read`.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    folder = folder_to_write()
    if folder is None:
        raise OSError(f"none of these folders can be written: {', '.join(map(str, folders()))}")
    data = _packed(entry, json.dumps([signature, stamp, _origin()]))
    path = folder / file_name(name, signature)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with draft.open("xb") as file:
            draft.chmod(0o644)
            file.write(data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


# Entries in memory ----------------------------------------------------------------------------------------------------


@functools.cache
def _extension(name: str) -> ModuleType:
    """Return one of Numba's C extensions, loaded once; Numba uses the same module if it is imported later."""
    if name in sys.modules:
        return sys.modules[name]
    if "numba" in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, _extension_file(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    if hasattr(module, "memsys_use_cpython_allocator"):
        module.memsys_use_cpython_allocator()  # as Numba does before anything is allocated
    return module


@functools.cache
def _c_symbols() -> Any:
    return ctypes.CDLL(None)


@functools.cache
def _address_of(name: str) -> int:
    """Return the address of a symbol of Numba's runtime, Python or the C library.

    Raises
    ------
    AttributeError, KeyError, ImportError
        If there is no such symbol.
    """
    if name in linked:
        return int(linked[name].address)
    if name.startswith("NRT_"):
        return int(_extension(_EXTENSIONS[2]).c_helpers[name.removeprefix("NRT_")])
    if name.startswith("numba_"):
        return int(_extension(_EXTENSIONS[0]).c_helpers[name.removeprefix("numba_")])
    library = ctypes.pythonapi if name.startswith(("Py", "_Py")) else _c_symbols()
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def is_complete(image: Image) -> bool:
    """Return True if every symbol that an image imports exists here."""
    try:
        return all(_address_of(name) for name in image.imports)
    except (AttributeError, KeyError, ImportError):
        return False


def _place(image: Image, environment: Any) -> int:
    """Copy an image to executable memory, never freed, since C code may run it at shutdown; return its address."""
    memory = mmap.mmap(-1, len(image.code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:] = image.code
    addresses = [*(_address_of(name) for name in image.imports), base]
    assert IMAGE == -1
    for offset, number, addend in image.fixups:
        struct.pack_into("<Q", memory, offset, addresses[number] + addend)
    for offset in image.environments:
        struct.pack_into("<Q", memory, offset, id(environment))
    if _c_symbols().mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(image.code)), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError("memory cannot be made executable")
    return base


def load(entry: Entry, function: Callable) -> Loaded:
    """Load an entry into memory.

    Parameters
    ----------
    function
        The Python function that was compiled, for its name and its module.

    Raises
    ------
    OSError, AttributeError, KeyError, ImportError
        If the entry cannot be loaded here.
    """
    with _loading:
        functions = _extension(_EXTENSIONS[1])
        environment = functions.Environment(function.__globals__)
        base = _place(entry.image, environment)
        symbols = entry.image.symbols
        address = base + symbols[entry.native]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(environment))
        if not entry.wrapper:
            return Loaded(None, address)
        module = sys.modules[function.__module__]
        wrapper = base + symbols[entry.wrapper]
        call = functions.make_function(module, function.__name__, function.__doc__ or "", wrapper, environment, ())
        return Loaded(call, address)
