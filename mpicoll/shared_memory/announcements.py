"""Announcements of the ranks of a domain: six numbers of each, which all ranks learn in half a microsecond.

They serve decisions about a communicator itself, outside its collectives: whether its ranks have found the same spare
channel, and whether they can keep it. See :mod:`mpicoll.kernels.announce`.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from mpicoll.kernels.announce import ENTRY_WORDS, LINE_NBYTES, NUMBERS, announce, look

_PAGE = 4096


def lines_nbytes(size: int) -> int:
    """Return the bytes of the lines of `size` ranks, in whole pages."""
    return -(-LINE_NBYTES * size // _PAGE) * _PAGE


class Round:
    """A round in which every rank tells its numbers; they can be read at any time after it is complete.

    Attributes
    ----------
    told
        The numbers by rank, int64 of shape (size, 6), once :meth:`is_complete` has returned True; else None.
    """

    __slots__ = ("_home", "_number", "told")

    def __init__(self, home: Announcements, number: int, told: np.ndarray | None = None) -> None:
        self._home, self._number, self.told = home, number, told

    def is_complete(self) -> bool:
        """Return whether all ranks have started the round; local."""
        return self.told is not None or self._home.look(self, self._number)

    def missing(self) -> list[int]:
        """Return the ranks that have not started the round."""
        return [] if self.told is not None else self._home.missing(self._number)


class Announcements:
    """One rank's side; rounds are started in the same order on all ranks.

    Parameters
    ----------
    address
        Address of the lines, in memory that all ranks share; zeros at first.
    polls
        How often a round that has just been started is looked at before the caller yields the core.

    Attributes
    ----------
    last
        The round that was started last; before the first, one that is complete, in which every rank told zeros.
    """

    def __init__(self, address: int, size: int, rank: int, polls: int) -> None:
        self._address, self._size, self._rank, self._polls = address, size, rank, polls
        words = (ctypes.c_int64 * (LINE_NBYTES // 8 * size)).from_address(address)
        entries = np.frombuffer(words, np.int64).reshape(size, 2, ENTRY_WORDS)
        self._entries = entries[:, 0], entries[:, 1]  # of even and odd rounds
        self._round = 0
        self._lock = threading.Lock()  # threads may look at one round
        self.last = Round(self, 0, np.zeros((size, NUMBERS), np.int64))

    def start(
        self, first: int = 0, second: int = 0, third: int = 0, fourth: int = 0, fifth: int = 0, sixth: int = 0
    ) -> Round:
        """Start a round with up to six signed 64-bit numbers of this rank; the last one must be complete.

        Raises
        ------
        RuntimeError
            If it is not: other ranks have not read this rank's numbers.
        """
        if not self.last.is_complete():
            raise RuntimeError("a round is started before the last one is complete")
        number = self._round = self._round + 1
        own = self._entries_address(number) + LINE_NBYTES * self._rank
        announce.run(own, number, first, second, third, fourth, fifth, sixth)
        self.last = Round(self, number)
        self.look(self.last, number, self._polls)
        return self.last

    def look(self, started: Round, number: int, polls: int = 1) -> bool:
        """Return whether all ranks have started a round, the last one; then its numbers are copied."""
        with self._lock:
            if started.told is None and look.run(self._entries_address(number), self._size, number, polls):
                # A rank may write the next numbers but one here as soon as this rank has started the next round.
                started.told = self._entries[number & 1][:, 1 : 1 + NUMBERS].copy()
        return started.told is not None

    def _entries_address(self, number: int) -> int:
        return self._address + 8 * ENTRY_WORDS * (number & 1)

    def missing(self, number: int) -> list[int]:
        """Return the ranks that have not started a round, the last one."""
        return np.flatnonzero(self._entries[number & 1][:, 0] != number).tolist()
