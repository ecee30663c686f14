"""Time of a computation, even or uneven between the ranks, and of the Allreduce of 8 KB that follows it.

``python -m bench.imbalance`` starts itself on 8 ranks. In the columns *even* all ranks compute for the same time; in
the columns *uneven* half of them compute for twice that time, and the others do not compute. With fewer cores than
ranks both take the same time if ranks that wait leave their cores to those that compute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench import text_tables
from bench.benchmark_options import measure_on_ranks, rank_counts

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = "bench.imbalance"
_COUNT, _ORDER = 1000, 120
"""Elements of the Allreduce, and rows of the matrices that are multiplied."""
_SAMPLE_SECONDS = 0.2
"""Calls in a row, since samples begin with a barrier of the MPI library, in which ranks take cores from each other."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=rank_counts, default=[8], help="rank counts to start when not run under mpirun (default: 8)")
    add("--compute", type=float, nargs="+", default=[0.2, 2, 8], metavar="MS", help="milliseconds (default: 0.2 2 8)")
    add("--seconds", type=float, default=4.0, help="time for each of --compute (default: %(default)s)")
    return parser


def _products(seconds: float) -> int:
    """Return the number of matrix products that take `seconds` on a core."""
    compute = _computation()
    compute(100)
    began = time.perf_counter()
    compute(1000)
    return max(1, round(1000 * seconds / (time.perf_counter() - began)))


def _computation() -> Callable[[int], None]:
    import numpy as np

    left = np.ones((_ORDER, _ORDER))
    result = np.empty_like(left)

    def compute(products: int) -> None:
        for _ in range(products):
            np.matmul(left, left, out=result)

    return compute


def _agreed_products(world: MPI.Intracomm, milliseconds: float) -> int:
    """Return the number of matrix products that take so long, which rank 0 measures while the others sleep."""
    import numpy as np

    number = np.array([_products(milliseconds / 1e3) if world.rank == 0 else 0], np.int64)
    request = world.Ibcast(number, 0)
    while not request.Test():
        time.sleep(0.005)
    return int(number[0])


def _contenders(world: MPI.Intracomm, products: int) -> dict[str, Callable[[], None]]:
    """Return a computation and an Allreduce by the MPI library and by us, one function for each column."""
    import numpy as np

    from mpicoll import Intracomm

    compute, x, y = _computation(), np.ones(_COUNT), np.empty(_COUNT)
    uneven = 2 * products if 2 * world.rank >= world.size else 0

    def turn(of: MPI.Intracomm, own: int) -> None:
        compute(own)
        of.Allreduce(x, y)

    comms = {"native": world, "auto": Intracomm(world)}
    shares = {"even": products, "uneven": uneven}
    return {f"{name} {share}": partial(turn, comm, shares[share]) for name, comm in comms.items() for share in shares}


def _measure(world: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    from bench.metadata import library
    from mpicoll.measure import compare

    rows = []
    for milliseconds in arguments.compute:
        contenders = _contenders(world, _agreed_products(world, milliseconds))
        found = compare(world, contenders, arguments.seconds, _SAMPLE_SECONDS)
        rows.append([f"{milliseconds:g} ms", *(f"{1e3 * timing.median:.2f}" for timing in found.values())])
    if world.rank == 0:
        title = f"{library()}, {world.size} ranks, median ms of a computation and an Allreduce of 8 KB"
        print("\n".join([title, *text_tables.plain([["computation", *contenders], *rows])]), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return measure_on_ranks(PROGRAM, make_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
