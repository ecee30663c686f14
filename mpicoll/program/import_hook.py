"""Hooks on the import of ``mpi4py.MPI`` and on MPI's initialisation, run before the program sees the module.

MPI is initialised when the program asks for it, with the ``mpi4py.rc`` that the program has set. A program that does
not use MPI does not initialise it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

_NAME = "mpi4py.MPI"


class _Moment:
    """The moment at which MPI has been imported, and no module of mpicoll is in the middle of its own import.

    A module of mpicoll that the program imports first imports MPI in its first lines. What is installed then needs
    that module as a whole.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function, self._imports = function, _Imports()
        self._has_come, self.is_over = False, False

    @contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Import a module in the block; call the function behind it if this is the moment."""
        self._imports.depth += 1
        try:
            yield
            self._has_come |= name == _NAME  # not if its import fails, after which the program may try again
        finally:
            self._imports.depth -= 1
            if self._imports.depth == 0 and self._has_come and not self.is_over:
                self.is_over = True
                self._function(sys.modules[_NAME])


class _Imports(threading.local):
    """Number of modules that a thread is importing at the moment."""

    depth = 0


class _Watching:
    """Loader that runs a module's own loader, and tells a moment of it."""

    def __init__(self, inner: Loader, moment: _Moment) -> None:
        self._inner, self._moment = inner, moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._inner
        with self._moment.importing(module.__name__):
            self._inner.exec_module(module)


class _Finder:
    """Finder for ``mpi4py.MPI`` and modules of mpicoll: asks the other finders, and wraps the loader that they find."""

    def __init__(self, moment: _Moment) -> None:
        self._moment = moment

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._moment.is_over or not (fullname == _NAME or fullname.startswith("mpicoll.")):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Loader", _Watching(spec.loader, self._moment))
                return spec
        return None


def when_mpi_is_imported(function: Callable[[Any], None]) -> None:
    """Call ``function(MPI)`` at the end of the import of ``mpi4py.MPI``; at once if it is imported already.

    If a module of mpicoll imports it, the end of that module's import counts.
    """
    # mpi4py puts a finder of its own in front of the others when it is imported; ours has to come before that.
    import mpi4py  # noqa: F401

    if _NAME in sys.modules:
        function(sys.modules[_NAME])
    else:
        sys.meta_path.insert(0, cast("Any", _Finder(_Moment(function))))


def when_mpi_is_initialized(function: Callable[[Any], None]) -> None:
    """Call ``function(MPI)`` as soon as the program has imported ``mpi4py.MPI`` and MPI is initialised.

    That is at the import, or in ``MPI.Init`` where the program has set ``mpi4py.rc.initialize = False``.
    """

    def imported(MPI: Any) -> None:
        if MPI.Is_initialized():
            function(MPI)
            return
        for name in ("Init", "Init_thread"):
            setattr(MPI, name, _followed(getattr(MPI, name), lambda: function(MPI)))

    when_mpi_is_imported(imported)


def _followed(initialize: Callable[..., Any], function: Callable[[], None]) -> Callable[..., Any]:
    def initialize_and_go_on(*arguments: Any, **settings: Any) -> Any:
        result = initialize(*arguments, **settings)
        function()
        return result

    return initialize_and_go_on
