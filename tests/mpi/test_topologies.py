"""Communicators with topologies, and merged ones: mpicoll's and mpi4py's at once, with mpi4py's results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Cartcomm, Distgraphcomm, Graphcomm, Intercomm, Intracomm
from mpicoll.errors import CollectiveTimeout, MismatchError, RemoteError

pytestmark = pytest.mark.mpi(min_size=1)

WORLD = MPI.COMM_WORLD
TIMEOUT = 15.0


def ring(comm: Any) -> Any:
    return comm.Create_cart([comm.size], True)


def line(comm: Any) -> Any:
    return comm.Create_cart([comm.size], False)


def grid(comm: Any) -> Any:
    return comm.Create_cart(MPI.Compute_dims(comm.size, 2), [True, False], reorder=True)


def graph(comm: Any) -> Any:
    """A ring; neighbours are so in both directions."""
    size, ranks = comm.size, range(comm.size)
    ends = [2 * rank + 2 for rank in ranks]
    return comm.Create_graph(ends, [(rank + step) % size for rank in ranks for step in (-1, 1)])


def adjacent(comm: Any) -> Any:
    size, rank = comm.size, comm.rank
    return comm.Create_dist_graph_adjacent([(rank - 1) % size, rank], [(rank + 1) % size, rank])


def distributed(comm: Any) -> Any:
    """Rank 0 gives all edges: everybody sends to rank 0 and to the next rank."""
    ranks = list(range(comm.size)) if comm.rank == 0 else []
    edges = [end for rank in ranks for end in (0, (rank + 1) % comm.size)]
    return comm.Create_dist_graph(ranks, [2] * len(ranks), edges)


KINDS = {ring: Cartcomm, line: Cartcomm, grid: Cartcomm, graph: Graphcomm, adjacent: Distgraphcomm,
         distributed: Distgraphcomm}  # fmt: skip


def plain_kind(kind: type) -> type:
    return getattr(MPI, kind.__name__)


def facts(comm: Any) -> list[Any]:
    """Return what a communicator says of its topology."""
    found = [comm.topology, comm.is_topo, comm.rank, comm.size, comm.degrees, comm.inoutedges]
    if comm.topology == MPI.CART:
        found += [comm.Get_topo(), comm.dims, comm.periods, comm.coords, comm.Get_coords(0), comm.Shift(0, 1)]
    elif comm.topology == MPI.GRAPH:
        found += [comm.Get_topo(), comm.neighbors, comm.index, comm.edges, comm.nnodes]
    else:
        found += [comm.Get_dist_neighbors(), comm.Get_dist_neighbors_count()]
    return found


def check(comm: Intracomm) -> None:
    """Make calls of every kind; the compiled path must take the plain one."""
    data, size = np.full(5, comm.rank + 1.0), comm.size
    for _ in range(3):
        result = np.zeros(5)
        comm.Allreduce(data, result)
        assert (result == size * (size + 1) / 2).all()
    assert comm.allgather(comm.rank) == list(range(size))
    comm.Iallreduce(MPI.IN_PLACE, data).Wait()
    assert (data == size * (size + 1) / 2).all()


@pytest.fixture
def settled(verdicts: MPI.Intracomm) -> Iterator[Intracomm]:
    """A communicator with settings that are not the defaults."""
    plain = WORLD.Dup()
    yield Intracomm(plain, algorithm="recursive_doubling", timeout=TIMEOUT)
    plain.Free()


@pytest.mark.parametrize("make", KINDS)
def test_classes_topologies_and_settings(settled: Intracomm, make: Callable[[Any], Any]) -> None:
    expected, kind = make(MPI.Intracomm(settled)), KINDS[make]
    made = make(settled)
    for comm in (made, made.Dup(), made.Clone(), made.Dup_with_info(MPI.INFO_ENV), made.Dup(MPI.INFO_ENV)):
        assert type(comm) is kind
        assert isinstance(comm, Intracomm)
        assert isinstance(comm, plain_kind(kind))
        assert facts(comm) == facts(expected)
        assert (comm.algorithm, comm.timeout) == ("recursive_doubling", TIMEOUT)
        check(comm)
        comm.Free()
        assert comm == MPI.COMM_NULL
    expected.Free()


@pytest.mark.parametrize("make", KINDS)
def test_nonblocking_duplicates(settled: Intracomm, make: Callable[[Any], Any]) -> None:
    made = make(settled)
    comm, request = made.Idup()
    assert (type(comm), comm.timeout) == (KINDS[make], TIMEOUT)
    request.Wait()
    assert facts(comm) == facts(made)
    check(comm)
    comm.Free()
    made.Free()


def test_the_compiled_path_is_taken() -> None:
    if WORLD.size == 1:
        pytest.skip("one rank communicates with nobody")
    made = ring(Intracomm(WORLD, timeout=TIMEOUT))
    check(made)
    assert bool(made._table) == bool(Intracomm(WORLD)._table)
    made.Free()


def test_parts_of_a_grid(settled: Intracomm) -> None:
    plain = MPI.Intracomm(settled).Create_cart(MPI.Compute_dims(settled.size, 2), [True, False])
    ours = settled.Create_cart(MPI.Compute_dims(settled.size, 2), [True, False])
    for remaining in ([True, False], [False, True], [True, True], [False, False]):
        expected, made = plain.Sub(remaining), ours.Sub(remaining)
        assert type(made) is Cartcomm
        assert (made.dims, made.periods, made.coords) == (expected.dims, expected.periods, expected.coords)
        assert MPI.Group.Compare(made.group, expected.group) == MPI.IDENT
        assert made.algorithm == "recursive_doubling"
        check(made)
        made.Free()
        expected.Free()
    part = ours.Split(ours.coords[0], ours.rank)
    assert type(part) is Intracomm
    check(part)
    for comm in (part, ours, plain):
        comm.Free()


def test_a_grid_that_has_no_room_for_all(settled: Intracomm) -> None:
    count = max(1, settled.size - 1)
    made = settled.Create_cart([count])
    assert (made == MPI.COMM_NULL) == (settled.rank >= count)
    if made != MPI.COMM_NULL:
        check(made)
        made.Free()


def test_handles_of_plain_ones(comm: Intracomm) -> None:
    plain = WORLD.Create_cart([WORLD.size])
    made = Cartcomm(plain, timeout=TIMEOUT)
    assert made.dims == [WORLD.size]
    check(made)
    with pytest.raises(TypeError, match="expecting a general graph communicator"):
        Graphcomm(plain)
    with pytest.raises(TypeError, match="expecting a "):
        Cartcomm(comm)
    with pytest.raises(TypeError, match="is not an intracommunicator"):
        Cartcomm(None)
    plain.Free()


def test_two_groups_and_their_merger(settled: Intracomm) -> None:
    if settled.size == 1:
        pytest.skip("one rank has no other group")
    part = settled.Split(settled.rank % 2)
    between = part.Create_intercomm(0, settled, 1 - settled.rank % 2)
    assert type(between) is Intercomm
    assert between.remote_size == settled.size - part.size
    for comm in (between, between.Dup(), between.Create(between.group)):
        assert type(comm) is Intercomm
        merged = comm.Merge(high=bool(settled.rank % 2))
        assert type(merged) is Intracomm
        assert merged.size == settled.size
        assert (merged.algorithm, merged.timeout) == ("recursive_doubling", TIMEOUT)
        check(merged)
        merged.Free()
        comm.Free()
    part.Free()


class Sub(Intracomm):
    """A class of a program's own."""


