"""Short collectives by what their arguments are: other buffers than arrays, counts that change, blocks that lie apart.

``python -m bench.arguments`` starts itself on 2 and on 8 ranks. Each row is the median time of a call of the MPI
library and of ours, in microseconds, and their ratio; arrays are made in each call, as programs do.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from bench import text_tables
from bench.benchmark_options import measure_on_ranks, rank_counts

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

PROGRAM = "bench.arguments"
_COUNT, _PERIOD, _SIDE = 5, 97, 4
_SAMPLE_SECONDS = 0.02
_Call = Callable[["MPI.Intracomm", int], Any]
"""A call on a communicator; the number differs from call to call, and is the same on all ranks."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=rank_counts, default=[2, 8], help="rank counts to start when not run under mpirun (2,8)")
    add("--seconds", type=float, default=1.0, help="time for each row (default: %(default)s)")
    return parser


def _changing(size: int, turn: int) -> list[int]:
    return [1 + (7 * turn + rank) % 19 for rank in range(size)]


def _add(left: Any, right: Any, datatype: MPI.Datatype) -> None:
    import numpy as np

    a, b = np.frombuffer(left), np.frombuffer(right)
    np.add(a, b, out=b)


def _calls(rank: int, size: int) -> Iterator[tuple[str, _Call]]:
    """Yield the name of each row, and its call."""
    import numpy as np
    from mpi4py import MPI

    column = MPI.DOUBLE.Create_vector(_COUNT, 1, 2).Commit()
    matrix, other = np.ones((4, _COUNT), order="F"), np.zeros((4, _COUNT), order="F")
    numbers = partial(array, "d")
    pairs = np.zeros(_COUNT, np.dtype([("value", "f8"), ("place", "i4")], align=True))
    others = np.zeros_like(pairs)
    operation = MPI.Op.Create(_add, commute=True)

    yield "Allreduce of arrays", lambda comm, turn: comm.Allreduce(np.ones(_COUNT), np.zeros(_COUNT))
    yield "of array.array", lambda comm, turn: comm.Allreduce(numbers([1.0] * _COUNT), numbers([0.0] * _COUNT))
    yield "in Fortran's order", lambda comm, turn: comm.Allreduce(matrix, other)
    yield "Bcast, count changes", lambda comm, turn: comm.Bcast(np.ones(1 + turn % _PERIOD))
    yield (
        "MAXLOC of pairs",
        lambda comm, turn: comm.Allreduce([pairs, MPI.DOUBLE_INT], [others, MPI.DOUBLE_INT], MPI.MAXLOC),
    )
    yield "of long double", lambda comm, turn: comm.Allreduce(np.ones(_COUNT, "g"), np.zeros(_COUNT, "g"))
    yield "by MPI.Op.Create", lambda comm, turn: comm.Allreduce(np.ones(_COUNT), np.zeros(_COUNT), operation)
    yield "Bcast of a column", lambda comm, turn: comm.Bcast([np.ones(2 * _COUNT), 1, column])
    yield "Ibcast and Wait", lambda comm, turn: comm.Ibcast([np.ones(2 * _COUNT), 1, column]).Wait()
    yield from _vector_calls(rank, size)
    yield from _block_calls(rank, size)


def _vector_calls(rank: int, size: int) -> Iterator[tuple[str, _Call]]:
    import numpy as np

    same, displs = [_COUNT] * size, [2 * _COUNT * each for each in range(size)]

    def whole(counts: list[int], *where: Any) -> list[Any] | None:
        return [np.zeros(sum(counts)), counts, *where] if rank == 0 else None

    def gatherv(comm: MPI.Intracomm, turn: int) -> None:
        counts = _changing(size, turn)
        comm.Gatherv(np.ones(counts[rank]), whole(counts), 0)

    def scatterv(comm: MPI.Intracomm, turn: int) -> None:
        counts = _changing(size, turn)
        comm.Scatterv(whole(counts), np.ones(counts[rank]), 0)

    yield "Gatherv", lambda comm, turn: comm.Gatherv(np.ones(_COUNT), whole(same))
    yield "counts change", gatherv
    yield "Scatterv", lambda comm, turn: comm.Scatterv(whole(same), np.ones(_COUNT))
    yield "counts change", scatterv
    yield (
        "Allgatherv, one count",
        lambda comm, turn: comm.Allgatherv(np.ones(_COUNT), [np.zeros(_COUNT * size), _COUNT]),
    )
    yield (
        "blocks apart",
        lambda comm, turn: comm.Allgatherv(np.ones(_COUNT), [np.zeros(2 * _COUNT * size), (same, displs)]),
    )


def _block_calls(rank: int, size: int) -> Iterator[tuple[str, _Call]]:
    """Yield calls that move square blocks of a matrix, which lie side by side, by a derived datatype."""
    import numpy as np
    from mpi4py import MPI

    rows = MPI.DOUBLE.Create_vector(_SIDE, _SIDE, _SIDE * size)
    block = rows.Create_resized(0, 8 * _SIDE).Commit()

    def blocks(everywhere: bool = False) -> list[Any] | None:
        matrix = [np.zeros((_SIDE, _SIDE * size)), [1] * size, list(range(size)), block]
        return matrix if rank == 0 or everywhere else None

    def part() -> np.ndarray:
        return np.ones((_SIDE, _SIDE))

    yield "Gatherv of blocks", lambda comm, turn: comm.Gatherv(part(), blocks())
    yield "Scatterv of blocks", lambda comm, turn: comm.Scatterv(blocks(), part())
    yield "Allgatherv of blocks", lambda comm, turn: comm.Allgatherv(part(), blocks(everywhere=True))


def _numbered(call: _Call, comm: MPI.Intracomm) -> Callable[[], None]:
    numbers = count()
    return lambda: call(comm, next(numbers))


def _measure(world: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    from bench.metadata import library
    from mpicoll import Intracomm
    from mpicoll.measure import compare

    comm, rows = Intracomm(world), []
    for name, call in _calls(world.rank, world.size):
        contenders = {"native": _numbered(call, world), "auto": _numbered(call, comm)}
        found = compare(world, contenders, arguments.seconds, _SAMPLE_SECONDS)
        native, auto = (1e6 * found[each].median for each in contenders)
        rows.append([name, f"{native:.1f}", f"{auto:.1f}", f"{native / auto:.2f}"])
    if world.rank == 0:
        title = f"{library()}, {world.size} ranks, median us of a call, and native's time over ours"
        print("\n".join([title, *text_tables.plain([["call", "native", "auto", "ratio"], *rows])]), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return measure_on_ranks(PROGRAM, make_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
