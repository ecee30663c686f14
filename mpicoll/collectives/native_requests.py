"""Requests of calls that the MPI library executes."""

from __future__ import annotations

import contextlib

from mpi4py import MPI

from mpicoll.collectives.operation import NativeOperation
from mpicoll.collectives.requests import FREED, PersistentRequest, Request


class NonblockingNativeRequest(Request):
    """The request of one nonblocking call that the MPI library executes."""

    def __init__(self, task: NativeOperation, timeout: float) -> None:
        super().__init__(timeout)
        self._task: NativeOperation | None = task
        self._begin(task.start(timeout))

    def _complete(self) -> None:
        if self._task is not None:
            self._task.unload()
        self._task = None
        super()._complete()


class NativeRequest(PersistentRequest):
    """A persistent collective that the MPI library executes.

    Ranks may start several in different orders. Where the library has no persistent collectives (MPI before 4.0), a
    start is a nonblocking call, and all ranks have to start theirs in the same order.
    """

    def __init__(self, task: NativeOperation, timeout: float) -> None:
        super().__init__(timeout)
        self._number = task.enter(timeout)
        self._kept: MPI.Request | None = None
        try:
            with contextlib.suppress(NotImplementedError):
                self._kept = task.keep()
        except Exception as error:
            task.channel.refuse_entered(self._number, error)
            raise
        self._task: NativeOperation | None = task

    def Start(self) -> None:
        """Start the operation; see :meth:`PersistentRequest.Start`."""
        self._refuse_second_start()
        task = self._task
        if task is None:
            raise RuntimeError(FREED)
        if self._kept is None:
            self._begin(task.start(self._timeout))
        else:
            task.channel.ensure_usable()
            self._kept.Start()  # type: ignore[attr-defined]
            self._begin(task.follow(self._kept, self._number))
        self.active = True

    def Free(self) -> None:
        """Free the request; local."""
        self._refuse_free()
        if self._task is not None and self._kept is not None and not self._task.channel.has_failed:
            self._kept.Free()
        self._task = self._kept = None
