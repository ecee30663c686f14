"""Worker: it reads shards, sends gradients to them, and keeps the bound on staleness."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from mpicoll.parameter_server.compressed_pulls import DeltaFollower
from mpicoll.parameter_server.connection import ShardConnection
from mpicoll.parameter_server.control import BINS, NEVER, Control, State
from mpicoll.parameter_server.partition import Partition, Settings
from mpicoll.parameter_server.server_state import PARAMETERS_TAG, STATE_TAG, state_nbytes, unpacked
from mpicoll.parameter_server.shard_memory import HOLD, PUBLISH

_LOOK_EVERY = 0.05
_FREE_TRIES = 2
"""Number of attempts at a snapshot after which the server is asked to keep the parameters unchanged."""


class Worker:
    """One worker: its connections to all shards, and its clock."""

    def __init__(
        self, links: Sequence[ShardConnection], control: Control, layout: Partition, settings: Settings, rank: int
    ) -> None:
        self._links, self._control, self._layout, self._settings, self._rank = links, control, layout, settings, rank
        self.steps = 0
        self._entered, self._looked = -1, 0.0
        self._histogram = np.zeros(BINS, np.int64)
        self._answers: dict[tuple[int, int], tuple[MPI.Request, np.ndarray]] = {}
        self.finished = self.settling = False

    def enter(self) -> None:
        """Wait until this worker may start its next step; return at once if it has started it already.

        Raises
        ------
        CollectiveTimeout
            If a worker that is too far behind gives no sign of life, or this one has been dropped.
        RemoteError
            If a server has failed.
        """
        if self._entered == self.steps:
            self._look_again()
            return
        if self._settings.staleness is None:
            self._look_again()
        elif self._settings.backup:
            self._await_next()
        else:
            self._keep_bound(self.steps - self._settings.staleness)
        self._entered = self.steps

    def _look_again(self) -> None:
        """Read the shared state, unless that was done recently: it takes as long as pulling a short vector."""
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._looked = time.monotonic()
            self._look()

    def _look(self) -> None:
        self._control.look()
        self._control.raise_failures()
        self._control.raise_dropped()

    def _keep_bound(self, least: int) -> None:
        """Wait until no clock is below `least`, and the parameters include the steps that the clocks count."""

        def behind() -> list[int]:
            return np.flatnonzero(self._control.clocks < least).tolist()

        def nobody_behind() -> bool:
            self._look()
            return not behind()

        self._control.wait(nobody_behind, behind, f"workers that have not taken {least} steps")
        if self._settings.direct:
            return
        for shard in range(len(self._links)):
            what = f"all workers' first {least} pushes to be applied"
            self._await_applied(shard, functools.partial(self._links[shard].is_applied, least), what)

    def _await_applied(self, shard: int, done: Callable[[], bool], what: str) -> None:
        """Wait until the published parameters of a shard include pushes."""
        link, rank = self._links[shard], self._layout.server_rank(shard)
        if link.follower is None:
            self._control.wait_at_most(done, rank, what)
        elif not done():
            link.want(PUBLISH)
            try:
                self._control.wait_at_most(done, rank, what)
            finally:
                link.want(0)

    def _await_next(self) -> None:
        """Wait until the step of this worker's last gradient has been applied, with that gradient or without.

        If it was applied before the gradient arrived, there is no wait, so that a slow worker catches up.
        """
        self._look_again()

        def behind() -> list[int]:
            clocks = self._control.clocks
            return np.flatnonzero(clocks < self.steps).tolist() or np.flatnonzero(clocks < NEVER // 2).tolist()

        for link in self._links if self.steps else ():
            self._control.wait(link.is_past_pulled, behind, "the next step")

    def pull(self, out: np.ndarray, first: int, snapshot: bool) -> int:
        """Read parameters from `first` on; return the lowest version of the shards."""
        for shard, link in enumerate(self._links):
            if self._settings.read_own and not self._settings.direct:
                self._await_applied(shard, link.is_own_applied, "the effect of this rank's own pushes")
            self._read(shard, *link.within(first, out), snapshot)
        return min(link.pulled for link in self._links)

    def _read(self, shard: int, at: int, out: np.ndarray, snapshot: bool) -> None:
        """Read parameters of a shard from element `at` on."""
        link, rank = self._links[shard], self._layout.server_rank(shard)
        if link.follower is not None and self._follow(shard, link.follower):
            out[:] = link.follower.parameters[at : at + out.size]
            link.pulled = link.follower.version
            return
        if snapshot:
            self._snapshot(link, at, out, rank)
        else:
            link.pull(at, out)
        link.pulled = link.seen

    def _follow(self, shard: int, follower: DeltaFollower) -> bool:
        """Bring a replica up to date; return False if the server has ended and shows its last parameters."""
        link, rank = self._links[shard], self._layout.server_rank(shard)

        def ended() -> bool:
            return bool(self._control.states[rank] & State.FINISHED)

        if ended():
            return False
        if not link.follow():
            what, nbytes = "all published parameters", follower.whole_nbytes
            message = self._ask(shard, PARAMETERS_TAG, link.ask_parameters, nbytes, what, ended)
            if message is None:
                return False
            follower.restore(message)
        return True

    def _snapshot(self, link: ShardConnection, at: int, out: np.ndarray, rank: int) -> None:
        for _ in range(_FREE_TRIES):
            if link.try_snapshot(at, out):
                return
        link.want(HOLD)
        try:
            self._control.wait_at_most(lambda: link.try_snapshot(at, out), rank, "parameters that do not change")
        finally:
            link.want(0)

    def push(self, gradient: np.ndarray, first: int, rate: float) -> int:
        """Send a gradient of the parameters from `first` on to all shards that it has elements of.

        Return the number of updates of the first shard since the last pull.
        """
        staleness = (self._add if self._settings.direct else self._send)(gradient, first, rate)
        self._control.tick()
        self.steps += 1
        return staleness

    def _add(self, gradient: np.ndarray, first: int, rate: float) -> int:
        staleness = [link.add(*link.within(first, gradient), rate) for link in self._links]
        self._histogram[min(staleness[0], BINS - 1)] += 1
        return staleness[0]

    def _send(self, gradient: np.ndarray, first: int, rate: float) -> int:
        for shard, link in enumerate(self._links):
            rank = self._layout.server_rank(shard)
            self._await_applied(shard, link.has_room, "room in its mailbox")
            if self._settings.backup and self._settings.error_feedback:
                self._control.wait_at_most(link.is_own_applied, rank, "what became of this rank's last push")
                link.take_back()
        for link in self._links:
            link.send(*link.within(first, gradient), rate)
        return self._links[0].seen - self._links[0].pulled

    def finish(self) -> None:
        """End this worker's part; it pushes nothing afterwards."""
        if self.finished:
            return
        self.finished = True
        if self._settings.direct:
            self._control.count(self._histogram)
        self._control.enter(State.FINISHED)
        self._control.retire(self._rank)

    def state(self) -> dict[str, np.ndarray]:
        """Return the whole state; each shard is of one version."""
        if self._settings.direct:
            return self._state_of_direct()
        parts = [self._state_of(shard) for shard in range(len(self._links))]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _state_of(self, shard: int) -> dict[str, np.ndarray]:
        start, stop = self._layout.bounds(shard)
        nbytes = state_nbytes(self._settings, stop - start)
        message = self._ask(shard, STATE_TAG, self._links[shard].ask, nbytes, "its whole state", lambda: False)
        assert message is not None
        return unpacked(message, self._settings)

    def _state_of_direct(self) -> dict[str, np.ndarray]:
        parameters = np.empty(self._layout.count, self._settings.dtype)
        for link in self._links:
            link.pull(*link.within(0, parameters))
        version = np.array([link.seen for link in self._links])
        return {"version": version, "steps": np.zeros_like(version), "parameters": parameters}

    def _ask(
        self, shard: int, tag: int, ask: Callable[[], None], nbytes: int, what: str, ended: Callable[[], bool]
    ) -> np.ndarray | None:
        """Ask a server for a message of `nbytes` bytes and return it; None if the server has ended before."""
        rank, key = self._layout.server_rank(shard), (shard, tag)
        if key in self._answers:  # one that a call before gave up: it is no answer to this one
            late = self._answers[key][0]
            self._control.wait_at_most(lambda: late.Test() or ended(), rank, what)
            if not late.Test():
                return None
        message = np.empty(nbytes, np.uint8)
        request = self._control.comm.Irecv(message, rank, tag)
        self._answers[key] = request, message
        ask()
        self._control.wait_at_most(lambda: request.Test() or ended(), rank, what)
        if not request.Test():
            return None
        del self._answers[key]
        return message

    def forget_answers(self) -> None:
        """Cancel the receives of messages that have not arrived; the servers send no more."""
        for request, _ in self._answers.values():
            if not request.Test():
                request.Cancel()
                request.Wait()

    @property
    def read_nbytes(self) -> int:
        """Bytes of the parameters that were read."""
        return sum(link.read_nbytes for link in self._links)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of the gradients that were sent."""
        return sum(link.sent_nbytes for link in self._links)

    def settle(self) -> None:
        """Wait until the other workers have finished and all pushes are applied; push nothing afterwards.

        A synchronous step that other workers have started is taken without this one, and no rank waits for its clock.
        """
        if not self.settling:
            self.settling = True
            self._control.enter(State.SETTLING)
            self._control.retire(self._rank)

        def working() -> list[int]:
            states = self._control.states[: self._layout.workers] == 0
            ranks: list[int] = np.flatnonzero(states & (self._control.dropped == 0)).tolist()
            return [rank for rank in ranks if rank != self._rank]

        def alone() -> bool:
            self._look()
            return not working()

        self._control.wait(alone, working, "the other workers to finish")
        for shard, link in enumerate(() if self._settings.direct else self._links):
            self._await_applied(shard, functools.partial(link.is_applied, NEVER), "the last gradients")

    def wait_for_all(self) -> None:
        """Wait until every worker has finished and all pushes are applied."""

        def missing() -> list[int]:
            working = np.flatnonzero(self._control.states & ~State.SETTLING == 0)
            workers = [rank for rank in working.tolist() if rank < self._layout.workers]
            return [rank for rank in workers if not self._control.dropped[rank]] or working.tolist()

        def over() -> bool:
            self._look()
            return bool((self._control.states[self._layout.workers :] & State.FINISHED).all())

        self._control.wait(over, missing, "all to finish")
