"""Life cycle of a parameter server: start, permitted calls, end."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.parameter_server.control import State
from mpicoll.parameter_server.partition import Partition, Settings
from mpicoll.parameter_server.rescue import rescued
from mpicoll.parameter_server.serve import Server
from mpicoll.parameter_server.windows import ServerWindows
from mpicoll.parameter_server.worker import Worker
from mpicoll.progress.failed_ranks import is_failure

_Self = TypeVar("_Self", bound="Lifecycle")


class Lifecycle:
    """Base class with the life cycle of a parameter server; attributes as in :class:`~mpicoll.ParameterServer`."""

    def __init__(self, session: ServerWindows, layout: Partition, settings: Settings) -> None:
        self._session, self._settings, self._control = session, settings, session.control
        self.rank, self.size, self.count, self.dtype = session.rank, layout.size, layout.count, settings.dtype
        self.workers, self.servers, self.is_server = layout.workers, layout.servers, self.rank >= layout.workers
        self._closed, self._served = False, False
        self._server: Server | None = None
        self._worker: Worker | None = None

    def _begin(self, initial: np.ndarray, state: dict[str, np.ndarray] | None) -> None:
        """Start this rank's role, and return when all ranks have started."""
        if self.is_server:
            self._server = self._session.server(initial, state)
        else:
            self._worker = self._session.worker(initial, state)
        self._session.begin()

    @property
    def steps(self) -> int:
        """Pushes of this worker; 0 on a server."""
        return 0 if self._worker is None else self._worker.steps

    @property
    def sent_nbytes(self) -> int:
        """Bytes of gradients that this worker has sent; 0 on a server."""
        return 0 if self._worker is None else self._worker.sent_nbytes

    @property
    def read_nbytes(self) -> int:
        """Bytes of parameters that this worker has read; 0 on a server."""
        return 0 if self._worker is None else self._worker.read_nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of parameters, mailboxes and optimizer that this rank holds as a server; 0 on a worker."""
        return 0 if self._server is None else self._server.held_nbytes

    def beat(self) -> None:
        """Give a sign of life, which renews this worker's lease, in a long computation."""
        self._ensure_open("beat")
        self._control.look()

    def finish(self) -> None:
        """End this worker's part: it pushes nothing more, and no rank waits for it; implied by the end of the block."""
        self._as_worker("finish").finish()

    def serve(self) -> None:
        """Serve until all workers have finished; the end of the block does so if the program has not.

        Raises
        ------
        RuntimeError
            On a worker.
        CollectiveTimeout
            If the lease of a worker that other ranks wait for has expired.
        CorruptPayload
            If a message is damaged.
        RemoteError
            If another server failed.
        """
        self._ensure_open("serve")
        if self._server is None:
            raise RuntimeError(f"serve: rank {self.rank} is a worker; the servers are the last {self.servers} ranks")
        if self._served:
            return
        self._served = True
        try:
            self._server.serve()
        except BaseException as error:
            if not is_failure(error):
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

    def rescue(self, comm: MPI.Intracomm) -> dict[str, np.ndarray]:
        """Return the newest state that ranks hold which are left after others have died; the session has ended then.

        Each shard comes from its server or from a server with a replica of it: the one that has applied more pushes. It
        includes every push that a worker has pulled, and all pushes that were published. Those that a worker had pushed
        and that were not published yet may be lost, at most one of each worker, or `slots` with ``read_own=False``.

        Parameters
        ----------
        comm
            A communicator of the ranks that are left, as of ``MPI.Comm.Shrink``. Collective over it.

        Returns
        -------
        dict
            As of :meth:`state`, without ``"published"``: published parameters are then the parameters.

        Raises
        ------
        RemoteError
            On every rank: all copies of a shard are lost. The message names its parameters.
        RuntimeError
            With direct pushes, whose servers know of no versions.
        """
        if self._settings.direct:
            raise RuntimeError("rescue: servers hold no state of their own with push='direct'")
        self._closed = True
        self._session.abandon()
        held = {} if self._server is None else self._server.held
        return rescued(comm, held, self._session.layout, self._settings)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish (workers) or serve to the end (servers), wait for all ranks, and free the windows; collective.

        An exception raised in the block is re-raised. After the death of a rank nothing is waited for or freed.
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
            if error is not None and is_failure(error):
                self._session.abandon()
            else:
                self._session.close(quiet=error is not None)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None and is_failure(error):
            return
        if self._worker is not None:
            self._worker.finish()
        elif error is None:
            self.serve()
        elif not self._served:
            self._control.enter(State.FAILED)

    def close(self) -> None:
        """End the session as the end of the block does; collective."""
        self.__exit__(None, None, None)
