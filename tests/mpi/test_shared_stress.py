"""Thousands of different calls, one after the other, with ranks that are late at random: every result is exact."""

from __future__ import annotations

import time

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.errors import CommunicatorBroken
from tests.mpi.memory import KINDS, neighbours_are_intact, place

pytestmark = pytest.mark.mpi(min_size=2)
CALLS = 10_000
LONGEST = 40_000
COLLECTIVES = ("allreduce", "reduce", "bcast", "reduce_scatter_block", "allgather", "barrier", "plan")
LEFT = mpicoll.op(lambda a, b: a, commutative=False)


class Mill:
    """Makes one call after the other on buffers that it keeps, and checks each result on its own rank."""

    def __init__(self, comm: Intracomm) -> None:
        self.comm = comm
        empty = np.zeros(LONGEST, np.int64)
        self.buffers = [(place(comm, one, empty), place(comm, two, empty)) for one in KINDS for two in KINDS]
        self.base = np.arange(LONGEST) % 97
        self.plans = [comm.Allreduce_init(*(b[:count] for b in self.buffers[4])) for count in (3, 700, 9000)]
        self.started = 0

    def call(self, collective: str, count: int, turn: int, where: int) -> None:
        comm, size, rank = self.comm, self.comm.size, self.comm.rank
        root, (send, recv) = turn % size, self.buffers[where]
        part = max(1, count // size)
        ours, everybodys = self.base[:count] * (rank + 1) + turn, self.base[:count] * (size * (size + 1) // 2)
        everybodys = everybodys + size * turn
        if collective == "barrier":
            comm.Barrier()
        elif collective == "bcast":
            recv[:count] = ours
            comm.Bcast(recv[:count], root)
            assert (recv[:count] == self.base[:count] * (root + 1) + turn).all()
        elif collective == "allgather":
            comm.Allgather(ours[:part].copy(), recv[: size * part])
            for r in range(size):
                assert (recv[r * part : (r + 1) * part] == self.base[:part] * (r + 1) + turn).all()
        elif collective == "reduce_scatter_block":
            send[: size * part] = rank + turn
            comm.Reduce_scatter_block(send[: size * part], recv[:part])
            assert (recv[:part] == size * turn + size * (size - 1) // 2).all()
        elif collective == "plan":
            self._start(turn)
        else:
            send[:count] = ours
            if collective == "reduce":
                comm.Reduce(send[:count], recv[:count], root=root)
            elif turn % 5 == 0:
                comm.Allreduce(send[:count], recv[:count], LEFT)
                everybodys = self.base[:count] + turn
            else:
                comm.Allreduce(send[:count], recv[:count])
            assert (collective == "reduce" and rank != root) or (recv[:count] == everybodys).all()

    def _start(self, turn: int) -> None:
        """Start a plan, make a call meanwhile, and wait for it."""
        plan, count = self.plans[turn % 3], (3, 700, 9000)[turn % 3]
        send, recv = self.buffers[4]
        send[:count] = self.comm.rank + turn
        plan.Start()
        self.comm.Allreduce(MPI.IN_PLACE, one := np.ones(5))
        plan.Wait()
        assert one[4] == self.comm.size
        assert (recv[:count] == self.comm.size * turn + self.comm.size * (self.comm.size - 1) // 2).all()


def test_ten_thousand_different_calls(comm: Intracomm) -> None:
    mill, alike, own = Mill(comm), np.random.default_rng(5), np.random.default_rng(comm.rank)
    calls = CALLS if comm.size <= 4 else CALLS // 2
    for turn in range(calls):
        collective = COLLECTIVES[alike.integers(len(COLLECTIVES))]
        count = int(2.0 ** alike.uniform(0, 9 if turn % 8 else np.log2(LONGEST)))
        where = int(alike.integers(len(mill.buffers)))
        if own.integers(60) == 0:
            time.sleep(own.uniform(0, 2e-3))
        mill.call(collective, count, turn, where)
    assert all(neighbours_are_intact(buffer) for pair in mill.buffers for buffer in pair)
    for plan in mill.plans:
        plan.Free()


def test_roots_that_are_ahead_of_the_others(comm: Intracomm) -> None:
    """Bursts of calls in which no rank waits for all others: in records, pieces of slots, whole slots, and longer."""
    alike, own = np.random.default_rng(8), np.random.default_rng(comm.rank)
    size, rank, base = comm.size, comm.rank, np.arange(LONGEST)
    for turn in range(CALLS // 2):
        burst = np.random.default_rng(turn // 100)  # the same rank is root, nearly always of the same collective
        root, kind = int(burst.integers(size)), burst.integers(5) if alike.random() < 0.99 else alike.integers(5)
        collective = ("Bcast", "Scatter", "Gather", "Reduce", "Scatterv")[kind]
        # Few different calls: of each the first is compared between all ranks.
        part = int(alike.choice((1, 3, 60))) if turn % 97 else int(alike.choice((900, LONGEST // size)))
        if own.integers(500) == 0 or (turn % 100 == 10 and rank == turn // 100 % size):
            time.sleep(2e-2)
        whole, wanted = base[: size * part] * (1 + rank) + turn, base[: size * part] * (1 + root) + turn
        mine = wanted[rank * part : (rank + 1) * part]
        got = np.zeros_like(mine)
        if collective == "Bcast":
            comm.Bcast(whole, root)
            got = whole[rank * part : (rank + 1) * part]
        elif collective == "Scatter":
            comm.Scatter(whole, got, root)
        elif collective == "Scatterv":
            comm.Scatterv([whole, [part] * size] if rank == root else None, got, root)
        elif collective == "Gather":
            comm.Gather(mine, whole, root)
            got, mine = (whole, wanted) if rank == root else (got, got)
        else:
            comm.Reduce(whole, sums := np.zeros_like(whole), root=root)
            total = base[: size * part] * (size * (size + 1) // 2) + size * turn
            got, mine = (sums, total) if rank == root else (got, got)
        assert (got == mine).all(), (turn, collective, root, part)


def test_the_same_calls_twice_give_the_same_bits(comm: Intracomm) -> None:
    given = np.random.default_rng(comm.rank).standard_normal(LONGEST) * 1e10
    seen: dict[int, bytes] = {}
    for turn in range(200):
        count = (7, 900, 5000, LONGEST)[turn % 4]
        send, recv = place(comm, KINDS[turn % 3], given[:count]), place(comm, KINDS[turn // 3 % 3], given[:count])
        comm.Allreduce(send, recv)
        assert seen.setdefault(count, recv.tobytes()) == recv.tobytes()


def test_many_communicators_leave_nothing_behind(comm: Intracomm) -> None:
    """Neither descriptors nor shared memory: what is freed is used again."""
    from pathlib import Path

    from mpicoll.kernels import allocator
    from mpicoll.shared_memory import numpy_allocator

    source = numpy_allocator.source()

    def footprint() -> tuple[int, int]:
        descriptors = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
        return descriptors, int(source.words[allocator.NEXT]) if source else 0

    def use() -> None:
        made = Intracomm(MPI.COMM_WORLD.Dup(), timeout=comm.timeout)
        plan = made.Allreduce_init(MPI.IN_PLACE, data := made.zeros(5000))
        data[:] = 1
        plan.Start()
        plan.Wait()
        assert (data == made.size).all()
        made.Allreduce(MPI.IN_PLACE, np.ones(100_000))
        plan.Free()
        made.Free()

    for _ in range(5):
        use()
    before = footprint()
    for _ in range(25):
        use()
    assert footprint() == before


def test_calls_after_the_end_are_refused_the_short_way_too() -> None:
    comm = Intracomm(MPI.COMM_WORLD.Dup(), timeout=20)
    data = np.ones(4)
    for _ in range(3):
        comm.Allreduce(MPI.IN_PLACE, data)
    comm.Free()
    for call in (lambda: comm.Allreduce(MPI.IN_PLACE, data), comm.Barrier, lambda: comm.Bcast(data)):
        with pytest.raises(CommunicatorBroken, match="it was freed"):
            call()
