"""New communicators of a program that make their first collectives by the MPI library.

To make a communicator mpicoll's takes a fraction of a millisecond, the time of a hundred short collectives. Many
communicators see only a few, or none: the rows and columns of a grid that is made for one transform. So one that a
program makes begins as a plain communicator of mpi4py, and becomes mpicoll's in its next blocking collective after some
number of them. All its ranks make the same collectives in the same order, and so count alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import comm as ours
from mpicoll.collectives import select
from mpicoll.communicator.channel_cache import known_channel, live_channels
from mpicoll.communicator.predefined import WORLD
from mpicoll.communicator.timed_agreement import largest_of_all
from mpicoll.interface.derived_communicators import Settings
from mpicoll.program.call_arguments import NAMES
from mpicoll.program.library_requests import is_started, only_ours
from mpicoll.program.refused_calls import is_refused
from mpicoll.progress.waiting import POLLS_BEFORE_YIELD

MOST_CHANNELS = 256
"""Number of a rank's communicators from which on new ones stay with the MPI library.

A program that never frees its communicators would meet the library's limit earlier than without mpicoll, which takes a
second, private one for each: MPICH has about two thousand at a time.
"""
_calls = 0


def begin_with_library(calls: int) -> None:
    """Let communicators that are made from now on make so many calls by the MPI library; on all ranks."""
    global _calls
    _calls = calls
    ours.make_later = _make_later if calls else None


def _make_later(made: Any, settings: Settings) -> Any:
    """Return the object of a new communicator that begins with the library's calls.

    mpi4py may have made the object, of a class of ours; then it changes its class. Return None for one of a class that
    is derived from ours.
    """
    if not isinstance(made, ours.Intracomm):
        made = MPI.Intracomm.__new__(classes[ours.class_for(made)], made)
    elif type(made) in classes:
        made.__class__ = classes[type(made)]
    elif type(made) not in classes.values():
        return None
    made._settings, made._left = settings, _calls
    return made


class LibraryFirst:
    """Mixin of communicators that make their first collectives by the MPI library."""

    _left: float = 0
    """Number of calls that are left to the library; 0 in an object that the program has made by the class."""
    _settings: Settings
    _ours: Any
    """Class of mpicoll's communicators of this kind."""
    _is_ours = False
    """True in an object of a class that the program has derived, which keeps it, once mpicoll makes its collectives."""

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """Return the name of the MPI library's algorithms; local."""
        if self._is_ours:
            return self._ours.algorithms(self, collective)
        select.row_of(collective)
        return (select.NATIVE,)

    def choice(self, collective: str, nbytes: int, **options: Any) -> str:
        """Return the name of the MPI library's algorithms; local."""
        if self._is_ours:
            return self._ours.choice(self, collective, nbytes, **options)
        select.row_of(collective)
        return select.NATIVE

    def _become_ours(self: Any, must: bool) -> bool:
        """Make this object one of mpicoll's communicators; collective.

        False where one of its ranks has very many of them, or the MPI library can make no more, which all ranks learn
        together. Then this one stays with the library, unless it `must` not.
        """
        live, world = np.array([live_channels()], np.int64), known_channel(WORLD)
        polls = POLLS_BEFORE_YIELD if world is None else world.polls
        largest_of_all(MPI.Intracomm(self), live, self._settings.timeout, polls=polls)
        if live[0] >= MOST_CHANNELS and not must:
            self._left = math.inf
            return False
        plain = type(self)
        if plain in classes.values():
            self.__class__ = self._ours
        else:
            self._is_ours = True
        made = known_channel(MPI.Intracomm(self)) is not None  # by the program, which has made another object
        try:
            self._set_up(self._settings, None if made else world)
        except MPI.Exception:
            self.__class__, self._is_ours, self._left = plain, False, math.inf
            if must:
                raise
            return False
        return True


def _counted(name: str, library: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that counts its calls, and leaves them to the library at first."""
    is_blocking = not is_started(name)
    is_persistent = name.endswith("_init")

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if self._is_ours:
            return getattr(self._ours, name)(self, *arguments, **named)
        has_ours = only_ours(arguments, named)
        if not (is_persistent or has_ours) and (self._left > 0 or not is_blocking):  # others do not wait for any rank
            self._left -= 1
            try:
                return library(self, *arguments, **named)
            except Exception as error:
                if not isinstance(error, MPI.Exception) and is_refused(self, name, arguments, named):
                    self._left += 1  # the other ranks have not counted it either
                raise
        if self._become_ours(must=has_ours):
            return getattr(self, name)(*arguments, **named)
        return library(self, *arguments, **named)

    call.__name__, call.__doc__ = name, library.__doc__
    return call


def _class_of(kind: type) -> type:
    library: Any = kind._kind  # type: ignore[attr-defined]
    methods = {name: _counted(name, getattr(library, name)) for name in NAMES if hasattr(library, name)}
    return type(kind.__name__, (LibraryFirst, kind), {**methods, "_ours": kind, "__module__": kind.__module__})


classes = {kind: _class_of(kind) for kind in ours.CLASSES.values()}
"""By class of mpicoll's communicators, that of those which begin with the library's calls."""