def test_duplicates_of_a_programs_own_class() -> None:
    plain = WORLD.Dup()
    made = Sub(plain, timeout=TIMEOUT).Dup()
    assert type(made) is Sub
    assert made.timeout == TIMEOUT
    check(made)
    assert type(made.Split()) is Intracomm
    made.Free()
    plain.Free()


# Neighbourhood collectives --------------------------------------------------------------------------------------------


def by_part(comm: Any, prefix: str = "", suffix: str = "") -> list[np.ndarray]:
    """Make each neighbourhood collective; return what has arrived.

    Open MPI's nonblocking ones treat a rank that is a neighbour twice otherwise than its blocking ones.
    """
    indegree, outdegree = comm.degrees
    out = np.arange(3.0 * outdegree) + 100 * comm.rank
    counts, sent = [3] * indegree, [3] * outdegree

    def types(count: int) -> list[Any]:
        return [[3] * count, [24 * place for place in range(count)], [MPI.DOUBLE] * count]

    def call(name: str, given: Any, got: Any) -> None:
        made = getattr(comm, f"{prefix}{name if prefix else name.capitalize()}{suffix}")(given, got)
        for _ in range(2 if suffix else 1):
            if suffix:
                made.Start()
            if made is not None:
                made.Wait()
        if suffix:
            made.Free()

    results = [np.full(3 * indegree, -1.0) for _ in range(5)]
    call("neighbor_allgather", out[:3].copy() if outdegree else np.zeros(3), results[0])
    call("neighbor_allgatherv", np.full(3, float(comm.rank)), [results[1], counts])
    call("neighbor_alltoall", out, results[2])
    call("neighbor_alltoallv", [out, sent], [results[3], counts])
    call("neighbor_alltoallw", [out, *types(outdegree)], [results[4], *types(indegree)])
    return results


