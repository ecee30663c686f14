"""Private memory copied between processes by the system: the same results as through stages, on all ranks alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import select
from mpicoll.collectives.select import Capabilities, Rule
from mpicoll.errors import MismatchError
from mpicoll.kernels import method_trials
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.operation_words import COLLECTIVES
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS
from mpicoll.shared_memory import kept_times, method_times
from mpicoll.shared_memory.domain_memory import NONBLOCKING_LANES, SharedArrays
from mpicoll.shared_memory.method_times import LENGTHS, Ratios
from tests.mpi.conftest import TIMEOUT, WORLD
from tests.secret_memory import secret, secret_on_one_rank

pytestmark = pytest.mark.mpi(min_size=2)
COUNT = 90_001
LONG = 512 << 10
"""Bytes that do not pass through slots."""
MEMORY = ("private", "shared", "by turns")


@pytest.fixture
def single(comm: Intracomm) -> Intracomm:
    if comm.channel.node is None or comm.channel.node.copies is None:
        pytest.skip("processes do not copy from each other here")
    return comm


@pytest.fixture
def unmeasured(single: Intracomm, shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Intracomm:
    """A communicator of processes that have neither measured nor read ratios."""
    monkeypatch.setenv("MPICOLL_CACHE_DIR", str(shared_folder))
    monkeypatch.setattr(method_times, "_known", [])
    return single


def _array(comm: Intracomm, memory: str, values: np.ndarray) -> np.ndarray:
    shared = memory == "shared" or (memory == "by turns" and comm.rank % 2 == 0)
    array: np.ndarray = comm.empty(values.size, values.dtype) if shared else np.empty_like(values)
    array[:] = values
    return array


def _calls(comm: Intracomm, memory: str, algorithm: str) -> dict[str, Callable[[], np.ndarray]]:
    """Return calls by collective, each of which returns what this rank has got."""
    size, rank, root = comm.size, comm.rank, comm.size - 1
    numbers = np.random.default_rng(rank)
    whole = _array(comm, memory, numbers.standard_normal(COUNT * size).astype(np.float32))
    part = _array(comm, memory, whole[:COUNT])

    def result(count: int) -> np.ndarray:
        return _array(comm, memory, np.zeros(count, np.float32))

    def moved(name: str, send: Any, count: int, *more: Any, mine: bool = True) -> Callable[[], np.ndarray]:
        def call() -> np.ndarray:
            recv = result(count)
            getattr(comm, name)(send, recv if mine else None, *more, algorithm=algorithm)
            return recv

        return call

    def in_place() -> np.ndarray:
        recv = _array(comm, memory, whole)
        comm.Allreduce(MPI.IN_PLACE, recv, algorithm=algorithm)
        return recv

    def broadcast() -> np.ndarray:
        recv = _array(comm, memory, whole)
        comm.Bcast(recv, root, algorithm=algorithm)
        return recv

    at_root = rank == root
    return {
        "allreduce": moved("Allreduce", whole, whole.size),
        "in place": in_place,
        "reduce": moved("Reduce", whole, whole.size, MPI.SUM, root, mine=at_root),
        "bcast": broadcast,
        "reduce_scatter": moved("Reduce_scatter_block", whole, COUNT),
        "allgather": moved("Allgather", part, whole.size),
        "gather": moved("Gather", part, whole.size, root, mine=at_root),
        "scatter": moved("Scatter", whole if at_root else None, COUNT, root),
        "alltoall": moved("Alltoall", whole, whole.size),
        "scan": moved("Scan", whole, whole.size),
        "exscan": moved("Exscan", whole, whole.size),
    }


@pytest.mark.parametrize("memory", MEMORY)
def test_the_same_bits_as_through_stages(single: Intracomm, memory: str) -> None:
    shared, copied = (_calls(single, memory, algorithm) for algorithm in ("shared", "single_copy"))
    for name, call in shared.items():
        wanted = call()
        for _ in range(2):
            assert copied[name]().tobytes() == wanted.tobytes(), name


def test_nonblocking_and_persistent_calls(single: Intracomm) -> None:
    data, result = np.arange(COUNT) + single.rank, np.zeros(COUNT, np.int64)
    wanted = single.size * np.arange(COUNT) + single.size * (single.size - 1) // 2
    single.Iallreduce(data, result, algorithm="single_copy").Wait()
    assert (result == wanted).all()
    request = single.Allreduce_init(data, result, algorithm="single_copy")
    for _ in range(3):
        result[:] = 0
        request.Start()
        request.Wait()
        assert (result == wanted).all()
    request.Free()


@pytest.mark.parametrize("algorithm", ["single_copy", None])
def test_memory_that_cannot_be_copied_passes_through_stages(single: Intracomm, algorithm: str | None) -> None:
    count, rank = LONG // 4, single.rank
    data, result = secret_on_one_rank(single, count), np.zeros(count)
    for turn in range(3):
        data[:] = rank + turn
        result[:] = 0
        single.Allreduce(data, result, algorithm=algorithm)
        assert (result == single.size * turn + single.size * (single.size - 1) // 2).all()
        single.Bcast(data, 1, algorithm=algorithm)
        assert (data == 1 + turn).all()
        for _ in range(3):
            single.Iallreduce(data, result, algorithm=algorithm).Wait()
            assert (result == single.size * (1 + turn)).all()
    several = [single.Iallreduce(data, np.empty(count), algorithm=algorithm) for _ in range(2 * NONBLOCKING_LANES)]
    persistent = single.Allreduce_init(data, result, algorithm=algorithm)
    for _ in range(3):
        result[:] = 0
        persistent.Start()
        persistent.Wait()
        assert (result == single.size * 3).all()
    persistent.Free()
    for request in several:
        request.Wait()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("how", ["blocking", "nonblocking", "persistent"])
def test_a_late_rank_finds_a_call_that_begins_again_through_stages(single: Intracomm, how: str) -> None:
    """The ranks that wait have told each other what they call; it is the same call afterwards."""
    count, rank = LONG // 8, single.rank
    data, result = secret_on_one_rank(single, count), np.zeros(count)
    data[:] = rank
    persistent = single.Allreduce_init(data, result, algorithm="single_copy")
    for _ in range(2):
        result[:] = 0
        WORLD.Barrier()
        if rank == single.size - 1:
            time.sleep(2 * LOOK_AFTER_SECONDS)
        if how == "blocking":
            single.Allreduce(data, result, algorithm="single_copy")
        elif how == "nonblocking":
            single.Iallreduce(data, result, algorithm="single_copy").Wait()
        else:
            persistent.Start()
            persistent.Wait()
        assert (result == single.size * (single.size - 1) // 2).all()
    persistent.Free()


@pytest.mark.parametrize("nodes", ["2", "1,7"])
def test_memory_that_cannot_be_copied_goes_by_messages_inside_nodes_without_segments(
    verdicts: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, nodes: str
) -> None:
    """On the ranks of the node alone; each run asks anew, since another one may have other buffers.

    Buffers that would travel between the pretended nodes as they are, those of a Bcast, are no secret here: on one host
    the MPI library cannot send them either.
    """
    places = SharedArrays.places
    monkeypatch.setattr(SharedArrays, "places", lambda own: [*places(own)[:-1], False])  # as with a full segment
    monkeypatch.setenv("MPICOLL_NODES", nodes)
    comm = Intracomm(WORLD.Dup(), timeout=TIMEOUT)
    node = None if comm.channel.cluster is None else comm.channel.cluster.node.node
    count, size, rank = LONG // 8, comm.size, comm.rank
    data = secret(8 * count) if rank == 1 else np.zeros(count)
    assert node is None or not node.segments
    usable = np.array([data.size > 0 and (rank != 1 or (node is not None and node.reach))])
    WORLD.Allreduce(MPI.IN_PLACE, usable, MPI.LAND)
    if not usable[0]:
        pytest.skip("no secret memory, no copies between processes, or no node of two ranks")
    total, whole, part = np.zeros(count), np.zeros(count * size), np.zeros(count // size)
    persistent = comm.Allreduce_init(data, total)
    for turn in range(3):
        base = size * turn + size * (size - 1) // 2

        def filled(turn: int = turn) -> np.ndarray:
            data[:] = rank + turn
            return data

        for call in (comm.Allreduce, lambda x, y: comm.Iallreduce(x, y).Wait()):
            call(filled(), total)
            assert (total == base).all()
        filled()
        persistent.Start()
        persistent.Wait()
        assert (total == base).all()
        comm.Reduce(filled(), total, root=1)
        assert rank != 1 or (total == base).all()
        if comm.choice("allgather", whole.nbytes) == comm.choice("reduce_scatter", data.nbytes) == select.HIERARCHY:
            comm.Reduce_scatter_block(filled()[: size * part.size], part)
            assert (part == base).all()
            comm.Allgather(filled(), whole)
            assert (whole.reshape(size, count) == np.arange(size)[:, None] + turn).all()
        other = np.full(count, float(rank))
        comm.Allreduce(other, total)
        assert (total == size * (size - 1) // 2).all()
    persistent.Free()


def test_ranks_that_ask_for_different_ways_are_told(single: Intracomm) -> None:
    data, other = np.ones(COUNT), Intracomm(WORLD.Dup(), timeout=TIMEOUT)
    with pytest.raises(MismatchError, match=r"algorithm=(shared.*algorithm=single_copy|single_copy.*algorithm=shared)"):
        other.Allreduce(MPI.IN_PLACE, data, algorithm="single_copy" if other.rank == 0 else "shared")


def test_there_is_no_such_barrier(single: Intracomm) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="'single_copy' is not possible for barrier"):
            single.Barrier(algorithm="single_copy")
        single.Barrier()


def test_where_processes_may_not_copy(monkeypatch: pytest.MonkeyPatch, verdicts: MPI.Intracomm) -> None:
    monkeypatch.setenv("MPICOLL_TRANSFER", "off")
    comm = Intracomm(WORLD.Dup(), timeout=TIMEOUT)
    assert "single_copy" not in comm.algorithms("allreduce")
    with pytest.raises(ValueError, match="'single_copy' is not possible"):
        comm.Allreduce(MPI.IN_PLACE, np.ones(3), algorithm="single_copy")


def test_the_choice_is_made_from_what_was_measured() -> None:
    for size in (2, 3, 8, 64):
        every = (Ratios(*[(ratio,) * len(LENGTHS)] * len(Ratios._fields)) for ratio in (0.8, 1.2))
        fast, slow = (Capabilities(size, math.inf, in_memory=COLLECTIVES, copies=copies) for copies in every)
        none = fast._replace(copies=None)
        for collective in COLLECTIVES:
            chosen = [select.choose(collective, 1 << 20, means) for means in (fast, slow, none)]
            moved = collective != "barrier"
            assert chosen == ["single_copy" if moved else "shared", "shared", "shared"], (collective, size)
            assert select.choose(collective, LENGTHS[0] - 1, fast) == "shared"


def test_all_ranks_have_the_same_measurement(single: Intracomm) -> None:
    node = single.channel.node
    assert node is not None
    own = np.array(node.copies)
    seen = np.zeros((single.size, *own.shape))
    single.Allgather(own, seen)
    assert (seen == own).all()
    assert own.min() > 0
    assert own.max() < math.inf


def test_a_collective_is_judged_by_its_own_times_at_its_length() -> None:
    measured = Ratios()._replace(bcast=(5.0, 5.0, 5.0, 0.5, 5.0))
    means = Capabilities(8, math.inf, in_memory=COLLECTIVES, copies=measured)
    chosen = [select.choose("bcast", nbytes, means) for nbytes in (LENGTHS[2], LENGTHS[3], LENGTHS[4])]
    assert chosen == ["shared", "single_copy", "shared"]
    assert select.choose("allreduce", LENGTHS[3], means) == "shared"


def test_ratios_between_measured_lengths_are_means_of_both() -> None:
    """Equal ones up to the next power of two, since compiled code knows lengths by their highest bit."""
    measured = Ratios()._replace(gather=(8.0, 2.0, 2.0, 0.5, 0.125))
    found = [measured.at("gather", nbytes) for nbytes in (32 << 10, 64 << 10, 1 << 20, (2 << 20) - 1, 8 << 20, 1 << 40)]
    assert found == pytest.approx([8 * 2**-0.5, 8 * 2**-1.5, 2 * 2**-1.5, 2 * 2**-1.5, 0.125, 0.125])
    assert measured.at("gather", (32 << 10) - 1) == math.inf
    assert measured._replace(gather=(math.inf,) * 5).at("gather", 1 << 20) == math.inf


@pytest.mark.parametrize(
    ("tuned", "ratio", "chosen"),
    [
        ("shared", 0.9, "shared"),
        ("shared", 0.5, "single_copy"),
        ("single_copy", 1.1, "single_copy"),
        ("single_copy", 2.0, "shared"),
        ("single_copy", math.inf, "single_copy"),
        ("ring", 0.5, "ring"),
    ],
)
def test_a_tuned_way_is_taken_unless_the_ranks_of_this_run_find_otherwise(
    tuned: str, ratio: float, chosen: str
) -> None:
    measured = Ratios()._replace(allreduce=(ratio,) * len(LENGTHS))
    rules = {"allreduce": (Rule(1 << 30, tuned),)}
    means = Capabilities(4, math.inf, in_memory=COLLECTIVES, copies=measured, rules=rules)
    assert select.choose("allreduce", 1 << 20, means) == chosen


def test_a_measurement_leaves_the_job_as_it_was(unmeasured: Intracomm) -> None:
    single, node = unmeasured, unmeasured.channel.node
    assert node is not None
    node.blocking[words.METHOD] = words.NOTHING
    found = method_times.ratios(single.channel.comm, node.blocking, node.plan)
    assert node.blocking[words.METHOD] == words.NOTHING
    node.blocking[words.METHOD] = node.method
    assert all(len(each) == len(LENGTHS) for each in found)
    data = np.ones(COUNT)
    single.Allreduce(MPI.IN_PLACE, data)
    assert (data == single.size).all()


def test_copies_that_fail_are_never_chosen(unmeasured: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank only: all ranks have to take the same way."""
    single, node = unmeasured, unmeasured.channel.node
    assert node is not None
    if single.rank == single.size - 1:
        monkeypatch.setattr(
            method_times._Collectives, "_works", property(lambda _: False, lambda *_: None), raising=False
        )
    found = method_times.ratios(single.channel.comm, node.blocking, node.plan)
    assert np.isinf(found).all()


