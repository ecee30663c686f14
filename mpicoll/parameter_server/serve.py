"""Server of a shard: it takes gradients from the mailboxes, applies them, and publishes the parameters."""

from __future__ import annotations

import time
import warnings

import numpy as np

from mpicoll.errors import CollectiveTimeout
from mpicoll.parameter_server.compressed_pulls import DeltaPublisher
from mpicoll.parameter_server.control import BINS, Control, State
from mpicoll.parameter_server.partition import Partition, Settings
from mpicoll.parameter_server.polling import Pause
from mpicoll.parameter_server.remote_memory import Region, word_at
from mpicoll.parameter_server.server_state import PARAMETERS_TAG, STATE_TAG, Answers, published_of
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES, HOLD, PUBLISH, Places, ShardHeader, opened
from mpicoll.parameter_server.shard_parameters import ShardParameters
from mpicoll.parameter_server.shard_replicas import ShardReplica, UpdateLog, replicas_on
from mpicoll.parameter_server.synchronous_rounds import SynchronousRound

_HOLD_SECONDS = 0.25
"""Longest time for which the parameters are kept unchanged for workers that read a snapshot."""
_PUBLISH_SECONDS = 0.25
"""Longest time for which pushes are applied and not published, with compressed pulls."""
_LOOK_EVERY = 0.1


