"""Alltoallw, vector collectives and buffer specifications against the MPI library's own calls.

``python -m bench.exchanges`` starts itself on 2 and on 8 ranks; ``mpirun -n 4 python -m bench.exchanges`` measures in
that run. ``auto`` is ours on ordinary arrays, ``segments`` on arrays in shared memory, with the library's time over
theirs and the half width of the 95 % interval.

- ``pencil2``, ``pencil3``: Alltoallw as FFT libraries make it, a distributed array of two or three dimensions that is
  divided along its first dimension before and along its second one after; complex128, subarray datatypes.
- ``alltoallv``, ``allgatherv``, ``gatherv``, ``scatterv``, ``reduce_scatter``: parts of different lengths, float64.
- ``allreduce``, ``bcast``: ``[array, MPI.DOUBLE]``, as many programs write it.

Sizes are those of this rank's longest buffer, roughly.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.benchmark_options import add_calls, is_launcher, make_parser, relaunch
from bench.result_files import BACK_TO_BACK, NATIVE, SINGLE, UNTOUCHED, Case

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from bench.harness import Contest
    from mpicoll import Intracomm

AUTO, SEGMENTS = "auto", "segments"
PENCILS = {"pencil2": 2, "pencil3": 3}
VECTORS = ("alltoallv", "allgatherv", "gatherv", "scatterv", "reduce_scatter")
FORMS = (*PENCILS, *VECTORS, "allreduce", "bcast")


class _Pencils:
    """Arrays and datatypes of an exchange between pencils."""

    def __init__(self, comm: MPI.Intracomm, form: str, nbytes: int, make: Callable[..., np.ndarray]) -> None:
        import numpy as np
        from mpi4py import MPI

        size, dimensions = comm.size, PENCILS[form]
        side = max(1, round((nbytes * size / 16) ** (1 / dimensions) / size)) * size
        before, after = [side] * dimensions, [side] * dimensions
        before[0], after[1] = side // size, side // size
        self.given, self.got = make(before, np.complex128), make(after, np.complex128)
        self.given[:] = np.random.default_rng(comm.rank).random(before)
        self.got[:] = 0
        block = [*before]
        block[1] = side // size
        self.types = [
            [
                MPI.DOUBLE_COMPLEX.Create_subarray(
                    whole, block, [rank * (side // size) * (place == axis) for place in range(dimensions)]
                ).Commit()
                for rank in range(size)
            ]
            for whole, axis in ((before, 1), (after, 0))
        ]
        where = [1] * size, [0] * size
        self.arguments = [self.given, where, self.types[0]], [self.got, where, self.types[1]]

    def free(self) -> None:
        """Free the datatypes."""
        for each in (*self.types[0], *self.types[1]):
            each.Free()


class _Vectors:
    """Arrays and counts of a vector collective, and of a call with specifications."""

    def __init__(self, comm: MPI.Intracomm, form: str, nbytes: int, make: Callable[..., np.ndarray]) -> None:
        import numpy as np
        from mpi4py import MPI

        rank, size = comm.rank, comm.size
        each = max(1, nbytes // 8 // size)
        counts = [max(1, each + (each // 4) * (1 if other % 2 else -1)) for other in range(size)]
        own, total, two = counts[rank], sum(counts), form == "alltoallv"
        lengths = {
            "alltoallv": (size * own, total), "allgatherv": (own, total), "gatherv": (own, total),
            "scatterv": (total, own), "reduce_scatter": (total, own),
        }.get(form, (total, total))  # fmt: skip
        self.given, self.got = (make(length, np.float64) for length in lengths)
        self.given[:] = np.arange(self.given.size) % 7 + rank
        self.got[:] = 0
        root = rank == 0
        sent = [own] * size if two else counts
        given, got = [self.given, sent, MPI.DOUBLE], [self.got, counts, MPI.DOUBLE]
        self.arguments: tuple[Any, ...] = {
            "alltoallv": (given, got),
            "allgatherv": (self.given, got),
            "gatherv": (self.given, got if root else None),
            "scatterv": (given if root else None, self.got),
            "reduce_scatter": (self.given, self.got, counts),
            "allreduce": ([self.given, MPI.DOUBLE], [self.got, MPI.DOUBLE]),
            "bcast": ([self.got, MPI.DOUBLE],),
        }[form]

    def free(self) -> None:
        """Free nothing."""


class Exchange:
    """One form and size: contenders and check; a `bench.harness.Contest`."""

    def __init__(self, comms: tuple[Intracomm, MPI.Intracomm], form: str, nbytes: int) -> None:
        import numpy as np

        ours, self._plain = comms
        kind, method = (_Pencils, "Alltoallw") if form in PENCILS else (_Vectors, form.capitalize())
        makers: dict[str, Callable[..., np.ndarray]] = {NATIVE: np.empty, AUTO: np.empty, SEGMENTS: ours.empty}
        self._buffers = {name: kind(ours, form, nbytes, make) for name, make in makers.items()}
        self.calls: dict[str, Callable[[], Any]] = {
            name: partial(getattr(self._plain if name == NATIVE else ours, method), *buffers.arguments)
            for name, buffers in self._buffers.items()
        }
        self.notes: list[str] = []
        length = max(each.nbytes for each in (self._buffers[NATIVE].given, self._buffers[NATIVE].got))
        dtype = str(self._buffers[NATIVE].got.dtype)
        name = f"alltoallw {form}" if form in PENCILS else form
        self.case = Case(name, length, length // 8, dtype, ours.size, buffers=UNTOUCHED)

    def wrong(self, contender: str) -> int:
        """Call both once more and return how many elements differ on all ranks."""
        import numpy as np
        from mpi4py import MPI

        for name in (NATIVE, contender):
            self._buffers[name].got[:] = 1
            self.calls[name]()
        differing = np.array([np.count_nonzero(self._buffers[contender].got != self._buffers[NATIVE].got)])
        self._plain.Allreduce(MPI.IN_PLACE, differing)
        return int(differing[0])

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return nothing more."""
        return {}

    def close(self) -> None:
        """Free datatypes and arrays."""
        self.calls.clear()
        for buffers in self._buffers.values():
            buffers.free()
        self._buffers.clear()


def _contests(arguments: argparse.Namespace, comms: tuple[Intracomm, MPI.Intracomm]) -> Iterator[Callable[[], Contest]]:
    for form in arguments.form:
        for nbytes in arguments.sizes:
            yield partial(Exchange, comms, form, nbytes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if any result was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser("bench.exchanges", __doc__)
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS), help="default: all of them")
    add_calls(parser, (BACK_TO_BACK, SINGLE))
    arguments = parser.parse_args(argv)
    if is_launcher():
        return relaunch("bench.exchanges", arguments, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mpi4py import MPI

    from bench import harness
    from mpicoll import Intracomm

    comms = Intracomm(MPI.COMM_WORLD), MPI.Intracomm(MPI.COMM_WORLD).Dup()
    return harness.run("bench.exchanges", arguments, list(_contests(arguments, comms)), argv, comms[1])


if __name__ == "__main__":
    sys.exit(main())
