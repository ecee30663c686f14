"""Allreduce of other libraries, measured beside ours where they are installed: gloo (in PyTorch) and numba-mpi."""

from __future__ import annotations

import datetime
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

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
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    operator = getattr(torch.distributed.ReduceOp, {"PROD": "PRODUCT"}.get(op, op), None)
    if operator is None:
        return None
    if not torch.distributed.is_initialized():
        start_gloo(comm)
    try:
        tensor = torch.from_numpy(recvbuf)
    except TypeError:  # an element type that PyTorch does not have
        return None

    def call() -> None:
        np.copyto(recvbuf, sendbuf)
        torch.distributed.all_reduce(tensor, operator)

    return call


def start_gloo(comm: MPI.Intracomm) -> None:
    """Let gloo's ranks find each other through a file, which therefore must be on a disk that all hosts see."""
    import torch

    name = np.zeros(4096, np.uint8)
    folder = tempfile.TemporaryDirectory(prefix="mpicoll-gloo-") if comm.rank == 0 else None
    if folder is not None:
        path = os.fsencode(Path(folder.name) / "store")
        name[: len(path)] = list(path)
    comm.Bcast(name)
    torch.distributed.init_process_group(
        "gloo",
        init_method="file://" + os.fsdecode(name.tobytes().rstrip(b"\0")),
        rank=comm.rank,
        world_size=comm.size,
        timeout=datetime.timedelta(seconds=_DEADLINE_SECONDS),
    )
    comm.Barrier()
    if folder is not None:
        folder.cleanup()
