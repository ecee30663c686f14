"""A parameter server loses nothing, mixes nothing, keeps its bound and always ends.

``MPICOLL_TEST_PUSHES`` is the number of pushes of all workers in the test of exact sums (2000 by default), and
``MPICOLL_TEST_STEPS`` that of steps of the workers in that of the bound on staleness (100).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from mpicoll import Intracomm, ParameterServer
from mpicoll.compression import ErrorFeedback, Key
from mpicoll.consensus import wait_politely
from mpicoll.errors import CollectiveTimeout, CorruptPayload, MismatchError, MpicollError, RemoteError
from mpicoll.optim.optimizers import OPTIMIZERS, checked_settings
from mpicoll.parameter_server import message_memory, windows
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES, ShardHeader
from tests import extent

pytestmark = pytest.mark.mpi
TIMEOUT = 20.0
PUSHES = int(os.environ.get("MPICOLL_TEST_PUSHES", "2000"))
STEPS = int(os.environ.get("MPICOLL_TEST_STEPS", "100"))


@pytest.fixture(autouse=True)
def _enough_ranks(comm: Intracomm) -> None:
    if comm.size < 2:
        pytest.skip("a worker and a server are two ranks")


def serving(initial: np.ndarray, comm: Intracomm, **settings: Any) -> ParameterServer:
    return ParameterServer(initial, comm=comm, **{"lr": -1.0, "timeout": TIMEOUT, **settings})


def server_counts(comm: Intracomm) -> range:
    return range(1, min(comm.size, 3))


def integers(rank: int, step: int, count: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).integers(-3, 4, count).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("push", ["mailbox", "direct"])
def test_every_push_counts_once(comm: Intracomm, push: str, dtype: type) -> None:
    """Mailboxes have one to three slots: they wrap hundreds of times."""
    for servers in server_counts(comm):
        workers, count = comm.size - servers, 37
        steps = -(-PUSHES // workers // (4 if servers == 2 or dtype == np.float64 else 1))
        first = np.arange(count).astype(dtype)
        with serving(first, comm, servers=servers, push=push, slots=2 * servers - 1) as ps:
            if not ps.is_server:
                found, gradients = np.empty(count, dtype), [integers(ps.rank, i, count).astype(dtype) for i in range(8)]
                for step in range(steps):
                    ps.push(gradients[step % 8])
                assert ps.result(found) == steps * workers
                total = first.astype(np.float64)
                for worker in range(workers):
                    for i in range(8):
                        total += integers(worker, i, count).astype(np.float64) * len(range(i, steps, 8))
                assert np.array_equal(found, total.astype(dtype))
        assert ps.staleness.sum() == steps * workers


@pytest.mark.parametrize("staleness", [None, 0])
@pytest.mark.parametrize("push", ["mailbox", "direct"])
def test_parts_of_the_vector(comm: Intracomm, push: str, staleness: int | None) -> None:
    """Every worker pushes to parts of its own choice, within a shard and across the border between two."""
    if push == "direct" and staleness == 0:
        pytest.skip("refused")
    count, first = 50, np.arange(50.0)
    with serving(first, comm, servers=server_counts(comm)[-1], push=push, staleness=staleness) as ps:
        if not ps.is_server:
            total = first.copy()
            for worker in range(ps.workers):
                random = np.random.default_rng(worker)
                for _ in range(20):
                    begin = int(random.integers(0, count))
                    gradient = random.integers(-3, 4, int(random.integers(1, count - begin + 1))).astype(float)
                    total[begin : begin + gradient.size] += gradient
                    if worker == ps.rank:
                        ps.pull()
                        ps.push(gradient, first=begin)
            ps.result()
            assert np.array_equal(ps.parameters, total)
            for begin, size in ((0, 1), (20, 30), (24, 3), (49, 1), (0, 50)):
                out = np.empty(size)
                ps.pull(out, first=begin, snapshot=push == "mailbox")
                assert np.array_equal(out, total[begin : begin + size])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_synchronous_step_for_parts_leaves_the_others_as_they_are(comm: Intracomm, optimizer: str) -> None:
    """Every worker pushes five elements, with gaps between them; these would move by their momentum."""
    workers = comm.size - 1
    count = 10 * workers
    inside = np.arange(count) % 10 < 5
    with serving(np.zeros(count), comm, servers=1, staleness=0, optimizer=optimizer, lr=0.5) as ps:
        if not ps.is_server:
            alone = OPTIMIZERS[optimizer](np.zeros(count), dict(ps._settings.hyper))
            ps.pull()
            ps.push(np.ones(count))
            before = np.empty(count)
            ps.pull(before)
            alone.apply(np.full(count, float(workers)), 0.5)
            assert np.array_equal(before, alone.parameters)
            ps.push(np.ones(5), first=10 * ps.rank)
            ps.result()
            alone.apply(np.ones(count), 0.5)
            assert np.array_equal(ps.parameters, np.where(inside, alone.parameters, before))


def test_long_vectors_travel_in_chunks(comm: Intracomm) -> None:
    count = 200_003
    for push in ("mailbox", "direct"):
        with serving(np.zeros(count, np.float32), comm, push=push) as ps:
            if not ps.is_server:
                for step in range(3):
                    ps.push(integers(ps.rank, step, count))
                ps.result()
                total = sum(integers(worker, step, count) for worker in range(ps.workers) for step in range(3))
                assert np.array_equal(ps.parameters, total)


def test_a_snapshot_is_one_version(comm: Intracomm) -> None:
    """Pushes are all ones: in one version of a shard all elements are equal to it. Rank 0 reads, the others push."""
    count, servers = 150_000, 2 if comm.size > 3 else 1
    with serving(np.zeros(count, np.float32), comm, servers=servers) as ps:
        if ps.is_server:
            ps.serve()
        elif ps.rank == 0 and ps.workers > 1:
            before, expected = 0, 80 * (ps.workers - 1)
            while ps.version < expected:
                ps.pull(snapshot=True)
                for shard in range(servers):
                    part = ps.parameters[shard * count // servers : (shard + 1) * count // servers]
                    assert (part == part[0]).all()
                assert ps.version == min(ps.parameters[0], ps.parameters[-1]) >= before
                before = ps.version
        else:
            ones = np.ones(count, np.float32)
            for _ in range(80):
                ps.push(ones)
                if ps.workers == 1:
                    ps.pull(snapshot=True)
                    assert (ps.parameters == ps.parameters[0]).all()


def delays(rank: int, steps: int) -> Iterator[None]:
    generator = np.random.default_rng(rank)
    for _ in range(steps):
        time.sleep(float(generator.choice([0, 0, 0.002, 0.01])))
        yield


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("push", ["mailbox", "direct"])
def test_the_bound_on_staleness_holds(comm: Intracomm, push: str, staleness: int) -> None:
    """Worker w adds one to element w: what is pulled says how many of its pushes are there."""
    if push == "direct" and staleness == 0:
        pytest.skip("refused")
    servers = 2 if comm.size > 3 else 1
    workers = comm.size - servers
    plan = [STEPS // (workers + worker) for worker in range(workers)]
    with serving(np.zeros(workers + 4, np.float32), comm, servers=servers, push=push, staleness=staleness) as ps:
        if not ps.is_server:
            one = np.zeros(ps.count, np.float32)
            one[ps.rank] = 1
            for step, _ in enumerate(delays(ps.rank, plan[ps.rank])):
                ps.pull()
                ps._control.look()
                assert ps._control.clocks.min() >= step - staleness
                for worker in range(workers):
                    assert ps.parameters[worker] >= min(step - staleness, plan[worker])
                assert ps.parameters[ps.rank] >= step - staleness
                ps.push(one)
    assert ps.staleness.sum() == sum(plan)


HYPER: dict[str, dict[str, float]] = {"sgd": {}, "momentum": {"momentum": 0.8}, "adagrad": {}, "adam": {"beta1": 0.7}}


def target(parameters: np.ndarray, rank: int, step: int) -> np.ndarray:
    """A gradient that depends on every bit of the parameters."""
    return parameters * np.float32(0.3) + np.random.default_rng([rank, step]).standard_normal(
        parameters.size, np.float32
    )


def synchronous(first: np.ndarray, workers: int, steps: int, optimizer: str, spec: str | None) -> np.ndarray:
    """What one process computes that adds up the workers' gradients in order."""
    parameters = first.copy()
    rule = OPTIMIZERS[optimizer](parameters, dict(checked_settings(optimizer, HYPER[optimizer])))
    feedback = [None if spec is None else ErrorFeedback(spec) for _ in range(workers)]
    for step in range(steps):
        total: np.ndarray | None = None
        for worker, memory in enumerate(feedback):
            gradient = target(parameters, worker, step)
            gradient = gradient if memory is None else through(memory, gradient, worker, step)
            total = gradient if total is None else total + gradient
        assert total is not None
        rule.apply(total, 0.05)
    return parameters


