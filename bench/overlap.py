"""Nonblocking collectives beside computation: how much of the communication is hidden.

``python -m bench.overlap`` starts itself on 2 and on 8 ranks. Each contender starts an operation, computes for about
as long as the operation takes alone, testing the request now and then, and waits. ``auto`` is the nonblocking call on
ordinary arrays, ``plan`` a persistent operation on arrays of `Intracomm.empty`. ``overlap`` is the hidden share of the
communication, ``1 - (together - computation) / communication``, of native first and then of the others: 100 % if the
operation costs nothing beside the computation, 0 % if they take turns. The ratio is native's time over ours for all of
it together, with a computation of the same length. Send buffers are written by their owners before each operation,
outside of the time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.benchmark_options import add_buffers, is_launcher, make_parser, relaunch
from bench.operations import write
from bench.result_files import ASIDE, NATIVE, PLAN, WRITTEN, Case

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from mpicoll import Intracomm

AUTO, ALONE, COMPUTE = "auto", " alone", "compute"
COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "bcast")
_METHODS = {"reduce_scatter": "Ireduce_scatter_block"}
_WIDTH = 96
"""Rows of the matrices that are multiplied: they stay in the first level of the cache."""


class Overlap:
    """One collective and length; a `bench.harness.Contest`."""

    def __init__(
        self, comms: tuple[Intracomm, MPI.Intracomm], collective: str, nbytes: int, tests: int, buffers: str
    ) -> None:
        import numpy as np

        from bench.collectives import vectors

        comm, self.plain = comms
        self.collective, self.tests = collective, tests
        self._given, self.expected = vectors(comm, collective, nbytes, np.dtype(np.float32), "SUM")
        self._buffers = {NATIVE: self._filled(np.empty), PLAN: self._filled(comm.empty)}
        self._buffers[AUTO] = self._buffers[NATIVE]
        self.case = Case(f"overlap {collective}", nbytes, nbytes // 4, "float32", comm.size, buffers=buffers)
        self._matrices = [np.full((_WIDTH, _WIDTH), 1e-3, np.float32) for _ in range(3)]
        starts = {NATIVE: self._start(self.plain, NATIVE), AUTO: self._start(comm, AUTO), PLAN: self._start_plan(comm)}
        self._units = self._calibrate(starts[NATIVE])
        self.calls: dict[str, Callable[[], None]] = {}
        for name, start in starts.items():
            self.calls[name] = partial(self._together, start)
            self.calls[name + ALONE] = partial(self._alone, start)
        self.calls[COMPUTE] = partial(self._compute, self._units)

    @property
    def before(self) -> Mapping[str, Callable[[], None]]:
        """Untimed writes of the send buffer before each operation, by contender; of other memory where none is sent."""
        if self.case.buffers != WRITTEN:
            return {}
        idle = self.collective == "bcast" and self.plain.rank
        return {
            name: partial(write, self._given if idle else self._of(name)[0]) for name in self.calls if name != COMPUTE
        }

    def _filled(self, empty: Callable[..., np.ndarray]) -> tuple[np.ndarray, ...]:
        """Return the arguments of the collective in memory that `empty` makes."""
        sent = empty(self._given.shape, self._given.dtype)
        sent[:] = self._given
        if self.collective == "bcast":
            return (sent,)
        got = empty(self.expected.shape, self.expected.dtype)
        got[:] = 0
        return sent, got

    def _of(self, contender: str) -> tuple[np.ndarray, ...]:
        return self._buffers[contender.removesuffix(ALONE)]

    def _start(self, comm: MPI.Intracomm, contender: str) -> Callable[[], Any]:
        method = getattr(comm, _METHODS.get(self.collective, f"I{self.collective}"))
        ends = self._of(contender)
        return lambda: method(*ends)

    def _start_plan(self, comm: Intracomm) -> Callable[[], Any]:
        method = _METHODS.get(self.collective, self.collective).removeprefix("I")
        plan = self._plan = getattr(comm, f"{method.capitalize()}_init")(*self._of(PLAN))

        def start() -> Any:
            plan.Start()
            return plan

        return start

    def _calibrate(self, start: Callable[[], Any]) -> int:
        """Return for how many products an operation of the MPI library takes; the same on all ranks."""
        from mpicoll.measure import compare

        calls = {"communication": partial(self._alone, start), "product": partial(self._compute, 1)}
        times = compare(self.plain, calls, 0.1)
        return max(1, round(times["communication"].median / times["product"].median))

    def _compute(self, units: int) -> None:
        import numpy as np

        a, b, out = self._matrices
        for _ in range(units):
            np.dot(a, b, out=out)

    def _alone(self, start: Callable[[], Any]) -> None:
        start().Wait()

    def _together(self, start: Callable[[], Any]) -> None:
        request, left = start(), self._units
        piece = max(1, left // (self.tests + 1))
        while left > 0:
            self._compute(min(piece, left))
            left -= piece
            if left > 0:
                request.Test()
        request.Wait()

    def wrong(self, contender: str) -> int:
        """Call it once more and count the wrong elements on all ranks."""
        import numpy as np
        from mpi4py import MPI

        if contender == COMPUTE:
            return 0
        got = self._of(contender)[-1]
        if self.collective != "bcast" or self.plain.rank:
            got[:] = 0
        self.calls[contender]()
        total = np.array([np.count_nonzero(got != self.expected)])
        self.plain.Allreduce(MPI.IN_PLACE, total)
        return int(total[0])

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the hidden share, between 0 and 1."""
        if contender + ALONE not in medians:
            return {ASIDE: True}
        shown = (medians[contender] - medians[COMPUTE]) / medians[contender + ALONE]
        return {"overlap": round(min(1.0, max(0.0, 1 - shown)), 3)}

    def close(self) -> None:
        """Free the persistent operation."""
        self._plan.Free()


def _contests(arguments: argparse.Namespace, comms: tuple[Intracomm, MPI.Intracomm]) -> Iterator[Callable[[], Overlap]]:
    for collective in arguments.collective:
        for nbytes in arguments.sizes:
            yield partial(Overlap, comms, collective, nbytes, arguments.tests, arguments.buffers)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if any element was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser("bench.overlap", __doc__)
    parser.set_defaults(sizes=[64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20])
    parser.add_argument(
        "--collective", nargs="+", choices=COLLECTIVES, default=["allreduce"], help="default: allreduce"
    )
    parser.add_argument("--tests", type=int, default=8, help="calls of Test while computing (default: %(default)s)")
    add_buffers(parser)
    arguments = parser.parse_args(argv)
    if is_launcher():
        return relaunch("bench.overlap", arguments, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mpi4py import MPI

    from bench import harness
    from mpicoll import Intracomm

    comms = Intracomm(MPI.COMM_WORLD), MPI.Intracomm(MPI.COMM_WORLD).Dup()
    return harness.run("bench.overlap", arguments, list(_contests(arguments, comms)), argv, comms[1])


if __name__ == "__main__":
    sys.exit(main())
