"""Execution of a program as ``__main__``, as the interpreter itself would do it."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

_OUR_FOLDER = str(Path(__file__).parent) + os.sep
_MAIN = "__main__"


class CannotStart(Exception):
    """Error for a program that cannot be started; `status` is the exit status that Python has in this case."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class _Found(NamedTuple):
    """A program: the name it has in ``sys.argv[0]``, its code, and attributes of its ``__main__``."""

    argv0: str
    code: CodeType
    attributes: dict[str, Any]


def execute(arguments: Sequence[str]) -> None:
    """Run ``PROGRAM.py [ARG ...]``, ``-m MODULE [ARG ...]``, ``-c COMMAND [ARG ...]`` or ``- [ARG ...]``.

    ``sys.argv``, ``sys.path[0]`` and ``sys.modules["__main__"]`` are the program's, and remain so.

    Raises
    ------
    CannotStart
        If there is no such program.
    """
    kind = arguments[0]
    rest = list(arguments[2:] if kind in ("-m", "-c") else arguments[1:])
    if kind in ("-m", "-c") and len(arguments) < 2:
        raise CannotStart(f"argument expected for {kind}", 2)
    module = ModuleType(_MAIN)
    sys.argv[:] = [kind, *rest]
    if kind == "-m":
        _set_path(str(Path.cwd()))
        found = _module(arguments[1])
    elif kind in ("-c", "-"):
        _set_path("")
        found = _command(arguments[1]) if kind == "-c" else _standard_input()
    else:
        found = _file(kind)
    sys.argv[0] = found.argv0
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    vars(module).update(__builtins__=builtins, **found.attributes)
    sys.modules[_MAIN] = module
    exec(found.code, vars(module))


def _command(text: str) -> _Found:
    attributes = {"__spec__": None, "__package__": None, "__loader__": importlib.machinery.BuiltinImporter}
    return _Found("-c", compile(text, "<string>", "exec", dont_inherit=True), attributes)


def _standard_input() -> _Found:
    name = "<stdin>"
    code = compile(sys.stdin.read(), name, "exec", dont_inherit=True)
    return _Found("-", code, {**_command("").attributes, "__file__": name, "__cached__": None})


def _set_path(folder: str) -> bool:
    """Replace the entry that the interpreter made for mpicoll itself; False with ``-P`` or ``-I``: there is none."""
    safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)
    if not safe:
        sys.path[0] = folder
    return not safe


def _file(path: str) -> _Found:
    """Find a script, a compiled one, or a folder or zip file with a ``__main__.py``."""
    if Path(path).is_dir() or pkgutil.get_importer(path).__class__.__name__ == "zipimporter":
        whole = str(Path(path).absolute())
        if not _set_path(whole):
            sys.path.insert(0, whole)
        spec = importlib.machinery.PathFinder.find_spec(_MAIN, [whole])
        if spec is None:
            raise CannotStart(f"can't find '__main__' module in {whole!r}", 1)
        return _of_spec(spec, _MAIN, path)
    try:
        with io.open_code(str(Path(path).resolve())) as stream:
            content = stream.read()
    except OSError as error:
        text = f"can't open file {str(Path(path).absolute())!r}: [Errno {error.errno}] {error.strerror}"
        raise CannotStart(text, 2) from None
    _set_path(str(Path(path).resolve().parent))
    name = str(Path(path).absolute())  # as Python itself has it in tracebacks and __file__
    code = pkgutil.read_code(io.BytesIO(content)) or compile(content, name, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader(_MAIN, name)
    empty = dict.fromkeys(("__spec__", "__package__", "__cached__", "__doc__"))
    return _Found(path, code, {**empty, "__file__": name, "__loader__": loader})


def _module(name: str) -> _Found:
    """Find a module by its name; a package's ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None and not name.endswith(f".{_MAIN}"):
            name, package = f"{name}.{_MAIN}", name
            spec = importlib.util.find_spec(name)
            if spec is None:
                text = f"No module named {name}; {package!r} is a package and cannot be directly executed"
                raise CannotStart(text, 1)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CannotStart(f"Error while finding module specification for {name!r} ({error!r})", 1) from None
    if spec is None:
        raise CannotStart(f"No module named {name}", 1)
    return _of_spec(spec, name, spec.origin or name)


def _of_spec(spec: importlib.machinery.ModuleSpec, name: str, argv0: str) -> _Found:
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(name) if get_code is not None else None
    if code is None:
        raise CannotStart(f"No code object available for {name}", 1)
    attributes = {"__spec__": spec, "__package__": spec.parent, "__loader__": spec.loader, "__doc__": None}
    return _Found(argv0, code, {**attributes, "__file__": spec.origin, "__cached__": spec.cached})


def without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OUR_FOLDER):
        trace = trace.tb_next
    return trace
