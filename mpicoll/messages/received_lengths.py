"""Check of the lengths of received messages, for calls in which each rank knows only its own counts.

The MPI library takes a message that is shorter than expected for a complete one, and reports one that is longer by an
error which does not name the sender.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI

from mpicoll.errors import MismatchError

_TOO_LONG = MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS


class LengthMismatch(MismatchError):
    """A message of another length than expected, of which only its receiver knows."""


class Expected(NamedTuple):
    """A message that is received: the place of its request among those that are waited for, its sender and length."""

    place: int
    peer: int
    nbytes: int


class ReceivedLengths:
    """Check of the messages that one row of a plan waits for.

    Attributes
    ----------
    statuses
        The statuses of all messages that are waited for, as the MPI library writes them.
    """

    def __init__(self, call: str, expected: Sequence[Expected], messages: int) -> None:
        self._call, self._expected = call, expected
        self._status = MPI.Status()
        self._nbytes = MPI._sizeof(MPI.Status)
        self.statuses = np.zeros(messages * self._nbytes, np.uint8)

    def __call__(self) -> None:
        """Raise LengthMismatch if a message that has arrived is shorter than expected."""
        for message in self._expected:
            nbytes = self._read(message.place).Get_count(MPI.BYTE)
            if nbytes != message.nbytes:
                raise self._error(message, f"sends {nbytes} bytes")

    def explain(self, error: MPI.Exception) -> NoReturn:
        """Raise LengthMismatch if `error` is that of a message that is longer than expected, else `error`."""
        if error.Get_error_class() in _TOO_LONG:
            for message in self._expected:
                if MPI.Get_error_class(self._read(message.place).error) == MPI.ERR_TRUNCATE:
                    raise self._error(message, "sends more bytes") from error
        raise error

    def test(self, requests: Sequence[MPI.Request]) -> bool:
        """Return whether all messages have arrived, as compiled code finds out, too."""
        statuses = [MPI.Status() for _ in requests]
        try:
            done = MPI.Request.Testall(requests, statuses)
        except MPI.Exception as error:
            if error.Get_error_class() in _TOO_LONG:
                raise LengthMismatch(f"{self._call}: a rank sends more bytes than this rank expects") from error
            raise
        for place, status in enumerate(statuses):
            self._part(place)[...] = np.frombuffer(ctypes.string_at(MPI._addressof(status), self._nbytes), np.uint8)
        return bool(done)

    def _part(self, place: int) -> np.ndarray:
        return self.statuses[place * self._nbytes : (place + 1) * self._nbytes]

    def _read(self, place: int) -> MPI.Status:
        ctypes.memmove(MPI._addressof(self._status), self._part(place).ctypes.data, self._nbytes)
        return self._status

    def _error(self, message: Expected, does: str) -> LengthMismatch:
        return LengthMismatch(
            f"{self._call}: rank {message.peer} {does}, but this rank expects {message.nbytes} bytes from it"
        )
