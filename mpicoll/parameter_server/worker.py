"""A worker's side: read shards, send gradients to them, keep the bound on staleness."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from mpicoll.compression import Key
from mpicoll.errors import CollectiveTimeout
from mpicoll.kernels import updates
from mpicoll.parameter_server.control import BINS, Control, State
from mpicoll.parameter_server.layout import Layout, Settings
from mpicoll.parameter_server.shard import Header, Places, codec_of
from mpicoll.parameter_server.transport import Region, word_at

_LOOK_EVERY = 0.05
_FREE_TRIES = 2
"""A snapshot that so often met a new version asks the server to hold still."""


class Link:
    """What one worker does with one shard.

    Attributes
    ----------
    part
        Its elements.
    pulled
        The version of the last pull, and ``seen`` the newest that this worker knows of.
    """

    def __init__(
        self, region: Region, places: Places, worker: int, bounds: tuple[int, int], settings: Settings
    ) -> None:
        self.part = slice(*bounds)
        self.pulled = self.seen = self.sent = 0
        self._region, self._places, self._worker, self._settings = region, places, worker, settings
        self._start, count = bounds[0], bounds[1] - bounds[0]
        self._codec = codec_of(settings.compressor, *bounds)
        self._compressor = None if settings.compressor is None else settings.compressor.part(*bounds)
        self._feedback = settings.feedback(*bounds)
        self._words = np.zeros(places.words, np.int64)
        self._scratch = np.empty(0 if self._compressor is None and not settings.direct else count, settings.dtype)
        most = 0 if self._compressor is None else places.payload_nbytes
        self._payload = np.empty(most // 4, np.uint32).view(np.uint8)
        self._compile()

    def _compile(self) -> None:
        """Have everything compiled before anybody waits for it."""
        updates.checksum(np.empty(0, np.uint32), np.uint64(0))
        if self._settings.direct:
            updates.scaled_into(self._scratch[:0], self._scratch[:0], self._scratch.dtype.type(0))
        if self._compressor is not None:
            zeros = np.zeros(self._scratch.size, np.float32)
            payload = self._payload[: self._compressor.compress(zeros, self._payload, Key())]
            self._compressor.decompress(payload, self._scratch)

    def read_words(self) -> np.ndarray:
        """Return the shard's words; the memory is used again."""
        self._region.read(0, self._words)
        self.seen = int(self._words[Places.VERSION])
        return self._words

    def pull(self, out: np.ndarray) -> int:
        """Read the parameters, each of which has the effect of at least the returned number of pushes."""
        self.read_words()
        self._region.read(self._places.parameters, out)
        return self.seen

    def try_snapshot(self, out: np.ndarray) -> bool:
        """Read the parameters; say whether all are of version `seen`."""
        before = self.read_words()[Places.SEQUENCE]
        if before % 2:
            return False
        self._region.read(self._places.parameters, out)
        after = np.empty(1, np.int64)
        self._region.read(word_at(Places.SEQUENCE), after)
        return bool(after[0] == before)

    def hold(self, on: bool) -> None:
        """Ask the server to leave the parameters as they are, or tell it that it may go on."""
        self._region.replace(word_at(self._places.holds + self._worker), np.array([on], np.int64))

    def is_applied(self, step: int) -> bool:
        """Return whether the parameters have every worker's first `step` pushes, or all of one that made fewer."""
        words, workers = self.read_words(), self._places.workers
        heads, tails = words[self._places.heads :][:workers], words[self._places.tails :][:workers]
        return bool((tails >= np.minimum(heads, step)).all())

    def has_room(self) -> bool:
        """Return whether another message fits into the mailbox; look at the version, too."""
        return self.sent - int(self.read_words()[self._places.tails + self._worker]) < self._places.slots

    def send(self, gradient: np.ndarray) -> None:
        """Put the shard's part of a gradient into the mailbox, where there is room."""
        payload = self._encoded(gradient)
        header = Header(self.sent, payload.size, self.sent, self.pulled, self._codec).sealed(payload)
        self._region.put(self._places.slot(self._worker, self.sent), header.words(), payload)
        self.sent += 1
        self._region.replace(word_at(self._places.heads + self._worker), np.array([self.sent], np.int64))

    def _encoded(self, gradient: np.ndarray) -> np.ndarray:
        if self._compressor is None:
            return gradient.view(np.uint8)
        owed = gradient if self._feedback is None else self._feedback.compensate(gradient)
        key = Key(rank=self._worker, step=self.sent, first=self._start)
        payload = self._payload[: self._compressor.compress(owed, self._payload, key)]
        if self._feedback is not None:
            self._compressor.decompress(payload, self._scratch)
            self._feedback.update(self._scratch)
        return payload

    def add(self, gradient: np.ndarray) -> int:
        """Add the step along a gradient to the parameters; return how many versions came since the last pull."""
        updates.scaled_into(self._scratch, gradient, gradient.dtype.type(-self._settings.lr))
        self._region.add(self._places.parameters, self._scratch)
        return self._region.fetch_add(word_at(Places.VERSION), 1) - self.pulled


