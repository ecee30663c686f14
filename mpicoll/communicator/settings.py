"""Settings that all ranks of a communicator share, and the kind of communicator that it has to be."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.environment import random_number

CHECK_MODES = ("off", "default", "full")


def check_mode() -> str:
    """Return the check mode of this rank's ``MPICOLL_CHECK``; ValueError if it is not one of :data:`CHECK_MODES`."""
    text = os.environ.get("MPICOLL_CHECK", "default") or "default"
    if text not in CHECK_MODES:
        raise ValueError(f"MPICOLL_CHECK: {text!r} is not one of {', '.join(CHECK_MODES)}")
    return text


def agree_on_session(comm: MPI.Intracomm) -> int:
    """Return a random number that identifies the channel; collective."""
    session = np.array([random_number(62) if comm.rank == 0 else 0], np.int64)
    comm.Bcast(session)
    return int(session[0])


def check_kind(comm: Any, kind: type[MPI.Intracomm]) -> None:
    """Raise unless `comm` is a communicator that can be one of this kind."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise RuntimeError("comm: MPI is not initialized, or finalized already")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm: {comm!r} is not an intracommunicator")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm: it is MPI.COMM_NULL")
    if kind is not MPI.Intracomm:
        kind(comm)  # mpi4py raises TypeError if it has another topology