class Server:
    """One server: the parameters of its shard and the state of its optimizer, and replicas of other shards.

    It updates a private copy of the parameters and, after each round over the mailboxes, replaces those that workers
    read by accumulates: MPI does not allow plain stores to memory that other ranks read at the same time. With
    compressed pulls it publishes a delta instead, for several pushes if no worker waits for one of them.
    With replicas it publishes what these have applied; see :mod:`mpicoll.parameter_server.shard_replicas`.
    """

    def __init__(
        self, region: Region, places: Places, control: Control, layout: Partition, settings: Settings, rank: int
    ) -> None:
        self._region, self._places, self._control, self._layout = region, places, control, layout
        self._settings, self._rank = settings, rank
        shard = rank - layout.workers
        self._bounds = layout.bounds(shard)
        self._is_first = shard == 0
        self._shard: ShardParameters | None = None
        self._replicas: dict[int, ShardReplica] = {}
        self._updates = UpdateLog(control.comm, layout.replica_ranks(shard))
        self._words = np.zeros(places.words, np.int64)
        self._taken = np.zeros(layout.workers, np.int64)
        self._given_back = np.zeros(layout.workers, np.int64)
        self._over, self._gone = np.zeros(layout.workers, np.bool_), np.zeros(layout.workers, np.bool_)
        self._left_out = np.zeros(layout.workers, np.int64)
        self._histogram = np.zeros(BINS, np.int64)
        self._sequence = self._shown = 0
        self._shown_at = time.monotonic()
        self._held_since: float | None = None
        self._answers = Answers(control.comm, layout.workers, STATE_TAG)
        self._pulls = Answers(control.comm, layout.workers, PARAMETERS_TAG)
        self._publisher: DeltaPublisher | None = None
        self._warned: set[int] = set()

    @property
    def version(self) -> int:
        """Number of pushes that have been applied; with direct pushes, that at the start."""
        return self._shown if self._shard is None else self._shard.version

    @property
    def held(self) -> dict[int, ShardParameters]:
        """Shards that this rank holds, by their number: its own and those that it has replicas of."""
        replicas = {number: replica.shard for number, replica in self._replicas.items()}
        return replicas if self._shard is None else {self._rank - self._layout.workers: self._shard, **replicas}

    @property
    def late(self) -> int:
        """Number of pushes that arrived after their step and were left out."""
        return int(self._left_out.sum())

    @property
    def held_nbytes(self) -> int:
        """Bytes of the region, of the replicas and, but with direct pushes, of parameters and optimizer."""
        holders = (self._shard, self._publisher, *self._replicas.values())
        return self._places.nbytes + sum(0 if holder is None else holder.nbytes for holder in holders)

    def begin(self, initial: np.ndarray, state: dict[str, np.ndarray] | None) -> None:
        """Set the shard's parameters from `initial` or a state, before other ranks access them."""
        start, stop = self._bounds
        if state is not None:
            initial = state["parameters"]
            self._shown = int(state["version"].min())
        shown = self._region.local[self._places.parameters :][: (stop - start) * initial.itemsize]
        shown.view(initial.dtype)[:] = initial[start:stop]
        first_words = self._region.local[: 8 * self._places.FIRST].view(np.int64)
        first_words[Places.VERSION] = self._shown
        self._region.refresh()
        if self._settings.direct:
            return
        self._shard = ShardParameters(self._settings, self._bounds, initial, state)
        self._step: SynchronousRound | None = None
        if self._settings.staleness == 0:
            self._step = SynchronousRound(self._layout.workers, self._settings.backup, stop - start, initial.dtype)
        self._replicas = replicas_on(self._rank, self._control.comm, self._layout, self._settings, initial, state)
        if self._settings.pull_compressor is not None:
            published = published_of(initial, state)[start:stop].copy()
            compressor = self._settings.pull_compressor.part(start, stop)
            self._publisher = DeltaPublisher(
                self._region, self._places, compressor, self._bounds, published, self._shown
            )

    def serve(self) -> None:
        """Serve until all workers have finished or been dropped, and all their gradients are applied.

        Raises
        ------
        CollectiveTimeout
            If the lease of a worker that other ranks wait for expires, and it is not to be dropped.
        CorruptPayload
            If a message is damaged.
        RemoteError
            If another server has failed.
        """
        pause, looked = Pause(), 0.0
        while True:
            busy = self._take_updates() | (self._shard is not None and self._round(self._shard))
            if not busy and self._gone.all() and self._is_drained():
                break
            if self._control.progress() or busy:
                pause.reset()
            else:
                pause.rest()
            if not busy or time.monotonic() - looked > _LOOK_EVERY:
                looked = time.monotonic()
                self._look()
        if self._is_first and not self._settings.direct:
            self._control.count(self._histogram, self.late)
        if self._publisher is not None and self._shard is not None:
            self._publisher.end(self._shard.parameters)
        for answers in (self._answers, self._pulls):
            answers.abandon(np.flatnonzero(self._control.dropped))
            for rank in answers.receivers:
                self._control.wait_at_most(answers.are_sent, rank, "a worker to take what it asked for")
        self._control.enter(State.FINISHED)
        self._end_replicas()

    def _take_updates(self) -> bool:
        """Apply updates of shards that this rank has replicas of; return whether there were any."""
        taken = [replica.take() for replica in self._replicas.values()]
        return any(taken)

    def _end_replicas(self) -> None:
        """Apply updates until the servers of all shards that this rank has replicas of have finished."""
        sources = [self._layout.server_rank(shard) for shard in self._replicas]

        def missing() -> list[int]:
            return [rank for rank in sources if not self._control.states[rank] & State.FINISHED]

        def ended() -> bool:
            self._take_updates()
            return not missing()

        if sources:
            self._control.look()
            self._control.wait(ended, missing, "the servers of its replicas to finish")
        for replica in self._replicas.values():
            replica.stop()

    def _is_drained(self) -> bool:
        """Return whether all messages are applied and published, by words read after all workers have ended."""
        return self._shown == self.version and bool((self._taken == self._heads()).all())

    def _heads(self) -> np.ndarray:
        return self._words[self._places.heads :][: self._layout.workers]

    def _look(self) -> None:
        """Read which workers have settled or finished, and check leases."""
        self._control.look()
        self._control.raise_failures()
        workers = self._layout.workers
        states, dropped = self._control.states[:workers], self._control.dropped != 0
        self._over[:] = (states != 0) | dropped
        self._gone[:] = (states & ~State.SETTLING != 0) | dropped
        if not self._is_first:
            return
        silent = self._control.silent(np.flatnonzero(~self._gone).tolist(), self._settings.lease)
        self._warned.intersection_update(silent)
        for worker in silent:
            if self._settings.on_silence == "drop":
                self._control.drop(worker)
                continue
            text = f"parameter server: rank {worker}, a worker, was silent for {self._settings.lease:g} s"
            if self._control.is_awaited(worker):
                raise CollectiveTimeout(text, [worker])
            if worker not in self._warned:
                self._warned.add(worker)
                warnings.warn(f"{text}; no rank waits for it so far", RuntimeWarning, stacklevel=2)

    def _round(self, shard: ShardParameters) -> bool:
        """Apply at most one message of each mailbox; return whether there was one, or parameters to be published.

        With a bound of 0 on staleness, only whole steps are published. With replicas nothing is applied before these
        have applied what came before.
        """
        over = self._over.copy()  # of those nothing comes after the following reading
        self._region.read(0, self._words)
        before = int(self._taken.sum())
        waiting = (self._heads() > self._taken).tolist()
        if not self._updates.is_applied():
            pass
        elif self._step is None:
            self._take_each(shard, waiting)
        elif self.version == self._shown:
            self._take_together(shard, self._step, waiting, over.tolist())
        shows = self.version > self._shown and self._updates.is_applied() and not self._is_held() and self._is_due()
        if shows:
            self._show(shard)
        elif self._settings.backup and self._updates.is_applied():
            self._give_back()
        if self._updates.is_applied():  # a checkpoint does not know more than the replicas
            self._answers.give(self._words[self._places.asks :], self._state)
        if self._publisher is not None:
            self._pulls.give(self._words[self._places.pulls :], self._publisher.whole)
        return shows or int(self._taken.sum()) > before

    def _state(self) -> np.ndarray:
        """Return a message with the whole state."""
        assert self._shard is not None
        return self._shard.packed(None if self._publisher is None else self._publisher.published)

    def _is_due(self) -> bool:
        """Return whether to publish what was applied.

        With compressed pulls each delta is read by all workers. If steps are not synchronous, a delta is therefore
        published once there are as many pushes as workers, a mailbox is full, a worker waits for it, or the last one
        was published :data:`_PUBLISH_SECONDS` ago.
        """
        if self._publisher is None or self._step is not None:
            return True
        waits = (self._wants() == PUBLISH).any() or (self._taken - self._given_back >= self._places.slots).any()
        if waits or time.monotonic() - self._shown_at > _PUBLISH_SECONDS:
            return True
        return self.version - self._shown >= int((~self._over).sum())

    def _wants(self) -> np.ndarray:
        return self._words[self._places.wants :][: self._layout.workers]

    def _take_each(self, shard: ShardParameters, waiting: list[bool]) -> None:
        """Apply the next message of each worker that has one."""
        for worker in np.flatnonzero(waiting).tolist():
            header, payload = self._open(shard, worker)
            self._note(header)
            rate = self._rate_of(header)
            self._updates.send(payload, shard.codec, rate, header.first, 1)
            shard.apply(shard.decoded(payload), rate, header.first)

    def _take_together(
        self, shard: ShardParameters, step: SynchronousRound, waiting: list[bool], over: list[bool]
    ) -> None:
        """Add messages to the synchronous step, and apply it when it is complete."""
        for worker in step.due(waiting, over):
            header, payload = self._open(shard, worker)
            if self._settings.backup and header.version < self._shown:
                self._left_out[worker] += 1
                continue
            self._note(header)
            step.add(worker, shard.decoded(payload), header.learning_rate, header.first)
        left = (self._heads() > self._taken).tolist()
        if step.is_complete([ended and not more for ended, more in zip(over, left, strict=True)]):
            for number, (begin, end) in enumerate(step.parts):
                part, pushes = step.total[begin:end], 0 if number else step.given
                self._updates.send(part.view(np.uint8), 0, step.rate, begin, pushes)
                shard.apply(part, step.rate, begin, pushes)
            step.reset()

    def _open(self, shard: ShardParameters, worker: int) -> tuple[ShardHeader, np.ndarray]:
        """Return header and payload of the next message of a worker."""
        number, most = int(self._taken[worker]), self._places.payload_nbytes
        self._region.refresh()
        slot = self._region.local[self._places.slot(worker, number) :][: HEADER_NBYTES + most]
        found = opened(slot, f"worker {worker}", number, shard.codec, most, shard.part_itemsize)
        self._taken[worker] += 1
        return found

    def _staleness(self, header: ShardHeader) -> int:
        return max(self.version - header.version, 0)

    def _note(self, header: ShardHeader) -> None:
        self._histogram[min(self._staleness(header), BINS - 1)] += 1

    def _rate_of(self, header: ShardHeader) -> float:
        """Return the learning rate; with `damping`, times ``min(1, workers / staleness)``."""
        rate = header.learning_rate
        if not self._settings.damping:
            return rate
        return rate * min(1.0, self._layout.workers / max(self._staleness(header), 1))

    def _is_held(self) -> bool:
        """Return whether a worker reads a snapshot within :data:`_HOLD_SECONDS`."""
        if not (self._wants() == HOLD).any():
            self._held_since = None
            return False
        now = time.monotonic()
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since < _HOLD_SECONDS:
            return True
        self._held_since = None
        return False

    def _show(self, shard: ShardParameters) -> None:
        """Publish the parameters, then free the slots of the messages."""
        version = np.array([shard.version], np.int64)
        if self._publisher is not None:
            self._publisher.publish(shard.parameters, shard.version)
            self._region.replace(word_at(Places.VERSION), version)
        else:
            self._mark()
            self._region.replace(self._places.parameters, shard.parameters)
            self._region.replace(word_at(Places.VERSION), version)
            self._mark()
        self._give_back()
        self._shown, self._shown_at = shard.version, time.monotonic()

    def _give_back(self) -> None:
        """Free slots by moving tails; a worker can then see whether its message was left out."""
        if self._settings.backup:
            self._region.replace(word_at(self._places.left_out), self._left_out)
        self._region.replace(word_at(self._places.tails), self._taken)
        self._given_back[:] = self._taken

    def _mark(self) -> None:
        """Make the sequence odd before a replacement and even after it."""
        self._sequence += 1
        self._region.replace(word_at(Places.SEQUENCE), np.array([self._sequence], np.int64))
