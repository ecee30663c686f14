"""Announcements of the ranks of a domain: six numbers of each, which all ranks learn in half a microsecond.

They serve decisions about a communicator itself, outside its collectives: whether its ranks have found the same spare
channel, and whether they can keep it. See :mod:`mpicoll.kernels.announce`.
"""

from __future__ import annotations

import ctypes

import numpy as np

from mpicoll.kernels.announce import ENTRY_WORDS, LINE_NBYTES, NUMBERS, announce

_PAGE = 4096


def lines_nbytes(size: int) -> int:
    """Return the bytes of the lines of `size` ranks, in whole pages."""
    return -(-LINE_NBYTES * size // _PAGE) * _PAGE


class Announcements:
    """One rank's side; rounds are started in the same order on all ranks.

    Parameters
    ----------
    address
        Address of the lines, in memory that all ranks share; zeros at first.
    polls
        How often a round that has just been started is looked at before the caller yields the core.
    """

    def __init__(self, address: int, size: int, rank: int, polls: int) -> None:
        self._address, self._size, self._rank, self._polls = address, size, rank, polls
        words = (ctypes.c_int64 * (LINE_NBYTES // 8 * size)).from_address(address)
        entries = np.frombuffer(words, np.int64).reshape(size, 2, ENTRY_WORDS)
        self._entries = entries[:, 0], entries[:, 1]  # of even and odd rounds
        self._round, self._own = 0, np.zeros(NUMBERS, np.int64)
        self._own_address = self._own.ctypes.data

    def start(self, *numbers: int) -> bool:
        """Start a round with up to six signed 64-bit numbers of this rank; return whether it is complete already."""
        self._own[: len(numbers)] = numbers
        self._own[len(numbers) :] = 0
        self._round += 1
        return self._look(self._polls)

    def is_complete(self) -> bool:
        """Return whether all ranks have started the round; local."""
        return self._look(1)

    @property
    def told(self) -> np.ndarray:
        """The numbers of a round that is complete, int64 of shape (size, 6); valid until the next one is started."""
        return self._entries[self._round & 1][:, 1 : 1 + NUMBERS]

    def missing(self) -> list[int]:
        """Return the ranks that have not started the round."""
        return np.flatnonzero(self._entries[self._round & 1][:, 0] != self._round).tolist()

    def _look(self, polls: int) -> bool:
        return bool(announce.run(self._address, self._size, self._rank, self._round, self._own_address, polls))
