"""First agreement of a communicator's ranks: on what their environment variables say, and on what they know."""

from __future__ import annotations

import os
import zlib
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.settings import CHECK_MODES, check_mode
from mpicoll.communicator.timed_agreement import largest_of_all
from mpicoll.communicator.topology import pretended_node
from mpicoll.environment import check_switches, core_limit, random_number
from mpicoll.errors import RemoteError

_TEXT_NBYTES = 512


class Agreement(NamedTuple):
    """Outcome of :func:`agree`.

    Attributes
    ----------
    session
        A random number for the channel.
    check
        The strictest check mode of any rank.
    is_common
        Whether all ranks have made the same offer.
    """

    session: int
    check: str
    is_common: bool


def agree(comm: MPI.Intracomm, offer: int = 0, timeout: Any = 0.0) -> Agreement:
    """Compare the environments of all ranks, and what they offer; collective.

    Variables other than ``MPICOLL_NODES`` may differ between ranks.

    Parameters
    ----------
    offer
        A number for what this rank knows, at least 0.
    timeout
        See :func:`largest_of_all`.

    Raises
    ------
    ValueError, RemoteError
        On all ranks if an environment variable is wrong on any, or ``MPICOLL_NODES`` differs between ranks.
    CollectiveTimeout
        If some rank does not make this call in time, see :func:`largest_of_all`.
    """
    wrong = what_is_wrong()
    nodes = os.environ.get("MPICOLL_NODES", "")
    code = zlib.crc32(nodes.encode())
    first, session = -(comm.rank if wrong else comm.size), random_number(62) if comm.rank == 0 else 0
    mode = 0 if wrong else CHECK_MODES.index(check_mode())
    agreed = np.array([first, -code, code, session, mode, -offer, offer], np.int64)
    largest_of_all(comm, agreed, timeout)
    first, lowest, highest, session, mode, least, most = agreed.tolist()
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
    return Agreement(session, CHECK_MODES[mode], -least == most)


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
