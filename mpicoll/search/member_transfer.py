"""Transfer of members' states between groups: arrays from each rank of a group to the same rank of another one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.errors import SearchError
from mpicoll.search.coordinator_messages import Naps

State = dict[str, np.ndarray]
"""Arrays by name."""
_MOST_HEADER_NBYTES = 1 << 20
_MOST_TAGS = 1 << 14
_Found = TypeVar("_Found")


def transfer(
    comm: MPI.Intracomm, copies: Sequence[tuple[int, int]], own: Callable[[int], State], timeout: float
) -> dict[int, State]:
    """Send states between ranks; collective over the ranks that take part in a copy.

    Messages are nonblocking, and no rank waits before it has sent everything, so that copies may cross.

    Parameters
    ----------
    comm
        Communicator for these messages alone.
    copies
        Source and destination rank of each copy, the same on all ranks.
    own
        Function of the number of a copy whose source is this rank that returns its state.
    timeout
        Seconds to wait for each message.

    Returns
    -------
    dict of State
        States that this rank has received, by the number of the copy; those from itself are copies.

    Raises
    ------
    SearchError
        If a message does not arrive in time, or has another length than its header says.
    """
    rank = comm.Get_rank()
    pending: list[tuple[MPI.Request, np.ndarray]] = []
    found: dict[int, State] = {}
    for number, (source, target) in enumerate(copies):
        if source == target == rank:
            found[number] = {name: array.copy() for name, array in own(number).items()}
        elif source == rank:
            pending += _send(comm, own(number), target, number % _MOST_TAGS)
    for number, (source, target) in enumerate(copies):
        if target == rank != source:
            found[number] = _receive(comm, source, number % _MOST_TAGS, timeout)
    _wait(lambda: True if all(request.Test() for request, _ in pending) else None, timeout, "states to be received")
    return found


def _send(comm: MPI.Intracomm, state: State, target: int, tag: int) -> list[tuple[MPI.Request, np.ndarray]]:
    """Start to send a header and each array; the arrays must live until the requests are complete."""
    arrays = [np.ascontiguousarray(array) for array in state.values()]
    header = [
        {"name": name, "dtype": array.dtype.str, "shape": array.shape}
        for name, array in zip(state, arrays, strict=True)
    ]
    text = np.frombuffer(json.dumps(header).encode(), np.uint8).copy()
    parts = [text, *(array.reshape(-1).view(np.uint8) for array in arrays if array.size)]
    return [(comm.Isend(part, target, tag), part) for part in parts]


def _receive(comm: MPI.Intracomm, source: int, tag: int, timeout: float) -> State:
    header = _checked_header(_message(comm, source, tag, timeout, None).tobytes(), source)
    state: State = {}
    for entry in header:
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        nbytes = math.prod(shape) * dtype.itemsize
        data = _message(comm, source, tag, timeout, nbytes) if nbytes else np.empty(0, np.uint8)
        state[entry["name"]] = data.view(dtype).reshape(shape)
    return state


def _checked_header(text: bytes, source: int) -> list[dict[str, Any]]:
    try:
        header: list[dict[str, Any]] = json.loads(text)
        for entry in header:
            if np.dtype(entry["dtype"]).hasobject or any(length < 0 for length in entry["shape"]):
                raise ValueError(f"{entry['name']!r} is not an array of numbers")
    except (ValueError, TypeError, KeyError) as error:
        raise SearchError(f"rank {source} has sent no state of a member: {error}") from None
    return header


def _message(comm: MPI.Intracomm, source: int, tag: int, timeout: float, nbytes: int | None) -> np.ndarray:
    """Return the bytes of the next message; `nbytes` of them, or at most those of a header if that is None."""
    status = MPI.Status()
    message = _wait(lambda: comm.Improbe(source, tag, status), timeout, f"the state of a member of rank {source}")
    count = status.Get_count(MPI.BYTE)
    if (count != nbytes) if nbytes is not None else not 0 < count <= _MOST_HEADER_NBYTES:
        raise SearchError(f"rank {source} has sent {count} bytes of a member's state, not {nbytes or 'a header'}")
    data = np.empty(count, np.uint8)
    request = message.Irecv(data)
    _wait(lambda: request.Test() or None, timeout, f"the state of a member of rank {source}")
    return data


def _wait(look: Callable[[], _Found | None], timeout: float, what: str) -> _Found:
    """Return what `look` finds, as soon as that is not None."""
    naps, deadline = Naps(), time.monotonic() + timeout
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise SearchError(f"waited {timeout:g} s for {what}")
        naps.pause()
