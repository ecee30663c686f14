"""Memory of a communicator for exchanges of blocks on a node."""

from __future__ import annotations

import threading

import numpy as np
from mpi4py import MPI

from mpicoll.collectives.known_specs import KnownSpecs
from mpicoll.kernels import exchange_words as layout
from mpicoll.kernels.strided_copy import LAYOUT_WORDS
from mpicoll.shared_memory import numpy_allocator
from mpicoll.shared_memory.domain import SharedMemoryDomain
from mpicoll.shared_memory.trials import OwnTrials

STAGE_NBYTES = 1 << 20
"""Length of the stage for one round, for all ranks together; with what is read it stays in the caches."""
_MIN_CHUNK_NBYTES = 16 << 10


class ExchangeMemory:
    """Memory for the exchanges of all objects of a communicator, which one thread at a time uses.

    Attributes
    ----------
    on_node
        Whether blocks are exchanged in shared memory; the same on all ranks.
    ready
        Whether all ranks have agreed on it, which a refused call may prevent.
    alone
        Lock of the thread that makes an exchange.
    words, address
        Words of :mod:`mpicoll.kernels.exchange_words`; empty, and 0, before :meth:`make`.
    offers, arrived
        Records that go to all ranks, and those that have come from them.
    error
        One word: 1 more than the rank that has found an error, 1 more than all ranks for memory that is out of reach.
    in_place, maximum
        What an Allreduce of `error` takes; compiled code knows the addresses of these objects, and of the arrays.
    specs
        Specifications that programs give again.
    """

    offers: np.ndarray
    arrived: np.ndarray
    wrong: np.ndarray
    specs: KnownSpecs

    def __init__(self, on_node: bool) -> None:
        self.on_node, self.ready = on_node, False
        self.alone = threading.Lock()
        self.words = memoryview(b"")
        self.address = 0

    def make(self, domain: SharedMemoryDomain) -> None:
        """Allocate the memory; local."""
        size = domain.size
        chunk = max(_MIN_CHUNK_NBYTES, STAGE_NBYTES // size)
        self.offers = np.zeros(size * layout.OFFER_NBYTES // 8, np.int64)
        self.arrived = np.zeros_like(self.offers)
        self._stage = numpy_allocator.empty(2 * size * chunk, np.uint8)
        self.error = np.zeros(1, np.int64)
        self.in_place, self.maximum = MPI.IN_PLACE, MPI.MAX
        self._rows = np.zeros(2 * size * LAYOUT_WORDS, np.int64)
        self.specs = KnownSpecs(size)
        self._trials = OwnTrials("alltoall", domain.oversubscribed)
        words = np.zeros(layout.ALL_WORDS, np.int64)
        for word, value in (
            (layout.SIZE, size),
            (layout.RANK, domain.rank),
            (layout.PEERS, domain.peers_address),
            (layout.OFFERS, self.offers.ctypes.data),
            (layout.ARRIVED, self.arrived.ctypes.data),
            (layout.STAGE, self._stage.ctypes.data),
            (layout.CHUNK, chunk),
            (layout.ROWS, self._rows.ctypes.data),
            (layout.ERROR, self.error.ctypes.data),
            (layout.OFFERS_ARRAY, id(self.offers)),
            (layout.ARRIVED_ARRAY, id(self.arrived)),
            (layout.ERROR_ARRAY, id(self.error)),
            (layout.IN_PLACE, id(self.in_place)),
            (layout.MAXIMUM, id(self.maximum)),
            (layout.TRIALS, 0 if domain.copies is None else self._trials.address),
        ):
            words[word] = value
        self.words, self.address = words.data, words.ctypes.data

    def is_shared(self, domain: SharedMemoryDomain) -> bool:
        """Return whether the other ranks can read the stage: a full segment gives private memory."""
        return domain.in_own_arena(self._stage.ctypes.data)


def memory_of(domain: SharedMemoryDomain | None) -> ExchangeMemory:
    """Return the memory for exchanges on a domain, or one that says that there are none."""
    if domain is None or not domain.segments:
        return ExchangeMemory(False)
    if domain.exchange_memory is None:
        domain.exchange_memory = ExchangeMemory(True)
    memory: ExchangeMemory = domain.exchange_memory
    return memory
