"""Allreduce of other libraries, measured beside ours where they are installed: gloo (in PyTorch) and numba-mpi."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

Call = Callable[[], None]
_NUMBA_MPI_DTYPES = ("float64", "int32", "int64")
_DEADLINE_SECONDS = 60


def allreduce(comm: MPI.Intracomm, sendbuf: np.ndarray, recvbuf: np.ndarray, op: str) -> dict[str, Call]:
    """Return what there is, by name; collective over `comm`, whose ranks must be those of COMM_WORLD.

    gloo reduces in place only, so that its call includes the copy that a program with two buffers would make.
    """
    found = {"gloo": _gloo(comm, sendbuf, recvbuf, op), "numba-mpi": _numba_mpi(sendbuf, recvbuf, op)}
    return {name: call for name, call in found.items() if call is not None}


def _numba_mpi(sendbuf: np.ndarray, recvbuf: np.ndarray, op: str) -> Call | None:
    if importlib.util.find_spec("numba_mpi") is None or sendbuf.dtype.name not in _NUMBA_MPI_DTYPES:
        return None
    import numba_mpi

    operator = getattr(numba_mpi.Operator, op, None)
    if operator is None:
        return None

    def call() -> None:
        numba_mpi.allreduce(sendbuf, recvbuf, operator)

    return call


def _gloo(comm: MPI.Intracomm, sendbuf: np.ndarray, recvbuf: np.ndarray, op: str) -> Call | None:
    torch = _torch_with_gloo(comm.rank, comm.size, _meeting_point(comm))
    operator = None if torch is None else getattr(torch.distributed.ReduceOp, {"PROD": "PRODUCT"}.get(op, op), None)
    if torch is None or operator is None:
        return None
    try:
        tensor = torch.from_numpy(recvbuf)
    except TypeError:  # an element type that PyTorch does not have
        return None

    def call() -> None:
        np.copyto(recvbuf, sendbuf)
        torch.distributed.all_reduce(tensor, operator)

    return call


@lru_cache(maxsize=1)
def _torch_with_gloo(rank: int, size: int, file: str) -> Any:
    if importlib.util.find_spec("torch") is None:
        return None
    import datetime

    import torch

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=_DEADLINE_SECONDS),
    )
    return torch


_meeting: dict[int, str] = {}


def _meeting_point(comm: MPI.Intracomm) -> str:
    """Return the name of a file on rank 0's machine by which gloo's ranks find each other; collective when first."""
    if 0 not in _meeting:
        name = np.zeros(4096, np.uint8)
        if comm.rank == 0:
            path = os.fsencode(Path(tempfile.mkdtemp(prefix="mpicoll-gloo-")) / "store")
            name[: len(path)] = list(path)
        comm.Bcast(name)
        _meeting[0] = os.fsdecode(name.tobytes().rstrip(b"\0"))
    return _meeting[0]
