"""Decentralised asynchronous training: all-to-all gradient exchange, and gossip (stochastic gradient push)."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import ErrorFeedback, compressor
from mpicoll.compression import Key
from mpicoll.consensus import all_succeed
from mpicoll.decentralized.mailboxes import PeerMailboxes
from mpicoll.errors import UsageError
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.parameter_server.remote_memory import SHARED_MEMORY, free_nbytes
from mpicoll.train.asynchronous.gradient_exchange import Sent, State
from mpicoll.train.asynchronous.placed_optimizer import PlacedOptimizer, is_fed_back
from mpicoll.train.asynchronous.server_exchange import spread_of
from mpicoll.train.config import TrainConfig
from mpicoll.train.strategies import strategy_name

_FEWEST_SLOTS, _MOST_SLOTS = 2, 16
_PART = 8
"""Divisor of the free shared memory: slots beyond the fewest use at most one `_PART`-th of it."""
_BINS = 1024
_LEAST_WEIGHT = 2.0**-500
"""Weight at which a rank that has received nothing for as many steps keeps it: half of it would be zero some day."""


class AllToAllExchange:
    """All-to-all exchange: every rank applies every gradient to a replica of its own; an `Exchange`.

    A gradient is written to the mailboxes of all other ranks, which apply it later. All replicas apply the same
    gradients in different orders, and differ by those in flight. At the end they are averaged.
    """

    has_result = averages_at_end = True

    def __init__(self, config: TrainConfig, comm: MPI.Intracomm, replica: np.ndarray, state: State | None) -> None:
        self._comm, self._replica = comm, replica
        self._codec = None if config.compression is None else compressor(config.compression)
        self._feedback = ErrorFeedback(self._codec) if self._codec is not None and is_fed_back(config) else None
        nbytes = replica.nbytes if self._codec is None else self._codec.wire_nbytes(replica.size)
        self._payload = np.empty(nbytes // 4, np.uint32).view(np.uint8)
        self._arrived = np.empty(0 if self._codec is None else replica.size, np.float32)
        self._placed = PlacedOptimizer(config, replica, comm.Get_size())
        self.scale = self._placed.scale
        kind = OPTIMIZERS[self._placed.optimizer]
        self._optimizer = kind(replica, self._placed.hyper)
        if state is not None:
            state = self._placed.restored(state)
            self._optimizer.steps = int(state["steps"][0])
            for name, vector in self._optimizer.state.items():
                vector[:] = state[name]
        self._before = self._optimizer.steps
        size, rank = comm.Get_size(), comm.Get_rank()
        slots = _slots(comm, "p2p", size * (size - 1) * nbytes)
        self._others = [other for other in range(size) if other != rank]
        self._peers = PeerMailboxes(
            MPI.Intracomm(comm),
            lambda rank: [other for other in range(size) if other != rank],
            nbytes,
            slots=slots,
            timeout=config.timeout,
        )
        self._pushes = self._sent = self._seen = 0
        self._histogram = np.zeros(_BINS, np.int64)

    def before(self) -> None:
        """Apply the gradients that have arrived."""
        self._peers.beat()
        while self._take():
            pass
        self._seen = self._optimizer.steps

    def _take(self) -> bool:
        found = False
        for mail in self._peers.take():
            found = True
            self._histogram[min(max(self._optimizer.steps - mail.version, 0), _BINS - 1)] += 1
            self._optimizer.apply(self._decoded(mail.payload), mail.number)
        return found

    def _decoded(self, payload: np.ndarray) -> np.ndarray:
        if self._codec is None:
            return payload.view(self._replica.dtype)
        self._codec.decompress(payload, self._arrived)
        return self._arrived

    def after(self, gradient: np.ndarray, rate: float) -> None:
        """Send the gradient to all others, waiting for free slots of slow ranks, and apply it."""
        payload, rate = self._encoded(self._placed.applied(gradient)), rate * self._placed.factor
        for other in self._others:
            has_room, whose = functools.partial(self._has_room, other), functools.partial(_only, other)
            self._peers.wait(has_room, whose, "room in a mailbox")
            self._peers.send(other, payload, rate, self._seen)
            self._sent += payload.size
        self._pushes += 1
        self._optimizer.apply(self._decoded(payload), rate)

    def _has_room(self, other: int) -> bool:
        """Return True if a rank's mailbox has a free slot; apply arrived gradients, since that rank may wait for it."""
        return self._peers.has_room(other) or (self._take() and self._peers.has_room(other))

    def _encoded(self, gradient: np.ndarray) -> np.ndarray:
        if self._codec is None:
            return gradient.view(np.uint8)
        compensated = gradient if self._feedback is None else self._feedback.compensate(gradient)
        key = Key(rank=self._peers.rank, step=self._pushes)
        payload = self._payload[: self._codec.compress(compensated, self._payload, key)]
        if self._feedback is not None:
            self._feedback.update(self._decoded(payload))
        return payload

    def beat(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        self._peers.beat()

    def snapshot(self) -> None:
        """Apply the gradients that have arrived."""
        self.before()

    def state(self) -> tuple[State, int]:
        """Return this rank's replica; see :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        steps = np.array([self._optimizer.steps])
        state = {"parameters": self._replica, "steps": steps, **self._optimizer.state}
        return self._placed.saved(state), self._optimizer.steps - self._before

    def settle(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        self._peers.wait(self._is_alone, self._peers.working, "the others to finish")

    def _is_alone(self) -> bool:
        """Return True if no more gradients can arrive: all others have finished, and the mailboxes are empty."""
        alone = not self._peers.working()
        while self._take():
            pass
        return alone

    def finish(self) -> None:
        """Apply all gradients in flight, then average the replicas."""
        self._peers.finish()
        self.settle()
        self._comm.Allreduce(MPI.IN_PLACE, self._replica, MPI.SUM)
        self._replica /= self._comm.Get_size()

    def close(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        self._peers.close()
        self._comm.Allreduce(MPI.IN_PLACE, self._histogram, MPI.SUM)

    def sent(self) -> Sent:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        return Sent(self._sent, 0, self._pushes * len(self._others) * self._replica.nbytes)

    def nbytes(self) -> dict[str, int]:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        return {
            "optimizer": self._placed.nbytes + sum(vector.nbytes for vector in self._optimizer.state.values()),
            "mailboxes": self._peers.nbytes,
        }

    def facts(self) -> dict[str, Any]:
        """Return the staleness of other ranks' gradients, in updates of the replica to which they were applied."""
        return {"staleness": spread_of(self._histogram)}


class GossipExchange:
    """Stochastic gradient push: every rank sends half of its weight, with its replica, to one other; an `Exchange`.

    A rank has a replica and a weight, 1 at first. After each step it sends half of its weight, with its replica, to the
    rank at distance 1, 2, 4, ... in turn (``--graph ring``: 1; ``complete``: 1, 2, 3, ...), if the mailbox there has a
    free slot. Received replicas are averaged with its own, by weights. The sum of all weights is constant, and so is,
    between updates, the sum of replicas times weights. Therefore no rank has to wait for another. On 4
    ranks, step 0 and step 1::

        0 -> 1 -> 2 -> 3 -> 0        0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1

    (Assran et al., "Stochastic gradient push for distributed deep learning", ICML 2019; weights as in Kempe et al.,
    "Gossip-based computation of aggregate information", FOCS 2003. Updates are applied to the replica, not to its
    product with the weight: those of a rank that sends more often than it receives would be too large.)
    """

    has_result = averages_at_end = True

    def __init__(self, config: TrainConfig, comm: MPI.Intracomm, replica: np.ndarray, state: State | None) -> None:
        self._comm, self._replica, self._size = comm, replica, comm.Get_size()
        self.scale, self._graph = float(self._size), config.graph
        self._weight, self._scratch = 1.0, np.empty_like(replica)
        self._optimizer = OPTIMIZERS["momentum"](replica, config.optimizer_settings)
        if state is not None:
            self._optimizer.state["velocity"][:] = state["velocity"]
        mailboxes = self._size * len(self._ahead(0))
        _slots(comm, "gossip", mailboxes * replica.nbytes)  # checks memory; few slots suffice, since none waits for one
        self._peers = PeerMailboxes(
            MPI.Intracomm(comm), self._ahead, replica.nbytes, slots=_FEWEST_SLOTS, timeout=config.timeout
        )
        self._turns = itertools.cycle(self._ahead(comm.Get_rank()))
        self._sent = self._steps = self._skipped = 0
        self._counts = np.zeros(2, np.int64)

    def _ahead(self, rank: int) -> list[int]:
        """Return the ranks to which `rank` sends in turn."""
        return [(rank + distance) % self._size for distance in distances(self._graph, self._size)]

    def before(self) -> None:
        """Average with the replicas that have arrived."""
        self._peers.beat()
        while self._take():
            pass

    def _take(self) -> bool:
        found, scalar = False, self._replica.dtype.type
        for mail in self._peers.take():
            found = True
            self._weight += mail.number
            # Moves a fraction of the difference: elements that are equal stay equal, bit for bit.
            way = np.subtract(mail.payload.view(self._replica.dtype), self._replica, out=self._scratch)
            way *= scalar(mail.number / self._weight)
            self._replica += way
        return found

    def after(self, gradient: np.ndarray, rate: float) -> None:
        """Update the replica, then send half of the weight with it."""
        self._optimizer.apply(gradient, rate)
        self._steps += 1
        if self._size == 1:
            return
        other = next(self._turns)
        if not self._peers.has_room(other) or self._weight < _LEAST_WEIGHT:
            self._skipped += 1
            return
        self._weight /= 2
        self._peers.send(other, self._replica.view(np.uint8), self._weight)
        self._sent += self._replica.nbytes

    def beat(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        self._peers.beat()

    def snapshot(self) -> None:
        """Average with the replicas that have arrived."""
        self.before()

    def state(self) -> tuple[State, None]:
        """Return this rank's replica; see :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        return {"parameters": self._replica, **self._optimizer.state}, None

    def settle(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        self._peers.wait(self._is_alone, self._peers.working, "the others to finish")

    def _is_alone(self) -> bool:
        alone = not self._peers.working()
        self.before()
        return alone

    def finish(self) -> None:
        """Average with all messages in flight, then take the weighted mean over all ranks."""
        self._peers.finish()
        self.settle()
        weight = np.array([self._weight])
        self._replica *= self._replica.dtype.type(self._weight)
        self._comm.Allreduce(MPI.IN_PLACE, weight, MPI.SUM)
        self._comm.Allreduce(MPI.IN_PLACE, self._replica, MPI.SUM)
        self._replica /= self._replica.dtype.type(weight[0])

    def close(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        self._peers.close()
        self._counts[:] = self._steps, self._skipped
        self._comm.Allreduce(MPI.IN_PLACE, self._counts, MPI.SUM)

    def sent(self) -> Sent:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        return Sent(self._sent, 0, self._sent)

    def nbytes(self) -> dict[str, int]:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        return {"optimizer": self._optimizer.nbytes, "mailboxes": self._peers.nbytes + self._scratch.nbytes}

    def facts(self) -> dict[str, Any]:
        """Return the fraction of the steps in which the other rank's mailbox was full, and nothing was sent."""
        return {"skipped": float(self._counts[1] / max(1, self._counts[0]))}


def distances(graph: str, size: int) -> list[int]:
    """Return the distances at which a rank sends to others in turn, from 1 to ``size - 1``; none on one rank."""
    if graph == "complete":
        return list(range(1, size))
    powers = [1 << k for k in range((size - 1).bit_length())]
    return powers[:1] if graph == "ring" else powers


def _slots(comm: MPI.Intracomm, mode: str, mailboxes_nbytes: int) -> int:
    """Return the number of slots of a mailbox, equal on all ranks. Collective.

    A rank that is five times as slow as the others finds five messages of each of them after a step. A sender that
    finds no free slot waits (all-to-all) or skips the message (gossip).

    Parameters
    ----------
    mailboxes_nbytes
        Bytes of all mailboxes together with one slot each.

    Raises
    ------
    UsageError
        On every rank, if mailboxes would not fit into the shared memory of one node.
    """
    slots = np.array([all_succeed(comm, lambda: _slots_here(mode, mailboxes_nbytes))])
    comm.Allreduce(MPI.IN_PLACE, slots, MPI.MIN)
    return int(slots[0])


def _slots_here(mode: str, mailboxes_nbytes: int) -> int:
    free = free_nbytes()
    if free is None:
        return _FEWEST_SLOTS
    if _FEWEST_SLOTS * mailboxes_nbytes > free:
        raise UsageError(
            f"--strategy {strategy_name(mode)} needs {_FEWEST_SLOTS * mailboxes_nbytes} bytes of {SHARED_MEMORY} for "
            f"all mailboxes, and {free} are free; use --strategy parameter_server, or --compression with peer_to_peer"
        )
    return max(_FEWEST_SLOTS, min(_MOST_SLOTS, free // _PART // max(1, mailboxes_nbytes)))


def _only(rank: int) -> list[int]:
    return [rank]
