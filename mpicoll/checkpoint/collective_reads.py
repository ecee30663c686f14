"""Collective file operations: results and errors are exchanged between ranks as JSON, and nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import all_succeed, wait_politely
from mpicoll.errors import CheckpointFailed, TrainingError

_MAX_GATHERED = 1 << 30
_T = TypeVar("_T")


def attempt(comm: MPI.Intracomm, action: Callable[[], _T], *, naming_rank: bool = False) -> _T:
    """Call `action` on every rank and return its result. Collective over `comm`.

    Parameters
    ----------
    naming_rank
        True to begin the message of a TrainingError with the rank; other messages always do.

    Raises
    ------
    CheckpointFailed
        On every rank, with the reason of the first rank on which `action` failed.
    """

    def guarded() -> _T:
        where = f"rank {comm.Get_rank()}: "
        try:
            return action()
        except TrainingError as error:
            raise CheckpointFailed(where * naming_rank + str(error)) from None
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except MemoryError:
            text = "not enough memory"
        except (ValueError, TypeError, RecursionError) as error:
            text = str(error)
        raise CheckpointFailed(where + text)

    found: _T = all_succeed(comm, guarded)
    return found


def on_root(comm: MPI.Intracomm, action: Callable[[], _T]) -> _T | None:
    """Call `action` on rank 0 only; return its result there, None elsewhere. Errors as in :func:`attempt`."""
    return attempt(comm, lambda: action() if comm.Get_rank() == 0 else None)


def from_root(comm: MPI.Intracomm, action: Callable[[], Any]) -> Any:
    """Call `action` on rank 0 and return its result, sent as JSON, on every rank. Errors as in :func:`attempt`."""
    found = on_root(comm, lambda: json.dumps(action()).encode())
    length = np.array([len(found or b"")], np.int64)
    comm.Bcast(length)
    text = np.empty(int(length[0]), np.uint8) if found is None else np.frombuffer(found, np.uint8).copy()
    comm.Bcast(text)
    return json.loads(text.tobytes())


def to_root(comm: MPI.Intracomm, record: Any) -> list[Any] | None:
    """Return the records of all ranks, sent as JSON, in rank order on rank 0; None elsewhere. Collective.

    Raises
    ------
    CheckpointFailed
        On every rank, if they take more than 1 GB together.
    """
    text = np.frombuffer(json.dumps(record).encode(), np.uint8).copy()
    wait_politely(comm)
    lengths = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([len(text)], np.int64), lengths)
    if lengths.sum() > _MAX_GATHERED:
        raise CheckpointFailed(f"descriptions of {lengths.sum()} bytes are too long; use fewer tensors")
    joined = np.empty(int(lengths.sum()) if comm.Get_rank() == 0 else 0, np.uint8)
    comm.Gatherv(text, [joined, lengths.tolist()])
    if comm.Get_rank():
        return None
    return [json.loads(part.tobytes()) for part in np.split(joined, np.cumsum(lengths)[:-1])]