def through(memory: ErrorFeedback, gradient: np.ndarray, worker: int, step: int) -> np.ndarray:
    codec = memory.compressor
    owed = memory.compensate(gradient) if codec.needs_feedback else gradient
    payload = np.empty(codec.wire_nbytes(gradient.size) // 4, np.uint32).view(np.uint8)
    arrived = np.empty_like(gradient)
    codec.decompress(payload[: codec.compress(owed, payload, Key(rank=worker, step=step))], arrived)
    if codec.needs_feedback:
        memory.update(arrived)
    return arrived


@pytest.mark.parametrize(
    ("optimizer", "spec"),
    [*((name, None) for name in HYPER), ("sgd", "int8"), ("sgd", "sign:block=32"), ("adam", "topk:0.1")],
)
def test_no_staleness_is_synchronous_to_the_bit(comm: Intracomm, optimizer: str, spec: str | None) -> None:
    count, steps = 501, 12
    first = np.random.default_rng(1).standard_normal(count, np.float32)
    settings = {"optimizer": optimizer, "staleness": 0, "lr": 0.05, "compression": spec, **HYPER[optimizer]}
    with serving(first, comm, **settings) as ps:
        if not ps.is_server:
            for step in range(steps):
                ps.pull()
                ps.push(target(ps.parameters, ps.rank, step))
            ps.result()
            expected = synchronous(first, ps.workers, steps, optimizer, spec)
            assert np.array_equal(ps.parameters.view(np.uint32), expected.view(np.uint32))


def test_what_is_owed_stays_at_the_worker(comm: Intracomm) -> None:
    """Every worker has elements of its own: of those, what has arrived and what is owed is what was given."""
    count, servers = 3000, server_counts(comm)[-1]
    with serving(np.zeros(count, np.float32), comm, servers=servers, compression="topk:0.05") as ps:
        if not ps.is_server:
            given, owed = np.zeros(count, np.float32), np.empty(count, np.float32)
            own = slice(ps.rank, None, ps.workers)
            for step in range(20):
                gradient = np.zeros(count, np.float32)
                gradient[own] = integers(ps.rank, step, count)[own]
                ps.push(gradient)
                given += gradient
            assert ps._worker is not None
            for link in ps._worker._links:
                assert link._feedback is not None
                owed[link.part] = link._feedback.residual
            ps.result()
            assert np.array_equal((ps.parameters + owed)[own], given[own])
            assert np.abs(owed[own]).max() > 0


def test_what_comes_behind_its_step_is_left_out(comm: Intracomm) -> None:
    """Rank 1 computes so long that the others have taken two steps meanwhile."""
    if comm.size < 3:
        pytest.skip("somebody else has to go on")
    steps = 6
    with serving(np.zeros(7, np.float32), comm, staleness=0, backup=1) as ps:
        if not ps.is_server:
            for step in range(steps):
                seen = ps.pull(snapshot=True)
                assert (ps.parameters == seen).all()
                if ps.rank == 1 and step == 1:
                    comm.Recv(np.empty(1), 0)
                if ps.rank == 0 and step == 4:
                    comm.Isend(np.zeros(1), 1).Wait()
                ps.push(np.ones(7, np.float32))
            version = ps.result()
            assert (ps.parameters == version).all()
    counted = int(ps.staleness.sum())
    assert ps.staleness[0] == counted
    assert ps.late >= 1
    assert counted + ps.late == steps * (comm.size - 1)


@pytest.mark.parametrize("read_own", [True, False])
def test_what_is_left_out_stays_residuals(comm: Intracomm, read_own: bool) -> None:
    """Of a worker's own elements, what has arrived and what is owed is what was given, though steps went without it.

    Rank 1 computes so long that the others have taken two steps meanwhile.
    """
    if comm.size < 3:
        pytest.skip("somebody else has to go on")
    steps, count = 8, 3000
    settings: dict[str, Any] = {"staleness": 0, "backup": 1, "compression": "topk:0.05", "read_own": read_own}
    with serving(np.zeros(count, np.float32), comm, servers=server_counts(comm)[0], **settings) as ps:
        if not ps.is_server:
            given, own = np.zeros(count, np.float32), slice(ps.rank, None, ps.workers)
            for step in range(steps):
                ps.pull()
                if ps.rank == 1 and step == 1:
                    comm.Recv(np.empty(1), 0)
                if ps.rank == 0 and step == 4:
                    comm.Isend(np.zeros(1), 1).Wait()
                gradient = np.zeros(count, np.float32)
                gradient[own] = integers(ps.rank, step, count)[own]
                ps.push(gradient)
                given += gradient
            ps.result()
            assert ps._worker is not None
            (link,) = ps._worker._links
            assert link._feedback is not None
            link.take_back()  # as before another push
            assert link._feedback.residual is not None
            assert np.array_equal((ps.parameters + link._feedback.residual)[own], given[own])
    assert ps.late >= 1


def test_late_gradients_can_count_less(comm: Intracomm) -> None:
    """Rank 0 pulls once: of its pushes each is one update later than the one before."""
    pushes = 3 * comm.size
    with serving(np.zeros(5, np.float32), comm, damping=True) as ps:
        if ps.rank == 0 and not ps.is_server:
            ps.pull()
            for _ in range(pushes):
                ps.push(np.ones(5, np.float32), rate=-2.0)
            ps.result()
            expected = sum(2.0 * min(1.0, ps.workers / max(late, 1)) for late in range(pushes))
            assert np.allclose(ps.parameters, expected, rtol=1e-6)


@pytest.mark.parametrize(("optimizer", "push"), [*((name, "mailbox") for name in HYPER), ("sgd", "direct")])
def test_a_state_is_what_it_goes_on_from(comm: Intracomm, optimizer: str, push: str) -> None:
    """Rank 0 alone pushes: twelve steps are the same as five, a state, and seven from it on other servers."""
    count, first = 61, np.random.default_rng(5).standard_normal(61, np.float32)
    settings: dict[str, Any] = {"optimizer": optimizer, "push": push, "lr": 0.05, **HYPER[optimizer]}
    settings["staleness"] = 0 if push == "mailbox" else None  # what was pushed is there when it is pulled
    found: list[np.ndarray] = []
    for plan in ([12], [5, 7]):
        state = None
        for number, steps in enumerate(plan):
            servers = server_counts(comm)[-1 - number % len(server_counts(comm))]
            blank = np.zeros(count, np.float32)
            with serving(first if state is None else blank, comm, servers=servers, state=state, **settings) as ps:
                if ps.rank == 0:
                    for step in range(steps):
                        ps.pull()
                        ps.push(target(ps.parameters, 0, step + 5 * number))
                    ps.settle()
                    before, state = ps.parameters.copy(), ps.state()
                    assert state["version"].tolist() == [sum(plan[: number + 1])] * servers
                    ps.result()
                    assert np.array_equal(ps.parameters, state["parameters"])
                    assert not np.array_equal(before, ps.parameters)
            state = shared(state, comm)
        found.append(state["parameters"])
    assert np.array_equal(found[0], found[1])


def shared(state: dict[str, np.ndarray] | None, comm: Intracomm) -> dict[str, np.ndarray]:
    """Return rank 0's state on all ranks."""
    layouts = comm.bcast({name: (array.shape, array.dtype.str) for name, array in (state or {}).items()})
    found = {name: np.zeros(*layout) for name, layout in layouts.items()}
    for name, array in found.items():
        if comm.rank == 0 and state is not None:
            array[:] = state[name]
        comm.Bcast(array)
    return found


def test_a_state_can_be_asked_for_while_others_push(comm: Intracomm) -> None:
    count, servers = 4001, server_counts(comm)[-1]
    with serving(np.zeros(count, np.float32), comm, servers=servers) as ps:
        if ps.rank == 0:
            for _ in range(10):
                state = ps.state()
                for shard in range(servers):
                    part = state["parameters"][shard * count // servers : (shard + 1) * count // servers]
                    assert (part == state["version"][shard]).all()
            ps.finish()
            with pytest.raises(RuntimeError, match="finished"):
                ps.state()
        elif not ps.is_server:
            for _ in range(100):
                ps.push(np.ones(count, np.float32))


def test_a_state_that_comes_late_is_not_taken_for_the_next(comm: Intracomm) -> None:
    """The server is busy with something else until rank 0 has given up."""
    with serving(np.zeros(7, np.float32), comm, timeout=1.0, lease=60.0) as ps:
        if ps._server is not None:
            answers, asked = ps._server._answers, comm.Irecv(np.empty(1), 0)
            give, held = answers.give, comm.rank == comm.size - 1

            def late(asks: np.ndarray, message: Any) -> None:
                nonlocal held
                if held and asked.Test():
                    held = False
                    give(asks, message)
                    comm.Isend(np.zeros(1), 0).Wait()
                elif not held:
                    give(asks, message)

            answers.give = late  # type: ignore[method-assign]
        elif ps.rank == 0:
            for push in range(3):
                if push == 1:
                    comm.Isend(np.zeros(1), comm.size - 1).Wait()
                    comm.Recv(np.empty(1), comm.size - 1)
                ps.push(np.ones(7, np.float32))
                ps.pull()
                if push == 0:
                    with pytest.raises(CollectiveTimeout, match="its whole state"):
                        ps.state()
            for expected in (3, 4):
                state = ps.state()
                assert state["version"] == expected
                assert (state["parameters"] == expected).all()
                ps.push(np.ones(7, np.float32))
                ps.pull()


def test_a_late_state_that_nobody_asks_for_again_hinders_nobody(comm: Intracomm) -> None:
    with serving(np.zeros(200_000, np.float32), comm, timeout=1.0, lease=60.0) as ps:
        if ps._server is not None:
            give, until = ps._server._answers.give, time.monotonic() + 1.5
            ps._server._answers.give = lambda *given: give(*given) if time.monotonic() > until else None  # type: ignore
        elif ps.rank == 0:
            with pytest.raises(CollectiveTimeout, match="its whole state"):
                ps.state()
            ps.push(np.ones(200_000, np.float32))
            assert ps.result() == 1


def test_workers_end_when_they_like(comm: Intracomm) -> None:
    with serving(np.zeros(5, np.float32), comm, staleness=1) as ps:
        if not ps.is_server:
            for _ in range(30 * ps.rank):  # rank 0 does nothing at all
                ps.pull()
                ps.push(np.ones(5, np.float32))
            ps.finish()
            with pytest.raises(RuntimeError, match="finished"):
                ps.push(np.ones(5, np.float32))
    with pytest.raises(RuntimeError, match="closed"):
        ps.beat()
    workers = comm.size - 1
    assert ps.staleness.sum() == 30 * workers * (workers - 1) // 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_nobody_waits_for_a_worker_that_settles(comm: Intracomm, staleness: int) -> None:
    """The others are one step further, of which they have begun another, when the first pushes nothing more."""
    if comm.size < 3:
        pytest.skip("two workers and a server are three ranks")
    with serving(np.zeros(3, np.float32), comm, staleness=staleness, timeout=5.0) as ps:
        if not ps.is_server:
            for _ in range(1 if ps.rank == 0 else 4):
                ps.pull()
                ps.push(np.ones(3, np.float32))
            if ps.rank == 0:
                ps.settle()
                pushes = 1 + 4 * (comm.size - 2)
                assert ps.state()["parameters"].tolist() == [pushes] * 3
                with pytest.raises(RuntimeError, match="push: this worker has called settle"):
                    ps.push(np.ones(3, np.float32))
            ps.result()


def test_an_exception_in_one_worker_does_not_stop_the_others(comm: Intracomm) -> None:
    @contextmanager
    def expecting() -> Iterator[None]:
        if comm.rank == 0:
            with pytest.raises(ZeroDivisionError):
                yield
        else:
            yield

    with expecting(), serving(np.zeros(3, np.float32), comm, staleness=0) as ps:
        if not ps.is_server:
            for step in range(20):
                if ps.rank == 0 and step == 5:
                    raise ZeroDivisionError
                ps.pull()
                ps.push(np.ones(3, np.float32))
    assert ps.staleness.sum() == 5 + 20 * (comm.size - 2)


def test_a_server_that_fails_is_named(comm: Intracomm) -> None:
    """The message in its first slot is damaged on its way."""
    failing = comm.rank == comm.size - 1
    error, text = (CorruptPayload, "worker 0") if failing else (RemoteError, f"rank {comm.size - 1}")
    with pytest.raises(error, match=text):
        steps_with_damage(comm)


def steps_with_damage(comm: Intracomm) -> None:
    with serving(np.zeros(64, np.float32), comm, staleness=0) as ps:
        if not ps.is_server:
            if ps.rank == 0:
                damage(ps)
            for _ in range(5):
                ps.pull()
                ps.push(np.ones(64, np.float32))


def damage(ps: ParameterServer) -> None:
    """Let this worker's messages arrive with one bit wrong."""
    assert ps._worker is not None
    region = ps._worker._links[0]._region
    put = region.put

    def wrong(offset: int, *parts: np.ndarray) -> None:
        header, payload = parts[0], parts[1].copy()
        payload[13] ^= 4
        put(offset, header, payload)

    region.put = wrong  # type: ignore[method-assign]


def test_a_header_is_checked() -> None:
    payload = np.arange(40, dtype=np.float32).view(np.uint8)
    good = ShardHeader(3, 160, 3, 7, 0).sealed(payload)
    assert good.words().nbytes == HEADER_NBYTES
    assert good == ShardHeader(3, 160, 3, 7, 0).sealed(payload)
    for other in (ShardHeader(4, 160, 3, 7, 0), ShardHeader(3, 160, 3, 8, 0)):
        assert other.sealed(payload).checksum != good.checksum
    for place in (0, 77, 159):
        changed = payload.copy()
        changed[place] ^= 1
        assert good.sealed(changed) != good
    swapped = payload.copy()
    swapped[4:8], swapped[8:12] = payload[8:12], payload[4:8]
    assert good.sealed(swapped) != good


@pytest.mark.parametrize("on_silence", extent.first(1, ["raise", "drop"]))
def test_a_silent_worker(comm: Intracomm, on_silence: str) -> None:
    if comm.size < 3:
        pytest.skip("somebody else has to go on")
    lease, steps = 1.5, 10
    error: Exception | None = None
    try:
        with serving(np.zeros(3, np.float32), comm, staleness=0, lease=lease, on_silence=on_silence) as ps:
            if not ps.is_server:
                for step in range(steps):
                    if ps.rank == 1 and step == 4:
                        time.sleep(2 * lease)
                    ps.pull()
                    ps.push(np.ones(3, np.float32))
    except (CollectiveTimeout, RemoteError) as caught:
        error = caught
    if on_silence == "drop":
        assert isinstance(error, CollectiveTimeout) == (comm.rank == 1)
        assert ps.staleness.sum() == 4 + steps * (comm.size - 2) if comm.rank != 1 else "dropped" in str(error)
    elif comm.rank == comm.size - 1:
        assert isinstance(error, CollectiveTimeout)
        assert error.missing_ranks == (1,)
        assert "rank 1" in str(error)
    else:
        assert isinstance(error, RemoteError)


def test_a_worker_stopped_while_it_waits_learns_that_it_was_dropped(comm: Intracomm) -> None:
    """It does not take the server for silent, although its deadline passed while it was stopped."""
    if comm.size < 3:
        pytest.skip("somebody else has to go on")
    lease = 1.0
    stops = iter([0.0, 4 * lease])

    def nothing() -> bool:
        time.sleep(next(stops, 0.0))
        return False

    with (
        pytest.raises(CollectiveTimeout) if comm.rank == 1 else nullcontext() as caught,
        serving(np.zeros(3, np.float32), comm, staleness=0, timeout=2 * lease, lease=lease, on_silence="drop") as ps,
    ):
        for _ in range(4 if not ps.is_server else 0):
            ps.pull()
            ps.push(np.ones(3, np.float32))
            if ps.rank == 1:
                ps._control.wait_at_most(nothing, comm.size - 1, "a thing that never comes")
    assert comm.rank != 1 or "has been dropped" in str(caught.value)


@pytest.mark.parametrize("on_silence", extent.first(1, ["drop", "raise"]))
def test_servers_answer_by_messages_until_the_others_have_left(comm: Intracomm, on_silence: str) -> None:
    """A worker stays away for longer than all deadlines; the others end as they do with windows."""
    if comm.size < 3:
        pytest.skip("somebody else has to go on")
    error: Exception | None = None
    try:
        with serving(
            np.zeros(5, np.float32), comm, timeout=0.6, on_silence=on_silence, transport="messages", staleness=0
        ) as ps:
            if ps.is_server:
                ps.serve()
            else:
                ps.pull()
                ps.push(np.ones(5, np.float32))
                if ps.rank == 1:
                    time.sleep(2.2)
                ps.result()
    except MpicollError as caught:
        error = caught
    wait_politely(comm)
    assert not message_memory._live
    if comm.rank == 1:
        assert isinstance(error, CollectiveTimeout)
    elif on_silence == "drop":
        assert error is None
        assert ps.missing == (1,)
    elif comm.rank == comm.size - 1:
        assert isinstance(error, CollectiveTimeout)
        assert error.missing_ranks == (1,)
    else:
        assert isinstance(error, RemoteError)


@pytest.mark.filterwarnings("ignore:parameter server")
@pytest.mark.parametrize("staleness", extent.first(1, [3, None]))
def test_a_worker_may_compute_as_long_as_nobody_waits_for_it(comm: Intracomm, staleness: int | None) -> None:
    """Rank 0 makes no call for longer than its lease; the others push meanwhile, and wait for nobody."""
    lease = 0.5
    with serving(np.zeros(3, np.float32), comm, staleness=staleness, lease=lease, timeout=60.0) as ps:
        if not ps.is_server:
            for step in range(3):
                if ps.rank == 0 and step == 1:
                    time.sleep(4 * lease)
                ps.pull()
                ps.push(np.ones(3, np.float32))
            while ps.rank and ps.pull() < 3 * ps.workers:
                time.sleep(0.01)
            ps.pull()
            assert ps.result() == 3 * ps.workers
    assert ps.staleness.sum() == 3 * (comm.size - 1)


def test_a_worker_that_only_pulls_is_not_silent(comm: Intracomm) -> None:
    """The others wait for its first step."""
    with serving(np.zeros(3, np.float32), comm, staleness=0, lease=0.5) as ps:
        if not ps.is_server:
            until = time.monotonic() + (1.5 if ps.rank == 0 else 0)
            while time.monotonic() < until:
                ps.pull()
                time.sleep(0.01)
            ps.push(np.ones(3, np.float32))
            ps.pull()
    assert ps.staleness.sum() == comm.size - 1


def test_a_wait_has_an_end_and_a_name(comm: Intracomm) -> None:
    """The others wait for rank 1, which comes back when they have given up."""
    if comm.size < 3:
        pytest.skip("nobody to wait for")
    others = [rank for rank in range(comm.size - 1) if rank != 1]
    with serving(np.zeros(3, np.float32), comm, staleness=0, timeout=2.0, lease=30.0) as ps:
        if ps.rank in others:
            ps.push(np.ones(3, np.float32))
            with pytest.raises(CollectiveTimeout, match="rank 1") as caught:
                ps.pull()
            assert caught.value.missing_ranks == (1,)
            comm.Isend(np.zeros(1), 1).Wait()
        elif ps.rank == 1:
            while not all(comm.Iprobe(rank) for rank in others):
                time.sleep(0.01)
            for rank in others:
                comm.Recv(np.empty(1), rank)


def test_who_does_not_come_to_the_end_is_named(comm: Intracomm) -> None:
    """Rank 0 comes so late that the others have given up, and yet nothing hangs."""
    if comm.rank == 0:
        with serving(np.zeros(3, np.float32), comm, timeout=1.0, lease=30.0) as ps:
            ps.finish()
            for rank in range(1, comm.size):
                comm.Recv(np.empty(1), rank)
    else:
        with (
            pytest.raises(CollectiveTimeout, match="rank 0") as caught,
            serving(np.zeros(3, np.float32), comm, timeout=1.0, lease=30.0),
        ):
            pass
        assert caught.value.missing_ranks == (0,)
        comm.Isend(np.zeros(1), 0).Wait()


def test_long_work_with_signs_of_life(comm: Intracomm) -> None:
    with serving(np.zeros(3, np.float32), comm, staleness=0, lease=1.5) as ps:
        if not ps.is_server:
            for _ in range(10 if ps.rank == 0 else 0):
                time.sleep(0.2)
                ps.beat()
            ps.push(np.ones(3, np.float32))
    assert ps.staleness.sum() == comm.size - 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"initial": [1.0, 2.0]}, "initial"),
    ({"initial": np.zeros((2, 2), np.float32)}, "initial"),
    ({"initial": np.zeros(9, np.int32)}, "initial"),
    ({"initial": np.zeros(0, np.float32)}, "initial"),
    ({"servers": 0}, "servers"),
    ({"servers": 99}, "servers"),
    ({"servers": 1.5}, "servers"),
    ({"optimizer": "magic"}, "optimizer"),
    ({"optimizer": "sgd", "momentum": 0.9}, "momentum"),
    ({"optimizer": "momentum", "momentum": 1.0}, "momentum"),
    ({"optimizer": "adam", "push": "direct"}, "optimizer"),
    ({"lr": float("nan")}, "lr"),
    ({"lr": "fast"}, "lr"),
    ({"staleness": -1}, "staleness"),
    ({"staleness": 0, "push": "direct"}, "staleness"),
    ({"backup": 1}, "backup"),
    ({"backup": 1, "staleness": 3}, "backup"),
    ({"backup": 99, "staleness": 0}, "backup"),
    ({"damping": True, "push": "direct"}, "damping"),
    ({"damping": True, "staleness": 0}, "damping"),
    ({"state": {"parameters": np.zeros(9, np.float32)}}, "state"),
    ({"state": 7}, "state"),
    ({"compression": "nothing"}, "compression"),
    ({"compression": "common"}, "compression"),
    ({"compression": "int8", "push": "direct"}, "compression"),
    ({"compression": "int8", "initial": np.zeros(9)}, "compression"),
    ({"error_feedback": True}, "error_feedback"),
    ({"push": "by hand"}, "push"),
    ({"slots": 0}, "slots"),
    ({"timeout": 0}, "timeout"),
    ({"lease": -1}, "lease"),
    ({"on_silence": "wait"}, "on_silence"),
]


