"""A parameter server's pace: pushes and pulls beside plain Put and Get of as many bytes, in turn in the same run.

``mpirun -n 8 python -m bench.server``, or without a launcher, which starts 2 and 8 ranks. Rank 0 measures; *idle*: no
other worker does anything; *load*: all others push and pull as fast as they can. Times are medians in microseconds;
shares are bandwidth over that of the plain operation of the same ranks at the same time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from bench import launch
from bench.benchmark_options import is_launcher
from mpicoll.quantities import parse_nbytes

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAM = "bench.server"
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
CONTENDERS = ("put", "get", "push", "pull", "snapshot")


class Plain:
    """Put and Get to the memory of the last rank."""

    def __init__(self, comm: MPI.Intracomm, count: int) -> None:
        from mpi4py import MPI

        self._target = comm.Get_size() - 1
        mine = 4 * count if comm.Get_rank() == self._target else 0
        self._window = MPI.Win.Allocate(mine, 1, MPI.INFO_NULL, comm)
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._spec = [np.ones(count, np.float32), count, MPI.FLOAT]
        self._place = (0, count, MPI.FLOAT)

    def put(self) -> None:
        """Write, and wait until it is there."""
        self._window.Put(self._spec, self._target, self._place)
        self._window.Flush(self._target)

    def get(self) -> None:
        """Read."""
        self._window.Get(self._spec, self._target, self._place)
        self._window.Flush(self._target)

    def close(self) -> None:
        """Free the memory; collective."""
        self._window.Unlock_all()
        self._window.Free()


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@contextmanager
def _servers(comm: MPI.Intracomm, count: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Operations of a parameter server that are measured on the last rank."""
    import mpicoll

    vector = np.ones(count, np.float32)
    out = np.empty(count, np.float32)
    with mpicoll.ParameterServer(vector, comm=comm, lr=1e-3, read_own=False) as boxes:
        yield {
            "push": lambda: boxes.push(vector),
            "pull": lambda: boxes.pull(out),
            "snapshot": lambda: boxes.pull(out, snapshot=True),
            "serve": boxes.serve,
            "finish": boxes.finish if not boxes.is_server else lambda: None,
        }


def measure(comm: MPI.Intracomm, nbytes: int, seconds: float, load: bool) -> dict[str, float]:
    """Return the median seconds of each contender on rank 0; nothing on the others. Collective."""
    plain, times = Plain(comm, nbytes // 4), {name: [0.0] * 0 for name in CONTENDERS}
    with _servers(comm, nbytes // 4) as actions:
        rank, size = comm.Get_rank(), comm.Get_size()
        if rank == size - 1:
            actions["serve"]()
        elif rank == 0:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until or len(times["put"]) < 5:
                for name, action in (("put", plain.put), ("get", plain.get)):
                    times[name].append(_seconds(action))
                for name in ("push", "pull", "snapshot"):
                    times[name].append(_seconds(actions[name]))
        elif load:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                actions["pull"]()
                actions["push"]()
    plain.close()
    return {name: median(found) for name, found in times.items() if found}


def _rows(comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
    loads = (False, True) if comm.Get_size() > 2 else (False,)
    for nbytes in arguments.sizes:
        for load in loads:
            found = measure(comm, nbytes, arguments.seconds, load)
            if found:
                cells = [f"{1e6 * found[name]:,.0f}" for name in ("put", "push", "get", "pull", "snapshot")]
                shares = [f"{found['put'] / found['push']:.0%}", f"{found['get'] / found['pull']:.0%}"]
                state = "load" if load else "idle"
                print(
                    f"| {' | '.join([str(comm.Get_size()), f'{nbytes >> 10} KB', state, *cells, *shares])} |",
                    flush=True,
                )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="when not run under mpirun (default: 2 8)")
    sizes = "of a vector, such as 64K 1MB (default: 64 KB to 16 MB)"
    parser.add_argument("--sizes", type=parse_nbytes, nargs="+", default=SIZES, metavar="BYTES", help=sizes)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_launcher():
        head = ("ranks", "bytes", "others", "put", "push", "get", "pull", "snapshot", "push/put", "pull/get")
        print(f"| {' | '.join(head)} |\n|---:|---:|---|{'---:|' * 7}", flush=True)
        return launch.run_on_each(arguments.ranks, PROGRAM, argv)
    from mpi4py import MPI

    _rows(MPI.COMM_WORLD, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
