"""Rendezvous by MPI: rank, size and a store for ``init_process_group`` without environment variables."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch.distributed as dist
from mpi4py import MPI

from mpicoll.environment import launcher_mismatch
from mpicoll.errors import CollectiveTimeout

SCHEME = "mpicoll"
_RECORD_NBYTES = 320
_NAP_SECONDS = 0.0005
_servers: list[Any] = []
"""Stores of this process; other ranks may need one even when this rank has left its group."""
Found = Iterator[tuple[Any, int, int]]


def install() -> None:
    """Register ``init_method="mpicoll://"``, and let ``"env://"`` take from MPI what the environment does not say.

    ``"env://"`` is the default. Where RANK and WORLD_SIZE, or MASTER_ADDR and MASTER_PORT, are not set, rank and size,
    or the store, come from MPI; where all are set, as by torchrun, nothing changes.
    """
    handlers: dict[str, Callable[..., Found]] = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    if SCHEME in handlers:
        return
    dist.register_rendezvous_handler(SCHEME, by_mpi)
    from_environment = handlers["env"]

    def by_environment(url: str, **options: Any) -> Found:
        if _lacking(url):
            return by_mpi(url, **options)
        return from_environment(url, **options)

    handlers["env"] = by_environment


def _lacking(url: str) -> bool:
    """Return whether neither the environment nor the URL has all that is needed."""
    query = parse_qs(urlparse(url).query)
    named = {"RANK": "rank", "WORLD_SIZE": "world_size", "MASTER_ADDR": "", "MASTER_PORT": ""}
    return not all(os.environ.get(variable) or name in query for variable, name in named.items())


def by_mpi(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Found:
    """Yield a store, and this process' rank and size in MPI.COMM_WORLD; collective over it.

    Raises
    ------
    RuntimeError
        If the launcher belongs to another MPI library.
    CollectiveTimeout
        If a rank does not come in time.
    """
    world = MPI.COMM_WORLD
    mismatch = launcher_mismatch(world.size, MPI.get_vendor()[0])
    if mismatch is not None:
        raise RuntimeError(f"init_process_group: {mismatch}")
    server = _serve(world.size, timeout) if world.rank == 0 else None
    if server is not None:
        _servers.append(server)
    record = f"{_own_name()} {server.port if server is not None else 0}"
    records = exchange_records(world, record, timeout.total_seconds())
    hosts = [each.split()[0] for each in records]
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = server or dist.TCPStore(host, int(records[0].split()[1]), world.size, False, timeout)
    yield store, world.rank, world.size
    raise RuntimeError("init_process_group: the store cannot be made a second time")


def _serve(size: int, timeout: timedelta) -> Any:
    """Return a store on a free port, which does not wait for the others."""
    return dist.TCPStore("127.0.0.1", 0, size, True, timeout, wait_for_workers=False)


def _own_name() -> str:
    return socket.gethostname().replace(" ", "")[:255] or "localhost"


_unfinished: list[Any] = []
"""Calls that were given up before all ranks had come, whose memory MPI may use for as long as the process lives."""


def exchange_records(comm: MPI.Intracomm, record: str, seconds: float) -> list[str]:
    """Return the records of all ranks, text of up to 320 bytes, in rank order; collective over `comm`.

    Raises
    ------
    CollectiveTimeout
        If a rank has not come after `seconds`.
    """
    mine = np.zeros(_RECORD_NBYTES, np.uint8)
    payload = record.encode()[:_RECORD_NBYTES]
    mine[: len(payload)] = np.frombuffer(payload, np.uint8)
    everyone = np.zeros((comm.Get_size(), _RECORD_NBYTES), np.uint8)
    request, until = comm.Iallgather(mine, everyone), time.monotonic() + seconds
    while not request.Test():
        if time.monotonic() > until:
            _unfinished.append((request, mine, everyone))
            raise CollectiveTimeout(f"rendezvous: not all {comm.Get_size()} ranks have come after {seconds:g} s")
        time.sleep(_NAP_SECONDS)
    return [row.tobytes().rstrip(b"\0").decode() for row in everyone]
