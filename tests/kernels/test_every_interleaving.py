"""Sequences of collectives on shared memory, proved right in every interleaving, by one run each.

See :mod:`mpicoll.plans.verify_plan`. Errors of a protocol show where memory is used again, so that sequences matter:
what the last operation but one left in a record, a slot or a stage is overwritten by the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import pytest

from mpicoll import plans
from mpicoll.kernels.instructions import AT_WORK, COPY, IS_DIVIDED, IS_PULLED, IS_PUSHED, IS_UNDIVIDED, WAIT_DONE
from mpicoll.plans import shared_memory_plans, simulated_executor
from mpicoll.plans.plan_rows import Row
from mpicoll.plans.simulated_executor import BUFFER_NBYTES, COUNTED, PLANS_NBYTES, Edits, Ranks, SimulatedOperation
from mpicoll.plans.simulated_memory import Memory
from mpicoll.plans.verify_plan import (
    METHODS,
    ONE_SEGMENT,
    SEGMENTS,
    SHORT,
    SLOT,
    Refuted,
    counted_operations,
    every_operation,
    memory_for,
    operation,
    prove,
    prove_communicators,
    prove_lanes,
    run,
)
from mpicoll.schedules import COLLECTIVES as ROWS
from tests import extent
from tests.kernels.world import COUNTS, KINDS, World, run_all


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [*range(2, 10), 16, 23] if extent.ALL else [2, 3, 4, 8])
def test_every_operation(size: int, method: str) -> None:
    for one in (*every_operation(size), *counted_operations(size)):
        prove(size, (one,), method)


def some(sequences: list[tuple[SimulatedOperation, ...]], most: int) -> list[tuple[SimulatedOperation, ...]]:
    """Return all of them where all tests are run; otherwise so many, drawn at random."""
    return sequences if extent.ALL else random.Random(1).sample(sequences, min(most, len(sequences)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sequences_of_two(size: int, method: str) -> None:
    for pair in some(list(itertools.product(every_operation(size), repeat=2)), 200):
        prove(size, pair, method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sequences_with_counted_parts(size: int, method: str) -> None:
    """Three of them, since the third one uses the first one's slot again; and each before and after any other."""
    counted, others = list(counted_operations(size)), list(every_operation(size))
    for three in some(list(itertools.product(counted, repeat=3)), 60):
        prove(size, three, method)
    for first, between, last in some(list(itertools.product(counted, others, counted)), 100):
        prove(size, (first, between, last), method)


