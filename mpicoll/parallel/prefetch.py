"""Prefetch of parameter groups (*units*), which are gathered from all ranks' chunks into a few buffers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpicoll import Intracomm
from mpicoll.parallel.parameter_groups import ParameterGroups

_MOST_PERSISTENT = 32
"""Up to this number, units use persistent operations, of which a communicator has a limited number."""


class GroupPrefetch:
    """Buffers that hold the units used or prepared last. The constructor and every method are collective.

    Parameters
    ----------
    division : ParameterGroups
        The units.
    blocks : list of (unit.block,) arrays
        This rank's chunk of each unit, padded.
    buffers
        Number of buffers, 1 or 2, each for one unit.
    """

    def __init__(self, division: ParameterGroups, blocks: list[np.ndarray], buffers: int) -> None:
        self._division, self._blocks = division, blocks
        padded = [division.padded(unit) for unit in division.units]
        # Neighbours stand in different buffers.
        self._buffers = [division.zeros(max(padded[place::buffers])) for place in range(buffers)]
        self._targets = [self._buffers[number % buffers][:length] for number, length in enumerate(padded)]
        self._held: list[int | None] = [None] * buffers
        self._under_way: list[tuple[Any, float] | None] = [None] * buffers
        self._persistent: dict[int, Any] = {}

    def use(self, number: int) -> np.ndarray:
        """Return the elements of a unit, valid until another unit uses its buffer."""
        place, division = number % len(self._buffers), self._division
        if self._held[place] != number:
            self._finish(place)
            with division.meter.waiting(division.sent_nbytes(division.units[number]), number):
                division.comm.Allgather(self._blocks[number], self._targets[number])
            self._held[place] = number
        self._finish(place)
        return self._targets[number][: division.units[number].length]

    def prepare(self, number: int) -> None:
        """Start to gather a unit, if there is one of that number, so that :meth:`use` waits less."""
        place, division = number % len(self._buffers), self._division
        if not 0 <= number < len(self._blocks) or self._held[place] == number:
            return
        self._finish(place)
        with division.meter.waiting(division.sent_nbytes(division.units[number])):
            request = self._start(number)
        self._held[place], self._under_way[place] = number, (request, time.perf_counter())

    def _start(self, number: int) -> Any:
        comm, chunk, target = self._division.comm, self._blocks[number], self._targets[number]
        if not isinstance(comm, Intracomm) or len(self._blocks) > _MOST_PERSISTENT:
            return comm.Iallgather(chunk, target)
        if number not in self._persistent:
            self._persistent[number] = comm.Allgather_init(chunk, target)
        self._persistent[number].Start()
        return self._persistent[number]

    def _finish(self, place: int) -> None:
        """Wait for the unit that is being gathered into a buffer."""
        if (flight := self._under_way[place]) is not None:
            request, since = flight
            self._division.meter.beside(since, self._held[place] or 0)
            with self._division.meter.waiting():
                request.Wait()
            self._under_way[place] = None

    def forget(self) -> None:
        """Invalidate all buffers, before the chunks change."""
        for place in range(len(self._held)):
            self._finish(place)
            self._held[place] = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)
