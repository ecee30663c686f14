"""One rank of the mixture: draws operations, makes them, and compares every element of every result."""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import traceback
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.communicator import abort
from tests.mixture import draw
from tests.mixture.draw import Operation
from tests.mixture.memory import MOST_SCATTERED, DatatypeMemory, Memory, draw_kind
from tests.mixture.objects import ObjectCall

WORLD = MPI.COMM_WORLD
LOOK_EVERY = 32
"""Turns after which the ranks agree on whether to go on."""
WRONG = 3
FAMILY = {"reduce_scatter_block": "reduce_scatter", "allgatherv": "allgather"}
DIRECT = {"gatherv": "linear", "scatterv": "linear", "alltoallv": "pairwise"}
"""Collectives of which ranks do not know all counts, and the algorithms that need not know them."""
_IN_FLIGHT, _PERSISTENT = 4, 5


class WrongResult(Exception):
    """An element is not what it must be."""


class Call:
    """An operation with its buffers on this rank."""

    def __init__(self, comm: Intracomm, operation: Operation, own: random.Random, *, contiguous: bool = False) -> None:
        self.comm, self.operation = comm, operation
        self.rank, self.size = comm.rank, comm.size  # known after the communicator was freed, too
        kinds = ["own" if contiguous else draw_kind(own) for _ in range(2)]
        result = operation.result(comm.rank, comm.size)
        self._send = self._recv = None
        whole = operation.in_place and operation.collective == "reduce_scatter_block"
        at_root = operation.collective in draw.IN_PLACE_AT_ROOT
        self._in_place = operation.in_place and (not at_root or comm.rank == operation.root)
        if operation.collective == "exscan" and result is None:
            result = operation.given(comm.rank)  # rank 0 has a buffer, too
        if result is not None:
            self._recv = self._memory(own, kinds[0], operation.count if whole else result.size)
        if operation.collective != "barrier" and not self._in_place and not self._is_bcast and self._gives:
            self._send = self._memory(own, kinds[1], operation.given(comm.rank).size)

    def _memory(self, own: random.Random, kind: str, count: int) -> Memory:
        operation, dtype = self.operation, self.operation.dtype
        if count == 0 and operation.collective in draw.MOVING_UNEQUAL_PARTS:
            dtype = own.choice(draw.ANY_DTYPES)
        if (
            dtype == np.longdouble
            and operation.collective in draw.REDUCING
            and kind in ("strided", "misaligned", "datatype")
        ):
            kind = "own"  # the MPI library reduces these elements, and knows no other memory
        if kind != "datatype":
            return Memory(self.comm, kind, count, dtype)
        if not 0 < count <= MOST_SCATTERED or dtype == np.float16:  # of which MPI has no datatype
            return Memory(self.comm, "own", count, dtype)
        return DatatypeMemory(own, count, dtype, (*operation.counts, *operation.sent_counts(self.rank)))

    def free(self) -> None:
        """Free the datatypes."""
        for memory in (self._send, self._recv):
            if memory is not None:
                memory.free()

    @property
    def _is_bcast(self) -> bool:
        return self.operation.collective == "bcast"

    @property
    def _gives(self) -> bool:
        scatters = self.operation.collective in ("scatter", "scatterv")
        return not scatters or self.rank == self.operation.root

    def load(self, operation: Operation) -> None:
        """Write this rank's data to its buffers."""
        self.operation, rank = operation, self.rank
        given = operation.given(rank)
        if self._recv is not None:
            self._recv.write(77)
        if self._send is not None:
            self._send.write(given)
        elif self._in_place:
            assert self._recv is not None
            whole = operation.collective not in draw.OWN_PART_IN_PLACE
            self._recv.write(given, slice(None) if whole else operation.part(rank))
        elif self._is_bcast and rank == operation.root:
            assert self._recv is not None
            self._recv.write(given)

    def make(self, prefix: str = "", suffix: str = "", **settings: Any) -> Any:
        """Make the call; `prefix` and `suffix` as in ``Iallreduce`` and ``Allreduce_init``."""
        operation = self.operation
        if operation.collective == "alltoallv" and operation.number % 2 and not (prefix or suffix or settings):
            assert self._send is not None
            assert self._recv is not None
            sent = operation.sent_counts(self.rank)
            self.comm.Alltoallw(self._send.spec_of_typed_parts(sent), self._recv.spec_of_typed_parts(sent))
            return None
        name = operation.collective if prefix else operation.collective.capitalize()
        return getattr(self.comm, prefix + name + suffix)(*self._arguments(), **settings)

    def _arguments(self) -> Sequence[Any]:
        operation, size = self.operation, self.size
        given, got = self._send, self._recv
        collective, root = operation.collective, operation.root
        send = MPI.IN_PLACE if self._in_place else given.spec() if given else None
        each = MPI.IN_PLACE if self._in_place else given.spec(size) if given else None  # a block for each rank
        recv, every = (got.spec(), got.spec(size)) if got else (None, None)
        counts, sent = operation.counts, operation.sent_counts(self.rank)
        if collective == "reduce_scatter":
            assert got is not None
            counts = tuple(count // got.unit for count in counts)
        whole = recv if not self._in_place else every  # in place, the whole vector
        return {
            "gather": lambda: (send, every, root),
            "gatherv": lambda: (send, None if got is None else got.spec_of_parts(counts), root),
            "scatter": lambda: (each, recv, root),
            "scatterv": lambda: (None if given is None else given.spec_of_parts(counts), recv, root),
            "alltoall": lambda: (each, every),
            "alltoallv": lambda: (given.spec_of_parts(sent), got.spec_of_parts(sent)),
            "scan": lambda: (send, recv, operation.mpi_op),
            "exscan": lambda: (send, recv, operation.mpi_op),
            "barrier": lambda: (),
            "bcast": lambda: (recv, operation.root),
            "allgather": lambda: (send, every),
            "allgatherv": lambda: (send, got.spec_of_parts(counts)),
            "allreduce": lambda: (send, recv, operation.mpi_op),
            "reduce": lambda: (send, recv, operation.mpi_op, operation.root),
            "reduce_scatter_block": lambda: (each, whole, operation.mpi_op),
            "reduce_scatter": lambda: (send, recv, counts, operation.mpi_op),
        }[collective]()

    def check(self) -> None:
        """Compare every element, and see that nothing else was written.

        Raises
        ------
        WrongResult
            Naming the first wrong element.
        """
        for memory in (self._send, self._recv):
            if memory is not None and not memory.is_intact():
                raise WrongResult(f"something was written beside a buffer ({memory.kind}) of {self.operation}")
        expected = self.operation.result(self.rank, self.size)
        if expected is None or self._recv is None:
            return
        got = self._recv.read()[: expected.size]
        wrong = np.flatnonzero(got != expected)
        if wrong.size:
            first = wrong[0]
            raise WrongResult(
                f"{self.operation} to {self._recv.kind} memory: {wrong.size:,} of {expected.size:,} elements are wrong"
                f", {first:,} to {wrong[-1]:,}; element {first:,} is {got[first]} and must be {expected[first]}"
            )

    def check_compressed(self) -> None:
        """Do so within the error of compressors that are not exact here, and compare the bits of all ranks."""
        assert self._recv is not None
        expected = self.operation.result(self.rank, self.size)
        assert expected is not None
        got = self._recv.read()
        if self.operation.compression.startswith("int8"):
            bound = (self.size + 2) * float(np.abs(expected).max()) / 127
            if not (np.abs(got - expected) <= bound).all():
                raise WrongResult(f"{self.operation}: the error is larger than {bound}")
        if self.operation.compression.startswith("topk"):
            # What is not sent counts as 0, so that each sum is one of some of the inputs, which are 1 or 2.
            sent = np.count_nonzero(got)
            if not ((got >= 0) & (got <= expected) & (got == np.rint(got))).all() or sent < -(-got.size // 10):
                raise WrongResult(f"{self.operation}: {sent} sums, from {got.min()} to {got.max()}")
        sums = np.array([zlib.crc32(np.ascontiguousarray(got).tobytes())], np.int64)
        others = np.empty(self.size, np.int64)
        self.comm.Allgather(sums, others)
        if (others != sums).any():
            raise WrongResult(f"{self.operation}: the ranks have got different bits")


def _over_nodes(comm: Intracomm, operation: Operation, numbers: random.Random) -> dict[str, str]:
    """Ask for shared memory inside nodes and messages between them, half the time where that is possible."""
    wanted = numbers.random() < 0.5 and operation.op != "LEFT" and operation.collective not in DIRECT
    names = comm.algorithms(FAMILY.get(operation.collective, operation.collective)) if wanted else ()
    return {"algorithm": "hierarchy"} if "hierarchy" in names else {}


def _child(numbers: random.Random) -> random.Random:
    """Return numbers for one operation: how many it draws depends on the size of its communicator, so on the rank."""
    return random.Random(numbers.getrandbits(60))


class Stream:
    """A thread's operations, on communicators of its own.

    Parameters
    ----------
    seed
        Decides the operations, alike on all ranks; and memory and delays, otherwise on each.
    sleeps
        Whether ranks are late at random.
    """

    def __init__(self, seed: int, sleeps: bool) -> None:
        self._alike, self._own = random.Random(seed), random.Random(f"{seed} {WORLD.rank}")
        self._sleeps, self._tag = sleeps, seed % 1000
        world = WORLD.Dup()
        parts = [world, world.Dup(), world.Split(world.rank % 2, world.rank), world.Split(0, -world.rank)]
        self.comms = [Intracomm(part, timeout=120.0) for part in parts]
        self.grid = self.comms[0].Create_cart(MPI.Compute_dims(world.size, 2), [True, False])
        column = self.grid.Sub([True, False])
        self.comms += [self.grid, column, column.Dup()]
        self.done: Counter[str] = Counter()
        self.recent: deque[tuple[str, int, Operation | ObjectCall]] = deque(maxlen=12)
        self._turn = 0
        self._in_flight: list[tuple[Call, Any]] = []
        self._persistent: list[tuple[Call, Any, Operation]] = []

    def run(self, seconds: float) -> None:
        """Make operations until the time is up on rank 0."""
        until = time.monotonic() + seconds
        going = np.array([1], np.int64)
        while going[0]:
            for _ in range(LOOK_EVERY):
                self._take_turn()
            going[0] = time.monotonic() < until
            self.comms[0].Bcast(going)
        self._finish()

    def _finish(self) -> None:
        self._end_all()
        for _, request, _ in self._persistent:
            request.Free()
        for comm in reversed(self.comms):
            comm.Free()

    def _take_turn(self) -> None:
        self._turn += 1
        if self._sleeps and self._own.random() < 0.02:
            time.sleep(self._own.uniform(0, 3e-3))
        (comm,) = self._alike.choices(self.comms, (0.5, 0.14, 0.08, 0.08, 0.1, 0.05, 0.05))
        way, numbers = self._alike.random(), _child(self._alike)
        if way < 0.62:
            self._blocking(comm, numbers)
        elif way < 0.63:
            self._neighbors(numbers)
        elif way < 0.65:
            self._on_a_passing_communicator(numbers)
        elif way < 0.70:
            self._objects(comm, numbers)
        elif way < 0.82:
            self._nonblocking(comm, numbers)
        elif way < 0.96:
            self._start_persistent(numbers)
        else:
            self._compressed(comm, numbers)

    def _note(self, way: str, comm: Intracomm, operation: Operation) -> None:
        self.recent.append((way, comm.size, operation))
        self.done[operation.collective] += 1

    def _blocking(self, comm: Intracomm, numbers: random.Random) -> None:
        operation = draw.draw(numbers, self._turn, comm.size)
        settings = self._settings(comm, operation, numbers)
        self._make(comm, operation, settings)
        if operation.collective in draw.BY_UNEQUAL_PARTS and numbers.random() < 0.5:
            for _ in range(2):  # ranks that have compared the counts before need fewer rounds
                self._make(comm, operation.again(numbers), settings)

    def _make(self, comm: Intracomm, operation: Operation, settings: dict[str, str]) -> None:
        """Make a blocking call from memory of its own."""
        call = Call(comm, operation, self._own, contiguous=bool(settings))  # the MPI library takes nothing else
        call.load(operation)
        self._note("blocking", comm, operation)
        call.make(**settings)
        call.check()
        call.free()

    def _settings(self, comm: Intracomm, operation: Operation, numbers: random.Random) -> dict[str, str]:
        """Return an algorithm, sometimes."""
        if operation.collective in DIRECT:
            names: tuple[str, ...] = (DIRECT[operation.collective], "native")
        else:
            names = comm.algorithms(FAMILY.get(operation.collective, operation.collective))
        name = numbers.choice(names)
        # The MPI library has no float16, and inside its own collectives nobody drives what is in flight.
        native = operation.wide and not self._in_flight
        excluded = ("shared", *["native"] * (not native))
        taken = numbers.random() < 0.08 and operation.op != "LEFT" and name not in excluded
        return {"algorithm": name} if taken else {}

    def _nonblocking(self, comm: Intracomm, numbers: random.Random) -> None:
        operation = draw.draw(numbers, self._turn, comm.size)
        call = Call(comm, operation, self._own)
        call.load(operation)
        self._note("nonblocking", comm, operation)
        self._in_flight.append((call, call.make("I", **_over_nodes(comm, operation, numbers))))
        while len(self._in_flight) > _IN_FLIGHT:
            self._end_one(self._own.randrange(len(self._in_flight)))

    def _end_all(self) -> None:
        MPI.Request.Waitall([request for _, request in self._in_flight])
        for call, _ in self._in_flight:
            call.check()
            call.free()
        self._in_flight.clear()

    def _end_one(self, which: int) -> None:
        """Wait for one, or for whichever comes first, with a message to this rank itself among them."""
        if self._own.random() < 0.3:
            receive = WORLD.Irecv(np.zeros(1), WORLD.rank, self._tag)
            which = MPI.Request.Waitany([receive, *(request for _, request in self._in_flight)]) - 1
            WORLD.Send(np.zeros(1), WORLD.rank, self._tag)
            receive.Wait()
        call, request = self._in_flight.pop(which)
        request.Wait()
        call.check()
        call.free()

    def _start_persistent(self, numbers: random.Random) -> None:
        """Set one up, or start some that are there, in any order, with a blocking call meanwhile."""
        if len(self._persistent) < _PERSISTENT:
            comm = numbers.choice(self.comms)
            operation = draw.draw(numbers, self._turn, comm.size)
            call = Call(comm, operation, self._own)
            settings = _over_nodes(comm, operation, numbers)
            self._persistent.append((call, call.make(suffix="_init", **settings), operation))
            return
        taken = numbers.sample(range(_PERSISTENT), numbers.choice((1, 2)))
        for which in taken:
            call, request, operation = self._persistent[which]
            call.load(operation.again(_child(numbers)))
            self._note("persistent", call.comm, call.operation)
            request.Start()
        self._blocking(self.comms[0], _child(numbers))
        for which in self._own.sample(taken, len(taken)):
            call, request, _ = self._persistent[which]
            request.Wait()
            call.check()
        if numbers.random() < 0.05:
            call, request, _ = self._persistent.pop(numbers.randrange(_PERSISTENT))
            request.Free()
            call.free()

    def _on_a_passing_communicator(self, numbers: random.Random) -> None:
        """Make some calls on a new communicator, and free it; the last one may be complete only then."""
        world = self.comms[0]
        ways = (
            lambda: world.Split(0, world.rank),
            lambda: world.Split(world.rank % 2, -world.rank),
            lambda: self.grid.Sub([False, True]),
            world.Dup,
        )
        comm = numbers.choice(ways)()
        for _ in range(numbers.randrange(4)):
            self._blocking(comm, _child(numbers))
        operation = draw.draw(_child(numbers), self._turn, comm.size)
        call = Call(comm, operation, self._own)
        call.load(operation)
        self._note("nonblocking", comm, operation)
        request = call.make("I")
        if numbers.random() < 0.5:
            request.Wait()
        comm.Free()
        request.Wait()
        call.check()
        call.free()
        self.done["communicators made and freed"] += 1

    def _neighbors(self, numbers: random.Random) -> None:
        grid, count = self.grid, numbers.randrange(1, 3000)
        given, got = np.arange(count) + 10_000.0 * grid.rank, np.full((grid.indegree, count), -1.0)
        self.done["neighbor_allgather"] += 1
        if numbers.random() < 0.5:
            grid.Neighbor_allgather(given, got)
        else:
            grid.Ineighbor_allgather(given, got).Wait()
        for source, part in zip(grid.inedges, got, strict=True):
            expected = np.arange(count) + 10_000.0 * source if source != MPI.PROC_NULL else np.full(count, -1.0)
            if (part != expected).any():
                raise WrongResult(f"neighbor_allgather of {count} elements: those of rank {source} are wrong")

    def _objects(self, comm: Intracomm, numbers: random.Random) -> None:
        call = ObjectCall(numbers, comm.size)
        self.recent.append(("objects", comm.size, call))
        self.done[call.collective] += 1
        wrong = call.wrong(comm)
        if wrong:
            raise WrongResult(wrong)

    def _compressed(self, comm: Intracomm, numbers: random.Random) -> None:
        operation = draw.draw_compressed(numbers, self._turn, comm.size)
        call = Call(comm, operation, self._own)
        call.load(operation)
        self._note("compressed", comm, operation)
        call.make(compression=operation.compression)
        if operation.compression in draw.EXACT_COMPRESSORS:
            call.check()
        else:
            call.check_compressed()
        call.free()


def _fail(stream: Stream, seed: int) -> None:
    """Explain what went wrong, and end all ranks: the others cannot know."""
    text = f"\nrank {WORLD.rank} of {WORLD.size}, seed {seed}: {traceback.format_exc()}\nits last operations:\n  "
    recent = [f"{way} on {size} ranks: {operation}" for way, size, operation in stream.recent]
    abort.end(text + "\n  ".join(recent) + "\n", WRONG)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sleeps", action="store_true")
    settings = parser.parse_args(argv)
    sys.setswitchinterval(5e-5)  # a thread that polls keeps the interpreter lock for so long
    threads = settings.threads if MPI.Query_thread() == MPI.THREAD_MULTIPLE else 1
    for dtype in draw.LEFT_DTYPES:
        draw.LEFT.reducer(dtype)
    streams = [Stream(settings.seed * 1000 + number, settings.sleeps) for number in range(threads)]

    def work(stream: Stream) -> None:
        try:
            stream.run(settings.seconds)
        except BaseException:
            _fail(stream, settings.seed)

    workers = [threading.Thread(target=work, args=(stream,)) for stream in streams[1:]]
    for worker in workers:
        worker.start()
    work(streams[0])
    for worker in workers:
        worker.join()
    if WORLD.rank == 0:
        done = sum((stream.done for stream in streams), Counter())
        print(json.dumps({"operations": done.total(), "collectives": dict(done)}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