@pytest.mark.parametrize("kind", ["gatherv", "scatterv"])
def test_parts_that_are_offered_late(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a rank publishes its record before its parts are in its slot."""
    make = simulated_executor.make_counted
    one = operation(2, kind, 4, root=1)
    prove(2, [one])

    def planted(collective: str, rank: int, *, is_root: bool, function: int) -> tuple[Row, ...]:
        header, enter, offer, started, *rest = make(collective, rank, is_root=is_root, function=function)
        return (header, enter, started, offer, *rest)

    monkeypatch.setattr(simulated_executor, "make_counted", planted)
    with pytest.raises(Refuted):
        prove(2, [one])


@pytest.mark.parametrize("size", [2, 3])
def test_sequences_of_three_through_stages(size: int) -> None:
    staged = [one for one in every_operation(size) if one.count > SLOT and one.places[0][0] > 0]
    for three in some(list(itertools.product(staged, repeat=3)), 200):
        prove(size, three)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sequences_on_memory_that_differs_between_ranks(size: int, method: str) -> None:
    """A rank whose buffers are private leaves others at work; one whose buffers they use does not."""
    numbers, operations = random.Random(size), [one for one in every_operation(size) if one.count > SLOT]
    places = [place for one in operations for place in one.places[:1]]
    for _ in range(1000 if extent.ALL else 60):
        three = numbers.choices(operations, k=3)
        prove(size, [dataclasses.replace(one, places=numbers.choices(places, k=size)) for one in three], method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "lanes"), [(2, 2), (3, 2), (2, 3)])
def test_operations_in_several_lanes(size: int, lanes: int, method: str) -> None:
    numbers, operations = random.Random(size + lanes), list(every_operation(size))
    for _ in range(200 if extent.ALL else 12):
        prove_lanes(size, [numbers.choices(operations, k=2) for _ in range(lanes)], method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("members", [[[0, 1], [1, 0]], [[0, 1, 2], [2, 3, 1]], [[0, 1, 2, 3], [2, 1], [0, 3]]], ids=str)
def test_communicators_with_processes_in_common(members: list[list[int]], method: str) -> None:
    numbers = random.Random(len(members))
    operations = [list(every_operation(len(each))) for each in members]
    for _ in range(200 if extent.ALL else 12):
        which = numbers.choices(range(len(members)), k=4)
        prove_communicators(members, [(number, numbers.choice(operations[number])) for number in which], method)


class Devices(Memory):
    """Memory of which the system copies a part only."""

    refused: range = range(0)

    def read_process(self, vectors: int, pid: int, local: int, remote: int, nbytes: int) -> bool:
        return remote not in self.refused and super().read_process(vectors, pid, local, remote, nbytes)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", [kind for kind in plans.COLLECTIVES if kind != "barrier"])
def test_all_ranks_see_that_memory_cannot_be_copied(kind: str, rank: int) -> None:
    """All make the call in another way, and go on with the next one."""
    memory = Devices(3, 3 * (PLANS_NBYTES + (3 << 18)))
    ranks, one = Ranks(memory, "TRANSFER"), operation(3, kind, SEGMENTS, rank)
    sent = ranks.buffers[rank][one.places[rank][kind == "bcast"]]
    memory.refused = range(sent, sent + BUFFER_NBYTES)

    def program(own: int) -> Iterator[int]:
        for each in (one, operation(3, "allreduce", SEGMENTS, memory="shared")):
            status = ranks.start(own, each)
            while status == ranks.words.WAITING:
                yield -1
                status = ranks.advance(own)
            yield status

    programs, ended = [program(own) for own in range(3)], [[] for _ in range(3)]
    for _ in range(1000):
        for own, each in enumerate(programs):
            memory.rank = own
            status = next(each, -1)
            ended[own] += [status] * (status >= 0)
    assert ended == [[ranks.words.FALLBACK, ranks.words.DONE]] * 3


def test_scratch_memory_of_two_plans() -> None:
    sequences = [[operation(3, "allreduce", SEGMENTS)], [operation(3, "reduce", SEGMENTS, 2)]]
    for method in METHODS:
        prove_lanes(3, sequences, method)
        with pytest.raises(Refuted):
            prove_lanes(3, sequences, method, one_scratch=True)


def test_stages_of_another_lane() -> None:
    """Planted: all lanes use the first one's stages."""
    sequences = [[operation(2, "bcast", SEGMENTS)], [operation(2, "alltoall", SEGMENTS)]]
    prove_lanes(2, sequences)
    with pytest.raises(Refuted):
        prove_lanes(2, sequences, edits={"operands": ("STAGES_PER_LANE * get(job, LANE) + which", "which")})


PLANTED = {
    "two stages instead of three": ("operands", "INPUT_STAGES, index", "1, index"),
    "no wait before a record is used again": (
        "call_records",
        "if not all_have_come(job, started, 0):",
        "if False:",
    ),
    "one stage for input": ("operands", "get(job, SEQUENCE) & 1, index", "0, index"),
    "no wait for those that use a buffer": ("executor", "is_last_segment(job) and not _input_is_staged(job)", "False"),
    "one record": ("operation_words", "sequence & (records - 1)", "0"),
    "one slot": ("operation_words", "(get(job, SEQUENCE) & 1) * get(job, SIZE) + rank", "rank"),
    "parts at a wrong place": ("scattered_parts", "before += nbytes if", "before += 0 if"),
    "a half filled before it was taken": (
        "gathered_parts",
        "if not has_reached(job, record + 8 * RECORD_TAKEN, mark(job, number - 1)):",
        "if False:",
    ),
    "a half taken before it was filled": (
        "gathered_parts",
        "not has_reached(job, record + 8 * RECORD_FILLED, mark(job, number + 1))",
        "False",
    ),
    "a half of all parts filled before it was taken": (
        "scattered_parts",
        "not _half_is_free(job, number - 2, length)",
        "False",
    ),
    "a half of all parts taken before it was filled": (
        "scattered_parts",
        "not has_reached(job, filled, mark(job, number + 1))",
        "False",
    ),
    "a part that is gone when it is copied": ("gathered_parts", "(is_read or get(job, CAREFUL))", "False"),
    "a root that has not started": ("gathered_parts", "status = meet(job, root)", "status = DONE"),
    "a root that leaves before others have written": ("gathered_parts", "if wait_done(job, rank) else", "if True else"),
    "parts that are gone when they are copied": ("scattered_parts", "(kind == IN_PLACE or get(job, CAREFUL))", "False"),
    "no wait for the root": ("scattered_parts", "status = meet(job, root)", "status = DONE"),
    "no wait for the others' work": ("call_records", "return all_have_come(job, sequence, 1) if", "return True if"),
    "started before its data": (
        "call_records",
        "    store(record + 8 * RECORD_COUNT, get(job, COUNT))\n",
        "    store(record + 8 * RECORD_COUNT, get(job, COUNT))\n    store_release(record, 4 * sequence)\n",
    ),
}


def ahead_of_others(size: int, ahead: int, length: int, seed: int) -> list[SimulatedOperation]:
    """Return operations most of which are so short that ranks do not wait for all others."""
    numbers, operations = random.Random(seed), list(every_operation(size))
    short = [one for one in operations if one.count <= SLOT and ROWS[one.kind].rooted]
    counts = (SHORT, SLOT, 20 * ahead)
    operations += [operation(size, kind, count, size - 1) for kind in COUNTED for count in counts]
    return [numbers.choice(short if numbers.random() < 1 - 1 / ahead else operations) for _ in range(length)]


@pytest.mark.parametrize(("ahead", "length"), [(2, 7), (4, 14), (8, 30), (16, 50)])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_ahead_of_others(size: int, ahead: int, length: int) -> None:
    """Sequences so long that every record is used again, some of them more than once."""
    for seed in range((400 if extent.ALL else 40) // ahead):
        prove(size, ahead_of_others(size, ahead, length, seed), METHODS[seed % 2], ahead=ahead)
    for root in range(size):
        prove(size, [operation(size, "bcast", 1, root)] * 3 * ahead, ahead=ahead)
        prove(size, [operation(size, "gather", 1, root), operation(size, "bcast", 1, 0)] * 2 * ahead, ahead=ahead)


TOO_FAR = {
    "half of the records": ("operation_words", "sequence & (records - 1)", "sequence & (records // 2 - 1)"),
    "half of the pieces": ("call_records", "sequence >> 1 & (ahead - 1)", "sequence >> 1 & (ahead // 2 - 1)"),
    "stages used again too early": (
        "call_records",
        "is_long:\n        return sequence - 1",
        "is_long:\n        return sequence - ahead",
    ),
    "records used again too early": ("call_records", "return sequence - ahead\n", "return sequence - 2 * ahead\n"),
    "pieces used again too early": ("call_records", "max(sequence - ahead,", "max(sequence - 2 * ahead,"),
    "pieces of a slot that is in use": ("call_records", "get(job, WHOLE_SLOT) + 1", "0"),
    "slots used again too early": (
        "call_records",
        "sequence)\n    return sequence - 1\n",
        "sequence)\n    return sequence - 2\n",
    ),
    "parts longer than a piece": ("call_records", "nbytes = get(job, PART_NBYTES)", "nbytes = 0"),
}


@pytest.mark.parametrize("ahead", [2, 4])
@pytest.mark.parametrize("error", TOO_FAR)
def test_ranks_too_far_ahead_are_found(error: str, ahead: int) -> None:
    module, old, new = TOO_FAR[error]
    sequences = [ahead_of_others(3, ahead, 4 * ahead, seed) for seed in range(100)]
    sequences += [[operation(3, "bcast", count)] * 4 * ahead for count in (1, SLOT, ONE_SEGMENT)]
    for one in (operation(3, "gatherv", 60 * ahead, 2), operation(3, "scatterv", 30 * ahead, 1)):  # by rank 1
        sequences.append([one, *[operation(3, "bcast", SLOT, 1)] * 5] * ahead)
    with pytest.raises(Refuted):
        prove_all(3, sequences, {module: (old, new)}, ahead)


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("between", range(4))
def test_calls_that_differed_are_found_later(between: int, ahead: int) -> None:
    """Two ranks that leave different calls at once hear of it when they must, and of which call it was."""
    memory = memory_for(2, 2)
    ranks = Ranks(memory, ahead=ahead)
    same = [operation(2, "bcast", 1)] * between + [operation(2, "barrier", 1)]
    own = [operation(2, "bcast", 1, 0), *same], [operation(2, "reduce", 1, 0), *same]
    ended = [0, 0]

    def program(rank: int) -> Iterator[int]:
        for one in own[rank]:
            status = ranks.start(rank, one)
            while status == ranks.words.WAITING:
                yield -1
                status = ranks.advance(rank)
            if status != ranks.words.DONE:
                ended[rank] = status
                return

    programs = [program(rank) for rank in range(2)]
    for _ in range(50):
        for rank, each in enumerate(programs):
            memory.rank = rank
            next(each, None)
    assert ended == [ranks.words.MISMATCH] * 2
    assert [memory.load(job + 8 * ranks.words.AWAITED) for job in ranks.jobs] == [1, 1]


def prove_all(
    size: int, sequences: Iterable[Sequence[SimulatedOperation]], edits: Edits, ahead: int = 1, method: str = "STAGE"
) -> None:
    for sequence in sequences:
        prove(size, sequence, method, edits, ahead)


def prove_pairs(size: int, edits: Edits) -> None:
    operations = [*every_operation(size), *counted_operations(size)]
    for method in METHODS:
        prove_all(size, some(list(itertools.product(operations, repeat=2)), 400), edits, method=method)


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_are_found(error: str) -> None:
    module, old, new = PLANTED[error]
    with pytest.raises(Refuted):
        prove_pairs(2, {module: (old, new)})


PLANTED_IN_PLANS = {
    "a root of a gather that leaves early": ("gather", IS_PUSHED, WAIT_DONE),
    "a sender of a gather that leaves early": ("gather", IS_PULLED, WAIT_DONE),
    "parts of a gather that nobody writes": ("gather", IS_PUSHED, COPY),
    "a half of a bcast that the root does not write": ("bcast", IS_DIVIDED, AT_WORK),
    "a half of a bcast that its receiver does not read": ("bcast", IS_DIVIDED, COPY),
    "a receiver of a bcast that leaves early": ("bcast", IS_DIVIDED, WAIT_DONE),
    "a whole bcast that its receiver does not read": ("bcast", IS_UNDIVIDED, COPY),
}


@pytest.mark.parametrize("error", PLANTED_IN_PLANS)
def test_errors_planted_in_a_plan_are_found(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collective, condition, left_out = PLANTED_IN_PLANS[error]
    size = 2 if collective == "bcast" else 3
    when = shared_memory_plans.when

    def planted(given: int, rows: list[Row], rank: int = 0) -> list[Row]:
        return when(given, [] if given == condition and rows[0][0] == left_out else rows, rank)

    monkeypatch.setattr(shared_memory_plans, "when", planted)
    found = 0
    for method, one in itertools.product(METHODS, every_operation(size, (collective,))):
        try:
            prove(size, (one, one), method)
        except Refuted:
            found += 1
    assert found > 0


@pytest.mark.parametrize("seed", range(4))
def test_ranks_do_the_same_in_every_interleaving(seed: int) -> None:
    """What the proof assumes of the code."""
    drawing = World(3, seed)
    operations = [drawing.draw(KINDS, COUNTS) for _ in range(6)]
    proof = Ranks(Memory(3, 3 * (PLANS_NBYTES + (1 << 19))))
    run(proof, operations)
    for number in range(3):
        world = World(3, 10 * seed + number)
        run_all(world, operations)
        assert world.machine.made == proof.memory.made
