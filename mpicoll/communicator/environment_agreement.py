"""First meeting of a communicator's ranks: they agree on what their environment variables say."""

from __future__ import annotations

import os
import zlib
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.settings import check_mode
from mpicoll.communicator.timed_agreement import largest_of_all
from mpicoll.communicator.topology import pretended_node
from mpicoll.environment import check_switches, core_limit
from mpicoll.errors import RemoteError

_TEXT_NBYTES = 512


def check_environments(comm: MPI.Intracomm, timeout: Any = 0.0) -> None:
    """Raise on all ranks if an environment variable is wrong on any, or ``MPICOLL_NODES`` differs between ranks.

    Other variables may differ: the ranks agree on common settings later.

    Raises
    ------
    CollectiveTimeout
        If some rank does not make this call in time, see :func:`largest_of_all`.
    """
    wrong = what_is_wrong()
    nodes = os.environ.get("MPICOLL_NODES", "")
    code = zlib.crc32(nodes.encode())
    first, lowest, highest = -(comm.rank if wrong else comm.size), -code, code
    agreed = np.array([first, lowest, highest], np.int64)
    largest_of_all(comm, agreed, timeout)
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


def what_is_wrong() -> str:
    """Return an error text for this rank's environment, "" if it is right."""
    try:
        check_mode()
        check_switches()
        core_limit()
        pretended_node()
    except ValueError as error:
        return str(error)
    return ""
