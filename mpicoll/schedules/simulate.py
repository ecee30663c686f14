"""Simulated time of a schedule on a described machine: LogGP with nodes, for thousands of ranks.

Every rank has a clock, and a link in each direction. Posting a step costs the executor's time, and an overhead for each
send. A message leaves when it is posted, its receive is posted too (rendezvous only), and the link is free. It arrives
after latency and transfer time; messages arrive one after the other at a receiver. A step is complete when its messages
have been transferred (short sends are buffered, and complete at once); then its receives cost overhead and reduction.
With a window, the next steps have been posted meanwhile.

Resources are shared evenly. The ranks of a node that send to other nodes in a step of the same number divide the node's
link among them; so do those that receive, and those that send inside the node divide its memory bandwidth. If there are
more ranks than cores, processor time and copies inside the node take longer by that factor, unless links were measured
with oversubscribed cores.

Ranks are elements of NumPy arrays. Rotating parts are simulated step by step for all ranks at once, others level by
level (:mod:`mpicoll.schedules.columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpicoll.schedules.algorithms import Algorithm
from mpicoll.schedules.all_ranks import Irregular, Rotation, Structure
from mpicoll.schedules.columns import Columns
from mpicoll.schedules.machine import IDENTITY, Link, MachineDescription, ReduceClass, Wire
from mpicoll.schedules.types import Reduce

Array = np.ndarray


def simulate(
    algorithm: Algorithm,
    size: int,
    nbytes: int,
    machine: MachineDescription,
    *,
    ranks_per_node: int = 1,
    root: int = 0,
    segments: int = 1,
    wire: Wire = IDENTITY,
) -> float:
    """Return the seconds of one collective, until the last rank has completed it.

    Parameters
    ----------
    nbytes
        Message size: bytes of the whole vector.
    ranks_per_node
        Number of ranks on each node; ranks are numbered node by node.
    root, segments
        As for :meth:`Algorithm.schedule`.
    wire
        Compressor of the messages.

    Raises
    ------
    ValueError
        If a number is out of range.
    """
    if nbytes < 0 or ranks_per_node < 1:
        raise ValueError(f"nbytes, ranks_per_node: {nbytes}, {ranks_per_node} are not at least 0 and 1")
    nodes = np.arange(size) // ranks_per_node
    return run(_structure(algorithm, size, root, segments), nbytes, machine, nodes, wire)


@lru_cache(maxsize=32)
def _structure(algorithm: Algorithm, size: int, root: int, segments: int) -> Structure:
    return algorithm.structure(size, root=root, segments=segments)


@lru_cache(maxsize=32)
def _columns(part: Irregular) -> Columns:
    return Columns(part)


def run(
    structure: Structure, nbytes: int, machine: MachineDescription, nodes: Sequence[int] | Array, wire: Wire = IDENTITY
) -> float:
    """Return the seconds for any structure; `nodes` has each rank's node."""
    if structure.size == 1:
        return machine.call
    world = _World(machine, np.asarray(nodes), wire)
    lengths = np.diff(np.array(structure.bounds(nbytes)))
    state = _State(*(np.zeros(structure.size) for _ in range(3)))
    state.clock += machine.call * world.slow
    for part in structure.parts:
        if isinstance(part, Rotation):
            _Rotating(part, world, lengths, state).run()
        elif any(part.steps):
            _Levels(_columns(part), world, lengths, state).run()
    return float(state.clock.max())


@dataclass
class _State:
    """Per rank: its clock, and when its links are free."""

    clock: Array
    out: Array
    into: Array


class _Curve:
    """Parameters as functions of message length."""

    def __init__(self, link: Link, reduce: Sequence[ReduceClass], wire: Wire) -> None:
        self._bounds = np.array([row.below for row in link.classes])
        table = [(row.latency, row.overhead, row.gap, row.per_byte, row.rendezvous) for row in link.classes]
        self._table = np.array(table, np.float64).T
        self._reduce_bounds = np.array([row.below for row in reduce])
        self._reduce = np.array([row.per_byte for row in reduce])
        self._wire = wire

    def at(self, nbytes: Array) -> Array:
        """Return the rows L, o, gap, transfer, rendezvous, encoding, decoding and reduction, all but one in seconds."""
        sent = nbytes * self._wire.ratio
        latency, overhead, gap, per_byte, waits = self._table[:, np.searchsorted(self._bounds, sent, side="right")]
        per_reduced = self._reduce[np.searchsorted(self._reduce_bounds, nbytes, side="right")]
        encode, decode = nbytes * self._wire.encode, nbytes * self._wire.decode
        return np.array([latency, overhead, gap, per_byte * sent, waits, encode, decode, per_reduced * nbytes])


