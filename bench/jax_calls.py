"""An allreduce in functions compiled by JAX, beside mpi4py's in an ordered ``io_callback``, and beside NumPy arrays.

``mpirun -n 2 python -m bench.jax_calls``, or without a launcher, which starts 2 ranks. *program* is a compiled function
with one call, *loop* one call of a compiled loop, *io_callback* and *its loop* the same with mpi4py's Allreduce in
``jax.experimental.io_callback``. Times are medians of the slowest rank's, of all contenders in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bench import text_tables
from bench.benchmark_options import measure_on_ranks
from mpicoll.quantities import format_nbytes, format_seconds, parse_nbytes, positive

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = "bench.jax_calls"
SIZES = (8, 64 << 10, 1 << 20, 16 << 20)
CALLS = 10
"""Calls in a loop."""
LOOPS = ("loop", "its loop")


def contenders(comm: MPI.Intracomm, nbytes: int) -> dict[str, Callable[[], Any]]:
    """Return calls that add up `nbytes` bytes of float32 over the ranks and wait for the result."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback

    import mpicoll
    import mpicoll.jax

    ours = mpicoll.Intracomm(comm)
    given = np.zeros(nbytes // 4, np.float32)
    result, x = np.empty_like(given), jnp.asarray(given)

    def host(array: Any) -> np.ndarray:
        comm.Allreduce(np.asarray(array), result)
        return result

    def direct(x: Any) -> Any:
        return mpicoll.jax.allreduce(x, comm=ours)

    def called_back(x: Any) -> Any:
        return io_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    def compiled(function: Callable[[Any], Any], calls: int) -> Callable[[], Any]:
        program = jax.jit(lambda x: jax.lax.fori_loop(0, calls, lambda _, x: function(x), x) if calls else function(x))
        return lambda: program(x).block_until_ready()

    return {
        "NumPy": lambda: ours.Allreduce(given, result),
        "mpi4py": lambda: comm.Allreduce(given, result),
        "program": compiled(direct, 0),
        "loop": compiled(direct, CALLS),
        "io_callback": compiled(called_back, 0),
        "its loop": compiled(called_back, CALLS),
    }


def _measure(comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    import jax

    from mpicoll import measure

    rows = []
    for nbytes in arguments.sizes:
        found = measure.compare(comm, contenders(comm, nbytes), arguments.seconds)
        times = {name: timing.median / (CALLS if name in LOOPS else 1) for name, timing in found.items()}
        rows.append([format_nbytes(nbytes), *map(format_seconds, times.values())])
    if comm.Get_rank() == 0:
        title = f"{comm.Get_size()} ranks, JAX {jax.__version__}"
        print("\n".join(["", title, "", *text_tables.markdown([["bytes", *times], *rows], names=1), ""]), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2], help="when not run under mpirun (default: 2)")
    sizes = "such as 64K 1MB (default: 8 B to 16 MB)"
    parser.add_argument("--sizes", type=parse_nbytes, nargs="+", default=SIZES, metavar="BYTES", help=sizes)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    return measure_on_ranks(PROGRAM, _parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
