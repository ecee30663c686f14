"""Communicator objects that use a channel, of which a program may make several for one communicator."""

from __future__ import annotations

import weakref
from typing import Any


class CommunicatorObjects:
    """Weak references to the objects; a WeakValueDictionary takes microseconds for each communicator."""

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, handle: Any) -> None:
        """Add an object, for as long as it lives."""
        key, references = id(handle), self._references
        references[key] = weakref.ref(handle, lambda _: references.pop(key, None))

    def leave(self) -> None:
        """Make all objects forget the channel, which serves no communicator now."""
        for reference in list(self._references.values()):
            handle = reference()
            if handle is not None:
                handle.forget_channel()
        self._references.clear()
