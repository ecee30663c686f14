"""Collectives against the MPI library's own.

``python -m bench.collectives --collective bcast allgather`` starts itself on 2 and on 8 ranks; ``mpirun -n 4 python -m
bench.collectives`` measures in that run. Columns, each as native's time over its own:

- ``auto``: a plain call with default arguments, on arrays from NumPy;
- ``plan``: a persistent operation on arrays from ``comm.empty``;
- algorithms by name;
- ``bound``: what ``plan`` reaches of the memory's speed, for allreduce from 1 MB up. Every sendbuf must be read and
  every recvbuf written once, as when each rank copies its sendbuf to its recvbuf, all at the same time: the time of
  that, measured in turn with the others, over the time of ``plan``.

Sizes are those of the whole vector. ``wrong`` counts elements that differ from the exact result, over all ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import launch
from bench.table import NATIVE, report
from mpicoll.__main__ import parse_nbytes
from mpicoll.environment import launched_size

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll import Intracomm

COLLECTIVES = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather")
METHODS = {"reduce_scatter": "Reduce_scatter_block"}
DEFAULT_SIZES = [8 * 4**power for power in range(12)] + [64 << 20]
PLAN, COPY = "plan", "copy"
BOUND_FROM = 1 << 20
LEVELS = ("multiple", "serialized", "funneled", "single")


def make_parser(prog: str, collectives: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--collective", nargs="+", choices=COLLECTIVES, default=list(collectives), help="default: %(default)s")
    add("--ranks", default="2,8", help="rank counts to start when not run under mpirun (default: %(default)s)")
    sizes = "message sizes such as 8 64K 1MB (default: 8 B to 32 MB in powers of 4, and 64 MB)"
    add("--sizes", type=parse_nbytes, nargs="+", default=DEFAULT_SIZES, metavar="BYTES", help=sizes)
    add("--algorithms", nargs="+", metavar="NAME", help="ours to measure (default: auto, plan and all)")
    add("--dtype", default="float32", help="element type (default: %(default)s)")
    add("--in-place", action="store_true", help="measure IN_PLACE instead of two buffers (allreduce)")
    add("--seconds", type=float, default=2.0, help="time per message size (default: %(default)s)")
    add("--thread-level", choices=LEVELS, help="what mpi4py asks of the MPI library (default: multiple)")
    add("--markdown", action="store_true", help="print the table for a document")
    add("--json", type=Path, metavar="FILE", help="write the samples' medians and the metadata too")
    return parser


def _relaunch(prog: str, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    status, environment = 0, launch.clean_environment()
    if arguments.thread_level:
        environment["MPI4PY_RC_THREAD_LEVEL"] = arguments.thread_level
    for ranks in arguments.ranks.split(","):
        command = launch.command(int(ranks), ["-m", prog, *argv])
        status |= subprocess.run(command, env=environment, check=False).returncode
    return status


class Measurement:
    """One collective and message size: buffers, contenders, check."""

    def __init__(self, comm: Intracomm, plain: MPI.Intracomm, collective: str, nbytes: int, dtype: str) -> None:
        import numpy as np

        self.comm, self.plain, self.collective = comm, plain, collective
        part = max(1, nbytes // np.dtype(dtype).itemsize // comm.size)
        count = part * comm.size if collective in ("reduce_scatter", "allgather") else 0
        count = count or max(1, nbytes // np.dtype(dtype).itemsize)
        pattern, mine = np.arange(count) % 13, slice(part * comm.rank, part * (comm.rank + 1))
        given, expected = pattern + comm.rank, pattern * comm.size + comm.size * (comm.size - 1) // 2
        if collective == "reduce_scatter":
            expected = expected[mine]
        elif collective == "allgather":
            given, expected = pattern[mine], pattern
        elif collective == "bcast":
            given, expected = pattern, pattern
        self.nbytes = count * np.dtype(dtype).itemsize
        self.given, self.expected = given.astype(dtype), expected.astype(dtype)
        self.ordinary = (self.given.copy(), np.zeros_like(self.expected))
        self.shared = (comm.empty(self.given.size, dtype), comm.zeros(self.expected.size, dtype))
        self.shared[0][:] = self.given
        self.in_place, self.plan = False, None
        self.calls: dict[str, Callable[[], None]] = {}

    def _arguments(self, buffers: tuple[Any, Any]) -> tuple[Any, ...]:
        from mpi4py import MPI

        send, recv = buffers
        if self.collective == "bcast":
            return (recv,)
        if self.collective == "reduce" and self.comm.rank:
            recv = None
        return (MPI.IN_PLACE if self.in_place else send, recv)

    def call(self, name: str) -> Callable[[], None]:
        """Return the call to time."""
        import numpy as np

        method = METHODS.get(self.collective, self.collective.capitalize())
        if name == PLAN:
            return self._started(getattr(self.comm, f"{method}_init")(*self._arguments(self.shared)))
        if name == COPY:
            send, recv = self.shared
            return lambda: np.copyto(recv, send)
        arguments = self._arguments(self.ordinary)
        bound = getattr(self.plain if name == NATIVE else self.comm, method)
        if name in (NATIVE, "auto"):
            return lambda: bound(*arguments)
        return lambda: bound(*arguments, algorithm=name)

    def _started(self, plan: Any) -> Callable[[], None]:
        self.plan = plan

        def call() -> None:
            plan.Start()
            plan.Wait()

        return call

    def wrong(self, name: str) -> int:
        """Return how many elements are wrong on all ranks together."""
        import numpy as np
        from mpi4py import MPI

        if name == COPY:
            return 0
        recv = (self.shared if name == PLAN else self.ordinary)[1]
        recv[:] = self.given if self.in_place or (self.collective == "bcast" and self.comm.rank == 0) else 0
        self.calls[name]()
        silent = self.collective == "reduce" and self.comm.rank
        total = np.array([0 if silent else np.count_nonzero(recv != self.expected)])
        self.plain.Allreduce(MPI.IN_PLACE, total)
        return int(total[0])

    def time(self, names: Sequence[str], seconds: float) -> dict[str, Any]:
        """Time the contenders in turn."""
        from bench.harness import compare

        self.calls = {name: self.call(name) for name in [NATIVE, *names]}
        if self.in_place:
            self.ordinary[1][:] = self.shared[1][:] = 0  # the sums would grow without end
        return compare(self.plain, self.calls, seconds)

    def free(self) -> None:
        """Free the plan."""
        if self.plan is not None:
            self.plan.Free()


def _names(arguments: argparse.Namespace, comm: Intracomm, collective: str, nbytes: int) -> list[str]:
    names = arguments.algorithms or ["auto", PLAN, *(n for n in comm.algorithms(collective) if n != NATIVE)]
    with_bound = collective == "allreduce" and PLAN in names and nbytes >= BOUND_FROM and not arguments.in_place
    return [*names, COPY] if with_bound else names


def measure(arguments: argparse.Namespace, collective: str, comms: tuple[Any, Any]) -> list[dict[str, Any]]:
    """Return a row for each size."""
    comm, plain = comms
    rows = []
    for nbytes in arguments.sizes:
        if comm.rank == 0 and sys.stderr.isatty():
            sys.stderr.write(f"\r{collective}, {nbytes} bytes{'':20s}\r")
        one = Measurement(comm, plain, collective, nbytes, arguments.dtype)
        one.in_place = arguments.in_place and collective == "allreduce"
        timings = one.time(_names(arguments, comm, collective, nbytes), arguments.seconds)
        wrong = sum(one.wrong(name) for name in timings)
        one.free()
        rows.append(
            {
                "collective": collective,
                "nbytes": one.nbytes,
                "size": comm.size,
                "choice": comm.choice(collective, one.nbytes),
                "wrong": wrong,
                "median": {name: timing.median for name, timing in timings.items()},
                "spread": {name: timing.spread for name, timing in timings.items()},
            }
        )
    return rows


def main(
    argv: Sequence[str] | None = None, prog: str = "bench.collectives", collectives: Sequence[str] = COLLECTIVES
) -> int:
    """Run the benchmark; exit status 1 if any element was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = make_parser(prog, collectives).parse_args(argv)
    if launched_size() is None and "mpi4py.MPI" not in sys.modules:
        return _relaunch(prog, arguments, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mpi4py import MPI

    from mpicoll import Intracomm

    comm, plain = Intracomm(MPI.COMM_WORLD), MPI.COMM_WORLD.Dup()
    wrong = 0
    for collective in arguments.collective:
        rows = measure(arguments, collective, (comm, plain))
        wrong += sum(row["wrong"] for row in rows)
        if comm.rank == 0:
            report(collective, rows, arguments)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
