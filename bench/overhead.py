"""Cost of our Python: per call, per step of a schedule, and for comparing calls (``MPICOLL_CHECK=full``).

``python -m bench.overhead`` starts itself on 2 ranks, where recursive doubling takes one step and the ring two. What
the second step costs, less one exchange of the same message with bare persistent requests, is what a step costs beyond
MPI.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench import launch
from mpicoll.environment import launched_size

if TYPE_CHECKING:
    from mpi4py import MPI

NATIVE, BARE = "native Allreduce, 8 B", "bare exchange, 4 B"
ONE_STEP, TWO_STEPS = "our Allreduce, 1 step", "our Allreduce, 2 steps"


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="time per table (default: %(default)s)")
    return parser


def _contenders() -> dict[str, Callable[[], None]]:
    import numpy as np
    from mpi4py import MPI

    from mpicoll import Intracomm

    plain, comm = MPI.COMM_WORLD.Dup(), Intracomm(MPI.COMM_WORLD)
    x, y = np.ones(2, np.float32), np.empty(2, np.float32)
    return {
        NATIVE: lambda: plain.Allreduce(x, y),
        ONE_STEP: lambda: comm.Allreduce(x, y, algorithm="recursive_doubling"),
        TWO_STEPS: lambda: comm.Allreduce(x, y, algorithm="ring"),
        BARE: _exchange(plain),
    }


def _exchange(comm: MPI.Intracomm) -> Callable[[], None]:
    """Exchange 4 bytes with the other rank, with nothing around the MPI calls."""
    import numpy as np
    from mpi4py import MPI

    peer = 1 - comm.rank
    sent, received = np.zeros(1, np.float32), np.zeros(1, np.float32)
    requests = [comm.Recv_init(received, peer, 1), comm.Send_init(sent, peer, 1)]
    startall, testall = MPI.Prequest.Startall, MPI.Request.Testall

    def exchange() -> None:
        startall(requests)
        while not testall(requests):
            pass

    return exchange


def _print(rank: int, seconds: float) -> None:
    from mpi4py import MPI

    from bench.metadata import library
    from mpicoll.measure import compare

    contenders = _contenders()
    timings = compare(MPI.COMM_WORLD, contenders, seconds)
    times = {name: timing.median * 1e6 for name, timing in timings.items()}
    if rank:
        return
    beyond = times[TWO_STEPS] - times[ONE_STEP] - times[BARE]
    mode = os.environ.get("MPICOLL_CHECK", "default")
    lines = [f"{library()}, MPICOLL_CHECK={mode}"]
    lines += [f"  {name:28s}{value:10.2f} us" for name, value in times.items()]
    lines.append(f"  {'a step beyond MPI':28s}{beyond:10.2f} us")
    sys.stdout.write("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = make_parser().parse_args(argv)
    if launched_size() is None and "mpi4py.MPI" not in sys.modules:
        status = 0
        for mode in ("off", "default", "full"):
            command = launch.command(2, ["-m", "bench.overhead", *argv])
            environment = {**launch.clean_environment(), "MPICOLL_CHECK": mode}
            status |= subprocess.run(command, env=environment, check=False).returncode
        return status
    from mpi4py import MPI

    if MPI.COMM_WORLD.size != 2:
        sys.stderr.write("bench.overhead: it needs exactly 2 ranks\n")
        return 2
    _print(MPI.COMM_WORLD.rank, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
