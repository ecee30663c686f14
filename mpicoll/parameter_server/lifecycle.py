"""Life cycle of a parameter server: start, permitted calls, end."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

import numpy as np

from mpicoll.parameter_server.control import State
from mpicoll.parameter_server.partition import Partition, Settings
from mpicoll.parameter_server.serve import Server
from mpicoll.parameter_server.windows import ServerWindows
from mpicoll.parameter_server.worker import Worker

_Self = TypeVar("_Self", bound="Lifecycle")


class Lifecycle:
    """A session from its beginning to its end; the attributes are those of :class:`~mpicoll.ParameterServer`."""

    def __init__(self, session: ServerWindows, layout: Partition, settings: Settings) -> None:
        self._session, self._settings, self._control = session, settings, session.control
        self.rank, self.size, self.count, self.dtype = session.rank, layout.size, layout.count, settings.dtype
        self.workers, self.servers, self.is_server = layout.workers, layout.servers, self.rank >= layout.workers
        self._closed, self._served = False, False
        self._server: Server | None = None
        self._worker: Worker | None = None

    def _begin(self, initial: np.ndarray, state: dict[str, np.ndarray] | None) -> None:
        """Take up the role; return when all have."""
        if self.is_server:
            self._server = self._session.server(initial, state)
        else:
            self._worker = self._session.worker()
        self._session.begin()

    def beat(self) -> None:
        """Show that this rank is alive, in a computation that takes long."""
        self._ensure_open("beat")
        self._control.look()

    def finish(self) -> None:
        """Stop taking part: nobody waits for this worker any more. The end of the block does it, too."""
        self._as_worker("finish").finish()

    def serve(self) -> None:
        """Do a server's work until all workers have finished; the end of the block does it where nobody called it.

        Raises
        ------
        RuntimeError
            On a worker.
        CollectiveTimeout, CorruptPayload, RemoteError
            If a worker for which others wait was silent for longer than its lease, a message is damaged, another
            server failed.
        """
        self._ensure_open("serve")
        if self._server is None:
            raise RuntimeError(f"serve: rank {self.rank} is a worker; the servers are the last {self.servers} ranks")
        if self._served:
            return
        self._served = True
        try:
            self._server.serve()
        except BaseException:
            self._control.enter(State.FAILED)
            raise

    def _as_worker(self, what: str) -> Worker:
        self._ensure_open(what)
        if self._worker is None:
            raise RuntimeError(f"{what}: rank {self.rank} is a server; workers are ranks 0 to {self.workers - 1}")
        return self._worker

    def _ensure_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: the parameter server has been closed")

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop taking part, or serve to the end; then wait until all ranks are here, and free everything.

        An exception raised in the block is re-raised.
        """
        if self._closed:
            return
        try:
            self._leave(error)
        except BaseException as problem:
            error = problem
            raise
        finally:
            self._closed = True
            self._session.close(quiet=error is not None)

    def _leave(self, error: BaseException | None) -> None:
        if self._worker is not None:
            self._worker.finish()
        elif error is None:
            self.serve()
        elif not self._served:
            self._control.enter(State.FAILED)

    def close(self) -> None:
        """Do what the end of the block does; collective."""
        self.__exit__(None, None, None)
