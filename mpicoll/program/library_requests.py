"""Nonblocking and persistent collectives of the MPI library, for programs whose ranks may not call MPI from a thread.

MPI promises that a nonblocking collective goes on while its rank waits in any call of MPI, such as ``Recv``. A thread
keeps that promise for mpicoll's (:mod:`mpicoll.progress.progress_thread`) and needs ``MPI_THREAD_MULTIPLE``. A program
that asks for less, by ``mpi4py.rc.threads = False`` or ``mpi4py.rc.thread_level``, would wait for ever::

    rank 0: Iallreduce, Recv from 1 ... Wait
    rank 1: Iallreduce, Wait, Send to 0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import comm as ours
from mpicoll.buffers.reduction_ops import UserOperation
from mpicoll.communicator.timed_agreement import largest_of_all
from mpicoll.program.call_arguments import NAMES, OBJECTS

_KEYWORDS = frozenset({"algorithm", "compression"})
"""Arguments that mpi4py does not know."""
_are_left = False


def may_call_from_threads(world: MPI.Intracomm, timeout: float) -> bool:
    """Return True if all ranks of a plain communicator may call MPI from several threads; collective."""
    lacking = np.array([MPI.Query_thread() != MPI.THREAD_MULTIPLE], np.int64)
    largest_of_all(world, lacking, timeout)
    return not lacking[0]


def leave_to_library() -> None:
    """Let the MPI library make nonblocking and persistent collectives on mpicoll's communicators; on all ranks."""
    global _are_left
    _are_left = True
    for library, kind in ours.CLASSES.items():
        for name in filter(is_started, NAMES):
            if hasattr(library, name):
                setattr(kind, name, _of_library(getattr(library, name), getattr(kind, name)))


def is_started(name: str) -> bool:
    """Return True for a method that returns a request."""
    return name not in OBJECTS and NAMES[name] != name


def are_library(name: str) -> bool:
    """Return True if calls of a method have been left to the MPI library."""
    return _are_left and is_started(name)


def only_ours(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return True for arguments that only mpicoll has."""
    return not _KEYWORDS.isdisjoint(named) or any(
        isinstance(argument, UserOperation) for argument in (*arguments, *named.values())
    )


def _of_library(library: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return (own if only_ours(arguments, named) else library)(self, *arguments, **named)

    call.__name__, call.__doc__ = library.__name__, library.__doc__
    return call
