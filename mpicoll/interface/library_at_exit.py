"""Collectives while the interpreter shuts down, which are the MPI library's.

Objects that live until then may make collectives in ``__del__``. Modules are taken apart meanwhile, and communicators
have given back what they hold of the library, so that no Python code of mpicoll may run. Every rank has called its exit
handlers before, so that all of them make these collectives by the library.
"""

from __future__ import annotations

from types import FunctionType

from mpi4py import MPI

from mpicoll.interface.communicator_state import with_subclasses

_KEPT = frozenset({"Free"})
"""Methods that are ours to the end: what a communicator has cached is freed with it."""
_PACKAGE = __package__.partition(".")[0]


def leave_to_library(communicator: type[MPI.Intracomm]) -> None:
    """Remove the methods that have the names of mpi4py's from a class of communicators, its bases and subclasses."""
    for cls in {each for sub in with_subclasses(communicator) for each in sub.__mro__ if _is_ours(each)}:
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType) and name not in _KEPT and _is_of_mpi4py(name):
                delattr(cls, name)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == _PACKAGE


def _is_of_mpi4py(name: str) -> bool:
    return not name.startswith("_") and any(hasattr(kind, name) for kind in (MPI.Intracomm, MPI.Topocomm))
