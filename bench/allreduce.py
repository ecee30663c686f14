"""Our allreduce algorithms against the MPI library's own.

``python -m bench.allreduce`` starts itself on 2 and on 8 ranks; ``mpirun -n 4 python -m bench.allreduce`` measures in
that run. Every line is checked: ``wrong`` counts elements that differ from the exact result, over all ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import launch
from mpicoll.__main__ import parse_nbytes
from mpicoll.environment import cores, launched_size

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll import Intracomm

DEFAULT_SIZES = [8 * 8**power for power in range(8)] + [64 << 20]
NATIVE = "native"
PLAN = "plan"
"""A persistent operation on arrays from ``comm.empty``."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.allreduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", default="2,8", help="rank counts to start when not run under mpirun (default: %(default)s)")
    add(
        "--sizes",
        type=parse_nbytes,
        nargs="+",
        default=DEFAULT_SIZES,
        metavar="BYTES",
        help="message sizes such as 8 64K 1MB (default: 8 B to 64 MB in powers of 8)",
    )
    add("--algorithms", nargs="+", metavar="NAME", help="ours to measure (default: auto and all)")
    add("--dtype", default="float32", help="element type (default: %(default)s)")
    add("--in-place", action="store_true", help="measure IN_PLACE instead of two buffers")
    add("--seconds", type=float, default=2.0, help="time per message size (default: %(default)s)")
    add("--markdown", action="store_true", help="print the table for a document")
    add("--json", type=Path, metavar="FILE", help="write the samples' medians and the metadata too")
    return parser