@pytest.mark.parametrize(("wrong", "name"), WRONG, ids=str)
def test_wrong_arguments_are_refused_everywhere(comm: Intracomm, wrong: dict[str, Any], name: str) -> None:
    for refusing in (range(comm.size), range(1)):
        arguments = {"initial": np.zeros(9, np.float32), **(wrong if comm.rank in refusing else {})}
        kinds = (TypeError, ValueError) if comm.rank in refusing else RemoteError
        with pytest.raises(kinds, match=name):
            serving(arguments.pop("initial"), comm, **arguments)
    with serving(np.zeros(9, np.float32), comm):
        pass


def test_servers_of_a_node_need_its_memory_together(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would find enough for itself."""
    nodes = comm.channel.node_ids
    if comm.size < 3 or nodes[-1] != nodes[-2]:
        pytest.skip("two servers on a node")
    initial, needed = np.zeros(100_000, np.float32), []
    kinds = ValueError if comm.rank >= comm.size - 2 else RemoteError
    monkeypatch.setattr(windows, "free_nbytes", lambda: 1)
    with pytest.raises(kinds, match="the 2 servers on the node of rank") as caught:
        serving(initial, comm, servers=2)
    needed.append(int(str(caught.value).split(" need ")[1].split()[0]))
    monkeypatch.setattr(windows, "free_nbytes", lambda: needed[0] - 1)
    with pytest.raises(kinds, match=f"need {needed[0]} bytes of .* and {needed[0] - 1} are free"):
        serving(initial, comm, servers=2)
    monkeypatch.setattr(windows, "free_nbytes", lambda: needed[0])
    with serving(initial, comm, servers=2):
        pass


def test_a_refusal_is_told_to_ranks_that_have_waited_for_long(comm: Intracomm) -> None:
    """They look at what others are in meanwhile; that one has refused is no difference between calls."""
    if comm.rank == comm.size - 1:
        time.sleep(0.7)
    with pytest.raises(ValueError if comm.rank == 0 else RemoteError, match="staleness"):
        serving(np.zeros(9, np.float32), comm, staleness=-1 if comm.rank == 0 else 1)


def test_ranks_that_differ_are_told(comm: Intracomm) -> None:
    with pytest.raises(MismatchError, match="ParameterServer"):
        serving(np.zeros(9 + (comm.rank == 0), np.float32), comm)


def test_wrong_vectors_change_nothing(comm: Intracomm) -> None:
    with serving(np.zeros(9, np.float32), comm) as ps:
        if ps.is_server:
            with pytest.raises(RuntimeError, match="server"):
                ps.pull()
        else:
            with pytest.raises(RuntimeError, match="worker"):
                ps.serve()
            for bad in (
                np.ones(8, np.float32),
                np.ones(9),
                np.ones((3, 3), np.float32),
                np.ones(18, np.float32)[::2],
                5,
            ):
                with pytest.raises((TypeError, ValueError), match="gradient"):
                    ps.push(bad)  # type: ignore[arg-type]
                with pytest.raises((TypeError, ValueError), match="out"):
                    ps.pull(bad)  # type: ignore[arg-type]
            for begin, size in ((-1, 2), (9, 1), (3, 7), (0, 0), (1.5, 2)):
                for call in (ps.push, ps.pull):
                    with pytest.raises((TypeError, ValueError), match="first"):
                        call(np.ones(size, np.float32), first=begin)
            fixed = np.ones(9, np.float32)
            fixed.setflags(write=False)
            with pytest.raises(ValueError, match="out"):
                ps.pull(fixed)
            assert ps.result() == 0
            assert not ps.parameters.any()
    with serving(np.zeros(9, np.float32), comm, push="direct") as ps:
        if not ps.is_server:
            with pytest.raises(ValueError, match="snapshot"):
                ps.pull(snapshot=True)
