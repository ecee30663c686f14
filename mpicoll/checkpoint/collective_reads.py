"""Exchange of contents and outcomes between ranks; upper-case calls only, nothing is unpickled."""

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
    """Call `action` and return its result, or raise what went wrong on the first rank as CheckpointFailed on all.

    Collective over `comm`. `naming_rank` is for failures that say something of the rank rather than of a file.
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
    """Do `action` on rank 0 only, and return its result there, None elsewhere; like :func:`attempt`."""
    return attempt(comm, lambda: action() if comm.Get_rank() == 0 else None)


def from_root(comm: MPI.Intracomm, action: Callable[[], Any]) -> Any:
    """Do `action` on rank 0 and return its result, which travels as JSON, on every rank."""
    found = on_root(comm, lambda: json.dumps(action()).encode())
    length = np.array([len(found or b"")], np.int64)
    comm.Bcast(length)
    text = np.empty(int(length[0]), np.uint8) if found is None else np.frombuffer(found, np.uint8).copy()
    comm.Bcast(text)
    return json.loads(text.tobytes())


def to_root(comm: MPI.Intracomm, record: Any) -> list[Any] | None:
    """Return the records of all ranks, in rank order, on rank 0 and None elsewhere; they travel as JSON.

    Raises
    ------
    CheckpointFailed
        On every rank, if they are too long altogether.
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
