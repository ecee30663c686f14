"""Processes of the ranks of a domain: the memory segments that this one has mapped, and access to private memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.environment import random_number
from mpicoll.kernels import atomics
from mpicoll.kernels import operation_words as words
from mpicoll.shared_memory import segment
from mpicoll.shared_memory.domain_memory import SharedArrays


class Peers(NamedTuple):
    """One rank's view of the processes of all ranks.

    Attributes
    ----------
    table
        PEER_WORDS words for each rank, see :mod:`mpicoll.kernels.operation_words`.
    reach
        Whether processes may copy from each other's private memory.
    segments
        Whether every rank has mapped the memory segments of all others, and all have their memory in them.
    records, slots
        Addresses here of the first rank's memory for the records and slots of all, if it lies in a segment.
    """

    table: np.ndarray
    reach: bool
    segments: bool
    records: int
    slots: int


def meet(comm: MPI.Intracomm, memory: SharedArrays) -> Peers:
    """Exchange processes and segments, and the places of this rank's `memory`, with the other ranks; collective."""
    own = segment.own()
    probe = np.array([random_number(62), 0], np.int64)
    card = [process_namespace(), os.getpid(), own.address, own.fd, own.nbytes, own.nonce, probe.ctypes.data, probe[0]]
    cards = _exchanged(comm, [*card, *memory.places()])
    table, room = np.zeros((comm.size, words.PEER_WORDS), np.int64), np.zeros(5, np.int64)
    read = True
    for rank, (space, pid, address, fd, nbytes, nonce, theirs, number, *_) in enumerate(cards.tolist()):
        known = space == card[0]  # else the number of the process means another one here, or none
        mapped = own.address if rank == comm.rank else segment.map_peer(pid, fd, nbytes, nonce) if known else 0
        table[rank, : words.STAGES] = pid, address, mapped, nbytes
        if rank != comm.rank and read:
            read = known and _may_transfer() and atomics.try_transfers.run(pid, theirs, room.ctypes.data, number)
    agreed = np.array([read, (table[:, words.MAPPED] != 0).all()], np.int64)
    comm.Allreduce(MPI.IN_PLACE, agreed, MPI.MIN)
    written = np.array([int(agreed[0] == 0 or probe[1] == probe[0] + 1)], np.int64)
    comm.Allreduce(MPI.IN_PLACE, written, MPI.MIN)
    return _with_places(table, bool(agreed[0] and written[0]), bool(agreed[1]), cards[:, len(card) :])


def inherit(
    comm: MPI.Intracomm, memory: SharedArrays, known: Peers, ranks: np.ndarray, places: np.ndarray | None
) -> Peers:
    """Take over the processes that a communicator knows of which these are some `ranks`.

    Parameters
    ----------
    places
        What :meth:`SharedArrays.places` returns on each rank, if they have told each other; else the call is
        collective.
    """
    if places is None:
        places = _exchanged(comm, memory.places())
    return _with_places(known.table[ranks], known.reach, known.segments, places)


def _exchanged(comm: MPI.Intracomm, card: list[int]) -> np.ndarray:
    cards = np.empty((comm.size, len(card)), np.int64)
    comm.Allgather(np.array(card, np.int64), cards)
    return cards


def _with_places(table: np.ndarray, reach: bool, segments: bool, places: np.ndarray) -> Peers:
    """Complete the table by where the ranks' memory lies, given by a row for each rank."""
    distance = table[:, words.MAPPED] - table[:, words.SEGMENT_ADDRESS]
    table[:, words.STAGES] = places[:, 0] + distance
    segments = segments and bool(places[:, 3].all())
    if not segments:
        table[:, words.SEGMENT_NBYTES] = 0
    records, slots = (places[0, 1:3] + distance[0]).tolist()
    return Peers(table, reach, segments, records, slots)


def process_namespace() -> int:
    """Return the number of this process' PID namespace, -1 where the system does not say."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return -1


def _may_transfer() -> bool:
    """Return whether the environment allows copies between processes."""
    return os.environ.get("MPICOLL_TRANSFER", "on") != "off"
