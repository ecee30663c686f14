"""Exceptions of mpicoll that programs written for mpi4py catch as ``MPI.Exception``, with the error class of MPI."""

from __future__ import annotations

from mpi4py import MPI

from mpicoll.errors import CommunicatorBroken


class _WithText(MPI.Exception):
    """An exception of an error class, with a text of its own."""

    error_class = MPI.ERR_OTHER

    def __init__(self, text: str) -> None:
        super().__init__(self.error_class)
        self._text = text

    def __str__(self) -> str:
        return self._text


class RootError(_WithText, ValueError):
    """The root is not a rank of the communicator."""

    error_class = MPI.ERR_ROOT


class FreedCommunicator(_WithText, CommunicatorBroken):
    """The communicator was freed."""

    error_class = MPI.ERR_COMM

    def __init__(self) -> None:
        super().__init__("communicator: it cannot be used any more: it was freed")