class _World:
    """The machine as the ranks see it."""

    def __init__(self, machine: MachineDescription, nodes: Array, wire: Wire) -> None:
        self.machine, self.wire = machine, wire
        self.node = np.unique(nodes, return_inverse=True)[1]
        there = np.full(len(nodes), len(nodes)) if machine.one_host else np.bincount(self.node)[self.node]
        if machine.one_host and machine.fitted:
            there = np.minimum(there, max(machine.fitted.ranks))
        self.slow = np.maximum(1.0, there / machine.cores)
        crowd = (float(there.max()) - machine.cores) / max(1, machine.crowd - machine.cores)
        links = machine.inside, machine.between
        self.inside, self.between = (_Curve(link.at(crowd), machine.reduce, wire) for link in links)
        # Where it was measured how oversubscribed cores slow a link down, nothing is to be added.
        self.turns_inside, self.turns_between = (
            np.ones(len(nodes)) if link.oversubscribed else self.slow for link in links
        )
        self.step = machine.step * self.slow

    def share(self, source: Array, dest: Array, group: Array | int = 0) -> tuple[Array, Array]:
        """Say which messages leave their node, and by how much sharing slows each of them down.

        Messages of equal `group` are under way together; a rank that sends several counts once.
        """
        leaves = self.node[source] != self.node[dest]
        machine, ranks = self.machine, len(self.node)
        if leaves.all() and self.node[-1] == ranks - 1:  # one rank a node has the link for itself
            return leaves, np.full(len(source), max(1.0, 1.0 / machine.between.streams))
        sending = self._crowd(source, group, leaves), self._crowd(source, group, ~leaves)
        crowd = np.maximum(sending[0], self._crowd(dest, group, leaves)) / machine.between.streams
        return leaves, np.maximum(1.0, np.where(leaves, crowd, sending[1] / machine.inside.streams))

    def _crowd(self, rank: Array, group: Array | int, counts: Array) -> Array:
        """Return for each message how many ranks of the rank's node there are among those that count."""
        ranks = len(self.node)
        pairs = np.unique((group * ranks + rank)[counts])
        place = group * ranks + self.node[rank]
        crowd = np.bincount(pairs // ranks * ranks + self.node[pairs % ranks], minlength=int(place.max(initial=0)) + 1)
        return crowd[place]

    def price(self, inside: Array, between: Array, source: Array, dest: Array, leaves: Array, share: Array) -> Array:
        """Choose each message's rows of :meth:`_Curve.at`, with what sharing of cores and links adds to them.

        Returns L, the sender's overhead with encoding, how long the link is busy, transfer, rendezvous, the
        receiver's overhead with decoding, reduction.
        """
        turns = [np.where(leaves, self.turns_between[rank], self.turns_inside[rank]) for rank in (source, dest)]
        # The network itself waits for no core, unless it is made of processes on this one.
        late = turns[0] if self.machine.one_host else np.where(leaves, 1.0, turns[0])
        latency, overhead, gap, transfer, waits, encode, decode, reduce = np.where(leaves, between, inside)
        transfer = transfer * share * np.where(leaves, 1.0, turns[0])
        return np.array(
            [
                latency * late,
                overhead * turns[0] + encode * self.slow[source],
                np.maximum(gap * share, transfer),
                transfer,
                waits,
                overhead * turns[1] + decode * self.slow[dest],
                reduce * self.slow[dest],
            ]
        )


class _Rotating:
    """Runs a rotation: in each step rank r sends to r + d and receives from r - d."""

    def __init__(self, part: Rotation, world: _World, lengths: Array, state: _State) -> None:
        self.part, self.world, self.state = part, world, state
        # Twice, so that the chunks of all ranks in a step are one slice.
        self.inside, self.between = (np.tile(curve.at(lengths), 2) for curve in (world.inside, world.between))
        self.chunks, self.ranks = len(lengths), np.arange(len(state.clock))
        self.alike = lengths.min() == lengths.max()
        self.routes: dict[int, tuple[Array, ...]] = {}
        self.prices: dict[int, Array] = {}

    def run(self) -> None:
        """Advance the state by all steps."""
        steps, window = self.part.steps, self.part.window
        under_way: list[tuple[Array, ...]] = []
        for number in range(len(steps) + window):
            if number >= window and under_way:
                self._complete(*under_way.pop(0))
            if number < len(steps):
                send, recv = steps[number].sends[0], steps[number].recvs[0]
                under_way.append(self._post(send.peer, send.start, recv.reduce is not Reduce.COPY))

    def _priced(self, distance: int, chunk: int) -> Array:
        """Return the rows of :meth:`_World.price` for each rank's send."""
        begin = 0 if self.alike else (chunk - self.part.first * self.part.segments) % self.chunks
        if distance not in self.routes:
            self.routes.clear()
            self.prices.clear()
            dest = (self.ranks + distance) % len(self.ranks)
            self.routes[distance] = (self.ranks, dest, *self.world.share(self.ranks, dest))
        if not self.alike or distance not in self.prices:
            chosen = slice(begin, begin + len(self.ranks) * self.part.segments, self.part.segments)
            rows = self.inside[:, chosen], self.between[:, chosen]
            self.prices[distance] = self.world.price(*rows, *self.routes[distance])
        return self.prices[distance]

    def _post(self, distance: int, chunk: int, reduces: bool) -> tuple[Array, ...]:
        state, world, size = self.state, self.world, len(self.ranks)
        latency, overhead, busy, transfer, waits, receiving, reduce = self._priced(distance, chunk)
        dest = self.routes[distance][1]
        posted = state.clock + world.step
        state.clock = ready = posted + overhead
        ready = np.where(waits, np.maximum(ready, posted[dest]), ready)
        start = np.maximum(ready, state.out)
        state.out = start + busy
        through = np.where(waits, start + transfer, state.clock)
        after = receiving + reduce if reduces else receiving
        source = (self.ranks - distance) % size
        return through, (start + latency)[source], transfer[source], after[source]

    def _complete(self, through: Array, head: Array, transfer: Array, after: Array) -> None:
        state = self.state
        state.into = np.maximum(head, state.into) + transfer
        state.clock = np.maximum(np.maximum(state.clock, through), state.into) + after


class _Levels:
    """Runs an irregular part, level by level."""

    def __init__(self, columns: Columns, world: _World, lengths: Array, state: _State) -> None:
        self.columns, self.world, self.state = columns, world, state
        source, dest = columns.source, columns.dest
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        nbytes = offsets[columns.end] - offsets[columns.begin]
        leaves, share = world.share(source, dest, columns.number)
        priced = world.price(world.inside.at(nbytes), world.between.at(nbytes), source, dest, leaves, share)
        self.latency, self.sending, self.busy, self.transfer, waits, self.receiving, reduce = priced
        self.waits = waits != 0
        self.after = self.receiving + np.where(columns.reduces, reduce, 0.0)
        self.behind = _before(self.busy, columns.send_step)
        self.said = _before(self.sending, columns.send_step) + self.sending
        self.ready, self.start = np.zeros(len(source)), np.zeros(len(source))
        self.posted = np.zeros(columns.steps)
        self.free = np.zeros(columns.steps + columns.size)
        self.free[columns.first_send] = state.out

    def run(self) -> None:
        """Advance the state by all levels."""
        for level in self.columns.levels:
            self._post(level.post, *level.posted)
            self._start(level.start)
            self._complete(level.complete, level.received, level.sent)
        self.state.out = np.maximum(self.state.out, self.free[self.columns.steps :])

    def _post(self, steps: Array, messages: Array, place: Array) -> None:
        ranks = self.columns.rank_of[steps]
        begin = self.state.clock[ranks] + self.world.step[ranks]
        self.posted[steps] = begin
        self.ready[messages] = begin[place] + self.said[messages]
        self.state.clock[ranks] = begin + np.bincount(place, self.sending[messages], len(steps))

    def _start(self, messages: Array) -> None:
        columns = self.columns
        met = np.maximum(self.ready[messages], self.posted[columns.recv_step[messages]])
        ready = np.where(self.waits[messages], met, self.ready[messages])
        start = np.maximum(ready, self.free[columns.send_step[messages]]) + self.behind[messages]
        self.start[messages] = start
        np.maximum.at(self.free, columns.next_step[messages], start + self.busy[messages])

    def _complete(self, steps: Array, received: tuple[Array, Array], sent: tuple[Array, Array]) -> None:
        state, ranks = self.state, self.columns.rank_of[steps]
        clock = state.clock[ranks]
        messages, place = sent
        late = self.start[messages] + self.transfer[messages]
        np.maximum.at(clock, place, np.where(self.waits[messages], late, 0.0))
        messages, place = received
        head = self.start[messages] + self.latency[messages]
        order = np.lexsort((head, place))
        messages, head, place = messages[order], head[order], place[order]
        transfer = self.transfer[messages]
        total = np.bincount(place, transfer, len(steps))
        into = state.into[ranks] + total
        np.maximum.at(into, place, head + total[place] - _before(transfer, place))
        state.into[ranks] = into
        np.maximum.at(clock, place, into[place])
        state.clock[ranks] = clock + np.bincount(place, self.after[messages], len(steps))


def _before(values: Array, group: Array) -> Array:
    """Return for each value the sum of those before it in its group; equal groups stand together."""
    if not len(values):
        return values
    sums = np.cumsum(values) - values
    begins = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    return sums - np.repeat(sums[begins], np.diff(np.append(begins, len(values))))
