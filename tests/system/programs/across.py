"""Every collective across hosts, against exact integers, and with equal bits on all ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from bench.cluster import VARIABLE
from mpicoll import Intracomm
from mpicoll.collectives.select import BY_PARTS, HIERARCHICAL, HIERARCHY
from tests.mpi import exact

COUNTS = (1, 7, 1501, 70_001, 1_000_003)
INTEGER, REAL = np.dtype(np.int32), np.dtype(np.float32)
WORLD = MPI.COMM_WORLD


def check_place(comm: Intracomm) -> None:
    """Ranks are numbered host by host, and only those of one host share memory."""
    place = json.loads(os.environ[VARIABLE])
    per_host = place["ranks_per_host"]
    assert comm.size == place["hosts"] * per_host
    assert MPI.Get_processor_name() == f"host{comm.rank // per_host + 1}"
    together = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert together.size == per_host
    together.Free()
    names = np.array([Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "ipc", "uts", "pid", "mnt")])
    all_names = np.empty((comm.size, names.size), names.dtype)
    WORLD.Allgather(names, all_names)
    same_host = np.arange(comm.size) // per_host == comm.rank // per_host
    assert ((all_names == names).all(axis=1) == same_host).all()
    assert ((all_names != names).all(axis=1) == ~same_host).all()


def check_choice(comm: Intracomm) -> None:
    for collective in (*HIERARCHICAL, *BY_PARTS):
        nbytes = 0 if collective == "barrier" else 16 << 20
        assert comm.choice(collective, nbytes) == HIERARCHY, collective


def check_equal_bits(result: np.ndarray) -> None:
    """A real sum depends on the order, which must be the same everywhere."""
    least, most = (np.empty_like(result.view(INTEGER)) for _ in range(2))
    WORLD.Allreduce(result.view(INTEGER), least, MPI.MIN)
    WORLD.Allreduce(result.view(INTEGER), most, MPI.MAX)
    assert (least == most).all()


def check_reductions(comm: Intracomm, count: int) -> None:
    given, wanted = (
        exact.given("SUM", INTEGER, comm.rank, count),
        exact.expected("SUM", INTEGER, comm.size, count),
    )
    result, root = np.zeros_like(given), count % comm.size
    for algorithm in ("auto", HIERARCHY, "ring"):
        result[:] = 0
        comm.Allreduce(given, result, algorithm=algorithm)
        assert exact.same_bits(result, wanted), (algorithm, count)
    result[:] = 0
    comm.Reduce(given, result if comm.rank == root else None, root=root)
    assert comm.rank != root or exact.same_bits(result, wanted), count
    real = np.random.default_rng(comm.rank).standard_normal(count).astype(REAL)
    comm.Allreduce(MPI.IN_PLACE, real)
    check_equal_bits(real)


def check_moves(comm: Intracomm, count: int) -> None:
    root = count % comm.size
    data = exact.given("SUM", INTEGER, root, count) if comm.rank == root else np.zeros(count, INTEGER)
    comm.Bcast(data, root)
    assert exact.same_bits(data, exact.given("SUM", INTEGER, root, count)), count
    part = -(-count // comm.size)
    whole = np.zeros(part * comm.size, INTEGER)
    comm.Allgather(np.arange(part, dtype=INTEGER) + part * comm.rank, whole)
    assert (whole == np.arange(whole.size)).all(), count
    mine = np.zeros(part, INTEGER)
    comm.Reduce_scatter_block(whole, mine)
    assert (mine == comm.size * (np.arange(part) + part * comm.rank)).all(), count


def main() -> int:
    comm = Intracomm(WORLD, timeout=30.0)
    check_place(comm)
    check_choice(comm)
    for count in COUNTS:
        check_reductions(comm, count)
        check_moves(comm, count)
        comm.Barrier()
    if comm.rank == 0:
        print("all exact")
    return 0


if __name__ == "__main__":
    sys.exit(main())
