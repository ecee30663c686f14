"""Collectives against the MPI library's own.

``python -m bench.collectives --collective bcast allgather`` starts itself on 2 and on 8 ranks; ``mpirun -n 4 python -m
bench.collectives`` measures in that run. Columns, each as native's time over its own with the half width of its 95 %
interval:

- ``native persistent``: the MPI library's own persistent operation; ``native Alloc_mem``: its plain call on memory
  from ``MPI.Alloc_mem``;
- ``auto``: a plain call with default arguments, on arrays from NumPy;
- ``plan``: a persistent operation on arrays from ``comm.empty``;
- algorithms by name;
- other libraries, with ``--others``: ``gloo`` (through PyTorch) and ``numba-mpi`` if they are installed;
- ``auto over fastest``, where several of our algorithms are measured: the time of ``auto`` over that of the fastest of
  them, and its name;
- ``bound``: what ``plan`` reaches of the memory's speed, for allreduce from 1 MB up. Every sendbuf must be read and
  every recvbuf written once, as when each rank copies its sendbuf to its recvbuf, all at the same time: the time of
  that, measured in turn with the others, over the time of ``plan``.

Calls are made in two manners, each with a table of its own: back to back, and one at a time, when all ranks begin at
the same moment (:mod:`bench.timing`). Before each call its owner writes every send buffer, outside of the time: what
was computed just before is modified in the caches of its owner's core, and a benchmark that never writes flatters
whoever leaves data where it is. ``--buffers untouched`` does not. For single calls the table has the 50th, 90th and
99th percentile.

Sizes are those of the whole vector. ``wrong`` counts elements that differ from the exact result, over all ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.baselines import WAYS
from bench.benchmark_options import add_buffers, add_calls, is_launcher, make_parser, relaunch
from bench.operations import write
from bench.result_files import ALLOC_MEM, BACK_TO_BACK, COPY, NATIVE, PERSISTENT, PLAN, SINGLE, WRITTEN, Case

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from bench.harness import Contest
    from mpicoll import Intracomm

    Buffers = tuple[np.ndarray, np.ndarray]

COLLECTIVES = (
    "allreduce",
    "reduce",
    "bcast",
    "reduce_scatter",
    "allgather",
    "alltoall",
    "gather",
    "scatter",
    "scan",
    "exscan",
)
OPS = ("SUM", "PROD", "MAX", "MIN", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR")
METHODS = {"reduce_scatter": "Reduce_scatter_block"}
REDUCING = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
BY_PARTS = ("reduce_scatter", "allgather", "alltoall", "gather", "scatter")
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
    text = "of the MPI library to measure besides its plain call (default: %(default)s)"
    add("--ways", nargs="*", choices=WAYS, default=list(WAYS), help=text)
    add_calls(parser, (BACK_TO_BACK, SINGLE))
    add_buffers(parser)
    add("--native-name", default=NATIVE, help="name of the baseline, if the MPI library was told how to do it")


class BenchCollective:
    """One collective and message size: buffers, contenders, check; a `bench.harness.Contest`."""

    def __init__(
        self,
        comms: tuple[Intracomm, MPI.Intracomm],
        collective: str,
        nbytes: int,
        dtype: str,
        op: str,
        in_place: bool = False,
        buffers: str = WRITTEN,
    ) -> None:
        import numpy as np
        from mpi4py import MPI

        self.comm, self.plain = comms
        self.collective, self.in_place, self.op = collective, in_place, getattr(MPI, op)
        self.given, self.expected = vectors(self.comm, collective, nbytes, np.dtype(dtype), op)
        self._ordinary = self._filled(np.empty)
        self._memory: dict[str, Buffers] = {}
        self._allocated: list[Any] = []
        self._plans: list[Any] = []
        self.calls: dict[str, Callable[[], None]] = {}
        self.notes: list[str] = []
        whole = max(self.given, self.expected, key=len)
        variant = " ".join(([op] if op != "SUM" else []) + ["in place"] * in_place)
        facts = (collective, whole.nbytes, whole.size, dtype, self.comm.size)
        self.case = Case(*facts, variant, buffers=buffers)

    def _filled(self, empty: Callable[..., np.ndarray]) -> Buffers:
        """Return the send and the receive buffer, from memory that `empty` gives."""
        send, recv = empty(self.given.size, self.given.dtype), empty(self.expected.size, self.expected.dtype)
        send[:], recv[:] = self.given, 0
        return send, recv

    def buffers(self, contender: str) -> Buffers:
        """Return its send and its receive buffer."""
        return self._memory.get(contender, self._ordinary)

    def add(self, names: Sequence[str], native: str = NATIVE, ways: Sequence[str] = ()) -> None:
        """Enter contenders by name; `native` is what the MPI library's own call is called."""
        self.calls[native] = self._plain_call(self.plain, self._ordinary)
        if PERSISTENT in ways:
            self._add_persistent(f"{native} {PERSISTENT}")
        if ALLOC_MEM in ways:
            memory = self._memory[f"{native} {ALLOC_MEM}"] = self._filled(self._alloc_mem)
            self.calls[f"{native} {ALLOC_MEM}"] = self._plain_call(self.plain, memory)
        if {PLAN, COPY} & set(names):
            self._memory[PLAN] = self._memory[COPY] = self._filled(self.comm.empty)
        self.calls.update({name: self._call(name) for name in names})

    def _alloc_mem(self, count: int, dtype: np.dtype) -> np.ndarray:
        import numpy as np
        from mpi4py import MPI

        self._allocated.append(MPI.Alloc_mem(count * dtype.itemsize))
        return np.frombuffer(self._allocated[-1], dtype)

    def _add_persistent(self, name: str) -> None:
        """Enter the MPI library's persistent operation if it has one, the same on all ranks."""
        import numpy as np
        from mpi4py import MPI

        plan, there = None, np.ones(1, np.int8)
        try:
            plan = getattr(self.plain, f"{self._method}_init")(*self._arguments(self._ordinary))
        except (NotImplementedError, MPI.Exception):
            there[0] = 0
        self.plain.Allreduce(MPI.IN_PLACE, there, MPI.MIN)
        if there[0]:
            self.calls[name] = self._started(plan)
            return
        if plan is not None:
            plan.Free()
        self.notes.append(f"{name} is left out: this MPI library has no MPI_{self._method}_init")

    @property
    def before(self) -> Mapping[str, Callable[[], None]]:
        """Untimed writes of the send buffer before each call, by contender.

        Ranks that send nothing write as many bytes elsewhere, since they would wait for the root in the call otherwise.
        """
        if self.case.buffers != WRITTEN:
            return {}
        return {name: self._writing(*self.buffers(name)) for name in self.calls}

    def _writing(self, send: np.ndarray, recv: np.ndarray) -> Callable[[], None]:
        import numpy as np

        if self.in_place:  # the sums would grow without end
            return partial(np.copyto, recv, self.given)
        return partial(write, recv if self.collective == "bcast" and not self.comm.rank else send)

    @property
    def _method(self) -> str:
        return METHODS.get(self.collective, self.collective.capitalize())

    def _arguments(self, buffers: tuple[np.ndarray, np.ndarray]) -> tuple[Any, ...]:
        from mpi4py import MPI

        send, recv = buffers
        if self.collective == "bcast":
            return (recv,)
        target = None if self.collective in ("reduce", "gather") and self.comm.rank else recv
        source = None if self.collective == "scatter" and self.comm.rank else send
        ends = (MPI.IN_PLACE if self.in_place else source, target)
        return (*ends, self.op) if self.collective in REDUCING else ends

    def _plain_call(self, comm: MPI.Intracomm, buffers: Buffers, **options: str) -> Callable[[], None]:
        arguments, bound = self._arguments(buffers), getattr(comm, self._method)
        return (lambda: bound(*arguments, **options)) if options else lambda: bound(*arguments)

    def _call(self, name: str) -> Callable[[], None]:
        import numpy as np

        send, recv = self.buffers(name)
        if name == PLAN:
            return self._started(getattr(self.comm, f"{self._method}_init")(*self._arguments((send, recv))))
        if name == COPY:
            return partial(np.copyto, recv, send)
        options = {} if name == AUTO else {"algorithm": name}
        return self._plain_call(self.comm, (send, recv), **options)

    def _started(self, plan: Any) -> Callable[[], None]:
        self._plans.append(plan)

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
        recv = self.buffers(contender)[1]
        recv[:] = self.given if self.in_place or (self.collective == "bcast" and self.comm.rank == 0) else 0
        self.calls[contender]()
        got_nothing = {"reduce": self.comm.rank > 0, "gather": self.comm.rank > 0, "exscan": self.comm.rank == 0}
        silent = got_nothing.get(self.collective, False)
        total = np.array([0 if silent else np.count_nonzero(recv != self.expected)])
        if self.in_place:
            recv[:] = 0  # what is called again without being written must not grow
        self.plain.Allreduce(MPI.IN_PLACE, total)
        return int(total[0])

    def detail(self, contender: str, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """Return which algorithm ``auto`` took."""
        return {"choice": self.comm.choice(self.collective, self.case.nbytes)} if contender == AUTO else {}

    def close(self) -> None:
        """Free the persistent operations, and then their memory."""
        from mpi4py import MPI

        for plan in self._plans:
            plan.Free()
        self.calls.clear()
        self._memory.clear()
        for memory in self._allocated:
            MPI.Free_mem(memory)


def vectors(comm: Intracomm, collective: str, nbytes: int, dtype: np.dtype, op: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what this rank gives and what it must get: small whole numbers, for which every order gives the same."""
    import numpy as np

    from bench.operations import NUMPY, operand

    part = max(1, nbytes // dtype.itemsize // comm.size)
    split = collective in BY_PARTS
    count = part * comm.size if split else max(1, nbytes // dtype.itemsize)
    mine = slice(part * comm.rank, part * (comm.rank + 1)) if split else slice(None)

    def repeated(period: np.ndarray) -> np.ndarray:
        return np.resize(period.astype(dtype), count)

    if collective in REDUCING:
        last = {"scan": comm.rank + 1, "exscan": max(1, comm.rank)}.get(collective, comm.size)
        expected = repeated(NUMPY[op].reduce([operand(op, rank) for rank in range(last)]))
        return repeated(operand(op, comm.rank)), expected[mine].copy() if split else expected
    if collective == "alltoall":
        theirs = [repeated(operand("SUM", rank))[mine] for rank in range(comm.size)]
        return repeated(operand("SUM", comm.rank)), np.concatenate(theirs)
    whole = repeated(operand("SUM", 0))
    given = whole[mine].copy() if collective in ("allgather", "gather") else whole
    return given, whole[mine].copy() if collective == "scatter" else whole


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
    contest = BenchCollective(comms, collective, nbytes, dtype, op, in_place, arguments.buffers)
    contest.add(_names(arguments, comms[0], collective, nbytes), arguments.native_name, arguments.ways)
    if arguments.others and collective == "allreduce" and not in_place:
        from bench import others

        contest.calls.update(others.allreduce(comms[1], *contest.buffers(NATIVE), op))
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
