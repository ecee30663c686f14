"""Machine code of kernels, kept on disk and loaded without Numba.

Numba takes half a second of each process's start and 50 MB of its memory, and what it does for a kernel that is on
disk is little: it puts code in memory, fills in addresses, and makes a function of it that Python can call. This module
does the same, with the three C extensions of Numba that such a function needs. What is kept was linked by
`object_file`, when `compiler` compiled the kernel.

An entry is used where it was made: with the same interpreter, Numba, NumPy and processor, and from the same sources.
Everything else counts as absent. Entries are machine code; they lie beside the sources, in NUMBA_CACHE_DIR, or in a
folder that only the user can write to.
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
"""Another number for another format, and for code that is linked in another way."""
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
"""By symbol, a `jit.Native` that kernels call, see `jit.linked`."""
_FOLDER = Path(__file__).parent
_loading = threading.RLock()


class Entry(NamedTuple):
    """A kernel's machine code as it is kept.

    Attributes
    ----------
    wrapper, native
        Names of the functions that Python and C call; "" if there is none.
    """

    image: Image
    wrapper: str
    native: str


class Loaded(NamedTuple):
    """A kernel in memory: what Python calls, None if nothing, and the address for C code."""

    call: Callable[..., Any] | None
    address: int


@functools.cache
def obstacle() -> str:
    """Return why machine code cannot be loaded here, "" if it can; every kernel is Numba's then."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < 1 << 32:
        return "it is known for Linux on x86-64 only"
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "this is not CPython with its global lock"
    changes = sorted(name for name in os.environ if name.startswith("NUMBA_") and name not in _HARMLESS)
    if changes:
        return f"{changes[0]} is set"
    if Path(".numba_config.yaml").exists():
        return "there is a .numba_config.yaml"
    try:
        _numba_folder()
        _processor()
    except (OSError, ImportError) as error:
        return str(error)
    return ""


# Where and for whom ---------------------------------------------------------------------------------------------------


@functools.cache
def _numba_folder() -> Path:
    """Return where Numba is installed, without importing it."""
    spec = importlib.machinery.PathFinder.find_spec("numba")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("Numba is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _extension_file(name: str) -> Path:
    """Return the file of one of Numba's C extensions."""
    stem = _numba_folder().joinpath(*name.split(".")[1:])
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = stem.with_name(stem.name + suffix)
        if path.exists():
            return path
    raise ImportError(f"there is no {stem}")


def _processor() -> list[str]:
    """Return the lines in which the system says what the first processor can do."""
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
    """Return what changes with anything but the sources: interpreter, Numba, NumPy, processor."""
    facts = [_MAGIC.decode(), sys.version, sys.implementation.cache_tag, np.__version__, _processor()]
    sizes = [_extension_file(name).stat().st_size for name in _EXTENSIONS]  # several environments may hold equal copies
    return json.dumps([*facts, (_numba_folder() / "_version.py").read_text(), sizes])


def folders() -> list[Path]:
    """Return where entries may be, the best place first."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    name = f"kernels-{zlib.crc32(str(_FOLDER).encode()):08x}"
    if chosen:
        return [Path(chosen) / f"mpicoll-{name}"]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    own = os.environ.get("MPICOLL_CACHE_DIR") or home / "mpicoll"
    return [_FOLDER / "__pycache__", Path(own) / name]


def _is_trusted(folder: Path) -> bool:
    """Return whether no other user can write to a folder; the folder of the sources is trusted as these are."""
    if folder.parent == _FOLDER or os.environ.get("NUMBA_CACHE_DIR"):
        return True
    stat = folder.stat()
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


@functools.cache
def folder_to_write() -> Path | None:
    """Return the folder for new entries; None if there is none."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and _is_trusted(folder):
                return folder
    return None


# Entries on disk ------------------------------------------------------------------------------------------------------


def file_name(name: str, signature: str) -> str:
    """Return the name of the entry of a function for argument types; other processors have other names."""
    key = zlib.crc32(f"{signature} {_origin()}".encode())
    return f"{name}-{key:08x}.code"


def _packed(entry: Entry, facts: str) -> bytes:
    image = entry.image
    header = [facts, image.imports, image.fixups, image.environments, image.symbols, entry.wrapper, entry.native]
    text = json.dumps(header).encode()
    check = zlib.crc32(image.code, zlib.crc32(text))
    return _LENGTHS.pack(_MAGIC, len(text), len(image.code), check) + text + image.code


def _unpacked(data: bytes, facts: str) -> Entry | None:
    """Return what was packed; None if it is damaged or belongs to something else."""
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
    """Return an entry; None if there is none that fits.

    Parameters
    ----------
    name, signature
        Function and argument types.
    stamp
        What changes with the sources.
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
    """Keep an entry, in one step, so that no process reads half of it.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    folder = folder_to_write()
    if folder is None:
        raise OSError(f"no folder of {', '.join(map(str, folders()))} can be written to")
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
    """Return one of Numba's C extensions; if Numba is imported later, it finds it there."""
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
    """Return the address of a symbol outside.

    Raises
    ------
    AttributeError, KeyError
        If there is none.
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
    """Return whether every symbol outside is there."""
    try:
        return all(_address_of(name) for name in image.imports)
    except (AttributeError, KeyError, ImportError):
        return False


def _place(image: Image, environment: Any) -> int:
    """Put an image into memory, for ever, since C code may run it while the interpreter ends; return the address."""
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
    """Put an entry into memory.

    Parameters
    ----------
    function
        The Python function that was compiled, for its name and its module.

    Raises
    ------
    OSError, AttributeError, KeyError, ImportError
        If it cannot be done here.
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
