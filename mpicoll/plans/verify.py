"""Proof that plans on shared memory are right in every interleaving.

The plans of all ranks are run once on simulated memory (see :mod:`mpicoll.plans.memory`), each rank until it has to
wait. That decides for all interleavings and all processors: no two accesses race, nobody waits for ever, and every rank
has the right result, in buffers that it may use for something else from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from mpicoll.errors import MpicollError
from mpicoll.plans.memory import Memory
from mpicoll.plans.model import BY_PARTS, PLANS_NBYTES, Edits, Operation, Ranks
from mpicoll.plans.node import COLLECTIVES
from mpicoll.schedules import COLLECTIVES as ROWS

SHORT, SLOT, ONE_SEGMENT, SEGMENTS = 1, 30, 60, 200
"""Elements that lie in a record, in a slot, and in one segment and several of what passes through stages."""
METHODS = ("STAGE", "TRANSFER")
_MEMORY_NBYTES = PLANS_NBYTES + (1 << 19)
_MOST_TURNS = 200_000


class Refuted(MpicollError, AssertionError):
    """A sequence of operations goes wrong in some interleaving."""


def operation(
    size: int, kind: str, count: int, root: int = 0, memory: str = "private", in_place: bool = False
) -> Operation:
    """Return an operation in which all ranks use the same kind of memory: ``"private"`` or ``"shared"``."""
    if kind in BY_PARTS:
        count = -(-count // size) * size
    place = {"private": 4, "shared": 0}[memory]
    values = np.random.default_rng(count + root).integers(0, 1 << 40, (size, count))
    return Operation(kind, count, root, in_place, [(place, place + 2)] * size, values)


def every_operation(size: int, kinds: Sequence[str] = COLLECTIVES) -> Iterator[Operation]:
    """Yield every kind, length and kind of memory; the first root and the last."""
    for kind, count in itertools.product(kinds, (SHORT, SLOT, ONE_SEGMENT, SEGMENTS)):
        if kind == "barrier" and count > SHORT:
            continue
        for root in (0, size - 1) if ROWS[kind].rooted else (0,):
            for memory in ("private", "shared") if count > SLOT else ("private",):
                yield operation(size, kind, count, root, memory)
    if "allreduce" in kinds:
        yield operation(size, "allreduce", SEGMENTS, 0, "private", in_place=True)


def prove(size: int, sequence: Sequence[Operation], method: str = "STAGE", edits: Edits = None) -> None:
    """Prove a sequence of operations for `size` ranks.

    Raises
    ------
    Refuted
        Naming the operations and the first thing that is wrong.
    """
    ranks = Ranks(Memory(size, size * _MEMORY_NBYTES), method, edits)
    try:
        run(ranks, sequence)
    except AssertionError as error:
        raise Refuted(f"{size} ranks, {method}: {', then '.join(map(str, sequence))}: {error}") from error


def prove_collective(collective: str, size: int) -> int:
    """Prove a collective for `size` ranks, alone and twice in a row; return the number of sequences.

    Raises
    ------
    Refuted
        As :func:`prove` does.
    """
    single = list(every_operation(size, (collective,)))
    sequences = [*((one,) for one in single), *itertools.product(single, repeat=2)]
    for method, sequence in itertools.product(METHODS, sequences):
        prove(size, sequence, method)
    return len(METHODS) * len(sequences)


def run(ranks: Ranks, operations: Sequence[Operation]) -> None:
    """Run all ranks to the end, each until it has to wait."""
    programs = [_program(ranks, rank, operations) for rank in range(ranks.size)]
    alive = list(range(ranks.size))
    for _ in range(_MOST_TURNS):
        for rank in tuple(alive):
            ranks.memory.rank = rank
            if next(programs[rank], None) is None:
                alive.remove(rank)
        if not alive:
            ranks.memory.rank = -1
            return
    raise AssertionError(f"ranks {alive} wait for ever")


def _program(ranks: Ranks, rank: int, operations: Sequence[Operation]) -> Iterator[bool]:
    """Make a rank's calls; yield where it has to wait."""
    for one in operations:
        status = ranks.start(rank, one)
        while status == ranks.executor.WAITING:
            yield True
            status = ranks.advance(rank)
        if status != ranks.executor.DONE:
            raise AssertionError(f"rank {rank} ends {one} with status {status}")
        ranks.check(rank, one)
