"""Replicas of a parameter server's shards have the bits of the shards, and no worker sees what they do not have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm, ParameterServer
from mpicoll.errors import CorruptPayload, RemoteError
from mpicoll.parameter_server import message_memory
from mpicoll.parameter_server.remote_memory import word_at
from mpicoll.parameter_server.serve import Server
from mpicoll.parameter_server.shard_memory import HEADER_NBYTES
from mpicoll.parameter_server.shard_replicas import ShardReplica
from mpicoll.parameter_server.windows import remote_memory

pytestmark = pytest.mark.mpi
COUNT = 501
MODES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum, one slot": {"optimizer": "momentum", "momentum": 0.5, "slots": 1},
    "adam, damped": {"optimizer": "adam", "damping": True},
    "compressed": {"compression": "topk:0.1", "optimizer": "adagrad"},
    "synchronous": {"staleness": 0, "optimizer": "adam"},
    "backup": {"staleness": 0, "backup": 1},
    "compressed steps": {"staleness": 0, "compression": "int8"},
    "pulls": {"pull_compression": "int8", "read_own": False, "optimizer": "momentum", "momentum": 0.9},
}


def serving(comm: Intracomm, **settings: Any) -> ParameterServer:
    servers = min(2, comm.size - 1)
    more = {"lr": 0.01, "timeout": 20.0, "servers": servers, "transport": "messages", "replicas": servers, **settings}
    return ParameterServer(np.linspace(-1, 1, COUNT).astype(np.float32), comm=comm, **more)


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(COUNT).astype(np.float32)


def copies(comm: Intracomm, ps: ParameterServer) -> list[dict[int, bytes]]:
    """Return all state of all copies of each server, by shard."""
    held = {} if ps._server is None else {shard: each.packed(None).tobytes() for shard, each in ps._server.held.items()}
    return [each for each in comm.allgather(held) if each]


@pytest.fixture(autouse=True)
def _enough_ranks(comm: Intracomm) -> None:
    if comm.size < 3:
        pytest.skip("a worker and two servers are three ranks")


@pytest.mark.parametrize("name", MODES)
def test_replicas_have_the_bits_of_the_shards(comm: Intracomm, name: str) -> None:
    settings, steps = MODES[name], 25
    if settings.get("backup", 0) >= comm.size - 2:
        pytest.skip("too few workers")
    with serving(comm, **settings) as ps:
        if not ps.is_server:
            for step in range(steps):
                if step % 5 == 0:  # gradients become so stale that damping matters
                    ps.pull()
                ps.push(gradient(ps.rank, step), 0.01 + 0.002 * step)
            ps.result()
    found = copies(comm, ps)
    assert len(found) == 2
    assert found[0].keys() == found[1].keys() == {0, 1}
    assert found[0] == found[1]
    versions = [np.frombuffer(message[:8], np.int64)[0] for message in found[0].values()]
    assert settings.get("backup") or versions == [steps * (comm.size - 2)] * 2


@pytest.mark.parametrize("settings", [{"optimizer": "adagrad"}, {"optimizer": "adam", "staleness": 0}], ids=str)
def test_replicas_take_gradients_of_parts(comm: Intracomm, settings: dict[str, Any]) -> None:
    with serving(comm, **settings) as ps:
        for step in range(0 if ps.is_server else 20):
            first = (37 * step + 90 * ps.rank) % 400
            ps.push(gradient(ps.rank, step)[: 1 + 5 * step], first=first)
    found = copies(comm, ps)
    assert found[0] == found[1]


def test_a_server_that_has_ended_serves_its_replicas(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last server takes updates of its replica only when all pushes to its own shard are applied."""
    take, end, ended = ShardReplica.take, Server._end_replicas, [comm.rank < comm.size - 1]

    def end_later(server: Server) -> None:
        ended.append(True)
        end(server)

    monkeypatch.setattr(ShardReplica, "take", lambda replica: any(ended) and take(replica))
    monkeypatch.setattr(Server, "_end_replicas", end_later)
    with serving(comm, read_own=False) as ps:
        push_once(ps)
    found = copies(comm, ps)
    assert found[0] == found[1]


