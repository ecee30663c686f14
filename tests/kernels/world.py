"""Ranks with one lane of operations on simulated memory, and the operations that they make."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from mpicoll import plans
from mpicoll.schedules import COLLECTIVES
from mpicoll.schedules.collectives import Where
from tests.kernels.interleaving import Machine, load_protocol

Edits = dict[str, tuple[str, str]] | None
KINDS = plans.COLLECTIVES
BY_PARTS = tuple(name for name, row in COLLECTIVES.items() if row.by_parts)
STAGE_NBYTES, SLOT_NBYTES = 512, 256
PLANS_NBYTES = 128 << 10
"""Of one rank."""
BUFFER_NBYTES = 2048
COUNTS = (1, 13, 30, 70, 130, 200)
"""By record, by slot, in one piece and in several."""


@dataclass
class Operation:
    """One call; `places` says for each rank in which of its buffers, of which the first half lie in its arena."""

    kind: str
    count: int
    root: int
    in_place: bool
    places: list[tuple[int, int]]
    values: np.ndarray = field(repr=False)
    """Of all ranks, shape (size, count)."""
    raises: int = -1
    """The rank on which the reducer raises."""


class World:
    """Ranks with one lane of operations."""

    def __init__(
        self, size: int, seed: int, method: str = "STAGE", *, least: bool = False, edits: Edits = None
    ) -> None:
        self.size = size
        self.machine = machine = Machine(size, size * (PLANS_NBYTES + (1 << 19)), seed, least=least)
        self.modules = load_protocol(machine, edits)
        self.words, self.executor = self.modules.job, self.modules.executor
        words = self.words
        self.bounds = [machine.private(8 * (size + 1)) for _ in range(size)]
        self.jobs = [machine.private(8 * (words.JOB_WORDS + 2 * size)) for _ in range(size)]
        self._plans: dict[tuple[str, int, int, bool], int] = {}
        self._plans_end = machine.private(size * PLANS_NBYTES)
        scratch = [machine.private(words.SCRATCH_NBYTES) for _ in range(size)]
        peers = machine.private(8 * words.PEER_WORDS * size)
        records = machine.shared(words.RECORD_NBYTES * 2 * size)
        slots = machine.shared(2 * size * SLOT_NBYTES)
        stages = 3 * STAGE_NBYTES
        self.buffers: list[list[int]] = []
        for rank in range(size):
            arena = machine.shared(stages)
            near = [machine.shared(BUFFER_NBYTES) for _ in range(4)]
            nbytes = near[-1] + BUFFER_NBYTES - arena if method == "STAGE" else 0
            self.buffers.append(near + [machine.shared(BUFFER_NBYTES) for _ in range(4)])
            for word, value in enumerate((rank, arena, arena, nbytes, arena)):
                machine.store(peers + 8 * (words.PEER_WORDS * rank + word), value)
        for rank in range(size):
            for word, value in {
                words.RECORDS: records, words.SIZE: size, words.RANK: rank, words.PEERS: peers, words.SLOTS: slots,
                words.SLOT_NBYTES: SLOT_NBYTES, words.SCRATCH: scratch[rank], words.METHOD: getattr(words, method),
                words.STAGE_NBYTES: STAGE_NBYTES, words.LANE: 0, words.SPINS: 1, words.YIELDS: 1,
                words.START_SPINS: 1, words.ITEMSIZE: 8,
            }.items():  # fmt: skip
                self.put(rank, word, value)

    def put(self, rank: int, word: int, value: int) -> None:
        self.machine.store(self.jobs[rank] + 8 * word, value)

    def get(self, rank: int, word: int) -> int:
        return self.machine.load(self.jobs[rank] + 8 * word)

    def plan(self, kind: str, rank: int, root: int, long: bool) -> int:
        """Return the address of a plan."""
        key = (kind, rank, root, long)
        if key not in self._plans:
            words = (
                np.array(plans.make(kind, self.size, rank, root=root, long=long), np.int64).view(np.uint8).reshape(-1)
            )
            self._plans[key] = self._plans_end
            self.machine.memory[self._plans_end : self._plans_end + words.size] = words
            self._plans_end += words.size
        return self._plans[key]

    def draw(self, kinds: tuple[str, ...], counts: tuple[int, ...] = COUNTS) -> Operation:
        """Draw an operation, of which all ranks know everything."""
        pick = self.machine.random
        kind, count = pick.choice(kinds), pick.choice(counts)
        if kind in BY_PARTS:
            count = -(-count // self.size) * self.size
        near = pick.random()
        places = [self._places(pick, near) for _ in range(self.size)]
        values = np.array([[pick.randrange(1 << 40) for _ in range(count)] for _ in range(self.size)], np.int64)
        in_place = pick.random() < 0.3 and kind == "allreduce"
        return Operation(kind, count, pick.randrange(self.size), in_place, places, values)

    def _places(self, pick: random.Random, near: float) -> tuple[int, int]:
        send, recv = (pick.randrange(2) if pick.random() < near else 4 + pick.randrange(2) for _ in range(2))
        return send, recv + 2

    def start(self, rank: int, operation: Operation) -> int:
        """Write this rank's input and begin; return the status."""
        words, machine, size = self.words, self.machine, self.size
        kind, count = operation.kind, operation.count
        send, recv = (self.buffers[rank][place] for place in operation.places[rank])
        if operation.in_place or kind == "bcast":
            send = recv
        part = count // size
        for place in range(size + 1):
            machine.store(self.bounds[rank] + 8 * place, place * part)
        given = operation.values[rank]
        if COLLECTIVES[kind].begins is Where.OWNER and kind != "alltoall":
            given = given[:part]
        if kind != "barrier" and (kind not in ("bcast", "scatter") or rank == operation.root):
            machine.write(send, given)
        for word, value in {
            words.COLLECTIVE: KINDS.index(kind),
            words.COUNT: 0 if kind == "barrier" else count,
            words.CALL: KINDS.index(kind) | operation.root << 32,
            words.REDUCER: 2 if operation.raises == rank else 1,
            words.ROOT: operation.root,
            words.SEND: send,
            words.RECV: recv,
            words.BOUNDS: self.bounds[rank],
            words.PLAN: self.plan(kind, rank, operation.root, 8 * count > SLOT_NBYTES and kind != "barrier"),
        }.items():
            self.put(rank, word, value)
        return int(self.executor.begin(self.jobs[rank]))

    def finish(self, rank: int, status: int) -> int:
        """Advance to the end; return the last status."""
        while status == self.executor.WAITING:
            self.machine.wait()
            status = self.executor.advance(self.jobs[rank])
        return status

    def check(self, rank: int, operation: Operation) -> None:
        """Compare the result, and use the buffers for something else, as the caller may from now on."""
        size, part = self.size, operation.count // self.size
        send, recv = (self.buffers[rank][place] for place in operation.places[rank])
        total = operation.values.sum(axis=0)
        own = slice(rank * part, (rank + 1) * part)
        expected = {
            "barrier": None,
            "allreduce": total,
            "reduce": total if rank == operation.root else None,
            "bcast": operation.values[operation.root],
            "reduce_scatter": total[own],
            "allgather": operation.values[:, :part].reshape(-1),
            "gather": operation.values[:, :part].reshape(-1) if rank == operation.root else None,
            "scatter": operation.values[operation.root, own],
            "alltoall": operation.values[:, own].reshape(-1),
            "scan": operation.values[: rank + 1].sum(axis=0),
            "exscan": operation.values[:rank].sum(axis=0) if rank else None,
        }[operation.kind]
        if expected is not None:
            got = self.machine.read(recv, expected.size)
            assert got.tolist() == expected.tolist(), f"rank {rank} of {size}: wrong result of {operation}"
        junk = np.full(operation.count, -rank - 1)
        self.machine.write(send, junk)
        self.machine.write(recv, junk)


def run_all(world: World, operations: list[Operation]) -> None:
    def program(rank: int) -> None:
        for operation in operations:
            status = world.finish(rank, world.start(rank, operation))
            assert status == world.executor.DONE, (rank, status, operation)
            world.check(rank, operation)

    world.machine.run([lambda rank=rank: program(rank) for rank in range(world.size)])  # type: ignore[misc]
