"""The executor and its plans on simulated memory: ranks that make calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

import numpy as np

from mpicoll.plans.counted_plans import make_counted
from mpicoll.plans.plan_rows import Row
from mpicoll.plans.shared_memory_plans import COLLECTIVES, make
from mpicoll.plans.simulated_memory import Memory
from mpicoll.plans.simulated_modules import Edits, load_executor
from mpicoll.schedules import COLLECTIVES as ROWS
from mpicoll.schedules.collective_table import Where

if TYPE_CHECKING:
    from mpicoll.plans.thread_memory import ThreadMemory

AnyMemory = Union[Memory, "ThreadMemory"]
STAGE_NBYTES, SLOT_NBYTES = 512, 256
"""Bytes of a stage; and of a slot if no rank is ahead of others, or of a piece of a slot."""
BUFFER_NBYTES, PLANS_NBYTES = 2048, 128 << 10
"""Bytes of a buffer, and of all plans of a rank."""
COUNTED = ("gatherv", "scatterv")
"""Kinds of operations of which only the root knows all counts, see :mod:`mpicoll.kernels.counted_parts`."""
BY_PARTS = tuple(name for name in COLLECTIVES if ROWS[name].by_parts)


@dataclass
class SimulatedOperation:
    """One call of a collective.

    Attributes
    ----------
    kind, count, root
        The collective, the number of elements, and the root.
    places
        By rank, the numbers of its sendbuf and recvbuf among its buffers, of which the first half lie in its segment.
    values : (size, count)
        Input of all ranks.
    raises
        The rank on which the reducer raises an exception, -1 for none.
    """

    kind: str
    count: int
    root: int
    in_place: bool
    places: list[tuple[int, int]]
    values: np.ndarray = field(repr=False)
    raises: int = -1


class Processes:
    """Segments of some processes in simulated memory, with buffers for collectives.

    Parameters
    ----------
    lanes
        Number of operation lanes; each has stages of its own in every segment.
    ahead
        How many operations a rank may be ahead of others, a power of two.

    Attributes
    ----------
    buffers
        By process and lane, four buffers in its segment, and four in private memory.
    """

    def __init__(
        self,
        memory: AnyMemory,
        size: int,
        method: str = "STAGE",
        edits: Edits = None,
        lanes: int = 1,
        ahead: int = 1,
    ) -> None:
        self.memory, self.method, self.lanes, self.ahead = memory, method, lanes, ahead
        self.modules = load_executor(memory, edits) if isinstance(memory, Memory) else memory.load_executor()
        words = self.modules.operation_words
        self.peers = memory.private(8 * words.PEER_WORDS * size)
        self.scratch = [memory.shared(words.SCRATCH_NBYTES) for _ in range(size)]
        self.buffers = [self._arena(process) for process in range(size)]

    def _arena(self, process: int) -> list[list[int]]:
        memory, words, lanes = self.memory, self.modules.operation_words, range(self.lanes)
        segment = memory.shared(self.lanes * words.STAGES_PER_LANE * STAGE_NBYTES)
        near = [[memory.shared(BUFFER_NBYTES) for _ in range(4)] for _ in lanes]
        nbytes = near[-1][-1] + BUFFER_NBYTES - segment
        for word, value in enumerate((memory.pid(process), segment, segment, nbytes, segment)):
            memory.store(self.peers + 8 * (words.PEER_WORDS * process + word), value)
        return [near[lane] + [memory.shared(BUFFER_NBYTES) for _ in range(4)] for lane in lanes]


class Ranks:
    """Ranks of one communicator with one operation lane.

    Parameters
    ----------
    method
        The method of access to private memory: ``"STAGE"`` or ``"TRANSFER"``.
    processes
        The processes of the ranks; by default new ones.
    members
        The process of each rank.
    lane
        The number of the lane, whose stages they use.
    scratch
        By process, the scratch memory of this lane; by default the first one of the process.
    buffers
        The lane whose buffers they use.
    ahead
        As for :class:`Processes`, if these are new ones.
    """

    def __init__(
        self,
        memory: AnyMemory,
        method: str = "STAGE",
        edits: Edits = None,
        *,
        processes: Processes | None = None,
        members: Sequence[int] | None = None,
        lane: int = 0,
        scratch: Sequence[int] | None = None,
        buffers: int = 0,
        ahead: int = 1,
    ) -> None:
        self.processes = processes or Processes(memory, memory.size, method, edits, ahead=ahead)
        self.members = list(range(memory.size) if members is None else members)
        self.size, self.memory, self.modules = len(self.members), memory, self.processes.modules
        self.words, self.executor = self.modules.operation_words, self.modules.executor
        words, size = self.words, self.size
        self.bounds = [memory.private(16 * size + 8) for _ in range(size)]
        self.jobs = [memory.private(8 * words.job_words(size)) for _ in range(size)]
        self._slot_nbytes = SLOT_NBYTES * self.processes.ahead
        self._plans: dict[tuple[str, int, int, bool], int] = {}
        self._plans_end = memory.private(size * PLANS_NBYTES)
        self.buffers = [self.processes.buffers[process][buffers] for process in self.members]
        ahead = self.processes.ahead
        peers, records = self._peers(), memory.shared(words.RECORD_NBYTES * 2 * ahead * size)
        slots = memory.shared(2 * size * self._slot_nbytes)
        own = self.processes.scratch if scratch is None else scratch
        for rank, process in enumerate(self.members):
            for word, value in {
                words.RECORDS: records, words.SIZE: size, words.RANK: rank, words.PEERS: peers, words.SLOTS: slots,
                words.SLOT_NBYTES: self._slot_nbytes, words.SCRATCH: own[process], words.LANE: lane,
                words.METHOD: getattr(words, self.processes.method), words.STAGE_NBYTES: STAGE_NBYTES,
                words.SPINS: 1, words.YIELDS: 1, words.START_SPINS: 1, words.ITEMSIZE: 8,
                words.AHEAD: ahead, words.ALLREDUCE_SLOT_NBYTES: self._slot_nbytes,
            }.items():  # fmt: skip
                self.put(rank, word, value)

    def _peers(self) -> int:
        """Return the address of the table of the ranks' processes and segments."""
        nbytes = 8 * self.words.PEER_WORDS
        peers = self.memory.private(nbytes * self.size)
        for rank, process in enumerate(self.members):
            for at in range(0, nbytes, 8):
                word = self.memory.load(self.processes.peers + nbytes * process + at)
                self.memory.store(peers + nbytes * rank + at, word)
        return peers

    def put(self, rank: int, word: int, value: int) -> None:
        """Write a word of a rank's job."""
        self.memory.store(self.jobs[rank] + 8 * word, value)

    def plan(self, kind: str, rank: int, root: int, long: bool) -> int:
        """Return the address of a plan."""
        key = (kind, rank, root, long)
        if key not in self._plans:
            rows = np.array(self._made(kind, rank, root, long), np.int64)
            self._plans[key] = self._plans_end
            self.memory.fill(self._plans_end, rows)
            self._plans_end += rows.nbytes
        return self._plans[key]

    def _made(self, kind: str, rank: int, root: int, long: bool) -> tuple[Row, ...]:
        if kind in COUNTED:
            exchange = self.modules.counted_parts.exchange_parts  # which simulated memory calls by its name
            function = getattr(exchange, "address", 0)
            return make_counted(kind.removesuffix("v"), rank, is_root=rank == root, function=function)
        return make(kind, self.size, rank, root=root, long=long)

    def plan_of(self, rank: int, operation: SimulatedOperation) -> int:
        """Return the address of an operation's plan; plans are made one at a time."""
        kind = operation.kind
        return self.plan(kind, rank, operation.root, 8 * operation.count > self._slot_nbytes and kind != "barrier")

    def start(self, rank: int, operation: SimulatedOperation) -> int:
        """Write this rank's input and start the operation; return the status."""
        words, kind, count = self.words, operation.kind, operation.count
        if kind in COUNTED:
            return self._start_counted(rank, operation)
        send, recv = (self.buffers[rank][place] for place in operation.places[rank])
        if operation.in_place or kind == "bcast":
            send = recv
        for place in range(self.size + 1):
            self.memory.store(self.bounds[rank] + 8 * place, place * (count // self.size))
        self._give(rank, operation, send)
        for word, value in {
            words.COLLECTIVE: COLLECTIVES.index(kind),
            words.COUNT: 0 if kind == "barrier" else count,
            words.CALL: COLLECTIVES.index(kind) | operation.root << 32,
            words.REDUCER: self.memory.reducer(raises=operation.raises == rank),
            words.ROOT: operation.root,
            words.SEND: send,
            words.RECV: recv,
            words.BOUNDS: self.bounds[rank],
            words.PLAN: self.plan_of(rank, operation),
        }.items():
            self.put(rank, word, value)
        return int(self.executor.begin(self.jobs[rank]))

    def _start_counted(self, rank: int, operation: SimulatedOperation) -> int:
        """Start a Gatherv or Scatterv in one round."""
        words, root, job, kind = self.words, operation.root, self.jobs[rank], operation.kind
        send, recv = (self.buffers[rank][place] for place in operation.places[rank])
        collective = words.COLLECTIVES.index(kind.removesuffix("v"))
        counts = np.diff(self.bounds_of(operation))
        gathers, at_root, nbytes = kind == "gatherv", rank == root, 8 * int(counts[rank])
        if gathers or at_root:
            self.memory.write(send, self._given(rank, operation))
        self.memory.fill(self.bounds[rank], np.concatenate([counts, self.bounds_of(operation)[:-1]]))
        for word, value in {
            words.COLLECTIVE: collective,
            words.COUNT: 0,
            words.CALL: collective | collective << 16 | root << 32,
            words.ROOT: root,
            words.SEND: send,
            words.RECV: recv,
            words.BOUNDS: self.bounds[rank],
            words.PART_NBYTES: 0 if gathers and at_root else nbytes,
            words.PLAN: self.plan(kind, rank, root, False),
        }.items():
            self.put(rank, word, value)
        if at_root:
            others = np.delete(8 * counts, rank)
            offered = 16 * self.size if gathers else 8 * self.size + int(others.sum())
            is_used = not gathers or others.max() > self._slot_nbytes >= offered
            self.put(rank, words.PART_NBYTES, min(self._slot_nbytes, offered) if is_used else 0)
        return int(self.executor.begin(job))

    def _given(self, rank: int, operation: SimulatedOperation) -> np.ndarray:
        """Return what a rank gives to a Gatherv, or the root to a Scatterv."""
        part = slice(*self.bounds_of(operation)[rank : rank + 2])
        return operation.values[rank][part if operation.kind == "gatherv" else slice(None)]

    def bounds_of(self, operation: SimulatedOperation) -> list[int]:
        """Return the offsets of the parts of a Gatherv or Scatterv, whose lengths differ."""
        return [operation.count * rank**2 // self.size**2 for rank in range(self.size + 1)]

    def _give(self, rank: int, operation: SimulatedOperation, send: int) -> None:
        """Write a rank's input to its sendbuf."""
        kind, given = operation.kind, operation.values[rank]
        if ROWS[kind].begins is Where.OWNER and kind != "alltoall":
            given = given[: operation.count // self.size]
        if kind != "barrier" and (ROWS[kind].begins is not Where.ROOT or rank == operation.root):
            self.memory.write(send, given)

    def advance(self, rank: int) -> int:
        """Advance a rank's operation; return the status."""
        return int(self.executor.advance(self.jobs[rank]))

    def check(self, rank: int, operation: SimulatedOperation) -> None:
        """Check the result, and overwrite the buffers, as the caller may after the operation.

        Raises
        ------
        AssertionError
            If the result is wrong.
        """
        send, recv = (self.buffers[rank][place] for place in operation.places[rank])
        expected = self._expected(rank, operation)
        if expected is not None:
            got = self.memory.read(recv, expected.size)
            if got.tolist() != expected.tolist():
                raise AssertionError(f"rank {rank} of {self.size}: wrong result of {operation}")
        junk = np.full(operation.count, -rank - 1)
        self.memory.write(send, junk)
        self.memory.write(recv, junk)

    def _expected(self, rank: int, operation: SimulatedOperation) -> np.ndarray | None:
        """Return the right result of a rank; None if it has none."""
        values, root, part = operation.values, operation.root, operation.count // self.size
        total, own = values.sum(axis=0), slice(rank * part, (rank + 1) * part)
        expected: dict[str, np.ndarray | None] = {
            "barrier": None,
            "allreduce": total,
            "reduce": total if rank == root else None,
            "bcast": values[root],
            "reduce_scatter": total[own],
            "allgather": values[:, :part].reshape(-1),
            "gather": values[:, :part].reshape(-1) if rank == root else None,
            "scatter": values[root, own],
            "alltoall": values[:, own].reshape(-1),
            "scan": values[: rank + 1].sum(axis=0),
            "exscan": values[:rank].sum(axis=0) if rank else None,
            "gatherv": np.concatenate([self._given(each, operation) for each in range(self.size)])
            if rank == root
            else None,
            "scatterv": values[root, slice(*self.bounds_of(operation)[rank : rank + 2])],
        }
        return expected[operation.kind]
