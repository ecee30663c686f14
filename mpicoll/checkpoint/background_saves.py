"""Checkpoints that a thread writes while the program goes on.

::

    program   step step | copy | step step step step step | wait, copy | step ...
    thread                     | write files, agree, rename |          | write ...

The copy is in memory; the program may change its arrays as soon as it is made. The thread makes collective calls, on a
communicator that nothing else uses.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpi4py import MPI

from mpicoll.checkpoint.write_assignment import PerRank, Piece, Tensors, Whole
from mpicoll.checkpoint.writer import CheckpointStore


class BackgroundSaves:
    """Saves to a :class:`CheckpointStore` by a thread, one at a time.

    Every method is collective over the communicator of the store, which must be used by nothing else. All ranks get
    the error of a save in the same call: the next :meth:`save`, or :meth:`wait`.

    Parameters
    ----------
    store
        The store; close it after :meth:`wait`.

    Raises
    ------
    RuntimeError
        If the MPI library does not allow calls from several threads.
    """

    def __init__(self, store: CheckpointStore) -> None:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "checkpoints in the background need an MPI library that allows calls from several threads "
                "(MPI_THREAD_MULTIPLE)"
            )
        self._store = store
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        """Wait for the last save, copy the tensors and begin to write them.

        Parameters
        ----------
        step, tensors, facts
            As for :meth:`CheckpointStore.save`.

        Raises
        ------
        CheckpointError
            On every rank: the last save has failed; this one was not begun.
        """
        self.wait()
        copies = copied(tensors)
        self._thread = threading.Thread(target=self._run, args=(step, copies, dict(facts)), name="mpicoll checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last save has ended; return at once if there is none.

        Raises
        ------
        CheckpointError
            On every rank: it has failed.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, step: int, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        try:
            self._store.save(step, tensors, facts)
        except BaseException as error:  # raised where the program waits
            self._error = error


def copied(tensors: Tensors) -> Tensors:
    """Return tensors with copies of their arrays."""
    found: dict[str, Any] = {}
    for name, entry in tensors.items():
        if isinstance(entry, (Piece, Whole, PerRank)):
            found[name] = replace(entry, array=entry.array.copy())
        else:
            found[name] = [replace(piece, array=piece.array.copy()) for piece in entry]
    return found