@pytest.mark.parametrize(("prefix", "suffix"), [("", ""), ("I", ""), ("", "_init")])
@pytest.mark.parametrize("make", KINDS)
def test_neighbours_get_what_they_get_from_mpi4py(
    comm: Intracomm, make: Callable[[Any], Any], prefix: str, suffix: str
) -> None:
    expected, made = make(MPI.Intracomm(comm)), make(comm)
    wanted = by_part(expected, prefix, suffix)
    for _ in range(2):
        for ours, plain in zip(by_part(made, prefix, suffix), wanted, strict=True):
            assert (ours == plain).all()
    expected.Free()
    made.Free()


@pytest.mark.parametrize("make", KINDS)
def test_objects_of_neighbours(comm: Intracomm, make: Callable[[Any], Any]) -> None:
    expected, made = make(MPI.Intracomm(comm)), make(comm)
    for obj in (None, 3, {"rank": comm.rank, "text": "x" * 100 * comm.rank}, np.arange(4 * comm.rank).tolist()):
        assert made.neighbor_allgather(obj) == expected.neighbor_allgather(obj)
        several = [(obj, end) for end in range(made.outdegree)]
        assert made.neighbor_alltoall(several) == expected.neighbor_alltoall(several)
    expected.Free()
    made.Free()


@pytest.fixture
def plain(verdicts: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """A communicator of all ranks, freed when all have come."""
    made = WORLD.Dup()
    yield made
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.001)
    made.Free()


def test_a_neighbour_that_does_not_come_is_named(plain: MPI.Intracomm) -> None:
    """The others have all that they need."""
    if plain.size < 3:
        pytest.skip("needs three ranks")
    made, last = line(Intracomm(plain, timeout=1.0)), plain.size - 1
    data, got = np.full(2, float(plain.rank)), np.zeros(4)
    if plain.rank == last - 1:
        with pytest.raises(
            CollectiveTimeout, match=r"Neighbor_allgather.* did not arrive, or had left already"
        ) as caught:
            made.Neighbor_allgather(data, got)
        assert last in caught.value.missing_ranks
        assert set(caught.value.missing_ranks) <= {last - 2, last}
    elif plain.rank != last:
        made.Neighbor_allgather(data, got)
        assert (got[2:] == plain.rank + 1).all()


def test_other_calls_are_a_mismatch(plain: MPI.Intracomm) -> None:
    if plain.size == 1:
        pytest.skip("one rank agrees with itself")
    made = ring(Intracomm(plain, timeout=TIMEOUT))
    data, got = np.zeros(6), np.zeros(6)
    begin = time.monotonic()
    calls = [made.Barrier, lambda: made.Neighbor_alltoall(data, got)]
    if made.rank in (0, 1, made.size - 1):
        with pytest.raises((MismatchError, RemoteError)):
            calls[made.rank != 0]()
    else:  # its neighbours make the same call
        calls[1]()
    assert time.monotonic() - begin < TIMEOUT


@pytest.mark.parametrize("persistent", [False, True])
def test_refused_arguments_are_an_error_on_all_neighbours(plain: MPI.Intracomm, persistent: bool) -> None:
    if plain.size == 1:
        pytest.skip("one rank has no neighbours")
    made = ring(Intracomm(plain, timeout=TIMEOUT))
    good, wrong = np.zeros(2 * 3), np.zeros(5)

    def call(data: np.ndarray) -> None:
        if persistent:
            request = made.Neighbor_alltoall_init(data, np.zeros(6))
            request.Start()
            request.Wait()
        else:
            made.Neighbor_alltoall(data, np.zeros(6))

    if made.rank == 0:
        with pytest.raises(ValueError, match="message"):
            call(wrong)
    elif made.rank in (1, made.size - 1):
        with pytest.raises(RemoteError, match="rank 0 refused its arguments"):
            call(good)


def test_objects_that_cannot_be_pickled(plain: MPI.Intracomm) -> None:
    if plain.size == 1:
        pytest.skip("one rank has no neighbours")
    made = ring(Intracomm(plain, timeout=TIMEOUT))
    if made.rank == 0:
        with pytest.raises((TypeError, AttributeError)):
            made.neighbor_allgather(lambda: None)
    elif made.rank in (1, made.size - 1):
        with pytest.raises(RemoteError, match="rank 0 refused its arguments"):
            made.neighbor_allgather(3)


def test_names_of_the_package() -> None:
    for kind in {*KINDS.values(), Intracomm, Intercomm}:
        assert getattr(mpicoll, kind.__name__) is kind
        assert issubclass(kind, plain_kind(kind))