def test_only_the_first_runs_on_a_quiet_machine_measure(unmeasured: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    node, measured = unmeasured.channel.node, []
    assert node is not None

    def measure(own: Any) -> np.ndarray:
        own.is_quiet = len(measured) != 1  # the second time something is in the way
        made = np.full((len(Ratios._fields), len(LENGTHS)), 99.0 if not own.is_quiet else 1.0 + len(measured))
        measured.append(made)
        return made

    monkeypatch.setattr(method_times._Collectives, "measure", measure)
    monkeypatch.setattr(method_times._Collectives, "confirm", lambda own, known: True)
    for _ in range(kept_times.ENOUGH + 3):
        monkeypatch.setattr(method_times, "_known", [])
        found = method_times.ratios(unmeasured.channel.comm, node.blocking, node.plan)
        unmeasured.Barrier()
    assert len(measured) == kept_times.ENOUGH + 1
    assert set(found.bcast) == {3.0}  # of 1, 3 and 4
    monkeypatch.setattr(method_times._Collectives, "confirm", lambda own, known: False)
    for _ in range(2):  # on other cores: measured again, and not kept
        monkeypatch.setattr(method_times, "_known", [])
        found = method_times.ratios(unmeasured.channel.comm, node.blocking, node.plan)
        assert set(found.bcast) == {float(len(measured))}
        unmeasured.Barrier()


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.4, True), (0.4, False), (3.0, False)])
def test_ratios_of_earlier_runs_are_checked(
    unmeasured: Intracomm, monkeypatch: pytest.MonkeyPatch, factor: float, agrees: bool
) -> None:
    node = unmeasured.channel.node
    assert node is not None
    monkeypatch.setattr(method_times, "_CALLS_IN_TURN", 1)
    collectives = method_times._Collectives(unmeasured.channel.comm, node.blocking, node.plan)
    known = np.full((len(Ratios._fields), len(LENGTHS)), 0.5)
    monkeypatch.setattr(
        collectives, "_run", lambda: {words.STAGE: 1.0, words.TRANSFER: 0.5 * factor}[node.blocking[words.METHOD]]
    )
    assert collectives.confirm(known) == agrees
    node.blocking[words.METHOD] = node.method


