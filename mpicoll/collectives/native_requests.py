"""Requests of calls that the MPI library executes."""

from __future__ import annotations

from mpicoll.collectives.operation import NativeOperation
from mpicoll.collectives.requests import FREED, STARTED_AGAIN, PersistentRequest, Request


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
    """A persistent collective that the MPI library executes."""

    def __init__(self, task: NativeOperation, timeout: float) -> None:
        super().__init__(timeout)
        self._task: NativeOperation | None = task

    def Start(self) -> None:
        """Start the operation; see :meth:`PersistentRequest.Start`."""
        if self._task is None:
            raise RuntimeError(FREED)
        if self._flight is not None:
            raise RuntimeError(STARTED_AGAIN)
        self._begin(self._task.start(self._timeout))
        self.active = True

    def Free(self) -> None:
        """Free the request; local."""
        self._refuse_free()
        self._task = None
