"""The public face: who calls what, in which order, and how it ends."""

from __future__ import annotations

from types import TracebackType

import numpy as np
from mpi4py import MPI

from mpicoll.compression import Compressor
from mpicoll.errors import MpicollError
from mpicoll.parameter_server import layout as arguments
from mpicoll.parameter_server.control import State
from mpicoll.parameter_server.server import Server
from mpicoll.parameter_server.session import Session, agree_on, places_of
from mpicoll.parameter_server.worker import Worker
from mpicoll.runtime.registry import channel_of

_TIMEOUT = 60.0


class ParameterServer:
    """Parameters that some ranks serve and the others pull, and move by pushing gradients, each at its own pace.

    The last `servers` ranks of `comm` are servers, the others workers. A server has a shard of the vector, about as
    many elements as every other. Making one is collective over `comm`, and so is leaving the block:

    >>> with mpicoll.ParameterServer(initial, comm=comm, lr=0.1) as ps:
    ...     if ps.is_server:
    ...         ps.serve()                      # until all workers have finished
    ...     else:
    ...         for batch in batches:
    ...             ps.pull(parameters)
    ...             ps.push(gradient(parameters, batch))

    Parameters
    ----------
    initial : (count,) float32 or float64
        The first parameters, of the same count and dtype on all ranks. What counts is each server's own shard.
    comm
        An intracommunicator with at least two ranks.
    servers
        Number of servers.
    optimizer
        ``"sgd"``, ``"momentum"``, ``"adagrad"`` or ``"adam"``; their settings are keywords: ``momentum``, ``epsilon``,
        ``beta1``, ``beta2``.
    lr
        Learning rate.
    staleness
        A worker that is more than so many steps (pushes) ahead of the slowest waits, and what it pulls has the effect
        of all steps that are further back. With 0 the servers apply, step by step, each worker's gradient in the order
        of ranks: the result is the same to the bit in every run. None: nobody waits.
    compression, error_feedback
        How gradients are sent: a compressor or its name, for float32; with feedback of what was lost, kept by the
        worker for each shard, where the compressor needs it or `error_feedback` says so.
    push
        ``"mailbox"``: gradients go to rings in the server's memory, and the server applies them. ``"direct"``: workers
        add ``-lr * gradient`` to the parameters themselves, without work of the server; only plain SGD.
    slots
        Gradients that fit into each mailbox.
    timeout
        Seconds that a rank waits for one that shows no sign of life before it raises
        :class:`~mpicoll.errors.CollectiveTimeout`.
    lease, on_silence
        A worker that makes no call for so many seconds (by default `timeout`) ends the job by an error that names it,
        ``"raise"``, or is dropped, ``"drop"``: nobody waits for it, and its next call raises CollectiveTimeout. A
        worker that computes for longer than that calls :meth:`beat` now and then.

    Attributes
    ----------
    rank, size, count, workers, servers : int
    is_server : bool
    dtype

    Raises
    ------
    TypeError, ValueError
        Naming the argument; RemoteError on the ranks whose arguments are right, MismatchError if the ranks differ.
        Nothing has been allocated then.

    Notes
    -----
    Parameters and mailboxes lie in windows of ``MPI_Win_allocate``, one for each shard, and are reached by one-sided
    operations: by accumulates, which are atomic for each element. A server is busy with nothing else and is always in
    MPI. One MPI call of a rank that waits for a server on another node has no deadline of its own; if the server dies,
    the launcher ends the job.

    Staleness is counted in updates: versions of the first shard between pull and push. (Li et al., "Scaling distributed
    machine learning with the parameter server", OSDI 2014; Ho et al., "More effective distributed ML via a stale
    synchronous parallel parameter server", NIPS 2013, for the bound; Niu et al., "Hogwild!", NIPS 2011, for direct
    pushes.)
    """

    def __init__(
        self,
        initial: np.ndarray,
        *,
        comm: MPI.Intracomm,
        lr: float,
        servers: int = 1,
        optimizer: str = "sgd",
        staleness: int | None = None,
        compression: str | Compressor | None = None,
        error_feedback: bool | None = None,
        push: str = "mailbox",
        slots: int = 2,
        timeout: float = _TIMEOUT,
        lease: float | None = None,
        on_silence: str = "raise",
        **hyper: float,
    ) -> None:
        plain = arguments.checked_comm(comm)
        problem: Exception | None = None
        text, seconds = "ParameterServer: refused", _TIMEOUT
        try:
            vector = arguments.checked_initial(initial)
            layout = arguments.checked_layout(vector.size, servers, plain)
            settings = arguments.checked(
                vector.dtype, optimizer=optimizer, lr=lr, hyper=hyper, staleness=staleness, compression=compression,
                error_feedback=error_feedback, push=push, slots=slots, timeout=timeout, lease=lease,
                on_silence=on_silence,
            )  # fmt: skip
            places = places_of(layout, settings, plain.rank)
            text, seconds = f"ParameterServer: {layout} {settings}", settings.timeout
        except (TypeError, ValueError, MpicollError) as error:
            problem = error
        agree_on(channel_of(comm), text, seconds, problem)
        self._session = Session(plain, layout, settings, places)
        self._layout, self._settings, self._control = layout, settings, self._session.control
        self._closed, self._served = False, False
        self._parameters: np.ndarray | None = None
        self._version = 0
        self._server: Server | None = None
        self._worker: Worker | None = None
        if self.is_server:
            self._server = self._session.server(vector)
        else:
            self._worker = self._session.worker()
        self._session.begin()

    @property
    def rank(self) -> int:
        """Number of this rank in the communicator."""
        return self._session.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._layout.size

    @property
    def count(self) -> int:
        """Number of parameters."""
        return self._layout.count

    @property
    def dtype(self) -> np.dtype:
        """Type of parameters and gradients."""
        return self._settings.dtype

    @property
    def workers(self) -> int:
        """Number of workers: ranks 0 to workers - 1."""
        return self._layout.workers

    @property
    def servers(self) -> int:
        """Number of servers, the ranks from `workers` on."""
        return self._layout.servers

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server."""
        return self._session.rank >= self._layout.workers

    @property
    def version(self) -> int:
        """On a worker what the last :meth:`pull` returned, on a server how many pushes it has applied."""
        return self._version if self._server is None else self._server.version

    @property
    def parameters(self) -> np.ndarray:
        """Where :meth:`pull` without `out` puts the parameters, on workers."""
        if self._parameters is None:
            self._parameters = np.zeros(self.count, self.dtype)
        return self._parameters

    @property
    def staleness(self) -> np.ndarray:
        """How many pushes were so many updates late, of all workers; the last element counts all that were later.

        Of shape (1024,), int64, on all ranks; known when the block has ended.
        """
        if self._session.staleness is None:
            raise RuntimeError("staleness: it is known when all ranks have left the block, and all of them well")
        return self._session.staleness

    def pull(self, out: np.ndarray | None = None, *, snapshot: bool = False) -> int:
        """Read the newest parameters, once the bound on staleness lets this worker begin its next step.

        Each element is one that was current at some time during the call, and all of them together may mix versions;
        with `snapshot` those of a shard are of one and the same version.

        Parameters
        ----------
        out : (count,) of `dtype`
            Overwritten; by default :attr:`parameters`.
        snapshot
            Not with direct pushes, where no moment is known at which all elements are of one version.

        Returns
        -------
        int
            The version: so many pushes, or more, are in each element.

        Raises
        ------
        TypeError, ValueError
            If `out` is not such a vector, or there can be no snapshot. Nothing has been read.
        CollectiveTimeout
            Naming the slowest workers if they stay silent, or the server.
        RemoteError
            If a server failed.
        """
        worker = self._as_worker("pull")
        if snapshot and self._settings.direct:
            raise ValueError("snapshot: True needs push='mailbox', where only the server changes the parameters")
        found = self.parameters if out is None else out
        arguments.checked_vector("out", found, self.count, self.dtype, writable=True)
        if not worker.finished:
            worker.enter()
        self._version = worker.pull(found, snapshot)
        return self._version

    def push(self, gradient: np.ndarray) -> int:
        """Send a gradient, and take a step of this worker's clock; the gradient may be changed when this returns.

        Parameters
        ----------
        gradient : (count,) of `dtype`
            Left as it is. NaN and inf are passed on.

        Returns
        -------
        int
            Its staleness: updates of the first shard that this worker knows of since its last pull, when it is sent.
            More may come before the server applies it; :attr:`staleness` counts those, too.

        Raises
        ------
        TypeError, ValueError
            If it is not such a vector. Nothing has been written.
        RuntimeError
            After :meth:`finish`, or on a server.
        CollectiveTimeout, RemoteError
            As for :meth:`pull`.
        """
        worker = self._as_worker("push")
        if worker.finished:
            raise RuntimeError("push: this worker has finished")
        arguments.checked_vector("gradient", gradient, self.count, self.dtype)
        worker.enter()
        return worker.push(gradient)

    def beat(self) -> None:
        """Show that this rank is alive, in a computation that takes long."""
        self._ensure_open("beat")
        self._control.look()

    def finish(self) -> None:
        """Leave the clock: nobody waits for this worker any more. The end of the block does it, too."""
        self._as_worker("finish").finish()

    def result(self, out: np.ndarray | None = None) -> int:
        """Finish, wait until all workers have finished, and read the last parameters; arguments as for :meth:`pull`.

        Returns
        -------
        int
            The number of pushes of all workers.
        """
        worker = self._as_worker("result")
        if out is not None:
            arguments.checked_vector("out", out, self.count, self.dtype, writable=True)
        worker.finish()
        worker.wait_for_all()
        return self.pull(out)

    def serve(self) -> None:
        """Do a server's work until all workers have finished; the end of the block does it where nobody called it.

        Raises
        ------
        RuntimeError
            On a worker.
        CollectiveTimeout, CorruptPayload, RemoteError
            If a worker was silent for longer than its lease, a message is damaged, another server failed.
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

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the clock, or serve to the end; then wait until all ranks are here, and free everything.

        Where an exception is on its way, it is the one that goes on.
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