@pytest.mark.parametrize("staleness", [None, 0])
def test_no_worker_sees_what_a_replica_does_not_have(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, staleness: int | None
) -> None:
    """Replicas take no updates until worker 0 has looked many times for the effect of its push."""
    told, take, open_ = comm.channel.comm.Dup(), ShardReplica.take, []

    def held_back(replica: ShardReplica) -> bool:
        if not open_ and told.Iprobe(0, 9):
            told.Recv(np.empty(1), 0, 9)
            open_.append(True)
        return bool(open_) and take(replica)

    monkeypatch.setattr(ShardReplica, "take", held_back)
    with serving(comm, read_own=False, slots=1, staleness=staleness) as ps:
        if not ps.is_server:
            ps.push(gradient(ps.rank, 0))
        if ps.rank == 0:
            try:
                look_for_the_push(ps)
            finally:  # a failure of this test must not let the servers wait
                for server in (ps.size - 1, ps.size - 2):
                    told.Send(np.zeros(1), server, 9)
        if not ps.is_server:
            assert ps.result() == ps.workers
    told.Free()


def look_for_the_push(ps: ParameterServer) -> None:
    """Check many times that this worker sees nothing but the initial parameters."""
    initial = np.linspace(-1, 1, COUNT).astype(np.float32)
    for _ in range(300):
        for link in ps._worker._links:  # type: ignore[union-attr]
            assert not link.has_room()
            assert link.seen == 0
            part = np.empty(link.part.stop - link.part.start, np.float32)
            link.pull(0, part)
            assert np.array_equal(part, initial[link.part])


