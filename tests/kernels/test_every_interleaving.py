"""Sequences of collectives on shared memory, proved free of races in every interleaving, by one run each.

See `least` in `interleaving`. Errors of a protocol show where memory is used again, so that sequences matter: what the
last operation but one left in a record, a slot or a stage is overwritten by the next.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from mpicoll.schedules import COLLECTIVES
from tests import extent
from tests.kernels.world import COUNTS, KINDS, Edits, Operation, World, run_all

SHORT, SLOT, ONE_PIECE, PIECES = 1, 30, 60, 200
"""Elements that lie in a record, in a slot, and in one piece and several of what passes through stages."""
FIRST_PLACE = {"private": 4, "shared": 0}


def operation(
    size: int, kind: str, count: int, root: int, memory: str = "private", in_place: bool = False
) -> Operation:
    """Return an operation in which all ranks use the same kind of memory."""
    if COLLECTIVES[kind].by_parts:
        count = -(-count // size) * size
    place = FIRST_PLACE[memory]
    values = np.random.default_rng(count + root).integers(0, 1 << 40, (size, count))
    return Operation(kind, count, root, in_place, [(place, place + 2)] * size, values)


def every_operation(size: int) -> Iterator[Operation]:
    """Yield every kind, length and kind of memory; the first root and the last."""
    yield operation(size, "barrier", 1, 0, "private")
    for kind, count in itertools.product(KINDS[1:], (SHORT, SLOT, ONE_PIECE, PIECES)):
        for root in (0, size - 1) if COLLECTIVES[kind].rooted else (0,):
            for memory in ("private", "shared") if count > SLOT else ("private",):
                yield operation(size, kind, count, root, memory)
    yield operation(size, "allreduce", PIECES, 0, "private", in_place=True)


class Refuted(AssertionError):
    """A sequence of operations goes wrong in some interleaving."""


def prove(size: int, sequence: tuple[Operation, ...], method: str = "STAGE", edits: Edits = None) -> None:
    world = World(size, 0, method, least=True, edits=edits)
    try:
        run_all(world, list(sequence))
    except AssertionError as error:
        raise Refuted(f"{size} ranks, {method}: {', then '.join(map(str, sequence))}: {error}") from error


@pytest.mark.parametrize("method", ["STAGE", "TRANSFER"])
@pytest.mark.parametrize("size", [*range(2, 10), 16, 23] if extent.ALL else [2, 3, 4, 5, 8])
def test_every_operation(size: int, method: str) -> None:
    for one in every_operation(size):
        prove(size, (one,), method)


def some(sequences: list[tuple[Operation, ...]], most: int) -> list[tuple[Operation, ...]]:
    """Return all of them where all tests are run; otherwise so many, drawn at random."""
    return sequences if extent.ALL else random.Random(1).sample(sequences, min(most, len(sequences)))


@pytest.mark.parametrize("method", ["STAGE", "TRANSFER"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sequences_of_two(size: int, method: str) -> None:
    for pair in some(list(itertools.product(every_operation(size), repeat=2)), 300):
        prove(size, pair, method)


@pytest.mark.parametrize("size", [2, 3])
def test_sequences_of_three_through_stages(size: int) -> None:
    staged = [one for one in every_operation(size) if one.count > SLOT and one.places[0][0] == FIRST_PLACE["private"]]
    for three in some(list(itertools.product(staged, repeat=3)), 300):
        prove(size, three)


PLANTED = {
    "two stages instead of three": ("operands", "INPUT_STAGES, index", "1, index"),
    "no wait before a record is used again": ("executor", "if not all_have_come(job, sequence - 1, 0):", "if False:"),
    "one record": ("job", "RECORD_NBYTES * (2 * rank + (sequence & 1))", "RECORD_NBYTES * (2 * rank)"),
    "one slot": ("job", "((sequence & 1) * get(job, SIZE) + rank)", "rank"),
    "no wait for the others' work": ("executor", "return all_have_come(job, sequence, 1) if", "return True if"),
    "started before its data": (
        "executor",
        "    store(record + 8 * RECORD_COUNT, get(job, COUNT))\n",
        "    store(record + 8 * RECORD_COUNT, get(job, COUNT))\n    store_release(record, 4 * sequence)\n",
    ),
}


def prove_pairs(size: int, edits: Edits) -> None:
    for pair in some(list(itertools.product(every_operation(size), repeat=2)), 400):
        prove(size, pair, edits=edits)


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_found(error: str) -> None:
    module, old, new = PLANTED[error]
    with pytest.raises(Refuted):
        prove_pairs(2, {module: (old, new)})


@pytest.mark.parametrize("seed", range(4))
def test_ranks_do_the_same_in_every_interleaving(seed: int) -> None:
    """What the proof assumes of the code."""
    first = World(3, seed)
    operations = [first.draw(KINDS, COUNTS) for _ in range(6)]
    made = []
    for number in range(4):
        world = World(3, 10 * seed + number, least=number == 0)
        run_all(world, operations)
        made.append(world.machine.made)
    assert all(other == made[0] for other in made[1:])
