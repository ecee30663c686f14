"""Specifications of Alltoallw that a program gives again and again, for compiled code to find them by their objects."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.known_types import handle_word
from mpicoll.buffers.typed_blocks import Description
from mpicoll.kernels import typed_specs as words

_PATIENCE = 64
"""Entries that are written without one being used: a program that makes new lists each time pays for no more."""


class KnownSpecs:
    """Table of the specifications seen last, with the objects that they consist of.

    A specification is entered when it comes for the first time: an FFT of three dimensions, say, uses each twice, there
    and back, before the next one has others.

    Attributes
    ----------
    address
        Where compiled code finds the table; see :mod:`mpicoll.kernels.typed_specs`.
    """

    def __init__(self, size: int) -> None:
        self._size, self._stride = size, words.entry_words(size)
        self._words = np.zeros(words.table_words(size), np.int64)
        self._words[words.HANDLE_NBYTES] = MPI._sizeof(MPI.Datatype)
        self.address = int(self._words.ctypes.data)
        self._places: dict[tuple[int, ...], int] = {}
        self._kept: list[Any] = [None] * words.ENTRIES
        self._next, self._left = 0, _PATIENCE

    def used(self) -> None:
        """Note that a call has found its specifications."""
        self._left = _PATIENCE

    def note(self, spec: Any, description: Description) -> None:
        """Enter a specification, and what Python has read of it."""
        if not self._left or not 3 <= len(spec) <= 4:
            return
        items, layouts = tuple(spec[1:]), description.layouts
        if layouts.low < 0 or layouts.irregular:
            return
        containers = self._containers(items)
        if containers is not None:
            self._enter(tuple(map(id, items)), items, containers, description)

    def _containers(self, items: tuple[Any, ...]) -> list[Any] | None:
        """Return the lists and tuples that a specification consists of, datatypes last; None for other forms."""
        *where, datatypes = items
        pair = where if len(where) == 1 else []
        counts, displs = where[0] if pair else where
        inner = [counts, displs, datatypes]
        if any(type(each) not in (list, tuple) for each in (*pair, *inner)):
            return None
        fits = all(len(each) == self._size for each in inner)
        return [*pair, *inner] if fits and all(isinstance(one, MPI.Datatype) for one in datatypes) else None

    def _enter(
        self, key: tuple[int, ...], items: tuple[Any, ...], containers: list[Any], description: Description
    ) -> None:
        place = self._places.get(key)
        if place is None:
            place, self._next = self._next, (self._next + 1) % words.ENTRIES
            self._places = {known: number for known, number in self._places.items() if number != place}
            self._places[key] = place
        self._left -= 1
        first = words.HEADER_WORDS + place * self._stride
        entry = self._words[first : first + self._stride]
        entry[words.ITEMS] = 0
        self._kept[place] = items, tuple(map(tuple, containers)), description
        entry[words.SECOND_ITEM : words.SECOND_ITEM + len(items)] = key
        layouts = description.layouts
        entry[words.LAYOUTS], entry[words.LOW], entry[words.HIGH] = layouts.address, layouts.low, layouts.high
        entry[words.CONTAINERS] = len(containers)
        rest = [word for each in containers for word in (id(each), len(each), *map(id, each))]
        for datatype in containers[-1]:
            rest += [MPI._addressof(datatype), handle_word(datatype)]
        entry[words.ENTRY_HEAD : words.ENTRY_HEAD + len(rest)] = rest
        entry[words.ITEMS] = 1 + len(items)