def test_a_damaged_update_is_found(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    applied = ShardReplica._apply

    def damaged(replica: ShardReplica) -> None:
        replica._message[HEADER_NBYTES + 5] ^= 1
        applied(replica)

    monkeypatch.setattr(ShardReplica, "_apply", damaged)
    text = r"for its replica: its checksum is wrong|a server, failed"
    with pytest.raises((CorruptPayload, RemoteError), match=text), serving(comm) as ps:
        push_once(ps)


def push_once(ps: ParameterServer) -> None:
    if not ps.is_server:
        ps.push(gradient(ps.rank, 0))
        ps.result()


# ---- after a death ---------------------------------------------------------------------------------------------------


@contextmanager
def left_of(comm: Intracomm, dead: list[int]) -> Iterator[MPI.Intracomm | None]:
    """Communicator of the ranks that are left; None on the dead ones."""
    found = MPI.Intracomm(comm).Split(int(comm.rank in dead), comm.rank)
    yield None if comm.rank in dead else found
    found.Free()


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("name", ["adam, damped", "synchronous", "pulls"])
def test_the_state_is_rescued_without_a_server(comm: Intracomm, name: str, victim: int) -> None:
    """All have taken some steps when the server seems to die; the others continue with its bits."""
    with serving(comm, **MODES[name]) as ps:
        if not ps.is_server:
            for step in range(7):
                ps.pull()
                ps.push(gradient(ps.rank, step))
            ps.result()
    expected = {} if ps._server is None else {shard: each.packed(None) for shard, each in ps._server.held.items()}
    with left_of(comm, [comm.size - victim]) as left:
        if left is not None:
            state = ps.rescue(left)
            assert state["version"].tolist() == [7 * ps.workers] * 2
            assert len({vector.tobytes() for vector in left.allgather(state["parameters"])}) == 1
            for shard, message in expected.items():
                start, stop = ps._session.layout.bounds(shard)
                assert message[16 : 16 + 4 * (stop - start)].tobytes() == state["parameters"][start:stop].tobytes()
            settings = {**MODES[name], "servers": 1, "replicas": 1, "state": state}
            with serving(Intracomm(left), **settings) as again:
                if again.rank == 0:
                    found = np.empty(COUNT, np.float32)
                    again.pull(found)
                    assert np.array_equal(found, state["parameters"])
                    again.push(gradient(again.rank, 7))
                    assert again.result() == 7 * ps.workers + 1


def test_a_shard_without_a_copy_is_lost(comm: Intracomm) -> None:
    with serving(comm, replicas=1):
        pass
    ps = serving(comm, replicas=1)
    ps.close()
    with left_of(comm, [comm.size - 1]) as left:
        if left is not None:
            with pytest.raises(
                RemoteError, match=rf"parameters 250 to 500 are lost: rank {comm.size - 1}, their server"
            ):
                ps.rescue(left)


def test_the_newest_copy_is_taken(comm: Intracomm) -> None:
    """A server may have applied updates that its replica has not: they are not thrown away where it is alive."""
    with serving(comm) as ps:
        if not ps.is_server:
            ps.push(gradient(ps.rank, 0))
    if ps._server is not None and ps.rank == comm.size - 1:
        ps._server.held[1].apply(np.ones(COUNT - COUNT // 2, np.float32), 1.0)
    state = ps.rescue(MPI.Intracomm(comm))
    assert state["version"].tolist() == [ps.workers, ps.workers + 1]


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["windows", "messages"])
def test_remote_memory_does_what_its_interface_says(
    comm: Intracomm, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_memory, "CHUNK_NBYTES", 4096)
    memory = remote_memory(MPI.Intracomm(comm).Dup(), transport, 20.0)
    owner, count = comm.size - 1, 3001
    vectors = 64 + 8 * comm.size
    region = memory.region(owner, vectors + (comm.size + 1) * 8 * count)
    memory.barrier()
    mine = np.random.default_rng(comm.rank).standard_normal(count)
    region.replace(vectors + comm.rank * 8 * count, mine)
    region.add(vectors + comm.size * 8 * count, np.full(count, 1.0 + comm.rank))
    region.fetch_add(0, 1)
    first = region.decide(word_at(1), comm.rank + 1)
    region.put(64 + 8 * comm.rank, np.array([comm.rank], np.int32), np.array([7], np.int32))
    memory.barrier()
    found, words = np.empty(count), np.empty(1, np.int64)
    for rank in range(comm.size):
        region.read(vectors + rank * 8 * count, found)
        assert np.array_equal(found, np.random.default_rng(rank).standard_normal(count))
    region.read(vectors + comm.size * 8 * count, found)
    assert (found == sum(range(1, comm.size + 1))).all()
    assert region.fetch_add(0, 0) == comm.size
    region.read(0, words)
    assert words[0] == comm.size
    if comm.rank == owner:
        region.refresh()
        pairs = region.local[64 : 64 + 8 * comm.size].view(np.int32)
        assert pairs.tolist() == [part for rank in range(comm.size) for part in (rank, 7)]
    memory.settle()
    assert 1 <= first <= comm.size
    assert len(set(comm.allgather(first))) == 1
    region.close()
    memory.comm.Free()


def test_messages_keep_every_push(comm: Intracomm) -> None:
    initial, steps = np.zeros(200_003, np.float32), 5
    with ParameterServer(initial, comm=comm, lr=-1.0, timeout=20.0, transport="messages") as ps:
        for step in range(0 if ps.is_server else steps):
            ps.push(np.full(initial.size, step + 1.0, np.float32))
        if not ps.is_server:
            assert ps.result() == steps * ps.workers
            assert (ps.parameters == ps.workers * steps * (steps + 1) / 2).all()
    with ParameterServer(initial, comm=comm, lr=-1.0, timeout=20.0, transport="messages", push="direct") as ps:
        if not ps.is_server:
            ps.push(np.ones(initial.size, np.float32))
            ps.result()
            assert (ps.parameters == ps.workers).all()
    assert not message_memory._live


def test_a_server_that_does_not_answer_is_named(comm: Intracomm) -> None:
    memory = remote_memory(MPI.Intracomm(comm).Dup(), "messages", 0.5)
    region = memory.region(0, 64)
    comm.Barrier()
    if comm.rank:
        with pytest.raises(TimeoutError, match=r"waited for rank 0 to access its memory; it gave up after"):
            region.fetch_add(0, 1)
    comm.Barrier()
    memory.settle()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replicas": 3, "servers": 2}, "replicas: 3 copies of a shard need as many servers, and servers is 2"),
        ({"replicas": 2, "transport": "windows"}, "replicas: 2 needs transport='messages', since windows"),
        ({"replicas": 2, "push": "direct"}, "replicas: 2 needs push='mailbox'"),
        ({"replicas": 0}, "replicas: 0 is not a whole number of at least 1"),
        ({"transport": "pigeons", "replicas": 1}, "transport: 'pigeons' is not one of windows, messages"),
    ],
)
def test_wrong_arguments_are_refused(comm: Intracomm, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        serving(comm, **settings)
