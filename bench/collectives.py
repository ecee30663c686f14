"""Collectives against the MPI library's own.

``python -m bench.collectives --collective bcast allgather`` starts itself on 2 and on 8 ranks; ``mpirun -n 4 python -m
bench.collectives`` measures in that run. Columns, each as native's time over its own with the half width of its 95 %
interval:

- ``auto``: a plain call with default arguments, on arrays from NumPy;
- ``plan``: a persistent operation on arrays from ``comm.empty``;
- algorithms by name;
- other libraries, with ``--others``: ``gloo`` (through PyTorch) and ``numba-mpi`` if they are installed;
- ``bound``: what ``plan`` reaches of the memory's speed, for allreduce from 1 MB up. Every sendbuf must be read and
  every recvbuf written once, as when each rank copies its sendbuf to its recvbuf, all at the same time: the time of
  that, measured in turn with the others, over the time of ``plan``.

Sizes are those of the whole vector. ``wrong`` counts elements that differ from the exact result, over all ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.options import is_launcher, make_parser, relaunch
from bench.records import COPY, NATIVE, PLAN, Case

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from bench.harness import Contest
    from mpicoll import Intracomm

COLLECTIVES = ("allreduce", "reduce", "bcast", "reduce_scatter", "allgather")
OPS = ("SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR")
METHODS = {"reduce_scatter": "Reduce_scatter_block"}
REDUCING = ("allreduce", "reduce", "reduce_scatter")
AUTO = "auto"
BOUND_FROM = 1 << 20


def add_own(parser: argparse.ArgumentParser, collectives: Sequence[str]) -> None:
    """Add what only this program takes."""
    add = parser.add_argument
    add("--collective", nargs="+", choices=COLLECTIVES, default=list(collectives), help="default: %(default)s")
    add("--algorithms", nargs="*", metavar="NAME", help="ours to measure (default: auto, plan and all)")
    add("--dtype", nargs="+", default=["float32"], metavar="TYPE", help="element types (default: float32)")
    add("--op", nargs="+", default=["SUM"], choices=OPS, help="operations of those that reduce (default: SUM)")
    add("--in-place", action="store_true", help="measure IN_PLACE instead of two buffers (allreduce)")
    add("--others", action="store_true", help="measure gloo and numba-mpi too, if they are installed (allreduce)")
    add("--native-name", default=NATIVE, help="name of the baseline, if the MPI library was told how to do it")


class Collective:
    """One collective and message size: buffers, contenders, check; a `bench.harness.Contest`."""

    def __init__(
        self, comms: tuple[Intracomm, MPI.Intracomm], collective: str, nbytes: int, dtype: str, op: str, in_place: bool
    ) -> None:
        import numpy as np
        from mpi4py import MPI

        self.comm, self.plain = comms
        self.collective, self.in_place, self.op = collective, in_place, getattr(MPI, op)
        given, expected = vectors(self.comm, collective, nbytes, np.dtype(dtype), op)
        self.given, self.expected = given, expected
        self.ordinary = (given.copy(), np.zeros_like(expected))
        self.shared = (self.comm.empty(given.size, dtype), self.comm.zeros(expected.size, dtype))
        self.shared[0][:] = given
        self.plan: Any = None
        self.calls: dict[str, Callable[[], None]] = {}
        whole = max(given, expected, key=len)
        variant = " ".join(([op] if op != "SUM" else []) + ["in place"] * in_place)
        self.case = Case(collective, whole.nbytes, whole.size, dtype, self.comm.size, variant)

    def add(self, names: Sequence[str], native: str = NATIVE) -> None:
        """Enter contenders by name; `native` is what the MPI library's own call is called."""
        self.calls[native] = self._call(NATIVE)
        self.calls.update({name: self._call(name) for name in names})
        if self.in_place:
            self.ordinary[1][:] = self.shared[1][:] = 0  # the sums would grow without end

    def _arguments(self, buffers: tuple[np.ndarray, np.ndarray]) -> tuple[Any, ...]:
        from mpi4py import MPI

        send, recv = buffers
        if self.collective == "bcast":
            return (recv,)
        target = None if self.collective == "reduce" and self.comm.rank else recv
        ends = (MPI.IN_PLACE if self.in_place else send, target)
        return (*ends, self.op) if self.collective in REDUCING else ends

    def _call(self, name: str) -> Callable[[], None]:
        import numpy as np

        method = METHODS.get(self.collective, self.collective.capitalize())
        if name == PLAN:
            return self._started(getattr(self.comm, f"{method}_init")(*self._arguments(self.shared)))
        if name == COPY:
            return partial(np.copyto, self.shared[1], self.shared[0])
        arguments = self._arguments(self.ordinary)
        bound = getattr(self.plain if name == NATIVE else self.comm, method)
        if name in (NATIVE, AUTO):
            return lambda: bound(*arguments)
        return lambda: bound(*arguments, algorithm=name)

    def _started(self, plan: Any) -> Callable[[], None]:
        self.plan = plan

        def call() -> None:
            plan.Start()
            plan.Wait()

        return call

    def wrong(self, contender: str) -> int:
        """Call it once more and return how many elements are wrong on all ranks together."""
        import numpy as np
        from mpi4py import MPI

        if contender == COPY:
            return 0
        recv = (self.shared if contender == PLAN else self.ordinary)[1]
        recv[:] = self.given if self.in_place or (self.collective == "bcast" and self.comm.rank == 0) else 0
        self.calls[contender]()
        silent = self.collective == "reduce" and self.comm.rank
        total = np.array([0 if silent else np.count_nonzero(recv != self.expected)])
        self.plain.Allreduce(MPI.IN_PLACE, total)
        return int(total[0])

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return which algorithm ``auto`` took."""
        return {"choice": self.comm.choice(self.collective, self.case.nbytes)} if contender == AUTO else {}

    def close(self) -> None:
        """Free the plan."""
        if self.plan is not None:
            self.plan.Free()


def vectors(comm: Intracomm, collective: str, nbytes: int, dtype: np.dtype, op: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what this rank gives and what it must get: small whole numbers, for which every order gives the same."""
    import numpy as np

    from bench.operations import NUMPY, operand

    part = max(1, nbytes // dtype.itemsize // comm.size)
    split = collective in ("reduce_scatter", "allgather")
    count = part * comm.size if split else max(1, nbytes // dtype.itemsize)
    mine = slice(part * comm.rank, part * (comm.rank + 1)) if split else slice(None)

    def repeated(period: np.ndarray) -> np.ndarray:
        return np.resize(period.astype(dtype), count)

    if collective in REDUCING:
        expected = repeated(NUMPY[op].reduce([operand(op, rank) for rank in range(comm.size)]))
        return repeated(operand(op, comm.rank)), expected[mine].copy()
    whole = repeated(operand("SUM", 0))
    return (whole[mine].copy() if collective == "allgather" else whole), whole


def _contests(arguments: argparse.Namespace, comms: tuple[Intracomm, MPI.Intracomm]) -> Iterator[Callable[[], Contest]]:
    for collective in arguments.collective:
        ops = arguments.op if collective in REDUCING else ["SUM"]
        for dtype in arguments.dtype:
            for op in ops:
                for nbytes in arguments.sizes:
                    yield partial(_contest, arguments, comms, collective, nbytes, dtype, op)


def _contest(
    arguments: argparse.Namespace,
    comms: tuple[Intracomm, MPI.Intracomm],
    collective: str,
    nbytes: int,
    dtype: str,
    op: str,
) -> Contest:
    in_place = arguments.in_place and collective == "allreduce"
    contest = Collective(comms, collective, nbytes, dtype, op, in_place)
    contest.add(_names(arguments, comms[0], collective, nbytes), arguments.native_name)
    if arguments.others and collective == "allreduce" and not in_place:
        from bench import others

        contest.calls.update(others.allreduce(comms[1], *contest.ordinary, op))
    return contest


def _names(arguments: argparse.Namespace, comm: Intracomm, collective: str, nbytes: int) -> list[str]:
    there = [AUTO, PLAN, *(name for name in comm.algorithms(collective) if name != NATIVE)]
    every = {AUTO, PLAN, *(name for each in COLLECTIVES for name in comm.algorithms(each))}
    unknown = set(arguments.algorithms or ()) - every
    if unknown:
        raise SystemExit(f"bench: --algorithms: there is no {', '.join(sorted(unknown))}")
    names = there if arguments.algorithms is None else [name for name in arguments.algorithms if name in there]
    with_bound = collective == "allreduce" and PLAN in names and nbytes >= BOUND_FROM and not arguments.in_place
    return [*names, COPY] if with_bound else names


def main(
    argv: Sequence[str] | None = None, program: str = "bench.collectives", collectives: Sequence[str] = COLLECTIVES
) -> int:
    """Run the benchmark; exit status 1 if any element was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser(program, __doc__)
    add_own(parser, collectives)
    arguments = parser.parse_args(argv)
    if is_launcher():
        return relaunch(program, arguments, argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from mpi4py import MPI

    from bench import harness
    from mpicoll import Intracomm

    comms = Intracomm(MPI.COMM_WORLD), MPI.Intracomm(MPI.COMM_WORLD).Dup()
    return harness.run(program, arguments, list(_contests(arguments, comms)), argv, comms[1])


if __name__ == "__main__":
    sys.exit(main())
