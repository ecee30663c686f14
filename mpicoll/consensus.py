"""Agreement between ranks: success or failure of an action, and small records. Nothing is pickled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.errors import TrainingError
from mpicoll.progress.failed_ranks import raise_if_failed

_MAX_RECORD = 1 << 28
_NAP_SECONDS = 0.0005
_LOOK_SECONDS = 0.2
"""Time between two looks for dead ranks."""


def wait_politely(comm: MPI.Intracomm) -> None:
    """Barrier that sleeps while it waits, so that a rank that is still at work has the core to itself.

    There is no deadline, since reading a file or compiling may take any time; a rank that dies ends the job.

    Raises
    ------
    RankFailed
        If a rank has died and the MPI library goes on without it.
    """
    request, look_at = comm.Ibarrier(), time.monotonic() + _LOOK_SECONDS
    while not request.Test():
        time.sleep(_NAP_SECONDS)
        if time.monotonic() > look_at:
            raise_if_failed(comm)
            look_at = time.monotonic() + _LOOK_SECONDS


def share(comm: MPI.Intracomm, record: dict[str, Any] | None, root: int = 0) -> dict[str, Any]:
    """Return the root's `record`, which travels as JSON, on every rank."""
    payload = b"" if record is None else json.dumps(record).encode()
    length = np.array([len(payload)], dtype=np.int64)
    comm.Bcast(length, root)
    if not 0 < length[0] <= _MAX_RECORD:
        raise RuntimeError(f"record: {length[0]} bytes are not in 1..{_MAX_RECORD}")
    text = np.frombuffer(payload, np.uint8).copy() if record is not None else np.empty(int(length[0]), np.uint8)
    comm.Bcast(text, root)
    found: dict[str, Any] = json.loads(text.tobytes())
    return found


def said_on_all(comm: MPI.Intracomm, command: str, obstacle: Callable[[], str]) -> bool:
    """Return whether rank 0 has found an obstacle, an error text or "", which it writes to standard error; collective.

    Parameters
    ----------
    command
        The command of ``python -m mpicoll`` that meets it.
    """
    text = obstacle() if comm.rank == 0 else ""
    if text:
        sys.stderr.write(f"mpicoll {command}: {text}\n")
    return bool(share(comm, {"obstacle": bool(text)} if comm.rank == 0 else None)["obstacle"])


def all_succeed(comm: MPI.Intracomm, action: Callable[[], Any]) -> Any:
    """Call `action` and return its result, or raise the first TrainingError of any rank on every rank.

    Another exception is raised as it is on its rank, and as a TrainingError on those without one. Collective over
    `comm`; ranks that have nothing to do pass ``lambda: None``.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    wait_politely(comm)
    failed = np.empty(comm.Get_size(), dtype=np.uint8)
    comm.Allgather(np.array([failure is not None], dtype=np.uint8), failed)
    if not failed.any():
        return result
    first = int(failed.argmax())
    mine = failure is not None and first == comm.Get_rank()
    text = str(failure) if isinstance(failure, TrainingError) else f"rank {first}: {type(failure).__name__}: {failure}"
    record = share(comm, {"kind": type(failure).__name__, "text": text[:2000]} if mine else None, first)
    if failure is not None and not isinstance(failure, TrainingError):
        raise failure
    raise _kind(record["kind"])(record["text"]) from None


def _kind(name: str) -> type[TrainingError]:
    return next((kind for kind in TrainingError.__subclasses__() if kind.__name__ == name), TrainingError)
