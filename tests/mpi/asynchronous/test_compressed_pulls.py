"""With compressed pulls every worker holds the published parameters, bit for bit, and nothing else changes."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest

from mpicoll import Intracomm, ParameterServer
from mpicoll.compression import Compressor, Key, compressor
from mpicoll.errors import CollectiveTimeout, CorruptPayload
from mpicoll.optim.optimizers import OPTIMIZERS, checked_settings
from mpicoll.parameter_server import serve
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES, Places
from tests import extent
from tests.mpi.asynchronous.test_parameter_server import delays, server_counts, serving, shared, target

pytestmark = pytest.mark.mpi
COUNT = 3001


@pytest.fixture(autouse=True)
def _enough_ranks(comm: Intracomm) -> None:
    if comm.size < 2:
        pytest.skip("a worker and a server are two ranks")


def bits(parameters: np.ndarray) -> bytes:
    return hashlib.sha256(parameters.data).digest()


def start() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(COUNT).astype(np.float32)


def in_one_process(optimizer: str, spec: str, servers: int, workers: int, steps: int) -> list[bytes]:
    """Return digests of the published parameters before each step, and of the servers' own at the end."""
    parameters, published, found = start(), start(), []
    cuts = [(shard * COUNT // servers, (shard + 1) * COUNT // servers) for shard in range(servers)]
    settings = dict(checked_settings(optimizer, {}))
    rules = [OPTIMIZERS[optimizer](parameters[slice(*cut)], settings) for cut in cuts]
    for step in range(steps):
        found.append(bits(published))
        gradients = [target(published, worker, step) for worker in range(workers)]
        total = sum(gradients[1:], gradients[0])
        for cut, rule in zip(cuts, rules, strict=True):
            part, codec = slice(*cut), compressor(spec).part(*cut)
            rule.apply(total[part], 0.05)
            published[part] += through(codec, parameters[part] - published[part], Key(step=step, first=cut[0]))
    return [*found, bits(parameters)]


def through(codec: Compressor, vector: np.ndarray, key: Key) -> np.ndarray:
    room = np.empty(codec.wire_nbytes(vector.size) // 4, np.uint32).view(np.uint8)
    decoded = np.empty_like(vector)
    codec.decompress(room[: codec.compress(vector, room, key)], decoded)
    return decoded


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("spec", ["int8", "topk:0.05", "sign", "fp16"])
def test_synchronous_steps_are_those_of_one_process(comm: Intracomm, spec: str, optimizer: str) -> None:
    steps = 10
    for servers in server_counts(comm):
        expected = in_one_process(optimizer, spec, servers, comm.size - servers, steps)
        settings = {"servers": servers, "optimizer": optimizer, "staleness": 0, "lr": 0.05, "pull_compression": spec}
        with serving(start(), comm, **settings) as ps:
            if not ps.is_server:
                for step in range(steps):
                    assert ps.pull() == step * ps.workers
                    assert bits(ps.parameters) == expected[step]
                    ps.push(target(ps.parameters, ps.rank, step))
                ps.result()
                assert bits(ps.parameters) == expected[steps]


@pytest.mark.parametrize(("spec", "read_own"), [("int8", True), ("topk:0.02", False), ("sign", False)])
def test_workers_hold_what_was_published(comm: Intracomm, spec: str, read_own: bool) -> None:
    """Workers pull in orders and at times of their own; the last of them so seldom that deltas do not suffice."""
    servers = server_counts(comm)[-1]
    seen: list[tuple[int, int, bytes]] = []
    with serving(start(), comm, lr=0.05, servers=servers, pull_compression=spec, read_own=read_own) as ps:
        if ps._server is not None:
            record(ps, seen)
            ps.serve()
        else:
            for step, _ in enumerate(delays(ps.rank, 60)):
                if ps.rank < ps.workers - 1 or step % 15 == 0:
                    ps.pull()
                    assert ps._worker is not None
                    for shard, link in enumerate(ps._worker._links):
                        seen.append((shard, link.pulled, bits(ps.parameters[link.part])))
                ps.push(target(ps.parameters, ps.rank, step))
            ps.result()
            final = bits(ps.parameters)
    everywhere = comm.allgather(seen)
    published = {entry for rank in range(ps.workers, comm.size) for entry in everywhere[rank]}
    pulled = {entry for rank in range(ps.workers) for entry in everywhere[rank]}
    assert pulled <= published
    assert len(pulled) >= (6 if ps.workers > 1 else 4)  # a single worker pulls every 15th step
    assert len(set(comm.allgather(b"" if ps.is_server else final)) - {b""}) == 1


def record(ps: ParameterServer, seen: list[tuple[int, int, bytes]]) -> None:
    """Note version and bits of all that a server publishes."""
    assert ps._server is not None
    publisher, shard = ps._server._publisher, ps.rank - ps.workers
    assert publisher is not None
    publish = publisher.publish
    seen.append((shard, 0, bits(publisher.published)))

    def noted(parameters: np.ndarray, version: int) -> None:
        publish(parameters, version)
        seen.append((shard, version, bits(publisher.published)))

    publisher.publish = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("read_own", [True, False])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_on_staleness_holds(comm: Intracomm, staleness: int, read_own: bool) -> None:
    """Worker w adds one to element w, and deltas lack nothing: what is pulled says how many pushes are there."""
    servers = 2 if comm.size > 3 else 1
    workers = comm.size - servers
    plan = [60 // (workers + worker) for worker in range(workers)]
    settings = {"servers": servers, "staleness": staleness, "pull_compression": "topk:1.0", "read_own": read_own}
    with serving(np.zeros(workers + 4, np.float32), comm, **settings) as ps:
        if not ps.is_server:
            one = np.zeros(ps.count, np.float32)
            one[ps.rank] = 1
            for step, _ in enumerate(delays(ps.rank, plan[ps.rank])):
                ps.pull()
                for worker in range(workers):
                    assert ps.parameters[worker] >= min(step - staleness, plan[worker])
                if read_own:
                    assert ps.parameters[ps.rank] == step
                ps.push(one)
    assert ps.staleness.sum() == sum(plan)


def test_a_delta_serves_several_pushes(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker waits for a push: there is a delta for at least as many pushes as workers."""
    monkeypatch.setattr(serve, "_PUBLISH_SECONDS", 1e9)
    pushes = 12
    with serving(start(), comm, pull_compression="int8", read_own=False, slots=pushes + 1) as ps:
        if ps._server is not None:
            ps.serve()
            assert ps._server.version == pushes * ps.workers
        else:
            ps.pull()
            for step in range(pushes):
                ps.push(target(ps.parameters, ps.rank, step))
            if ps.rank == 0:
                while ps.pull() <= (pushes - 1) * ps.workers:
                    time.sleep(0.001)
                assert ps._worker is not None
                words = ps._worker._links[0].read_words()
                assert 1 <= words[Places.DELTAS] <= pushes
                for worker in range(1, ps.workers):
                    comm.Send(np.zeros(1), worker)
            else:
                comm.Recv(np.empty(1), 0)
            ps.result()


def test_pushes_are_published_soon(comm: Intracomm) -> None:
    """Rank 0 alone pushes, once, and does not wait for it; the others see it, although they push nothing."""
    with serving(start(), comm, pull_compression="int8", read_own=False) as ps:
        if not ps.is_server:
            if ps.rank == 0:
                ps.push(np.ones(COUNT, np.float32))
            while ps.pull() < 1:
                time.sleep(0.001)


def test_parts_and_snapshots(comm: Intracomm) -> None:
    with serving(start(), comm, servers=server_counts(comm)[-1], pull_compression="int8") as ps:
        if not ps.is_server:
            for step in range(5):
                ps.push(target(start(), ps.rank, step)[:100], first=step * 50)
                ps.pull(snapshot=True)
            rows = np.empty(1000, np.float32)
            ps.pull(rows, first=1000)
            assert np.array_equal(rows, ps.parameters[1000:2000])
            ps.result()


def test_who_begins_elsewhere_gets_the_servers_parameters(comm: Intracomm) -> None:
    with serving(start() if comm.rank == comm.size - 1 else start() + comm.rank, comm, pull_compression="sign") as ps:
        if not ps.is_server:
            ps.pull()
            assert bits(ps.parameters) == bits(start())
            assert ps.read_nbytes == (4 * COUNT + HEADER_NBYTES if ps.rank else 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_state_is_what_it_goes_on_from(comm: Intracomm, optimizer: str) -> None:
    """Rank 0 alone pushes: twelve steps are the same as five, a state, and seven from it."""
    settings: dict[str, Any] = {"optimizer": optimizer, "lr": 0.05, "staleness": 0, "pull_compression": "topk:0.02"}
    found = []
    for plan in ([12], [5, 7]):
        state = None
        for number, steps in enumerate(plan):
            initial = start() if state is None else np.zeros(COUNT, np.float32)
            with serving(initial, comm, state=state, **settings) as ps:
                if ps.rank == 0:
                    for step in range(steps):
                        ps.pull()
                        ps.push(target(ps.parameters, 0, step + 5 * number))
                    ps.settle()
                    ps.pull()
                    published, state = ps.parameters.copy(), ps.state()
                    assert bits(state["published"]) == bits(published)
                    assert ps.read_nbytes < 12 * 4 * COUNT * 0.1
                    ps.result()
                    assert bits(ps.parameters) == bits(state["parameters"]) != bits(published)
            state = shared(state, comm)
        found.append(state)
    for name in ("parameters", "published"):
        assert bits(found[0][name]) == bits(found[1][name])


def test_states_with_and_without_published_parameters(comm: Intracomm) -> None:
    state = {"parameters": start(), "version": np.array([4]), "steps": np.array([4])}
    for given, spec, expected in (
        (state, "int8", start()),
        ({**state, "published": start() + 1}, "int8", start() + 1),
        ({**state, "published": start() + 1}, None, start()),
    ):
        with serving(np.zeros(COUNT, np.float32), comm, state=given, pull_compression=spec) as ps:
            if not ps.is_server:
                assert ps.pull() == 4
                assert bits(ps.parameters) == bits(expected)
                ps.result()
                assert bits(ps.parameters) == bits(start())


def test_a_damaged_delta_is_not_applied(comm: Intracomm) -> None:
    """The server writes one bit of its first delta wrong."""
    expecting = pytest.raises(CorruptPayload, match="message 0 of the server's deltas")
    with serving(start(), comm, staleness=0, pull_compression="int8") as ps:
        if ps._server is not None:
            damage(ps)
            ps.serve()
        else:
            ps.pull()
            ps.push(target(ps.parameters, ps.rank, 0))
            with expecting:
                ps.pull()
            assert bits(ps.parameters) == bits(start())


def damage(ps: ParameterServer) -> None:
    assert ps._server is not None
    region, places = ps._server._region, ps._server._places
    replace = region.replace

    def wrong(offset: int, values: np.ndarray) -> None:
        if offset == places.delta(0):
            values = values.copy()
            values[20] ^= 1 << 33
        replace(offset, values)

    region.replace = wrong  # type: ignore[method-assign]


def test_a_dropped_worker_does_not_hold_up_the_others(comm: Intracomm) -> None:
    """Rank 1 has asked for all parameters, more than MPI sends unasked, and takes nothing until it was dropped."""
    if comm.size < 3:
        pytest.skip("somebody else has to go on")
    lease, steps, count = 1.3, 8, 200_000
    settings = {"lease": lease, "timeout": 4.0, "on_silence": "drop", "pull_compression": "topk:0.01"}
    error: Exception | None = None
    try:
        with serving(np.zeros(count, np.float32), comm, staleness=0, **settings) as ps:
            for step in range(0 if ps.is_server else steps):
                if ps.rank == 1 and step == 3:
                    assert ps._worker is not None
                    (link,) = ps._worker._links
                    link.ask_parameters()
                    time.sleep(3 * lease)
                ps.pull()
                ps.push(np.ones(count, np.float32))
            if not ps.is_server:
                ps.result()
    except CollectiveTimeout as caught:
        error = caught
    if comm.rank == 1:
        assert "dropped" in str(error)
    else:
        assert error is None
        assert ps.staleness.sum() == 3 + steps * (comm.size - 2)


@pytest.mark.parametrize("spec", extent.first(1, ["topk:0.05", "int8"]))
def test_a_late_answer_is_not_taken_for_the_next(comm: Intracomm, spec: str) -> None:
    """The server answers after rank 0 has given up; its next pull has the newer parameters all the same."""
    with serving(start(), comm, timeout=1.0, lease=60.0, pull_compression=spec, servers=1) as ps:
        if ps._server is not None:
            give, until = ps._server._pulls.give, time.monotonic() + 2.0
            ps._server._pulls.give = lambda *given: give(*given) if time.monotonic() > until else None  # type: ignore
        elif ps.rank == 0:
            assert ps._worker is not None
            follower = ps._worker._links[0].follower
            assert follower is not None
            follower.parameters[:] = 0  # not those of the server
            with pytest.raises(CollectiveTimeout, match="all published parameters"):
                ps.pull()
            for _ in range(30):  # the others wait for it
                time.sleep(0.05)
                ps.beat()
            ps.push(np.ones(COUNT, np.float32))
            assert ps.pull() == 1
            assert bits(ps.parameters) == bits(ps.state()["published"])


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pull_compression": "nothing"}, "pull_compression"),
    ({"pull_compression": 7}, "pull_compression"),
    ({"pull_compression": "common"}, "pull_compression"),
    ({"pull_compression": "powersgd:2"}, "pull_compression"),
    ({"pull_compression": "qsgd"}, "unbiased"),
    ({"pull_compression": "int8", "push": "direct"}, "pull_compression.*mailbox"),
    ({"pull_compression": "int8", "initial": np.zeros(9)}, "pull_compression.*float64"),
    ({"state": {"parameters": np.zeros(9, np.float32), "published": np.zeros(8, np.float32)}}, "state"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG, ids=str)
def test_wrong_arguments_are_refused(comm: Intracomm, wrong: dict[str, Any], says: str) -> None:
    arguments = {"initial": np.zeros(9, np.float32), **wrong}
    with pytest.raises((TypeError, ValueError), match=says):
        serving(arguments.pop("initial"), comm, **arguments)
