"""Clocks of several ranks made comparable: processes of one system share theirs, others' offsets are measured."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

_ROUNDS = 30


class Drift(NamedTuple):
    """Offsets of this rank's clock from rank 0's at two times of its own."""

    begun: float
    offset: float
    ended: float
    later_offset: float

    def corrected(self, times: np.ndarray) -> np.ndarray:
        """Return times of this rank's clock as rank 0's has them; between the two, offsets change evenly."""
        if self.offset == self.later_offset == 0.0:
            return times
        slope = (self.later_offset - self.offset) / max(self.ended - self.begun, 1e-9)
        corrected: np.ndarray = times + self.offset + slope * (times - self.begun)
        return corrected


def system_identity() -> str:
    """Return what processes have in common that share a monotonic clock: the running system, and its time namespace."""
    parts = [platform.node()]
    for read in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
        lambda: str(Path("/proc/self/ns/time").readlink()),
    ):
        try:
            parts.append(read())
        except OSError:
            parts.append("")
    return "/".join(parts)


def offset_to_first(comm: MPI.Intracomm, clock: Callable[[], float], identity: str) -> float:
    """Return the seconds to add to this rank's clock to have that of rank 0; collective.

    0 where `identity` is that of rank 0. Otherwise from the quickest of some exchanges with rank 0, as NTP does: off by
    at most half of the time that this exchange took.
    """
    mine = np.frombuffer(hashlib.sha256(identity.encode()).digest()[:8], np.int64)
    all_of_them = np.empty(comm.size, np.int64)
    comm.Allgather(mine, all_of_them)
    offset = 0.0
    for rank in np.flatnonzero(all_of_them != all_of_them[0]).tolist():
        if comm.rank == 0:
            _answer(comm, rank, clock)
        elif comm.rank == rank:
            offset = _ask(comm, clock)
    return offset


def _answer(comm: MPI.Intracomm, rank: int, clock: Callable[[], float]) -> None:
    time = np.empty(1)
    for _ in range(_ROUNDS):
        comm.Recv(time, rank)
        time[0] = clock()
        comm.Send(time, rank)


def _ask(comm: MPI.Intracomm, clock: Callable[[], float]) -> float:
    time, found = np.empty(1), []
    for _ in range(_ROUNDS):
        begun = clock()
        comm.Send(time, 0)
        comm.Recv(time, 0)
        ended = clock()
        found.append((ended - begun, float(time[0]) - (begun + ended) / 2))
    return min(found)[1]
