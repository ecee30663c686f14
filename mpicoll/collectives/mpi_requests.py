"""Requests of mpicoll as subclasses of ``MPI.Request``, which mpi4py's functions for several requests accept.

mpi4py gives the MPI library an array of handles, but the library cannot progress operations of mpicoll: with
generalized requests ``MPI_Waitall`` would wait for ever, or need a progress thread, which competes with the program
for the interpreter. So ``MPI.Request.Waitall``, ``Waitany``, ``Testsome``, ... and ``MPI.Prequest.Startall`` are
replaced by functions that look for requests of mpicoll first. Lists without any go to mpi4py's own functions. In other
lists both kinds are polled; operations of mpicoll progress meanwhile and have their deadlines.

Requests of mpicoll have a handle that the MPI library refuses, for code that passes it on nevertheless.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.collectives import request_lists

_REFUSED = "request: a request of mpicoll was given to the MPI library, which cannot wait for it"
_new = MPI.Request.__new__


class OwnRequest(MPI.Request):
    """A request whose operation is mpicoll's.

    Attributes
    ----------
    active
        True from its start until it is found to be complete: an inactive one is ignored among others.
    """

    active = True

    def __new__(cls, *arguments: Any) -> Any:
        """Make one with a handle that the MPI library refuses."""
        return _new(cls, _stand_in())

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """True if the operation is known to have ended, successfully or not; advances nothing."""

    @property
    def has_failed(self) -> bool:
        """True if the operation has ended with an exception that Wait raises."""
        return self.has_ended and getattr(self, "_error", None) is not None

    @property
    @abstractmethod
    def polls(self) -> int:
        """Number of polls before the core is yielded."""

    @abstractmethod
    def watch(self) -> Callable[[float], float]:
        """Return the watchdog of a long wait for it; see `look` of :func:`mpicoll.progress.waiting.wait_until`."""

    @abstractmethod
    def give_up(self, error: BaseException) -> None:
        """Abandon the operation because of `error`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a completed request as ``MPI.REQUEST_NULL``, which mpi4py's is then; refuse others.

        Persistent ones are refused, which mpi4py's are also while they are inactive.
        """
        if self or isinstance(self, MPI.Prequest):
            raise ValueError(f"cannot serialize {type(self).__name__!r} instance, which is not complete")
        return (MPI.Request, ())

    def __bool__(self) -> bool:
        """Return False once it is complete; mpi4py's is ``MPI.REQUEST_NULL`` then."""
        return self.active

    def __eq__(self, other: object) -> bool:
        """Return True for itself, and for null requests once it is complete."""
        if not isinstance(other, MPI.Request):
            return NotImplemented
        return self is other or not (self or other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return id(self)

    def Cancel(self) -> None:
        """Raise RuntimeError: MPI has no way to cancel collectives."""
        raise RuntimeError("request: collectives cannot be cancelled")

    cancel = Cancel


@functools.cache
def _stand_in() -> MPI.Request:
    """Return a request with a handle that no call of the MPI library takes for a complete one, or waits for."""
    if MPI.REQUEST_NULL.handle < 1 << 32:  # handles are numbers, and 0 is never one
        return MPI.Request.fromhandle(0)

    def refuse(status: MPI.Status) -> None:
        _stand_in.cache_clear()  # the library frees the handle, which later requests must not have
        raise RuntimeError(_REFUSED)

    request = MPI.Grequest.Start(refuse)  # handles are addresses: one that has ended, with an error
    request.Complete()
    return request


def _is_own(request: Any) -> bool:
    return isinstance(request, OwnRequest)


def _has_own(requests: Sequence[Any]) -> bool:
    """Return whether requests of ours are among them; TypeError for an iterator, as from mpi4py."""
    len(requests)
    return any(issubclass(kind, OwnRequest) for kind in set(map(type, requests)))


def _replacement(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return mpi4py's method with this name for lists that may have requests of ours."""
    mixed = request_lists.function(name, _is_own, plain)
    if name.endswith("any"):

        def method(cls: type, requests: Sequence[Any], status: MPI.Status | None = None) -> Any:
            return mixed(requests, status) if _has_own(requests) else plain(requests, status)
    else:

        def method(cls: type, requests: Sequence[Any], statuses: list[MPI.Status] | None = None) -> Any:  # type: ignore[misc]
            return mixed(requests, statuses) if _has_own(requests) else plain(requests, statuses)

    return method


def _startall(plain: Callable[..., None]) -> Callable[..., None]:
    def method(cls: type, requests: list[Any]) -> None:
        if not _has_own(requests):
            plain(requests)
            return
        if any(_is_own(request) and not isinstance(request, MPI.Prequest) for request in requests):
            raise MPI.Exception(MPI.ERR_REQUEST)
        plain([request for request in requests if not _is_own(request)])
        for request in requests:
            if _is_own(request):
                request.Start()

    return method


def _replace(kind: type, name: str, function: Callable[..., Any]) -> None:
    """Replace a class method; since extension classes refuse the assignment, write to their method table.

    If the interpreter keeps that table elsewhere, mpi4py's method stays, and the MPI library refuses our handles.
    """
    replaced = getattr(kind, name)
    function.__name__, function.__qualname__, function.__doc__ = name, f"{kind.__name__}.{name}", replaced.__doc__
    try:
        setattr(kind, name, classmethod(function))
    except TypeError:
        tables = gc.get_referents(kind.__dict__)
        if len(tables) == 1 and isinstance(tables[0], dict) and tables[0].get(name) is kind.__dict__[name]:
            tables[0][name] = classmethod(function)
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def _install() -> None:
    for name in request_lists.NAMES:
        if hasattr(MPI.Request, name):  # some came with MPI 4.1
            _replace(MPI.Request, name, _replacement(name, getattr(MPI.Request, name)))
    _replace(MPI.Prequest, "Startall", _startall(MPI.Prequest.Startall))


_install()