def test_a_busy_machine_is_not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_times, "cores", lambda: 2)
    for preempted, load, quiet, quiet_in_turns in (
        (1 << 30, 3.0, True, True),
        (-1, 3.1, False, False),
        (-1, 0.0, False, True),
    ):
        monkeypatch.setattr(method_times, "_PREEMPTED", preempted)
        monkeypatch.setattr(method_times.os, "getloadavg", lambda load=load: (load, 9.0, 9.0))
        assert method_times._Undisturbed(2)() == quiet
        assert method_times._Undisturbed(3)() == quiet_in_turns


@pytest.mark.parametrize("collective", ["allreduce", "bcast", "alltoall"])
def test_trials_change_the_way_of_all_ranks_in_the_same_call(single: Intracomm, collective: str) -> None:
    node, size = single.channel.node, single.size
    assert node is not None
    assert node.trials is not None
    own = node.trials._own
    own[method_trials.OWN_FIRST] = own[method_trials.OWN_LONGEST] = 1
    kept, node.blocking[words.METHOD_TIMES] = node.blocking[words.METHOD_TIMES], own.ctypes.data
    count = LONG // 8 * size
    given, result = np.empty(count), np.empty(count)
    first = select.ON_NODE.index(select.choose(collective, given.nbytes, single._scope.means))
    taken = []
    try:
        for turn in range(60):
            taken.append(node.trials.method(collective, given.nbytes, first, True))
            given[:] = np.arange(count) + turn * (single.rank + 1)
            if collective == "allreduce":
                single.Allreduce(given, result)
                expected = size * np.arange(count) + turn * size * (size + 1) // 2
            elif collective == "bcast":
                single.Bcast(given, root=turn % size)
                result[:], expected = given, np.arange(count) + turn * (turn % size + 1)
            else:
                single.Alltoall(given, result)
                part = np.arange(count // size) + single.rank * (count // size)
                expected = np.concatenate([part + turn * (rank + 1) for rank in range(size)])
            np.testing.assert_array_equal(result, expected)
    finally:
        node.blocking[words.METHOD_TIMES] = kept
    assert set(taken) == {words.STAGE, words.TRANSFER}
    assert WORLD.allgather(taken) == [taken] * size


def test_calls_on_arrays_in_shared_memory_are_not_timed(single: Intracomm) -> None:
    """They take as long by either method, and would hide how the methods differ."""
    node, count = single.channel.node, LONG // 8 * single.size
    assert node is not None
    assert node.trials is not None
    own = node.trials._own
    kept, node.blocking[words.METHOD_TIMES] = node.blocking[words.METHOD_TIMES], own.ctypes.data
    given, result = single.empty(count, np.float64), single.empty(count, np.float64)
    given[:] = 1
    try:
        before = own.copy()
        single.Allreduce(given, result)
        assert (own[method_trials.OWN_FIRST :] == before[method_trials.OWN_FIRST :]).all()
        single.Allreduce(given.copy(), result)
        assert not (own[method_trials.OWN_FIRST :] == before[method_trials.OWN_FIRST :]).all()
    finally:
        node.blocking[words.METHOD_TIMES] = kept
