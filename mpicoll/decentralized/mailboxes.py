"""Mailboxes for one-sided messages between ranks, without servers.

Every rank has a region with a ring of slots for each rank that sends to it, with one writer and one reader; messages
are those of the parameter server. A rank reads messages whenever it wants; a sender waits only for a free slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.parameter_server.control import Control, State
from mpicoll.parameter_server.partition import Partition
from mpicoll.parameter_server.remote_memory import Memory, WindowMemory, word_at
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES, Places, ShardHeader, bits_of, opened

_CODEC = 0


class Mail(NamedTuple):
    """A message: its source rank, two numbers, and its bytes, which are valid until the next one is taken."""

    source: int
    number: float
    version: int
    payload: np.ndarray


class PeerMailboxes:
    """The mailboxes of all ranks. The constructor and :meth:`close` are collective over `comm`.

    Parameters
    ----------
    comm
        A plain intracommunicator; it is duplicated.
    destinations
        Function that returns the ranks that a rank sends to; equal on all ranks.
    payload_nbytes
        Largest message in bytes, a multiple of 4.
    slots
        Number of messages that fit into a mailbox.
    timeout
        Seconds without a sign of life of a rank after which ranks that wait for it raise CollectiveTimeout.
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
        memory = WindowMemory(self._comm)
        self._control = Control(memory, Partition(size, 0, 1), timeout, owner=0)
        self._places = [Places(len(each), 0, 4, slots, payload_nbytes) for each in sources]
        regions = [memory.region(rank, places.nbytes) for rank, places in enumerate(self._places)]
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
        """Write a message of uint8 to a mailbox with a free slot; `version` is not negative."""
        places, way, region = self._places[destination], self._ways[destination], self._regions[destination]
        sent = self._sent[destination]
        header = ShardHeader(sent, payload.size, sent, version, _CODEC, 0, bits_of(number)).sealed(payload)
        region.put(places.slot(way, sent), header.words(), payload)
        self._sent[destination] = sent + 1
        region.replace(word_at(places.heads + way), np.array([sent + 1], np.int64))

    def take(self) -> Iterator[Mail]:
        """Yield messages that have arrived, at most one of each rank; a slot is freed when the next one is taken.

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
            source = f"worker {self._sources[way]}"
            header, payload = opened(slot, source, number, _CODEC, places.payload_nbytes, 4)
            yield Mail(self._sources[way], header.learning_rate, header.version, payload)
            self._taken[way] += 1
            region.replace(word_at(places.tails + way), self._taken[way : way + 1])

    def _heads(self) -> np.ndarray:
        return self._words[self._places[self.rank].heads :][: len(self._sources)]

    def wait(self, done: Callable[[], bool], ranks: Callable[[], Sequence[int]], what: str) -> None:
        """Call `done` with polling back-off until it returns True; `ranks` returns the ranks waited for.

        Raises
        ------
        CollectiveTimeout
            If one of these ranks gives no sign of life for the timeout.
        """
        self._control.wait(done, ranks, what)

    def beat(self) -> None:
        """Give a sign of life."""
        self._control.look()

    def finish(self) -> None:
        """Announce that this rank sends no more messages."""
        self._control.enter(State.FINISHED)

    def working(self) -> list[int]:
        """Return the other ranks that may still send."""
        self._control.look()
        ranks: list[int] = np.flatnonzero(self._control.states == 0).tolist()
        return [rank for rank in ranks if rank != self.rank]

    def is_empty(self) -> bool:
        """Return whether all messages to this rank have been taken."""
        self._regions[self.rank].read(0, self._words)
        return bool((self._heads() == self._taken).all())

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's mailboxes."""
        return self._places[self.rank].nbytes

    def close(self) -> None:
        """Wait for all ranks, and free the mailboxes; collective."""
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
    """Shared counter, from which ranks draw numbers of work items, so that faster ranks get more; and a failure flag.

    The constructor and :meth:`close` are collective over the ranks of `memory`.

    Parameters
    ----------
    memory
        Remote memory of the ranks.
    owner
        Rank that owns the counter.
    start, failed
        The first number, and whether the failure flag is set; equal on all ranks.
    """

    def __init__(self, memory: Memory, owner: int = 0, *, start: int = 0, failed: bool = False) -> None:
        self._memory, self._region = memory, memory.region(owner, word_at(2))
        if memory.comm.rank == owner:
            self.draw(start)
            self._region.fetch_add(word_at(1), int(failed))
        memory.barrier()

    def draw(self, count: int = 1) -> int:
        """Draw `count` numbers, counted from 0, that no other rank gets; return the first."""
        return self._region.fetch_add(0, count)

    def tell_failure(self) -> None:
        """Set the failure flag."""
        self._region.fetch_add(word_at(1), 1)

    def is_failed(self) -> bool:
        """Return whether the failure flag is set."""
        return self._region.fetch_add(word_at(1), 0) > 0

    def close(self) -> None:
        """Free the memory."""
        self._memory.settle()
        self._region.close()
