"""Communicators made, used and freed in random order, by every means; nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.communicator import channel

pytestmark = pytest.mark.mpi
STEPS, ALIVE = 1000, 8


class Population:
    """Communicators by number; the numbers are equal on all ranks, of which some have COMM_NULL, or nothing.

    Every rank draws the same random numbers, whether or not it has the communicator.
    """

    def __init__(self, seed: int, root: Any) -> None:
        self.draw, self.has_requests = random.Random(seed), bool(seed % 2)
        self.alive = [root]
        self.pending: list[tuple[Any, np.ndarray, int]] = []

    def run(self) -> None:
        makers = (self.split, self.split, self.duplicate, self.grid, self.grid, self.subgrid)
        for _ in range(STEPS):
            place, number = self.draw.randrange(len(self.alive)), self.draw.randrange(1 << 30)
            step: Callable[[Any, int], Any] = self.draw.choice((*makers, self.use))
            wants_to_free = len(self.alive) > ALIVE or self.draw.random() < 0.3
            comm = self.alive[place]
            if wants_to_free:
                if place:
                    self.free(self.alive.pop(place), number)
                continue
            made = step(comm, number) if comm is not None and comm != MPI.COMM_NULL else None
            if step in makers:
                self.alive.append(made)
        self.finish(0)
        for comm in self.alive[1:]:
            self.free(comm, 0)

    def split(self, comm: Any, number: int) -> Any:
        colors = [MPI.UNDEFINED if number >> rank & 3 == 3 else number >> rank & 1 for rank in range(comm.size)]
        return comm.Split(0 if number % 3 else colors[comm.rank], comm.rank if number % 2 else -comm.rank)

    def duplicate(self, comm: Any, number: int) -> Any:
        return comm.Dup()

    def grid(self, comm: Any, number: int) -> Any:
        shapes = ([comm.size], [comm.size, 1], [1, comm.size], [max(1, comm.size - 1)])
        shape = shapes[number % 4]
        return comm.Create_cart(shape, [bool(number >> 2 & 1)] * len(shape))

    def subgrid(self, comm: Any, number: int) -> Any:
        if isinstance(comm, MPI.Cartcomm):
            return comm.Sub([bool(number >> dimension & 1) for dimension in range(comm.Get_dim())])
        return comm.Split(0)

    def use(self, comm: Any, number: int) -> None:
        data = np.ones((3, 300_000)[number % 7 == 0])
        if number % 3 == 0 or not self.has_requests:
            comm.Allreduce(MPI.IN_PLACE, data)
            assert (data == comm.size).all()
        elif number % 3 == 1:
            assert comm.allgather({comm.rank}) == [{rank} for rank in range(comm.size)]
        else:
            self.pending.append((comm.Iallreduce(MPI.IN_PLACE, data), data, comm.size))

    def finish(self, left: int) -> None:
        while len(self.pending) > left:
            request, data, size = self.pending.pop(0)
            request.Wait()
            assert (data == size).all()

    def free(self, comm: Any, number: int) -> None:
        self.finish(number % 3)
        if comm is not None and comm != MPI.COMM_NULL:
            (comm.Free, MPI.Intracomm(comm).Free, comm.Disconnect)[number % 3]()


@pytest.mark.parametrize("seed", [2, 3])
def test_in_random_order(seed: int) -> None:
    plain, lost = MPI.COMM_WORLD.Dup(), len(channel._kept)
    Population(seed, mpicoll.Intracomm(plain)).run()
    assert len(channel._kept) == lost
    plain.Free()
