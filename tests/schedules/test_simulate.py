"""The simulator: closed formulas, nodes by hand, and the same model computed one event after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicoll.schedules import ALGORITHMS, COLLECTIVES, Algorithm, Recv, Reduce, Schedule, Send, Step, find
from mpicoll.schedules import simulate as simulation
from mpicoll.schedules.all_ranks import Structure, written_down
from mpicoll.schedules.machine import (
    IDENTITY,
    UNBOUNDED,
    Fitted,
    Link,
    MachineDescription,
    ReduceClass,
    SizeClass,
    Wire,
    textbook,
)
from mpicoll.schedules.replay import ScheduleError
from mpicoll.schedules.simulate import run, simulate
from tests import extent
from tests.schedules.plain_clocks import PlainClocks

ROWS = [row for table in ALGORITHMS.values() for row in table.values()]
ROOTED = tuple(name for name, row in COLLECTIVES.items() if row.rooted)
L, OVERHEAD, G, GAMMA, STEP, CALL = 10e-6, 1e-6, 1e-9, 0.25e-9, 2e-6, 5e-6


@pytest.fixture(scope="module", autouse=True)
def _forget_structures() -> Iterator[None]:
    """Drop the kept structures of many ranks, half a million objects in which garbage would be looked for."""
    yield
    simulation._structure.cache_clear()
    simulation._columns.cache_clear()


def name_of(row: Algorithm) -> str:
    return f"{row.collective}-{row.name}"


def plain(**changes: object) -> MachineDescription:
    """A machine whose parameters do not depend on length."""
    link = Link((SizeClass(UNBOUNDED, L, OVERHEAD, 0.0, G),))
    made = MachineDescription("plain", link, link, (ReduceClass(UNBOUNDED, GAMMA),), CALL, STEP, 1)
    return replace(made, **changes)  # type: ignore[arg-type]


def simulated(collective: str, name: str, size: int, nbytes: int, machine: MachineDescription | None = None) -> float:
    return simulate(find(collective, name), size, nbytes, machine or plain())


ALPHA = STEP + 2 * OVERHEAD + L


@pytest.mark.parametrize("size", [2, 3, 5, 16, 300])
def test_ring(size: int) -> None:
    nbytes = 1000 * size
    wanted = CALL + 2 * (size - 1) * (ALPHA + 1000 * G) + (size - 1) * 1000 * GAMMA
    assert math.isclose(simulated("allreduce", "ring", size, nbytes), wanted, rel_tol=1e-12)


@pytest.mark.parametrize("levels", [1, 2, 3, 8])
def test_recursive_doubling_and_tree(levels: int) -> None:
    nbytes = 4096
    doubling = CALL + levels * (ALPHA + nbytes * (G + GAMMA))
    assert math.isclose(simulated("allreduce", "recursive_doubling", 2**levels, nbytes), doubling, rel_tol=1e-12)
    down = CALL + levels * (ALPHA + nbytes * G)
    assert math.isclose(simulated("bcast", "tree", 2**levels, nbytes), down, rel_tol=1e-12)
    up = down + levels * nbytes * GAMMA
    assert math.isclose(simulated("reduce", "tree", 2**levels, nbytes), up, rel_tol=1e-12)


def in_own_chunks(schedule: Schedule) -> tuple[Step, ...]:
    """Return the steps; in an alltoall as if what a rank has for others were one chunk with its own number."""
    if schedule.collective != "alltoall":
        return schedule.steps
    size = schedule.size
    own = [send._replace(start=send.start // size) for step in schedule.steps for send in step.sends]
    got = [recv._replace(start=recv.start // size) for step in schedule.steps for recv in step.recvs]
    pairs = zip(own, got, strict=True)
    return tuple(Step((a._replace(stop=a.start + 1),), (b._replace(stop=b.start + 1),)) for a, b in pairs)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_structures_are_the_schedules_that_are_proved(row: Algorithm) -> None:
    for size in range(1, 65):
        for root in {0, size // 2, size - 1} if row.collective in ROOTED else {0}:
            for segments in (1, 3) if row.segmented and size <= 16 else (1,):
                structure = row.structure(size, root=root, segments=segments)
                for rank in range(size):
                    schedule = row.schedule(size, rank, root=root, segments=segments)
                    steps = [part.steps_of(rank, size) for part in structure.parts]
                    assert sum(steps, ()) == in_own_chunks(schedule)
                assert structure.chunks == schedule.chunks_per_vector
                if row.rotates or row.parts:
                    windows = {part.window for part in structure.parts if any(part.steps)}
                    assert windows <= {schedule.window}


def one_by_one(structure: Structure, nbytes: int, machine: MachineDescription, nodes: list[int], wire: Wire) -> float:
    """The same, computed by :class:`PlainClocks`."""
    size, state = structure.size, None
    for part in structure.parts:
        schedules = [
            Schedule("any", "any", size, rank, structure.chunks, part.steps_of(rank, size), part.window)
            for rank in range(size)
        ]
        clocks = PlainClocks(schedules, nbytes, machine, nodes, wire)
        state = state or ([machine.call * slow for slow in clocks.slow], [0.0] * size, [0.0] * size)
        clocks.run(*state)
    assert state is not None
    return max(state[0])


times = st.floats(0, 1e-4)
rows = st.tuples(times, times, times, st.floats(0, 1e-8), st.booleans())


@st.composite
def machines(draw: st.DrawFn) -> MachineDescription:
    def link() -> Link:
        first, second = draw(rows), draw(rows)
        classes = (SizeClass(draw(st.integers(1, 3000)), *first), SizeClass(UNBOUNDED, *second))
        oversubscribed = tuple(SizeClass(row.below, *draw(rows)[:4], row.rendezvous) for row in classes)
        return Link(classes, draw(st.floats(0.5, 3)), oversubscribed if draw(st.booleans()) else ())

    kernels = (ReduceClass(draw(st.integers(1, 3000)), draw(st.floats(0, 1e-8))), ReduceClass(UNBOUNDED, 1e-9))
    fitted = draw(st.sampled_from([None, Fitted((2, 3), 2, 1, 9, 0.1, 5)]))
    cores, one_host = draw(st.integers(1, 4)), draw(st.booleans())
    more = {"crowd": draw(st.integers(0, 6)), "fitted": fitted}
    return MachineDescription("any", link(), link(), kernels, draw(times), draw(times), cores, one_host, **more)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_vectors_give_what_events_give_one_by_one(row: Algorithm, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 9))
    machine, nbytes = data.draw(machines()), data.draw(st.integers(0, 20000))
    nodes = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    wire = data.draw(st.sampled_from([IDENTITY, Wire(0.25, 1e-9, 2e-9)]))
    root = data.draw(st.integers(0, size - 1)) if row.collective in ROOTED else 0
    segments = data.draw(st.integers(1, 3)) if row.segmented else 1
    structure = row.structure(size, root=root, segments=segments)
    wanted = one_by_one(structure, nbytes, machine, nodes, wire)
    assert math.isclose(run(structure, nbytes, machine, nodes, wire), wanted, rel_tol=1e-12)
    built = written_down([row.schedule(size, rank, root=root, segments=segments) for rank in range(size)])
    if len(structure.parts) == 1:
        assert math.isclose(run(built, nbytes, machine, nodes, wire), wanted, rel_tol=1e-12)


def test_nodes_by_hand() -> None:
    """Ranks 0 1 | 2 3: everybody sends 1000 bytes to the other node at once, then inside."""
    inside = Link((SizeClass(UNBOUNDED, 1e-6, 0.5e-6, 0.0, 1e-9),), streams=2)
    between = Link((SizeClass(UNBOUNDED, 20e-6, 1e-6, 0.0, 10e-9),))
    machine = MachineDescription("two nodes", inside, between, (ReduceClass(UNBOUNDED, 1e-9),), 0.0, 3e-6, 2)

    def steps(rank: int) -> tuple[Step, ...]:
        across, beside = (rank + 2) % 4, rank ^ 1
        return tuple(Step((Send(peer, 0, 1),), (Recv(peer, 0, 1, Reduce.OWN_FIRST),)) for peer in (across, beside))

    schedules = [Schedule("any", "any", 4, rank, 1, steps(rank)) for rank in range(4)]
    # Two ranks share each node's link, so that 1000 bytes take 20 us; the memory bears two senders.
    first = 3e-6 + 1e-6 + 20e-6 + 20e-6 + 1e-6 + 1e-6
    second = 3e-6 + 0.5e-6 + 1e-6 + 1e-6 + 0.5e-6 + 1e-6
    nodes = [0, 0, 1, 1]
    assert math.isclose(run(written_down(schedules), 1000, machine, nodes), first + second, rel_tol=1e-12)
    # One core for two ranks: processor time and the copy inside take twice as long.
    oversubscribed = first + second + 3e-6 + 1e-6 + 1e-6 + 1e-6 + second
    one = replace(machine, cores=1)
    assert math.isclose(run(written_down(schedules), 1000, one, nodes), oversubscribed, rel_tol=1e-12)


def test_a_rendezvous_waits_for_the_receiver() -> None:
    link = Link((SizeClass(500, L, OVERHEAD, 0.0, G), SizeClass(UNBOUNDED, L, OVERHEAD, 0.0, G, rendezvous=True)))
    machine = plain(inside=link, between=link, reduce=(ReduceClass(UNBOUNDED, 1e-6),))
    # Rank 1 reduces what rank 2 sends, which takes long, before it receives from rank 0.
    late = (Step(recvs=(Recv(2, 0, 1, Reduce.OWN_FIRST),)), Step(recvs=(Recv(0, 0, 1),)))
    send = (Step(sends=(Send(1, 0, 1),)),)
    parts = written_down([Schedule("any", "any", 3, rank, 1, (send, late, send)[rank]) for rank in range(3)])
    busy = CALL + ALPHA
    buffered = busy + 100 * (G + 1e-6) + STEP + OVERHEAD
    assert math.isclose(run(parts, 100, machine, [0, 1, 2]), buffered, rel_tol=1e-12)
    waiting = busy + 1000 * (G + 1e-6) + STEP + 1000 * G + L + OVERHEAD
    assert math.isclose(run(parts, 1000, machine, [0, 1, 2]), waiting, rel_tol=1e-12)


def test_a_window_hides_latency() -> None:
    ring, piped = find("allreduce", "ring"), find("allreduce", "pipelined_ring")
    machine = plain(step=0.0)
    nbytes = 8 << 20
    assert simulate(piped, 8, nbytes, machine, segments=8) < simulate(ring, 8, nbytes, machine)


def test_a_compressed_message_is_shorter_and_costs_coding() -> None:
    ring, size = find("allreduce", "ring"), 4
    wire = Wire(0.25, 2e-9, 3e-9)
    wanted = CALL + 6 * (ALPHA + 1000 * (G / 4 + 5e-9)) + 3 * 1000 * GAMMA
    assert math.isclose(simulate(ring, size, 4000, plain(), wire=wire), wanted, rel_tol=1e-12)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
@settings(max_examples=12, deadline=None)
@given(levels=st.integers(0, 4), nbytes=st.integers(0, 1 << 22), more=st.integers(0, 1 << 20))
def test_more_bytes_or_twice_the_ranks_are_never_faster(row: Algorithm, levels: int, nbytes: int, more: int) -> None:
    size, machine = 2**levels, plain()
    time = simulate(row, size, nbytes, machine)
    assert simulate(row, size, nbytes + more, machine) >= time * (1 - 1e-12)
    assert simulate(row, 2 * size, nbytes, machine) >= time * (1 - 1e-12)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_thousands_of_ranks(row: Algorithm) -> None:
    size = 4096 if extent.ALL or name_of(row) == "allreduce-ring" else 1024
    time = simulate(row, size, 1 << 20, textbook(), ranks_per_node=16)
    assert 1e-5 < time < 10


def test_what_cannot_be_simulated() -> None:
    ring = find("allreduce", "ring")
    with pytest.raises(ValueError, match="nbytes"):
        simulate(ring, 4, -1, plain())
    with pytest.raises(ValueError, match="size: 0"):
        simulate(ring, 0, 1, plain())
    one_sided = [Schedule("any", "any", 2, 0, 1, (Step(sends=(Send(1, 0, 1),)),)), Schedule("any", "any", 2, 1, 1, ())]
    with pytest.raises(ScheduleError, match="does not receive"):
        run(written_down(one_sided), 8, plain(), [0, 1])
