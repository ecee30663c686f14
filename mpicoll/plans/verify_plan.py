"""Proof that plans on shared memory are correct in every interleaving.

The plans of all ranks are run once on simulated memory (see :mod:`mpicoll.plans.simulated_memory`), each rank until it
has to wait. This run decides for all interleavings and all processors: no two accesses race, no rank deadlocks, every
rank gets the right result, and its buffers may be reused after the operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from mpicoll.errors import MpicollError
from mpicoll.kernels.scattered_parts import has_room
from mpicoll.plans.shared_memory_plans import COLLECTIVES
from mpicoll.plans.simulated_executor import (
    BY_PARTS,
    COUNTED,
    PLANS_NBYTES,
    SLOT_NBYTES,
    Edits,
    Processes,
    Ranks,
    SimulatedOperation,
)
from mpicoll.plans.simulated_memory import Memory
from mpicoll.schedules import COLLECTIVES as ROWS

SHORT, SLOT, ONE_SEGMENT, SEGMENTS = 1, 30, 60, 200
"""Numbers of elements that fit into a record, a slot, one segment of a stage, and several segments."""
METHODS = ("STAGE", "TRANSFER")
_MEMORY_NBYTES = PLANS_NBYTES + (3 << 18)
_MOST_TURNS = 200_000


class Refuted(MpicollError, AssertionError):
    """A sequence of operations has a data race, a deadlock or a wrong result in some interleaving."""


def operation(
    size: int, kind: str, count: int, root: int = 0, memory: str = "private", in_place: bool = False
) -> SimulatedOperation:
    """Return an operation in which the buffers of all ranks are ``"private"`` or ``"shared"`` memory, or one of each.

    Parameters
    ----------
    size
        Number of ranks.
    kind
        The collective in lower case, such as ``"allreduce"``.
    count
        Number of int64 elements.
    memory
        ``"private"``, ``"shared"``, or ``"to shared"`` and ``"to private"``, where recvbufs are other memory than
        sendbufs.
    """
    if kind in BY_PARTS:
        count = -(-count // size) * size
    places = {"private": (4, 6), "shared": (0, 2), "to shared": (4, 2), "to private": (0, 6)}[memory]
    values = np.random.default_rng(count + root).integers(0, 1 << 40, (size, count))
    return SimulatedOperation(kind, count, root, in_place, [places] * size, values)


def every_operation(size: int, kinds: Sequence[str] = COLLECTIVES) -> Iterator[SimulatedOperation]:
    """Yield operations of every collective, length and kind of memory, with the first root and the last."""
    for kind, count in itertools.product(kinds, (SHORT, SLOT, ONE_SEGMENT, SEGMENTS)):
        if kind == "barrier" and count > SHORT:
            continue
        for root in (0, size - 1) if ROWS[kind].rooted else (0,):
            for memory in ("private", "shared") if count > SLOT else ("private",):
                yield operation(size, kind, count, root, memory)
            for memory in ("to shared", "to private") if kind == "gather" and count > SLOT else ():
                yield operation(size, kind, count, root, memory)
    if "allreduce" in kinds:
        yield operation(size, "allreduce", SEGMENTS, 0, "private", in_place=True)


def counted_operations(size: int) -> Iterator[SimulatedOperation]:
    """Yield Gathervs and Scattervs in one round: every length and kind of memory, with the first root and the last."""
    kinds = COUNTED if has_room(size, SLOT_NBYTES) else COUNTED[:1]
    for kind, count, root in itertools.product(kinds, (SHORT, SLOT, ONE_SEGMENT, SEGMENTS), (0, size - 1)):
        for memory in ("private", "shared", "to shared", "to private") if count > SLOT else ("private",):
            yield operation(size, kind, count, root, memory)


def prove(
    size: int, sequence: Sequence[SimulatedOperation], method: str = "STAGE", edits: Edits = None, ahead: int = 1
) -> None:
    """Prove that a sequence of operations is correct for `size` ranks.

    Parameters
    ----------
    sequence
        Operations that all ranks make one after the other, see :func:`operation`.
    method
        The method of access to private memory: ``"STAGE"`` or ``"TRANSFER"``.
    edits
        Changes to the executor's source, by module, for tests of the proof.
    ahead
        How many operations a rank may be ahead of others, a power of two: records are used again after twice as many.

    Raises
    ------
    Refuted
        If it is not correct; the message names the operations and the first error.
    """
    memory = memory_for(size, size)
    ranks = Ranks(memory, method, edits, ahead=ahead)
    with _refuting(memory, f"{size} ranks, {method}: {_text(sequence)}"):
        run(ranks, sequence)


def prove_lanes(
    size: int,
    sequences: Sequence[Sequence[SimulatedOperation]],
    method: str = "STAGE",
    edits: Edits = None,
    *,
    one_scratch: bool = False,
) -> None:
    """Prove that concurrent sequences are correct, each in an operation lane of one communicator.

    A rank may advance its lanes in any order, from any thread: here each lane of a rank is a thread of its own. Each
    lane uses other buffers of the program.

    Parameters
    ----------
    sequences
        The operations of each lane; further parameters are those of :func:`prove`.
    one_scratch
        Whether all lanes of a rank use the same scratch memory, which is an error that the proof has to find.

    Raises
    ------
    Refuted
        As :func:`prove` does.
    """
    lanes = len(sequences)
    memory = memory_for(lanes * size, lanes * size)
    processes = Processes(memory, size, method, edits, lanes)
    everybody, groups = range(size), []
    for lane in range(lanes):
        scratch = (
            None
            if one_scratch
            else [memory.shared(processes.modules.operation_words.SCRATCH_NBYTES) for _ in everybody]
        )
        groups.append(Ranks(memory, processes=processes, members=everybody, lane=lane, scratch=scratch, buffers=lane))
    programs = {
        lane * size + rank: _program(groups[lane], rank, sequences[lane]) for lane in range(lanes) for rank in everybody
    }
    with _refuting(memory, f"{size} ranks, {method}, lanes: {'; '.join(map(_text, sequences))}"):
        _run(memory, programs)


def prove_communicators(
    members: Sequence[Sequence[int]],
    calls: Sequence[tuple[int, SimulatedOperation]],
    method: str = "STAGE",
    edits: Edits = None,
) -> None:
    """Prove that calls on several communicators are correct, which may share processes and buffers.

    Parameters
    ----------
    members
        By communicator, the process of each rank.
    calls
        Pairs of communicator and operation; every process makes the calls of its communicators in this order.

    Raises
    ------
    Refuted
        As :func:`prove` does.
    """
    size = 1 + max(map(max, members))
    memory = memory_for(size, len(members) * size)
    processes = Processes(memory, size, method, edits, len(members))
    groups = []
    for lane, processes_of in enumerate(members):
        scratch = [memory.shared(processes.modules.operation_words.SCRATCH_NBYTES) for _ in range(size)]
        groups.append(Ranks(memory, processes=processes, members=processes_of, lane=lane, scratch=scratch))

    def program(process: int) -> Iterator[bool]:
        for number, one in calls:
            if process in members[number]:
                yield from _program(groups[number], members[number].index(process), (one,))

    programs = {process: program(process) for process in range(size)}
    what = f"communicators {[list(each) for each in members]}, {method}: {_text([one for _, one in calls])}"
    with _refuting(memory, what):
        _run(memory, programs)


def memory_for(threads: int, ranks: int) -> Memory:
    """Return memory for `threads` threads, and for plans, stages and buffers of `ranks` ranks."""
    return Memory(threads, ranks * _MEMORY_NBYTES)


def _text(sequence: Sequence[SimulatedOperation]) -> str:
    return ", then ".join(map(str, sequence))


@contextmanager
def _refuting(memory: Memory, what: str) -> Iterator[None]:
    """Raise Refuted with `what` for an error of a proof, and release its memory."""
    try:
        yield
    except AssertionError as error:
        raise Refuted(f"{what}: {error}") from error
    finally:
        memory.release()


def prove_collective(collective: str, size: int) -> int:
    """Prove all sequences of one and two operations of a collective for `size` ranks; return their number.

    Raises
    ------
    Refuted
        As :func:`prove` does.
    """
    operations = counted_operations(size) if collective in COUNTED else every_operation(size, (collective,))
    single = [one for one in operations if one.kind == collective]
    sequences = [*((one,) for one in single), *itertools.product(single, repeat=2)]
    for method, sequence in itertools.product(METHODS, sequences):
        prove(size, sequence, method)
    return len(METHODS) * len(sequences)


def run(ranks: Ranks, operations: Sequence[SimulatedOperation]) -> None:
    """Run all ranks to the end, each until it has to wait."""
    assert isinstance(ranks.memory, Memory)
    _run(ranks.memory, {rank: _program(ranks, rank, operations) for rank in range(ranks.size)})


def _run(memory: Memory, programs: Mapping[int, Iterator[bool]]) -> None:
    """Run threads to the end, each until it has to wait."""
    alive = dict(programs)
    for _ in range(_MOST_TURNS):
        for thread, program in tuple(alive.items()):
            memory.rank = thread
            if next(program, None) is None:
                del alive[thread]
        if not alive:
            memory.rank = -1
            return
    raise AssertionError(f"ranks {sorted(alive)} wait for ever")


def _program(ranks: Ranks, rank: int, operations: Sequence[SimulatedOperation]) -> Iterator[bool]:
    """Make a rank's calls; yield where it has to wait."""
    for one in operations:
        status = ranks.start(rank, one)
        while status == ranks.executor.WAITING:
            yield True
            status = ranks.advance(rank)
        if status != ranks.executor.DONE:
            raise AssertionError(f"rank {rank} ends {one} with status {status}")
        ranks.check(rank, one)
