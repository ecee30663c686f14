"""Mailboxes between ranks that all compute: each sends to some of the others, and nobody waits but for room.

Where parameters have no server, every rank has a region of its own with a ring of slots for each rank that sends to it:
one writer and one reader, and the same messages as on the way to a server. A rank takes what has come when it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.parameter_server.control import Control, State
from mpicoll.parameter_server.partition import Partition
from mpicoll.parameter_server.remote_memory import Region, Window, word_at
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES, Places, ShardHeader, bits_of, opened

_CODEC = 0


class Mail(NamedTuple):
    """A message: who sent it, two numbers that came with it, and its bytes, which are good until the next is taken."""

    source: int
    number: float
    version: int
    payload: np.ndarray


class PeerMailboxes:
    """The mailboxes of all ranks. Making one is collective over `comm`, and so is `close`.

    Parameters
    ----------
    comm
        A plain intracommunicator; it is duplicated.
    destinations
        To whom a rank sends: a function of the rank, which all ranks agree about.
    payload_nbytes
        The most bytes in a message, a multiple of 4.
    slots
        Messages that fit into a mailbox.
    timeout
        Seconds of silence of a rank after which those who wait for it raise CollectiveTimeout.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        destinations: Callable[[int], Sequence[int]],
        payload_nbytes: int,
        *,
        slots: int,
        timeout: float,
    ) -> None:
        self._comm = comm.Dup()
        self.rank, size = self._comm.rank, self._comm.size
        sources = [[source for source in range(size) if rank in destinations(source)] for rank in range(size)]
        self._control = Control(self._comm, Partition(size, 0, 1), timeout, owner=0)
        self._places = [Places(len(each), 0, 4, slots, payload_nbytes) for each in sources]
        regions: list[Region] = [Window(self._comm, rank, places.nbytes) for rank, places in enumerate(self._places)]
        self._regions, self._sources = regions, sources[self.rank]
        self._ways = {rank: sources[rank].index(self.rank) for rank in destinations(self.rank)}
        self._sent = dict.fromkeys(self._ways, 0)
        self._taken = np.zeros(len(self._sources), np.int64)
        self._words = np.zeros(self._places[self.rank].words, np.int64)
        self._comm.Barrier()

    def has_room(self, destination: int) -> bool:
        """Return whether another message fits into this rank's mailbox there."""
        places, way = self._places[destination], self._ways[destination]
        tail = np.empty(1, np.int64)
        self._regions[destination].read(word_at(places.tails + way), tail)
        return self._sent[destination] - int(tail[0]) < places.slots

    def send(self, destination: int, payload: np.ndarray, number: float = 0.0, version: int = 0) -> None:
        """Put a message, of uint8, into a mailbox that has room; `version` is not negative."""
        places, way, region = self._places[destination], self._ways[destination], self._regions[destination]
        sent = self._sent[destination]
        header = ShardHeader(sent, payload.size, sent, version, _CODEC, 0, bits_of(number)).sealed(payload)
        region.put(places.slot(way, sent), header.words(), payload)
        self._sent[destination] = sent + 1
        region.replace(word_at(places.heads + way), np.array([sent + 1], np.int64))

    def take(self) -> Iterator[Mail]:
        """Yield what has come, at most one message of each rank; its slot is given back when the next is taken.

        Raises
        ------
        CorruptPayload
            If a message is damaged.
        """
        region, places = self._regions[self.rank], self._places[self.rank]
        region.read(0, self._words)
        for way in np.flatnonzero(self._heads() > self._taken).tolist():
            number = int(self._taken[way])
            region.refresh()
            slot = region.local[places.slot(way, number) :][: HEADER_NBYTES + places.payload_nbytes]
            header, payload = opened(slot, self._sources[way], number, _CODEC, places.payload_nbytes, 4)
            yield Mail(self._sources[way], header.learning_rate, header.version, payload)
            self._taken[way] += 1
            region.replace(word_at(places.tails + way), self._taken[way : way + 1])

    def _heads(self) -> np.ndarray:
        return self._words[self._places[self.rank].heads :][: len(self._sources)]

    def wait(self, done: Callable[[], bool], ranks: Callable[[], Sequence[int]], what: str) -> None:
        """Call `done`, less and less often, until it is true; `ranks` says for whom this rank waits.

        Raises
        ------
        CollectiveTimeout
            If one of those is silent for longer than the timeout.
        """
        self._control.wait(done, ranks, what)

    def beat(self) -> None:
        """Show that this rank is alive."""
        self._control.look()

    def finish(self) -> None:
        """Say that this rank sends nothing more."""
        self._control.enter(State.FINISHED)

    def working(self) -> list[int]:
        """Return the others that may still send."""
        self._control.look()
        ranks: list[int] = np.flatnonzero(self._control.states == 0).tolist()
        return [rank for rank in ranks if rank != self.rank]

    def is_empty(self) -> bool:
        """Return whether all that has been sent to this rank has been taken."""
        self._regions[self.rank].read(0, self._words)
        return bool((self._heads() == self._taken).all())

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's mailboxes."""
        return self._places[self.rank].nbytes

    def close(self) -> None:
        """Wait until all ranks are here, and free everything; collective."""
        self._control.enter(State.FINISHED | State.CLOSING)
        everybody = self._comm.Ibarrier()
        self._control.wait(everybody.Test, self._absent, "all to leave the block")
        for region in self._regions:
            region.close()
        self._control.close()
        self._comm.Free()

    def _absent(self) -> list[int]:
        absent: list[int] = np.flatnonzero(self._control.states & State.CLOSING == 0).tolist()
        return absent


class Counter:
    """A number that all ranks draw from: who shares out work by it leaves more to those who are faster.

    Beside it stands whether one of them has failed.

    Making one and closing it is collective over `comm`.
    """

    def __init__(self, comm: MPI.Intracomm, owner: int = 0) -> None:
        self._region = Window(comm, owner, word_at(2))
        comm.Barrier()

    def draw(self, count: int = 1) -> int:
        """Take so many numbers, from 0 upward, that nobody else gets; return the first."""
        return self._region.fetch_add(0, count)

    def tell_failure(self) -> None:
        """Say that a rank has failed."""
        self._region.fetch_add(word_at(1), 1)

    def is_failed(self) -> bool:
        """Return whether one has said so."""
        return self._region.fetch_add(word_at(1), 0) > 0

    def close(self) -> None:
        """Free the memory."""
        self._region.close()
