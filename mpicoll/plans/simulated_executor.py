"""The executor and its plans on simulated memory: the functions that Numba compiles, run as Python."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from mpicoll import kernels
from mpicoll.plans.shared_memory_plans import COLLECTIVES, make
from mpicoll.plans.simulated_memory import Memory
from mpicoll.schedules import COLLECTIVES as ROWS
from mpicoll.schedules.collective_table import Where

if TYPE_CHECKING:
    from mpicoll.plans.thread_memory import ThreadMemory

AnyMemory = Union[Memory, "ThreadMemory"]
Edits = dict[str, tuple[str, str]] | None
"""By module, a text of its source and its replacement: errors that the proof has to find."""
STAGE_NBYTES, SLOT_NBYTES = 512, 256
BUFFER_NBYTES, PLANS_NBYTES = 2048, 128 << 10
"""Bytes of a buffer, and of all plans of a rank."""
BY_PARTS = tuple(name for name in COLLECTIVES if ROWS[name].by_parts)
_MODULES = (
    "operation_words",
    "instructions",
    "operands",
    "movement",
    "call_records",
    "executor",
    "withdrawal",
)


def load_executor(memory: Memory, edits: Edits = None) -> types.SimpleNamespace:
    """Return the executor's modules, with `memory` in the place of `atomics`."""
    modules = load_modules(memory, _MODULES, edits)
    _note_waits(memory, modules)
    return modules


def load_modules(memory: Memory, names: Sequence[str], edits: Edits = None) -> types.SimpleNamespace:
    """Return modules of kernels, each after those that it imports, with `memory` in the place of `atomics`."""
    package = f"simulated_{id(memory)}"
    atomics = types.ModuleType(f"{package}.atomics")
    for name in ("load", "store", "load_acquire", "store_release", "fence", "copy", "read_process", "write_process"):
        setattr(atomics, name, getattr(memory, name))
    atomics.call_reducer = memory.reduce  # type: ignore[attr-defined]
    atomics.pause = atomics.yield_core = lambda: None  # type: ignore[attr-defined]
    decorators = types.ModuleType(f"{package}.decorators")
    for name in ("helper", "inline_helper"):
        setattr(decorators, name, lambda function: function)
    for name in ("kernel_for", "linked", "short_kernel"):
        setattr(decorators, name, lambda *signature: lambda function: function)
    messages = types.ModuleType(f"{package}.messages")
    messages.execute_bound = None  # type: ignore[attr-defined]
    top = types.ModuleType(package)
    top.__path__ = []
    made: dict[str, Any] = {
        package: top,
        f"{package}.atomics": atomics,
        f"{package}.decorators": decorators,
        messages.__name__: messages,
    }
    sys.modules.update(made)
    try:
        for name in names:
            module = _load(package, name, (edits or {}).get(name, ("", "")))
            made[module.__name__] = module
    finally:
        for name in made:
            sys.modules.pop(name, None)
    return types.SimpleNamespace(**{name: made[f"{package}.{name}"] for name in names})


def _load(package: str, name: str, edit: tuple[str, str]) -> types.ModuleType:
    path, (old, new) = Path(kernels.__file__).with_name(f"{name}.py"), edit
    spec = importlib.util.spec_from_file_location(f"{package}.{name}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(_compiled(path, old, new), module.__dict__)
    return module


@functools.cache
def _compiled(path: Path, old: str, new: str) -> types.CodeType:
    """Return a module's code, with `new` in the place of `old`."""
    source = path.read_text()
    if old not in source:
        raise ValueError(f"edits: {old!r} is not in {path.name}")
    return compile(source.replace(old, new) if old else source, str(path), "exec")


def _note_waits(memory: Memory, modules: types.SimpleNamespace) -> None:
    """Make the function that waits for a flag report the value to the memory."""
    has_come, record_of = modules.call_records.has_come, modules.operation_words.record_of

    def noted(job: int, rank: int, sequence: int, stage: int) -> bool:
        came: bool = has_come(job, rank, sequence, stage)
        if came:
            memory.waited(record_of(job, rank, sequence), 4 * sequence + stage)
        return came

    modules.call_records.has_come = noted


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

    Attributes
    ----------
    buffers
        By process and lane, four buffers in its segment, and four in private memory.
    """

    def __init__(
        self, memory: AnyMemory, size: int, method: str = "STAGE", edits: Edits = None, lanes: int = 1
    ) -> None:
        self.memory, self.method, self.lanes = memory, method, lanes
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
    ) -> None:
        self.processes = processes or Processes(memory, memory.size, method, edits)
        self.members = list(range(memory.size) if members is None else members)
        self.size, self.memory, self.modules = len(self.members), memory, self.processes.modules
        self.words, self.executor = self.modules.operation_words, self.modules.executor
        words, size = self.words, self.size
        self.bounds = [memory.private(8 * (size + 1)) for _ in range(size)]
        self.jobs = [memory.private(8 * words.job_words(size)) for _ in range(size)]
        self._plans: dict[tuple[str, int, int, bool], int] = {}
        self._plans_end = memory.private(size * PLANS_NBYTES)
        self.buffers = [self.processes.buffers[process][buffers] for process in self.members]
        peers, records = self._peers(), memory.shared(words.RECORD_NBYTES * 2 * size)
        slots = memory.shared(2 * size * SLOT_NBYTES)
        own = self.processes.scratch if scratch is None else scratch
        for rank, process in enumerate(self.members):
            for word, value in {
                words.RECORDS: records, words.SIZE: size, words.RANK: rank, words.PEERS: peers, words.SLOTS: slots,
                words.SLOT_NBYTES: SLOT_NBYTES, words.SCRATCH: own[process], words.LANE: lane,
                words.METHOD: getattr(words, self.processes.method), words.STAGE_NBYTES: STAGE_NBYTES,
                words.SPINS: 1, words.YIELDS: 1, words.START_SPINS: 1, words.ITEMSIZE: 8,
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
            rows = np.array(make(kind, self.size, rank, root=root, long=long), np.int64)
            self._plans[key] = self._plans_end
            self.memory.fill(self._plans_end, rows)
            self._plans_end += rows.nbytes
        return self._plans[key]

    def plan_of(self, rank: int, operation: SimulatedOperation) -> int:
        """Return the address of an operation's plan; plans are made one at a time."""
        kind = operation.kind
        return self.plan(kind, rank, operation.root, 8 * operation.count > SLOT_NBYTES and kind != "barrier")

    def start(self, rank: int, operation: SimulatedOperation) -> int:
        """Write this rank's input and start the operation; return the status."""
        words, kind, count = self.words, operation.kind, operation.count
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
        }
        return expected[operation.kind]