def _relaunch(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    status = 0
    for ranks in arguments.ranks.split(","):
        command = launch.command(int(ranks), ["-m", "bench.allreduce", *argv])
        status |= subprocess.run(command, env=launch.clean_environment(), check=False).returncode
    return status


class Measurement:
    """One message size: buffers, contenders, check."""

    def __init__(self, comm: Intracomm, plain: MPI.Intracomm, nbytes: int, dtype: str, in_place: bool) -> None:
        import numpy as np

        self.comm, self.plain, self.in_place = comm, plain, in_place
        self.plan: Any = None
        self.calls: dict[str, Callable[[], None]] = {}
        self.count = max(1, nbytes // np.dtype(dtype).itemsize)
        pattern = np.arange(self.count) % 13
        self.given = (pattern + comm.rank).astype(dtype)
        self.expected = (pattern * comm.size + comm.size * (comm.size - 1) // 2).astype(dtype)
        self.sendbuf, self.recvbuf = self.given.copy(), np.zeros_like(self.given)
        self.shared_sendbuf, self.shared_recvbuf = comm.empty(self.count, dtype), comm.empty(self.count, dtype)
        self.shared_sendbuf[:] = self.given

    def call(self, name: str) -> Callable[[], None]:
        """Return the call to time."""
        from mpi4py import MPI

        send: Any = MPI.IN_PLACE if self.in_place else self.sendbuf
        recv = self.recvbuf
        if name == NATIVE:
            allreduce = self.plain.Allreduce
            return lambda: allreduce(send, recv)
        if name == PLAN:
            return self._plan()
        mine = self.comm.Allreduce
        if name == "auto":
            return lambda: mine(send, recv)
        return lambda: mine(send, recv, algorithm=name)

    def _plan(self) -> Callable[[], None]:
        """Return what a persistent operation on arrays from ``comm.empty`` does."""
        from mpi4py import MPI

        send: Any = MPI.IN_PLACE if self.in_place else self.shared_sendbuf
        plan = self.plan = self.comm.Allreduce_init(send, self.shared_recvbuf)

        def call() -> None:
            plan.Start()
            plan.Wait()

        return call

    def wrong(self, name: str) -> int:
        """Return how many elements are wrong on all ranks together."""
        import numpy as np

        recvbuf = self.shared_recvbuf if name == PLAN else self.recvbuf
        recvbuf[:] = self.given if self.in_place else 0
        self.calls[name]()
        total = np.array([np.count_nonzero(recvbuf != self.expected)])
        self.plain.Allreduce(self.plain_in_place(), total)
        return int(total[0])

    def free(self) -> None:
        """Free the plan."""
        if self.plan is not None:
            self.plan.Free()

    @staticmethod
    def plain_in_place() -> Any:
        """Return MPI.IN_PLACE."""
        from mpi4py import MPI

        return MPI.IN_PLACE


def _measure(arguments: argparse.Namespace, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    from mpi4py import MPI

    from bench.harness import compare
    from mpicoll import Intracomm

    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(MPI.COMM_WORLD)
    names = arguments.algorithms or ["auto", PLAN, *(n for n in comm.algorithms("allreduce") if n != NATIVE)]
    rows = []
    for nbytes in arguments.sizes:
        progress(f"{nbytes} bytes")
        one = Measurement(comm, plain, nbytes, arguments.dtype, arguments.in_place)
        one.calls = contenders = {name: one.call(name) for name in [NATIVE, *names]}
        if arguments.in_place:
            one.recvbuf[:] = one.shared_recvbuf[:] = 0  # in place the sums would grow without end
        timings = compare(plain, contenders, arguments.seconds)
        wrong = sum(one.wrong(name) for name in contenders)
        one.free()
        rows.append(
            {
                "nbytes": one.given.nbytes,
                "choice": comm.choice("allreduce", one.given.nbytes),
                "wrong": wrong,
                "median": {name: timing.median for name, timing in timings.items()},
                "spread": {name: timing.spread for name, timing in timings.items()},
            }
        )
    return rows


def _format_size(nbytes: int) -> str:
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def _cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    native = row["median"][NATIVE]
    busbw = 2 * row["nbytes"] * (row["size"] - 1) / row["size"] / row["median"].get("auto", native) / 1e9
    cells = [_format_size(row["nbytes"]), f"{native * 1e6:.1f}"]
    cells += [f"{native / row['median'][name]:.2f}" for name in names]
    return [*cells, f"{busbw:.2f}", row["choice"], str(row["wrong"])]


def table(rows: list[dict[str, Any]], markdown: bool) -> list[str]:
    """Return the table: native in microseconds, ours as native's time over our time (above 1: we are faster)."""
    names = [name for name in rows[0]["median"] if name != NATIVE]
    header = ["size", "native us", *(name.replace("_", " ") for name in names), "busbw GB/s", "auto takes", "wrong"]
    cells = [header, *(_cells(row, names) for row in rows)]
    ratios = [[row["median"][NATIVE] / row["median"][name] for row in rows] for name in names]
    means = [f"{math.exp(sum(map(math.log, ratio)) / len(ratio)):.2f}" for ratio in ratios]
    cells.append(["geometric mean", "", *means, "", "", str(sum(row["wrong"] for row in rows))])
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    if not markdown:
        return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return [lines[0], "|" + "---:|" * len(header), *lines[1:]]


def _metadata(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import mpi4py
    import numba
    import numpy as np
    from mpi4py import MPI

    from bench.harness import library

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return {
        "library": library(),
        "thread_level": levels[MPI.Query_thread()],
        "ranks": size,
        "cores": cores(),
        "dtype": arguments.dtype,
        "in_place": arguments.in_place,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
    }


def _warnings(rows: list[dict[str, Any]], metadata: dict[str, Any]) -> list[str]:
    lines = []
    if metadata["ranks"] > metadata["cores"]:
        lines.append(f"note: {metadata['ranks']} ranks share {metadata['cores']} cores: times contain scheduling")
    noisy = [_format_size(row["nbytes"]) for row in rows if max(row["spread"].values()) > 0.25]
    if noisy:
        lines.append(f"note: quartiles are more than 25 % apart at {', '.join(noisy)}: repeat before you believe it")
    return lines


def _report(rows: list[dict[str, Any]], arguments: argparse.Namespace, size: int) -> None:
    metadata = _metadata(size, arguments)
    place = "in place" if arguments.in_place else "two buffers"
    title = (
        f"allreduce, {metadata['library']} (threads: {metadata['thread_level']}), {size} ranks on "
        f"{metadata['cores']} cores, {arguments.dtype} SUM, {place}; ours as native's time / our time"
    )
    lines = ["", title, "", *table([{**row, "size": size} for row in rows], arguments.markdown), ""]
    sys.stdout.write("\n".join(lines + _warnings(rows, metadata)) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"metadata": metadata, "rows": rows}, indent=1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if any element was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = make_parser().parse_args(argv)
    if launched_size() is None and "mpi4py.MPI" not in sys.modules:
        return _relaunch(arguments, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank

    def progress(text: str) -> None:
        if rank == 0 and sys.stderr.isatty():
            sys.stderr.write(f"\r{text:40s}\r")

    rows = _measure(arguments, progress)
    if rank == 0:
        _report(rows, arguments, MPI.COMM_WORLD.size)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
