"""Collectives of Python objects against mpi4py's own.

``python -m bench.objects --collective allreduce bcast`` starts itself on 2 and on 8 ranks; ``mpirun -n 4 python -m
bench.objects`` measures in that run. ``auto`` is ours, with mpi4py's time over its own and the half width of the 95 %
interval. Both are called in turn, in random order, in two manners: back to back, and one at a time, when all ranks
begin at the same moment (:mod:`bench.timing`).

Objects are a float, a pair of numbers (MAXLOC, where a collective reduces), a small dictionary, a list of 100 floats,
numbers of 100 words in a dictionary (added up by a function, where a collective reduces), arrays of 512 bytes and of
1 MB, two arrays of 1 KB in a dictionary, a date and a set (which are pickled), a text of 4 KB, and an array of 10 MB in
a tuple. ``--sizes`` does not apply. ``wrong`` counts results that differ from mpi4py's in type or value.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.benchmark_options import add_calls, is_launcher, make_parser, relaunch
from bench.result_files import BACK_TO_BACK, NATIVE, SINGLE, UNTOUCHED, Case

if TYPE_CHECKING:
    from mpi4py import MPI

    from bench.harness import Contest
    from mpicoll import Intracomm

AUTO = "auto"
REDUCING = ("allreduce", "reduce", "scan", "exscan")
COLLECTIVES = (*REDUCING, "bcast", "allgather", "gather", "scatter", "alltoall")
OBJECTS = {
    "float": 8,
    "pair": 16,
    "dict": 64,
    "pickle": 100,
    "vector": 512,
    "list": 800,
    "counts": 1 << 10,
    "state": 2 << 10,
    "text": 4 << 10,
    "array": 1 << 20,
    "tuple": 10 << 20,
}
"""Their bytes, roughly."""
REDUCED = ("float", "pair", "counts", "vector", "array")
"""Objects of collectives that reduce; the others have all of them."""


def make_object(kind: str, rank: int) -> Any:
    """Return an object of a kind, which is another one on each rank."""
    import numpy as np

    makers: dict[str, Callable[[], Any]] = {
        "float": lambda: rank + 0.5,
        "pair": lambda: (float(rank), rank),
        "dict": lambda: {"loss": 0.25, "step": rank, "name": "epoch", "done": False},
        "pickle": lambda: [datetime.date(2020, 1, 1 + rank % 28), {rank, "a"}],
        "vector": lambda: np.arange(64.0) + rank,
        "list": lambda: [float(number + rank) for number in range(100)],
        "counts": lambda: {f"word {number}": number for number in range(rank, rank + 100)},
        "state": lambda: {"weights": np.ones((8, 16)), "momentum": np.zeros((8, 16)) + rank, "step": rank},
        "text": lambda: chr(97 + rank) * OBJECTS["text"],
        "array": lambda: np.arange(OBJECTS["array"] // 8, dtype=np.float64) + rank,
        "tuple": lambda: (np.arange(OBJECTS["tuple"] // 8, dtype=np.float64), rank),
    }
    return makers[kind]()


def add_counts(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Return the sums of two dictionaries of numbers."""
    total = dict(one)
    for word, number in other.items():
        total[word] = total.get(word, 0) + number
    return total


def same(got: Any, expected: Any) -> bool:
    """Say whether two results are equal in type and value."""
    import numpy as np

    if type(got) is not type(expected):
        return False
    if isinstance(got, (list, tuple)):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(got, dict):
        return same(list(got.items()), list(expected.items()))
    if isinstance(got, np.ndarray):
        return got.dtype == expected.dtype and np.array_equal(got, expected)
    return bool(got == expected)


class Objects:
    """One collective and object: contenders and check; a `bench.harness.Contest`."""

    def __init__(self, comms: tuple[Intracomm, MPI.Intracomm], collective: str, kind: str) -> None:
        self._plain = comms[1]
        self.calls = {NATIVE: self._call(comms[1], collective, kind), AUTO: self._call(comms[0], collective, kind)}
        self.notes: list[str] = []
        self.case = Case(collective, OBJECTS[kind], 1, kind, comms[0].size, "objects", buffers=UNTOUCHED)

    def _call(self, comm: MPI.Intracomm, collective: str, kind: str) -> Callable[[], Any]:
        from mpi4py import MPI

        given, method = make_object(kind, comm.rank), getattr(comm, collective)
        if collective in REDUCING:
            return partial(method, given, {"pair": MPI.MAXLOC, "counts": add_counts}.get(kind, MPI.SUM))
        return partial(method, [given] * comm.size if collective in ("scatter", "alltoall") else given)

    def wrong(self, contender: str) -> int:
        """Call both once more and return on how many ranks the results differ."""
        import numpy as np
        from mpi4py import MPI

        differing = np.array([int(not same(self.calls[contender](), self.calls[NATIVE]()))])
        self._plain.Allreduce(MPI.IN_PLACE, differing)
        return int(differing[0])

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return nothing more."""
        return {}

    def close(self) -> None:
        """Forget the objects."""
        self.calls.clear()


def _contests(arguments: argparse.Namespace, comms: tuple[Intracomm, MPI.Intracomm]) -> Iterator[Callable[[], Contest]]:
    for collective in arguments.collective:
        for kind in arguments.objects:
            if collective not in REDUCING or kind in REDUCED:
                yield partial(Objects, comms, collective, kind)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if any result was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser("bench.objects", __doc__)
    add = parser.add_argument
    add("--collective", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES), help="default: all of them")
    add("--objects", nargs="+", choices=OBJECTS, default=list(OBJECTS), help="default: %(default)s")
    add_calls(parser, (BACK_TO_BACK, SINGLE))
    arguments = parser.parse_args(argv)
    if is_launcher():
        return relaunch("bench.objects", arguments, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mpi4py import MPI

    from bench import harness
    from mpicoll import Intracomm

    comms = Intracomm(MPI.COMM_WORLD), MPI.Intracomm(MPI.COMM_WORLD).Dup()
    return harness.run("bench.objects", arguments, list(_contests(arguments, comms)), argv, comms[1])


if __name__ == "__main__":
    sys.exit(main())
