"""Mailboxes between equals lose nothing and keep their order; what is built on them has everybody's sum, or mean."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.decentralized.mailboxes import Counter, PeerMailboxes
from mpicoll.errors import CollectiveTimeout
from mpicoll.parameter_server.windows import remote_memory
from mpicoll.train.asynchronous.decentralized_exchange import AllToAllExchange, GossipExchange
from mpicoll.train.config import TrainConfig

pytestmark = pytest.mark.mpi
CONFIG = TrainConfig(optimizer="sgd", momentum=0.0, timeout=20.0)


def content(source: int, destination: int, number: int) -> np.ndarray:
    random = np.random.default_rng([source, destination, number])
    return random.integers(0, 256, 4 * int(random.integers(0, 300)), np.uint8)


def test_messages_come_once_and_in_order(comm: Intracomm) -> None:
    """With two slots in each mailbox these wrap a hundred times."""

    def others_of(rank: int) -> list[int]:
        return [other for other in range(comm.size) if other != rank]

    count, others = 200, others_of(comm.rank)
    peers = PeerMailboxes(MPI.Intracomm(comm), others_of, 1200, slots=2, timeout=20)
    sent, taken = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
    while any(number < count for number in (*sent.values(), *taken.values())):
        for other in others:
            if sent[other] < count and peers.has_room(other):
                peers.send(other, content(comm.rank, other, sent[other]), sent[other] / 3, sent[other])
                sent[other] += 1
        for mail in peers.take():
            number = taken[mail.source]
            assert np.array_equal(mail.payload, content(mail.source, comm.rank, number))
            assert (mail.number, mail.version) == (number / 3, number)
            taken[mail.source] += 1
    peers.finish()
    peers.wait(lambda: not peers.working(), peers.working, "the others")
    peers.close()


@pytest.mark.parametrize("transport", ["windows", "messages"])
def test_every_number_is_drawn_once(comm: Intracomm, transport: str) -> None:
    memory, most = remote_memory(MPI.Intracomm(comm).Dup(), transport, 20.0), 500
    counter = Counter(memory, owner=comm.size - 1)
    mine = np.zeros(most, np.int64)
    while (number := counter.draw()) < most:
        mine[number] += 1
    assert counter.draw(0) >= most
    counter.close()
    comm.Allreduce(MPI.IN_PLACE, mine)
    assert (mine == 1).all()
    memory.comm.Free()


@pytest.mark.parametrize("transport", ["windows", "messages"])
def test_a_counter_may_begin_where_another_ended(comm: Intracomm, transport: str) -> None:
    memory = remote_memory(MPI.Intracomm(comm).Dup(), transport, 20.0)
    counter = Counter(memory, owner=0, start=7, failed=True)
    assert counter.draw() >= 7
    assert counter.is_failed()
    counter.close()
    memory.comm.Free()


def test_a_silent_peer_is_named(comm: Intracomm) -> None:
    """The others wait for room in the mailbox of rank 0, which does nothing; then it empties it."""
    if comm.size == 1:
        pytest.skip("nobody to wait for")
    peers = PeerMailboxes(MPI.Intracomm(comm), lambda rank: [0] if rank else [], 8, slots=1, timeout=1.0)
    if comm.rank:
        peers.send(0, np.zeros(8, np.uint8))
        with pytest.raises(CollectiveTimeout, match="rank 0") as caught:
            peers.wait(lambda: peers.has_room(0), lambda: [0], "room")
        assert caught.value.missing_ranks == (0,)
        comm.Isend(np.zeros(1), 0).Wait()
    for source in range(1, comm.size if comm.rank == 0 else 1):
        comm.Recv(np.empty(1), source)
    peers.close()


def pushes(rank: int, count: int) -> list[np.ndarray]:
    random = np.random.default_rng(rank)
    return [random.integers(-3, 4, count).astype(np.float32) for _ in range(25)]


@pytest.mark.parametrize("compression", [None, "fp16", "topk:0.5"])
def test_every_replica_takes_every_gradient(comm: Intracomm, compression: str | None) -> None:
    """Sums of small integers are exact in any order, and in half precision; of the rest, some is owed at the end."""
    config = TrainConfig(**{**vars(CONFIG), "compression": compression})
    count = 101
    replica = np.arange(count, dtype=np.float32)
    exchange = AllToAllExchange(config, comm, replica, None)
    for gradient in pushes(comm.rank, count):
        if comm.rank == 1:
            time.sleep(0.002)
        exchange.before()
        exchange.after(gradient.copy(), 1.0)
    exchange.finish()
    exchange.close()
    total = sum(sum(pushes(rank, count)) for rank in range(comm.size))
    if compression == "topk:0.5":
        assert exchange._feedback is not None
        owed = exchange._feedback.residual.astype(np.float64)
        comm.Allreduce(MPI.IN_PLACE, owed)
        total = total - owed
    assert np.array_equal(replica, np.arange(count) - total)
    assert same_everywhere(comm, replica)
    pace = exchange.facts()["staleness"]
    assert pace is None if comm.size == 1 else 0 <= pace["mean"] <= pace["most"]


def same_everywhere(comm: Intracomm, vector: np.ndarray) -> bool:
    table = np.empty((comm.size, vector.size), vector.dtype)
    comm.Allgather(vector, table)
    return all(row.tobytes() == table[0].tobytes() for row in table)


def test_gossip_keeps_the_mean(comm: Intracomm) -> None:
    """Without gradients the mean stays, and all come close to it; with them it moves by their mean."""
    count, steps = 64, 60
    start = np.random.default_rng(comm.rank).standard_normal(count)
    mean = start.copy()
    comm.Allreduce(MPI.IN_PLACE, mean)
    mean /= comm.size
    replica = start.copy()
    exchange = GossipExchange(CONFIG, comm, replica, None)
    for _ in range(steps):
        exchange.before()
        exchange.after(np.zeros(count), 1.0)
        time.sleep(0.001)
    exchange.finish()
    weights = np.array([exchange._weight])
    exchange.close()
    comm.Allreduce(MPI.IN_PLACE, weights)
    assert weights[0] == pytest.approx(comm.size, rel=1e-12)
    np.testing.assert_allclose(replica, mean, rtol=0, atol=1e-12)
    assert same_everywhere(comm, replica)
    assert comm.size == 1 or exchange.facts()["skipped"] < 1


def test_gossip_brings_replicas_together(comm: Intracomm) -> None:
    replica = np.full(9, float(comm.rank))
    exchange = GossipExchange(CONFIG, comm, replica, None)
    for _ in range(100):
        exchange.before()
        exchange.after(np.zeros(9), 1.0)
        comm.Barrier()
    apart = np.array([replica.max(), -replica.min()])
    comm.Allreduce(MPI.IN_PLACE, apart, MPI.MAX)
    assert apart.sum() <= 0.1
    exchange.finish()
    exchange.close()


@pytest.mark.parametrize("kind", [AllToAllExchange, GossipExchange])
def test_a_state_is_what_it_goes_on_from(comm: Intracomm, kind: Any) -> None:
    config = TrainConfig(momentum=0.5, timeout=20.0)
    replica = np.random.default_rng(4).standard_normal(30)
    exchange = kind(config, comm, replica, None)
    for step in range(3):
        exchange.before()
        exchange.after(np.full(30, 1.0 + step), 0.1)
    state, _ = exchange.state()
    state = {name: vector.copy() for name, vector in state.items()}
    exchange.finish()
    exchange.close()
    again = state["parameters"].copy()
    resumed = kind(config, comm, again, state)
    found, _ = resumed.state()
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], state[name]) for name in state)
    resumed.finish()
    resumed.close()


def test_a_weight_does_not_become_zero(comm: Intracomm) -> None:
    """A rank to which nobody sends for a long time would halve it until it is."""
    replica = np.ones(4, np.float32)
    exchange = GossipExchange(CONFIG, comm, replica, None)
    if comm.rank > 0:
        exchange._weight = 2.0**-1074  # the least positive number
        for _ in range(5):
            exchange.after(np.zeros(4, np.float32), 0.1)
            exchange.before()
        assert exchange._weight > 0
    exchange.finish()
    exchange.close()
    assert (replica == 1).all()