class Worker:
    """One worker: its links to all shards, its clock."""

    def __init__(self, links: Sequence[Link], control: Control, layout: Layout, settings: Settings, rank: int) -> None:
        self._links, self._control, self._layout, self._settings, self._rank = links, control, layout, settings, rank
        self.steps = 0
        self._entered, self._looked = -1, 0.0
        self._histogram = np.zeros(BINS, np.int64)
        self.finished = False

    def enter(self) -> None:
        """Wait until this worker may begin its next step; at once, when it has begun it already.

        Raises
        ------
        CollectiveTimeout
            If a worker that is too far behind stays silent, or this one has been dropped.
        RemoteError
            If a server has failed.
        """
        if self._entered == self.steps:
            return
        if self._settings.staleness is None:
            self._look_again()
        else:
            self._keep_bound(self.steps - self._settings.staleness)
        self._entered = self.steps

    def _look_again(self) -> None:
        """Look where that is long ago: it takes as long as pulling a short vector."""
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._looked = time.monotonic()
            self._look()

    def _look(self) -> None:
        self._control.look()
        self._control.raise_failures()
        if self._control.dropped[self._rank]:
            text = f"parameter server: rank {self._rank} was silent for longer than its lease and has been dropped"
            raise CollectiveTimeout(text, [self._rank])

    def _keep_bound(self, least: int) -> None:
        """Wait until nobody's clock is below `least`, and the parameters have what those clocks say."""

        def behind() -> list[int]:
            return np.flatnonzero(self._control.clocks < least).tolist()

        def nobody_behind() -> bool:
            self._look()
            return not behind()

        self._control.wait(nobody_behind, behind, f"workers that have not taken {least} steps")
        if self._settings.direct:
            return
        for shard, link in enumerate(self._links):
            rank = self._layout.server_rank(shard)
            what = f"the effect of everybody's first {least} pushes"
            self._control.wait_for_server(lambda link=link: link.is_applied(least), rank, what)  # type: ignore[misc]

    def pull(self, out: np.ndarray, snapshot: bool) -> int:
        """Read all parameters; return the lowest version of a shard."""
        for shard, link in enumerate(self._links):
            if snapshot:
                self._snapshot(link, out[link.part], self._layout.server_rank(shard))
            else:
                link.pull(out[link.part])
            link.pulled = link.seen
        return min(link.pulled for link in self._links)

    def _snapshot(self, link: Link, out: np.ndarray, rank: int) -> None:
        for _ in range(_FREE_TRIES):
            if link.try_snapshot(out):
                return
        link.hold(True)
        try:
            self._control.wait_for_server(lambda: link.try_snapshot(out), rank, "parameters that do not change")
        finally:
            link.hold(False)

    def push(self, gradient: np.ndarray) -> int:
        """Send a gradient to all shards; return how many updates the first one has seen since the last pull."""
        staleness = self._add(gradient) if self._settings.direct else self._send(gradient)
        self._control.tick()
        self.steps += 1
        return staleness

    def _add(self, gradient: np.ndarray) -> int:
        staleness = [link.add(gradient[link.part]) for link in self._links]
        self._histogram[min(staleness[0], BINS - 1)] += 1
        return staleness[0]

    def _send(self, gradient: np.ndarray) -> int:
        for shard, link in enumerate(self._links):
            rank = self._layout.server_rank(shard)
            self._control.wait_for_server(link.has_room, rank, "room in its mailbox")
        for link in self._links:
            link.send(gradient[link.part])
        return self._links[0].seen - self._links[0].pulled

    def finish(self) -> None:
        """Leave the clock; nothing is pushed after this."""
        if self.finished:
            return
        self.finished = True
        if self._settings.direct:
            self._control.count(self._histogram)
        self._control.enter(State.FINISHED)
        self._control.retire(self._rank)

    def wait_for_all(self) -> None:
        """Wait until every worker has finished and every push is in the parameters."""

        def missing() -> list[int]:
            working = np.flatnonzero(self._control.states == 0)
            workers = [rank for rank in working.tolist() if rank < self._layout.workers]
            return [rank for rank in workers if not self._control.dropped[rank]] or working.tolist()

        def over() -> bool:
            self._look()
            return bool((self._control.states[self._layout.workers :] & State.FINISHED).all())

        self._control.wait(over, missing, "all to finish")
