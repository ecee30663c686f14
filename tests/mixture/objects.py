"""Collectives of objects, drawn alike on all ranks, with what each rank must get."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from tests.objects import Vector, differ

COLLECTIVES = ("bcast", "gather", "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan")
REDUCING = COLLECTIVES[5:]
KINDS = (
    "float",
    "int",
    "text",
    "bytes",
    "list",
    "dict",
    "array",
    "arrays in a tuple",
    "scalar",
    "nested",
    "pickle",
    "array in a tuple",
)
NOT_ADDED = ("dict", "nested")


def _object(kind: str, nbytes: int, seed: int, rank: int) -> Any:
    """Return a rank's object; those of one kind can be added, and sums do not depend on the order."""
    text = chr(97 + (seed + rank) % 26) * (nbytes // (1 + (seed + rank) % 3))
    array = np.arange(nbytes // 8) + (seed + rank) % 1000
    return {
        "float": float(seed % 1000 + rank),
        "int": 2 ** (seed % 70) + rank,
        "text": text,
        "bytes": text.encode(),
        "list": [rank] * (nbytes // 64),
        "dict": {"rank": rank, "text": text},
        "array": array,
        "arrays in a tuple": (array, rank, array[:3]),
        "array in a tuple": (rank, array),
        "scalar": np.float64(seed % 1000 + rank),
        "nested": {"a": [array[:7], {"b": (text, rank)}], 1: [[rank]] * 2},
        "pickle": Vector([rank] * (nbytes // 64)),
    }[kind]


class ObjectCall:
    """One collective of objects."""

    def __init__(self, numbers: random.Random, size: int) -> None:
        self.collective = numbers.choice(COLLECTIVES)
        kinds = KINDS if self.collective not in REDUCING else tuple(kind for kind in KINDS if kind not in NOT_ADDED)
        self.root, self.seed = numbers.randrange(size), numbers.randrange(1 << 20)
        self.nbytes = int(2.0 ** numbers.uniform(0, 21 if numbers.random() < 0.1 else 13))
        kind = numbers.choice(kinds)
        mixed = self.collective not in REDUCING and numbers.random() < 0.3
        self.kinds = [numbers.choice(kinds) if mixed else kind for _ in range(size)]
        self.op: Any = numbers.choice((MPI.SUM, lambda a, b: a + b))

    def __str__(self) -> str:
        return f"{self.collective} of {'/'.join(sorted(set(self.kinds)))}, {self.nbytes:,} bytes, root {self.root}"

    def given(self, rank: int, dest: int = 0) -> Any:
        """Return what a rank has, for `dest` if it has something for each."""
        return _object(self.kinds[rank], self.nbytes, self.seed + dest, rank)

    def make(self, comm: Intracomm) -> Any:
        """Make the call."""
        own, root, everybody = self.given(comm.rank), self.root, range(comm.size)
        method = getattr(comm, self.collective)
        if self.collective == "scatter":
            return method([self.given(root, dest) for dest in everybody] if comm.rank == root else None, root)
        if self.collective == "alltoall":
            return method([self.given(comm.rank, dest) for dest in everybody])
        if self.collective in REDUCING:
            return method(own, self.op, root) if self.collective == "reduce" else method(own, self.op)
        return method(own) if self.collective == "allgather" else method(own, root)

    def result(self, rank: int, size: int) -> Any:
        """Return what a rank must get."""
        name, root = self.collective, self.root
        if name == "bcast":
            return self.given(root)
        if name == "scatter":
            return self.given(root, rank)
        if name == "alltoall":
            return [self.given(other, rank) for other in range(size)]
        if name in ("gather", "reduce") and rank != root:
            return None
        if name in ("gather", "allgather"):
            return [self.given(other) for other in range(size)]
        last = {"scan": rank + 1, "exscan": rank}.get(name, size)
        total = self.given(0) if last else None
        for other in range(1, last):
            total = total + self.given(other)
        return total

    def wrong(self, comm: Intracomm) -> str:
        """Make the call, and return how the result differs from what it must be, or nothing."""
        difference = differ(self.make(comm), self.result(comm.rank, comm.size))
        return f"{self}: {difference}" if difference else ""
