"""An Allreduce of 8 KB after a computation that takes some ranks longer: how much of it those get that compute.

``python -m bench.imbalance`` starts itself on 8 ranks. In the rows *even* all ranks compute as long; in the rows
*uneven* half of them compute twice as long, and the others not at all. With more ranks than cores the time of both is
the same where ranks that wait leave the cores to those that compute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.benchmark_options import measure_on_ranks, rank_counts

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = "bench.imbalance"
_COUNT, _ORDER = 1000, 120
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
    """Return how many products of matrices take so long on a core."""
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
    """Return how many products of matrices take so long; rank 0 alone finds out, with a core to itself."""
    import numpy as np

    number = np.array([_products(milliseconds / 1e3) if world.rank == 0 else 0], np.int64)
    request = world.Ibcast(number, 0)
    while not request.Test():
        time.sleep(0.005)
    return int(number[0])


def _contenders(world: MPI.Intracomm, products: int) -> dict[str, Callable[[], None]]:
    """Return turns of a computation and an Allreduce, by the MPI library and by us, in the order of the columns."""
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

    if world.rank == 0:
        sys.stdout.write(f"{library()}, {world.size} ranks, median ms of a computation and an Allreduce of 8 KB\n")
        sys.stdout.write(f"{'computation':>14s}{'native even':>14s}{'uneven':>10s}{'auto even':>14s}{'uneven':>10s}\n")
    for milliseconds in arguments.compute:
        contenders = _contenders(world, _agreed_products(world, milliseconds))
        found = compare(world, contenders, arguments.seconds, _SAMPLE_SECONDS)
        if world.rank == 0:
            times = [1e3 * found[name].median for name in contenders]
            sys.stdout.write(
                f"{milliseconds:11.1f} ms{times[0]:14.2f}{times[1]:10.2f}{times[2]:14.2f}{times[3]:10.2f}\n"
            )
            sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return measure_on_ranks(PROGRAM, make_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
