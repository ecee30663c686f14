"""Connection of one worker to one shard."""

from __future__ import annotations

import numpy as np

from mpicoll.compression import Key
from mpicoll.kernels import optimizer_updates
from mpicoll.parameter_server.compressed_pulls import DeltaFollower
from mpicoll.parameter_server.partition import Settings
from mpicoll.parameter_server.remote_memory import Region, word_at
from mpicoll.parameter_server.shard_memory import Places, ShardHeader, bits_of, codec_of


class ShardConnection:
    """One worker's access to one shard.

    Parameters
    ----------
    start : (count,) of `settings.dtype`
        Parameters of the shard that may be those of the server at the start.

    Attributes
    ----------
    part
        The shard's elements, a slice of all parameters.
    pulled, seen
        The version of the last pull, and the newest version that this worker knows of.
    sent_nbytes
        Bytes of gradients sent so far.
    follower
        With compressed pulls, the replica of the published parameters; else None.
    """

    def __init__(
        self,
        region: Region,
        places: Places,
        worker: int,
        bounds: tuple[int, int],
        settings: Settings,
        start: np.ndarray,
    ) -> None:
        self.part = slice(*bounds)
        self.pulled = self.seen = self.sent = self.sent_nbytes = self._read_nbytes = 0
        self._asked = self._asked_parameters = self._left_out = 0
        self._region, self._places, self._worker, self._settings = region, places, worker, settings
        self._start, count = bounds[0], bounds[1] - bounds[0]
        self._codec = codec_of(settings.compressor, *bounds)
        self._compressor = None if settings.compressor is None else settings.compressor.part(*bounds)
        self._feedback = settings.feedback(*bounds)
        self.follower: DeltaFollower | None = None
        if settings.pull_compressor is not None:
            self.follower = DeltaFollower(region, places, settings.pull_compressor.part(*bounds), bounds, start)
        self._words = np.zeros(places.words, np.int64)
        self._scratch = np.empty(0 if self._compressor is None and not settings.direct else count, settings.dtype)
        most = 0 if self._compressor is None else places.payload_nbytes
        self._payload = np.empty(most // 4, np.uint32).view(np.uint8)
        self._compile()

    def _compile(self) -> None:
        """Compile the kernels before other ranks wait for this one."""
        optimizer_updates.checksum(np.empty(0, np.uint32), np.uint64(0))
        if self._settings.direct:
            optimizer_updates.scaled_into(self._scratch[:0], self._scratch[:0], self._scratch.dtype.type(0))
        if self._compressor is not None:
            zeros = np.zeros(self._scratch.size, np.float32)
            payload = self._payload[: self._compressor.compress(zeros, self._payload, Key())]
            self._compressor.decompress(payload, self._scratch)

    @property
    def read_nbytes(self) -> int:
        """Bytes of parameters read so far."""
        return self._read_nbytes + (0 if self.follower is None else self.follower.read_nbytes)

    def read_words(self) -> np.ndarray:
        """Read and return the shard's words; later calls overwrite the array."""
        self._region.read(0, self._words)
        self.seen = int(self._words[Places.VERSION])
        return self._words

    def within(self, first: int, vector: np.ndarray) -> tuple[int, np.ndarray]:
        """Return the part of a vector, from parameter `first` on, that belongs to the shard, after its offset there."""
        start, stop = max(self.part.start, first), min(self.part.stop, first + vector.size)
        if start >= stop:
            return 0, vector[:0]
        return start - self.part.start, vector[start - first : stop - first]

    def _read(self, at: int, out: np.ndarray) -> None:
        if out.size:
            self._read_nbytes += out.nbytes
            self._region.read(self._places.parameters + at * out.itemsize, out)

    def pull(self, at: int, out: np.ndarray) -> int:
        """Read parameters from element `at` on; return a version: each includes at least that number of pushes."""
        self.read_words()
        self._read(at, out)
        return self.seen

    def try_snapshot(self, at: int, out: np.ndarray) -> bool:
        """Read parameters; return whether all are of version `seen`."""
        before = self.read_words()[Places.SEQUENCE]
        if before % 2:
            return False
        self._read(at, out)
        after = np.empty(1, np.int64)
        self._region.read(word_at(Places.SEQUENCE), after)
        return bool(after[0] == before)

    def want(self, what: int) -> None:
        """Ask the server for :data:`~mpicoll.parameter_server.shard_memory.HOLD` or `PUBLISH`, or for nothing by 0."""
        self._region.replace(word_at(self._places.wants + self._worker), np.array([what], np.int64))

    def follow(self) -> bool:
        """Bring the replica up to date by deltas; return False if all parameters have to be read instead."""
        assert self.follower is not None
        return self.follower.catch_up(int(self.read_words()[Places.DELTAS]))

    def is_applied(self, step: int) -> bool:
        """Return whether the parameters include every worker's first `step` pushes, or all pushes of one with fewer."""
        words, workers = self.read_words(), self._places.workers
        heads, tails = words[self._places.heads :][:workers], words[self._places.tails :][:workers]
        return bool((tails >= np.minimum(heads, step)).all())

    def is_past_pulled(self) -> bool:
        """Return whether a newer version than the last one pulled is known."""
        self.read_words()
        return self.seen > self.pulled

    def ask(self) -> None:
        """Request the whole state of the shard from the server."""
        self._asked += 1
        self._region.replace(word_at(self._places.asks + self._worker), np.array([self._asked], np.int64))

    def ask_parameters(self) -> None:
        """Request all published parameters of the shard from the server."""
        self._asked_parameters += 1
        word = word_at(self._places.pulls + self._worker)
        self._region.replace(word, np.array([self._asked_parameters], np.int64))

    def is_own_applied(self) -> bool:
        """Return whether the parameters include all gradients that this worker has sent."""
        return int(self.read_words()[self._places.tails + self._worker]) == self.sent

    def has_room(self) -> bool:
        """Return whether another message fits into the mailbox; updates `seen`."""
        return self.sent - int(self.read_words()[self._places.tails + self._worker]) < self._places.slots

    def send(self, at: int, gradient: np.ndarray, rate: float) -> None:
        """Write the gradient of the parameters from `at` on to the mailbox, which must have a free slot."""
        payload = self._encoded(gradient)
        header = ShardHeader(self.sent, payload.size, self.sent, self.pulled, self._codec, at, bits_of(rate)).sealed(
            payload
        )
        self.sent_nbytes += payload.size
        self._region.put(self._places.slot(self._worker, self.sent), header.words(), payload)
        self.sent += 1
        self._region.replace(word_at(self._places.heads + self._worker), np.array([self.sent], np.int64))

    def take_back(self) -> None:
        """Return the last message to the residual, if the server has left it out; the server must have read it."""
        left_out = int(self.read_words()[self._places.left_out + self._worker])
        if left_out > self._left_out and self._feedback is not None:
            self._feedback.update(np.negative(self._scratch, out=self._scratch))
        self._left_out = left_out

    def _encoded(self, gradient: np.ndarray) -> np.ndarray:
        if self._compressor is None:
            return gradient.view(np.uint8)
        compensated = gradient if self._feedback is None else self._feedback.compensate(gradient)
        key = Key(rank=self._worker, step=self.sent, first=self._start)
        payload = self._payload[: self._compressor.compress(compensated, self._payload, key)]
        if self._feedback is not None:
            self._compressor.decompress(payload, self._scratch)
            self._feedback.update(self._scratch)
        return payload

    def add(self, at: int, gradient: np.ndarray, rate: float) -> int:
        """Add ``-rate * gradient`` to the parameters; return the number of versions since the last pull."""
        if gradient.size:
            scaled = self._scratch[: gradient.size]
            optimizer_updates.scaled_into(scaled, gradient, gradient.dtype.type(-rate))
            self.sent_nbytes += gradient.nbytes
            self._region.add(self._places.parameters + at * gradient.itemsize, scaled)
        return self._region.fetch_add(word_at(Places.VERSION), 1) - self.pulled
