"""The public face: what a program gives and gets."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel_cache import channel_of
from mpicoll.compression import Compressor
from mpicoll.errors import MpicollError
from mpicoll.parameter_server import partition as arguments
from mpicoll.parameter_server.lifecycle import Lifecycle
from mpicoll.parameter_server.windows import ServerWindows, agree_on, places_of

_TIMEOUT = 60.0


class ParameterServer(Lifecycle):
    """Parameters held by some ranks (servers); the others (workers) pull them and push gradients at their own pace.

    The last `servers` ranks of `comm` are servers, the others workers. Each server holds a shard;
    shards are of nearly equal size. Making one is collective over `comm`, and so is leaving the block:

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
        The first parameters, of the same count and dtype on all ranks. Each server begins with its own
        values of its shard.
    comm
        An intracommunicator with at least two ranks.
    servers
        Number of servers.
    optimizer
        ``"sgd"``, ``"momentum"``, ``"adagrad"`` or ``"adam"``; their settings are keywords: ``momentum``,
        ``nesterov``, ``epsilon``, ``beta1``, ``beta2``.
    lr
        Learning rate of pushes that come without one.
    staleness
        A worker that is more than so many steps (pushes) ahead of the slowest waits, and its pull includes every
        step older than that. With 0 this is synchronous training: the servers take each step with the
        sum of all workers' gradients, added up in the order of ranks, and the result is the same to the bit in every
        run. None: nobody waits.
    backup
        With ``staleness=0``: so many workers, those that come last, are not waited for in each step, and what they send
        for it is left out; with error feedback it becomes part of the residual, and comes with their next gradients.
        (Chen et al., "Revisiting distributed synchronous SGD", 2016.)
    damping
        Whether the learning rate of a gradient that is more than one update of each worker late is divided by the
        number of updates. (Zhang et al., "Staleness-aware async-SGD", IJCAI 2016.)
    read_own
        Whether a pull waits for the effect of this worker's own pushes, as bounded staleness is defined in the paper
        below. Without it, a worker can run ahead of a busy server by one mailbox of gradients, and gradients are
        staler by that.
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
        Each call of a worker renews its lease of so many seconds (by default `timeout`). With ``"raise"`` one whose
        lease has run out is named by a warning, and goes on with its next call; if another rank waits for it, for a
        step or at the end, the job ends by an error that names it. With ``"drop"`` it is dropped at once: nobody waits
        for it, and its next call raises CollectiveTimeout. A worker that computes for longer calls :meth:`beat` now
        and then. A server that has a single worker waits for it without limit.
    state
        What :meth:`state` returned, of this optimizer and any number of servers, to go on from in place of `initial`.

    Attributes
    ----------
    rank, size : int
        In the communicator.
    workers, servers : int
        Workers are ranks 0 to workers - 1, the others servers.
    count, dtype
        Number and type of the parameters.
    is_server : bool
        Whether this rank is one.

    Raises
    ------
    TypeError, ValueError
        Naming the argument; RemoteError on the ranks whose arguments are right, MismatchError if the ranks differ.
        Nothing has been allocated then.

    Notes
    -----
    Parameters and mailboxes lie in windows of ``MPI_Win_allocate``, one for each shard, and are reached by one-sided
    operations: by accumulates, which are atomic for each element. A server is busy with nothing else and is always in
    MPI. One MPI call of a rank that waits for a server on another node has no deadline of its own, nor has one that
    waits for a rank of its own node which was stopped inside a lock of the MPI library; if a rank dies, the launcher
    ends the job.

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
        backup: int = 0,
        damping: bool = False,
        read_own: bool = True,
        compression: str | Compressor | None = None,
        error_feedback: bool | None = None,
        push: str = "mailbox",
        slots: int = 2,
        timeout: float = _TIMEOUT,
        lease: float | None = None,
        on_silence: str = "raise",
        state: dict[str, np.ndarray] | None = None,
        **hyper: float,
    ) -> None:
        plain = arguments.checked_comm(comm)
        problem: Exception | None = None
        text, seconds = "", _TIMEOUT
        try:
            vector = arguments.checked_initial(initial)
            layout = arguments.checked_layout(vector.size, servers, plain)
            settings = arguments.checked(
                vector.dtype, layout.workers, optimizer=optimizer, lr=lr, hyper=hyper, staleness=staleness,
                backup=backup, damping=damping, read_own=read_own, compression=compression,
                error_feedback=error_feedback, push=push, slots=slots, timeout=timeout, lease=lease,
                on_silence=on_silence,
            )  # fmt: skip
            before = arguments.checked_state(state, vector.size, settings)
            places = places_of(layout, settings, plain.rank)
            text, seconds = f"ParameterServer: {layout} {settings} {before is None}", settings.timeout
        except (TypeError, ValueError, MpicollError) as error:
            problem = error
        agree_on(channel_of(comm), text, seconds, problem)
        super().__init__(ServerWindows(plain, layout, settings, places), layout, settings)
        self._parameters: np.ndarray | None = None
        self._version = 0
        self._begin(vector, before)

    @property
    def version(self) -> int:
        """On a worker what the last :meth:`pull` returned, on a server how many pushes it has applied."""
        return self._version if self._server is None else self._server.version

    @property
    def parameters(self) -> np.ndarray:
        """Array that :meth:`pull` without `out` fills with the parameters, on workers."""
        if self._parameters is None:
            self._parameters = np.zeros(self.count, self.dtype)
        return self._parameters

    @property
    def staleness(self) -> np.ndarray:
        """Histogram of the staleness of all workers' pushes, in updates; the last element counts all that were later.

        Of shape (1024,), int64, on all ranks; known when the block has ended.
        """
        if self._session.staleness is None:
            raise RuntimeError("staleness: it is known when all ranks have left the block, and all of them well")
        return self._session.staleness

    @property
    def late(self) -> int:
        """Number of pushes that the first server left out (`backup`), as far as this worker has learnt of them."""
        if self._session.late is None:
            raise RuntimeError("late: it is known when all ranks have left the block, and all of them well")
        return self._session.late

    @property
    def is_dropped(self) -> bool:
        """True if this is a worker that was silent for longer than its lease, as far as it knows."""
        return not self.is_server and bool(self._control.dropped[self.rank])

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not come to the end of the block; known when it has ended."""
        return self._session.missing

    @property
    def steps(self) -> int:
        """Pushes of this worker; 0 on a server."""
        return 0 if self._worker is None else self._worker.steps

    @property
    def sent_nbytes(self) -> int:
        """Bytes of gradients that this worker has sent; 0 on a server."""
        return 0 if self._worker is None else self._worker.sent_nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of parameters, mailboxes and optimizer that this rank holds as a server; 0 on a worker."""
        return 0 if self._server is None else self._server.held_nbytes

    def pull(self, out: np.ndarray | None = None, *, first: int | None = None, snapshot: bool = False) -> int:
        """Read the newest parameters, once the bound on staleness lets this worker begin its next step.

        Each element is one that was current at some time during the call, and all of them together may mix versions;
        with `snapshot` those of a shard are of one and the same version.

        Parameters
        ----------
        out : (count,) of `dtype`
            Overwritten; by default :attr:`parameters`.
        first
            Read as many parameters as `out` is long, from this one on.
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
        begin = arguments.checked_part("out", found, first, self.count, self.dtype)
        arguments.checked_vector("out", found, found.size, self.dtype, writable=True)
        if not worker.finished and not worker.settling:
            worker.enter()
        self._version = worker.pull(found, begin, snapshot)
        return self._version

    def push(self, gradient: np.ndarray, rate: float | None = None, *, first: int | None = None) -> int:
        """Send a gradient, and count one step of this worker; the gradient may be changed when this returns.

        Parameters
        ----------
        gradient : (count,) of `dtype`
            Left as it is. NaN and inf are passed on.
        rate
            The learning rate, by default `lr`; in synchronous training that of the lowest rank counts.
        first
            The gradient is of as many parameters as it is long, from this one on; all others stay as they are, and what
            the optimizer keeps of them. Not with compression.

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
            After :meth:`settle` or :meth:`finish`, or on a server.
        CollectiveTimeout, RemoteError
            As for :meth:`pull`.
        """
        worker = self._as_worker("push")
        if worker.finished or worker.settling:
            raise RuntimeError(f"push: this worker has {'finished' if worker.finished else 'called settle'}")
        begin = arguments.checked_part("gradient", gradient, first, self.count, self.dtype)
        if first is not None and self._settings.compressor is not None:
            raise ValueError(f"first: {first} needs gradients that are not compressed")
        found = self._settings.lr if rate is None else arguments.checked_number("rate", rate)
        worker.enter()
        return worker.push(gradient, begin, found)

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

    def settle(self) -> None:
        """Push nothing more; wait until all other workers have finished and all pushes are in the parameters.

        One worker may call it, to read the last :meth:`state` before it finishes. Others may be at any step: one that
        they have begun is taken without this worker.

        Raises
        ------
        CollectiveTimeout, RemoteError
            As for :meth:`pull`.
        """
        self._as_worker("settle").settle()

    def state(self) -> dict[str, np.ndarray]:
        """Return parameters and the servers' optimizers, to be saved; the others go on meanwhile.

        Each shard is saved at a single version, but for direct pushes, where it may mix versions as :meth:`pull` does.

        Returns
        -------
        dict
            ``"parameters"`` and the optimizer's vectors, each (count,) of `dtype`; ``"version"`` and ``"steps"`` of the
            optimizer, each (servers,) of int64.

        Raises
        ------
        RuntimeError
            On a server, or after :meth:`finish`, when servers may be gone.
        CollectiveTimeout, RemoteError
            As for :meth:`pull`.
        """
        worker = self._as_worker("state")
        if worker.finished:
            raise RuntimeError("state: this worker has finished; servers need not be there any more")
        return worker.state()
