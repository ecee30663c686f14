"""Client interface of the parameter server."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel_cache import channel_of
from mpicoll.compression import Compressor
from mpicoll.errors import MpicollError
from mpicoll.parameter_server import partition as arguments
from mpicoll.parameter_server.lifecycle import Lifecycle
from mpicoll.parameter_server.windows import ServerWindows, agree_on, places_of, with_replicas

_TIMEOUT = 60.0


class ParameterServer(Lifecycle):
    """Parameter server: some ranks (servers) hold the parameters; the others (workers) pull them and push gradients.

    The last `servers` ranks of `comm` are servers, the others workers. Each server holds a shard; shards have nearly
    equal lengths. The constructor and the end of the ``with`` block are collective over `comm`:

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
        The initial parameters, of the same count and dtype on all ranks. Each server takes its shard from its own
        array.
    comm
        An intracommunicator with at least two ranks.
    servers
        Number of servers.
    optimizer
        ``"sgd"``, ``"momentum"``, ``"adagrad"`` or ``"adam"``. Its settings are further keywords: ``momentum``,
        ``nesterov``, ``epsilon``, ``beta1``, ``beta2``.
    lr
        Learning rate of pushes without `rate`; a negative one adds what is pushed.
    staleness
        Bound on staleness in steps (pushes): a worker that is more steps ahead of the slowest one waits, and its pull
        includes all older steps. 0 is synchronous training: the servers take each step with the sum of all workers'
        gradients, added in rank order, and the result is the same to the bit in every run. None is no bound: workers
        never wait for each other.
    backup
        Number of backup workers, with ``staleness=0``: the gradients of that many workers, which arrive last, are left
        out of each step. With error feedback they become part of the residual. (Chen et al., "Revisiting distributed
        synchronous SGD", 2016.)
    damping
        Whether the learning rate of a gradient whose staleness is larger than the number of workers is multiplied by
        ``workers / staleness``. (Zhang et al., "Staleness-aware async-SGD", IJCAI 2016.)
    read_own
        Whether a pull waits until this worker's own pushes are applied, as the definition of bounded staleness in Ho
        et al. requires. Otherwise a worker can be ahead of a busy server by one mailbox of gradients.
    compression, error_feedback
        Compressor of float32 gradients, or its specification; and whether to use error feedback, with a residual on
        the worker for each shard (None: if the compressor needs it).
    pull_compression
        Compressor of float32 parameters, or its specification, for links that are slow in both directions. Servers
        then publish parameters by compressed deltas, whose errors are part of the next deltas, and a pull reads the
        deltas since this worker's last pull. Parameters that are pulled are the published ones, to the bit and of one
        version for each shard; :meth:`state` and, after all workers have finished, :meth:`result` return the server's
        own. Takes memory for a replica on each worker. Without ``staleness=0``, ``read_own=False`` lets servers publish
        one delta for several pushes. Not for compressors that are unbiased, nor for direct pushes. (Tang et al.,
        "DoubleSqueeze", ICML 2019; Gruntkowska et al., "EF21-P and friends", ICML 2023.)
    push
        ``"mailbox"``: workers write gradients to mailboxes in the server's memory, and the server applies them.
        ``"direct"``: workers add ``-lr * gradient`` to the parameters, without the server; only for ``"sgd"``.
    slots
        Number of gradients that fit into each mailbox.
    timeout
        Seconds without any sign of life of a rank after which ranks that wait for it raise
        :class:`~mpicoll.errors.CollectiveTimeout`.
    lease, on_silence
        Each call of a worker renews its lease of `lease` seconds (`timeout` by default). With ``"raise"``, an expired
        lease is reported by a warning, and the worker may continue with its next call; but if another rank waits for
        it, for a step or at the end, the job ends with an error that names it. With ``"drop"``, the worker is dropped:
        no rank waits for it, and its next call raises CollectiveTimeout. In longer computations a worker calls
        :meth:`beat`. A server with a single worker waits for it without limit.
    transport
        ``"windows"``: one-sided MPI; ``"messages"``, which servers answer: for jobs that go on when a rank dies, as
        windows do not. Calls raise :class:`~mpicoll.errors.RankFailed` or ``MPI.Exception`` then; see :meth:`rescue`.
    replicas
        Number of copies of each shard, on as many servers and, where possible, nodes. Servers publish updates when all
        copies have them. Needs ``transport="messages"`` and ``push="mailbox"``.
    state
        A state of :meth:`state`, of the same optimizer and any number of servers, to continue from in place of
        `initial`.

    Attributes
    ----------
    rank, size : int
        This rank, and the number of ranks.
    workers, servers : int
        Their numbers; workers are ranks 0 to workers - 1, the others servers.
    count, dtype
        Number and type of the parameters.
    is_server : bool
        Whether this rank is a server.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it. The other ranks raise RemoteError. Nothing is allocated.
    MismatchError
        If the arguments differ between ranks.

    Notes
    -----
    Parameters and mailboxes lie in windows of ``MPI_Win_allocate``, one for each shard. Ranks access them by one-sided
    accumulates, which are atomic for each element. A server does nothing else and is always inside MPI. A single MPI
    call has no deadline: neither one that waits for a server on another node, nor one that waits for a rank of the same
    node that was stopped inside a lock of the MPI library. If a rank dies, the launcher ends the job.

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
        pull_compression: str | Compressor | None = None,
        push: str = "mailbox",
        slots: int = 2,
        timeout: float = _TIMEOUT,
        lease: float | None = None,
        on_silence: str = "raise",
        transport: str = "windows",
        replicas: int = 1,
        state: dict[str, np.ndarray] | None = None,
        **hyper: float,
    ) -> None:
        plain = arguments.checked_comm(comm)
        channel = channel_of(comm)
        problem: Exception | None = None
        text, seconds = "", _TIMEOUT
        try:
            vector = arguments.checked_initial(initial)
            layout = arguments.checked_layout(vector.size, servers, plain)
            settings = arguments.checked(
                vector.dtype, layout.workers, optimizer=optimizer, lr=lr, hyper=hyper, staleness=staleness,
                backup=backup, damping=damping, read_own=read_own, compression=compression,
                error_feedback=error_feedback, pull_compression=pull_compression, push=push, slots=slots,
                timeout=timeout, lease=lease, on_silence=on_silence, transport=transport, replicas=replicas,
            )  # fmt: skip
            arguments.check_replicas(settings.replicas, layout.servers, transport, push)
            before = arguments.checked_state(state, vector.size, settings)
            places = places_of(layout, settings, plain.rank, channel.node_ids)
            text, seconds = f"ParameterServer: {layout} {settings} {before is None}", settings.timeout
        except (TypeError, ValueError, MpicollError) as error:
            problem = error
        agree_on(channel, text, seconds, problem)
        layout = with_replicas(layout, plain, settings.replicas)
        super().__init__(ServerWindows(plain, layout, settings, places), layout, settings)
        self._parameters: np.ndarray | None = None
        self._version = 0
        self._begin(vector, before)

    @property
    def version(self) -> int:
        """On a worker, the version that the last :meth:`pull` returned; on a server, the number of pushes applied."""
        return self._version if self._server is None else self._server.version

    @property
    def parameters(self) -> np.ndarray:
        """The array that :meth:`pull` without `out` writes to, on workers."""
        if self._parameters is None:
            self._parameters = np.zeros(self.count, self.dtype)
        return self._parameters

    @property
    def staleness(self) -> np.ndarray:
        """Histogram of the staleness of all workers' pushes, int64 of shape (1024,), on all ranks.

        Element i counts the pushes with a staleness of i updates, the last one also those with more. Known after the
        end of the block; before that, or if some rank did not reach it, RuntimeError is raised.
        """
        if self._session.staleness is None:
            raise RuntimeError("staleness: known only after all ranks have left the block without an error")
        return self._session.staleness

    @property
    def late(self) -> int:
        """Number of pushes that the first server left out (`backup`), on all ranks; known as :attr:`staleness` is."""
        if self._session.late is None:
            raise RuntimeError("late: known only after all ranks have left the block without an error")
        return self._session.late

    @property
    def is_dropped(self) -> bool:
        """True if this rank is a worker that is known to have been dropped, since its lease had expired."""
        return not self.is_server and bool(self._control.dropped[self.rank])

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that did not reach the end of the block; known after the end of the block."""
        return self._session.missing

    def pull(self, out: np.ndarray | None = None, *, first: int | None = None, snapshot: bool = False) -> int:
        """Read the newest parameters, after the bound on staleness allows this worker's next step.

        Each element has a value that it had at some time during the call. Different elements may be of different
        versions; with `snapshot`, or with `pull_compression`, all elements of a shard are of the same version.

        Parameters
        ----------
        out : (count,) of `dtype`
            Overwritten; by default :attr:`parameters`.
        first
            Index of the first parameter to read; `out` then has the length of the part.
        snapshot
            Whether to read all elements of a shard at the same version. Not possible with direct pushes.

        Returns
        -------
        int
            The version: each element includes at least this number of pushes; with `pull_compression` without what
            the deltas so far lack of them.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong. Nothing is read then.
        CollectiveTimeout
            If the slowest workers, or a server, show no sign of life; the message names them.
        RemoteError
            If a server failed.
        CorruptPayload
            With `pull_compression`, if a delta is damaged.
        """
        worker = self._as_worker("pull")
        if snapshot and self._settings.direct:
            raise ValueError("snapshot: True needs push='mailbox'")
        found = self.parameters if out is None else out
        begin = arguments.checked_part("out", found, first, self.count, self.dtype)
        arguments.checked_vector("out", found, found.size, self.dtype, writable=True)
        if not worker.finished and not worker.settling:
            worker.enter()
        self._version = worker.pull(found, begin, snapshot)
        return self._version

    def push(self, gradient: np.ndarray, rate: float | None = None, *, first: int | None = None) -> int:
        """Send a gradient, and count one step of this worker; the gradient may be changed after the call.

        Parameters
        ----------
        gradient : (count,) of `dtype`
            The gradient, which is not changed. NaN and inf are sent as they are.
        rate
            The learning rate, by default `lr`; in synchronous training that of the lowest rank counts.
        first
            Index of the first parameter of a gradient for a part of the parameters; the others, and the optimizer's
            state for them, do not change. Not possible with compression.

        Returns
        -------
        int
            The staleness of the gradient when it is sent: the number of updates of the first shard since this worker's
            last pull that it knows of. :attr:`staleness` also counts updates before the server applies the gradient.

        Raises
        ------
        TypeError, ValueError
            If an argument is wrong. Nothing is sent then.
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
            raise ValueError(f"first: {first} is not possible with compression; push whole gradients")
        found = self._settings.lr if rate is None else arguments.checked_number("rate", rate)
        worker.enter()
        return worker.push(gradient, begin, found)

    def result(self, out: np.ndarray | None = None) -> int:
        """:meth:`finish`, wait until all workers have finished, and read the last parameters, as :meth:`pull` does.

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
        """Wait until all other workers have finished and all pushes are applied; this worker pushes nothing afterwards.

        One worker may call it, to read the last :meth:`state` before it finishes. A synchronous step that other workers
        have started is taken without this worker.

        Raises
        ------
        CollectiveTimeout, RemoteError
            As for :meth:`pull`.
        """
        self._as_worker("settle").settle()

    def state(self) -> dict[str, np.ndarray]:
        """Return the parameters and the state of the servers' optimizers, for a checkpoint; other workers continue.

        Each shard is of a single version; with direct pushes it may mix versions as :meth:`pull` does.

        Returns
        -------
        dict
            ``"parameters"`` and the optimizer's vectors, each (count,) of `dtype`; ``"version"`` and ``"steps"`` of the
            optimizer, each (servers,) of int64; with `pull_compression` also the ``"published"`` parameters.

        Raises
        ------
        RuntimeError
            On a server, or after :meth:`finish`, when servers may be gone.
        CollectiveTimeout, RemoteError
            As for :meth:`pull`.
        """
        worker = self._as_worker("state")
        if worker.finished:
            raise RuntimeError("state: this worker has finished, and servers may have ended")
        return worker.state()
