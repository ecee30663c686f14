"""First meeting of a communicator's ranks: they agree on what their environment variables say."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.settings import check_mode
from mpicoll.communicator.topology import pretended_node
from mpicoll.environment import core_limit
from mpicoll.errors import CollectiveTimeout, RemoteError
from mpicoll.progress.waiting import POLLS_BEFORE_YIELD, wait_until

DEFAULT_TIMEOUT = 60.0
_TEXT_NBYTES = 512
_abandoned: list[tuple[MPI.Request, np.ndarray]] = []
"""Meetings to which not all ranks came in time, and their memory, which the MPI library still writes."""


def check_environments(comm: MPI.Intracomm, timeout: Any) -> None:
    """Raise on all ranks if an environment variable is wrong on any, or ``MPICOLL_NODES`` differs between ranks.

    Other variables may differ: the ranks agree on common settings later.

    Raises
    ------
    CollectiveTimeout
        If some rank does not make this call within `timeout` seconds, or a minute if that is longer, since processes
        start at different times. A `timeout` that is no number, which is refused later, is a minute.
    """
    wrong = what_is_wrong()
    nodes = os.environ.get("MPICOLL_NODES", "")
    code = zlib.crc32(nodes.encode())
    first, lowest, highest = -(comm.rank if wrong else comm.size), -code, code
    agreed = np.array([first, lowest, highest], np.int64)
    _meet(comm, agreed, max(timeout, DEFAULT_TIMEOUT) if isinstance(timeout, (int, float)) else DEFAULT_TIMEOUT)
    first, lowest, highest = agreed.tolist()
    if -first < comm.size:
        text = np.zeros(_TEXT_NBYTES, np.uint8)
        own = wrong.encode()[:_TEXT_NBYTES]
        text[: len(own)] = np.frombuffer(own, np.uint8)
        comm.Bcast(text, -first)
        if wrong:
            raise ValueError(wrong)
        raise RemoteError(f"rank {-first}: {text.tobytes().rstrip(bytes(1)).decode(errors='replace')}")
    if -lowest != highest:
        raise ValueError(f"MPICOLL_NODES: {nodes!r} here, but another value on other ranks")


def _meet(comm: MPI.Intracomm, agreed: np.ndarray, timeout: float) -> None:
    """Replace numbers by the largest ones of all ranks; collective, with a deadline."""
    request = comm.Iallreduce(MPI.IN_PLACE, agreed, MPI.MAX)

    def look(waited: float) -> float:
        if waited < timeout:
            return timeout
        _abandoned.append((request, agreed))
        raise CollectiveTimeout(
            f"rank {comm.rank} of {comm.size} waited {timeout:g} s for the others to make their first call of mpicoll"
            " for this communicator; did one of them fail before, or use another communicator?"
        )

    wait_until(request.Test, POLLS_BEFORE_YIELD, look)


def what_is_wrong() -> str:
    """Return an error text for this rank's environment, "" if it is right."""
    try:
        check_mode()
        core_limit()
        pretended_node()
    except ValueError as error:
        return str(error)
    return ""
