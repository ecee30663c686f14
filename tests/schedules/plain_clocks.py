"""The simulator's model once more, event by event in plain Python: what the vectorised one is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpicoll.schedules import Reduce, Schedule, chunk_bounds
from mpicoll.schedules.machine import MachineDescription, Wire
from mpicoll.schedules.replay import Ensemble, Posting


class PlainClocks:
    """One part: schedules of all ranks, from clocks and link times that are given to those that it leaves."""

    def __init__(
        self, schedules: Sequence[Schedule], nbytes: int, machine: MachineDescription, nodes: Sequence[int], wire: Wire
    ) -> None:
        self.schedules, self.machine, self.nodes, self.wire = schedules, machine, nodes, wire
        self.bounds = chunk_bounds(nbytes, schedules[0].chunks)
        size = len(schedules)
        self.sender_of = Ensemble(schedules).sender_of
        self.receiver_of = [{} for _ in range(size)]
        for rank, matches in enumerate(self.sender_of):
            for place, (peer, sent_at) in matches.items():
                self.receiver_of[peer][sent_at] = (rank, place)
        self.posted: dict[tuple[int, int], float] = {}
        self.ready: dict[tuple[int, Posting], float] = {}
        ranks = [nodes.count(node) for node in nodes]
        known = max(machine.fitted.ranks) if machine.one_host and machine.fitted else size
        crowd = [min(size, known) if machine.one_host else count for count in ranks]
        self.crowd_share = (max(crowd) - machine.cores) / max(1, machine.crowd - machine.cores)
        self.slow = [max(1.0, count / machine.cores) for count in crowd]

    def run(self, clock: list[float], out: list[float], into: list[float]) -> None:
        self.clock, self.out, self.into = clock, out, into
        self.free = [{0: time} for time in out]
        posted, completed = [0] * len(clock), [0] * len(clock)
        moved = True
        while moved:
            moved = False
            for rank, schedule in enumerate(self.schedules):
                while completed[rank] < len(schedule.steps):
                    if posted[rank] < len(schedule.steps) and posted[rank] - completed[rank] < schedule.window:
                        self.post(rank, posted[rank])
                        posted[rank] += 1
                    elif self.met(rank, completed[rank]):
                        self.complete(rank, completed[rank])
                        completed[rank] += 1
                    else:
                        break
                    moved = True
        assert all(done == len(s.steps) for done, s in zip(completed, self.schedules, strict=True))
        for rank, schedule in enumerate(self.schedules):
            out[rank] = self.link_free(rank, len(schedule.steps))

    def met(self, rank: int, number: int) -> bool:
        step = self.schedules[rank].steps[number]
        others = [self.receiver_of[rank][Posting(number, slot)] for slot in range(len(step.sends))]
        others += [self.sender_of[rank][Posting(number, slot)] for slot in range(len(step.recvs))]
        return all((peer, place.step) in self.posted for peer, place in others)

    def facts(self, rank: int, place: Posting) -> dict[str, Any]:
        """Everything about one message, found by its send."""
        machine, wire = self.machine, self.wire
        send = self.schedules[rank].steps[place.step].sends[place.slot]
        nbytes = self.bounds[send.stop] - self.bounds[send.start]
        leaves = self.nodes[rank] != self.nodes[send.peer]
        link = machine.between if leaves else machine.inside
        row = next(row for row in link.at(self.crowd_share).classes if nbytes * wire.ratio < row.below)
        crowd = self.crowd(rank, place.step, leaves, sends=True)
        if leaves:
            crowd = max(crowd, self.crowd(send.peer, place.step, True, sends=False))
        share = max(1.0, crowd / link.streams)
        turns = [1.0 if link.oversubscribed else self.slow[end] for end in (rank, send.peer)]
        slow = turns[0] if machine.one_host or not leaves else 1.0
        transfer = row.per_byte * nbytes * wire.ratio * share * (1.0 if leaves else slow)
        per_reduced = next(kernel.per_byte for kernel in machine.reduce if nbytes < kernel.below)
        return {
            "latency": row.latency * slow,
            "sending": row.overhead * turns[0] + wire.encode * nbytes * self.slow[rank],
            "busy": max(row.gap * share, transfer),
            "transfer": transfer,
            "waits": row.rendezvous,
            "receiving": row.overhead * turns[1] + wire.decode * nbytes * self.slow[send.peer],
            "reduce": per_reduced * nbytes * self.slow[send.peer],
        }

    def crowd(self, rank: int, number: int, leaves: bool, *, sends: bool) -> int:
        """How many ranks of this rank's node send or receive in the step in which messages of this number are sent."""
        found = set()
        for source, schedule in enumerate(self.schedules):
            if number < len(schedule.steps):
                for send in schedule.steps[number].sends:
                    here = source if sends else send.peer
                    same = self.nodes[here] == self.nodes[rank]
                    if same and (self.nodes[source] != self.nodes[send.peer]) == leaves:
                        found.add(here)
        return len(found)

    def post(self, rank: int, number: int) -> None:
        self.clock[rank] += self.machine.step * self.slow[rank]
        self.posted[rank, number] = self.clock[rank]
        for slot in range(len(self.schedules[rank].steps[number].sends)):
            self.clock[rank] += self.facts(rank, Posting(number, slot))["sending"]
            self.ready[rank, Posting(number, slot)] = self.clock[rank]

    def start(self, rank: int, place: Posting) -> float:
        facts = self.facts(rank, place)
        ready = self.ready[rank, place]
        if facts["waits"]:
            peer, received_at = self.receiver_of[rank][place]
            ready = max(ready, self.posted[peer, received_at.step])
        behind = sum(self.facts(rank, Posting(place.step, slot))["busy"] for slot in range(place.slot))
        return max(ready, self.link_free(rank, place.step)) + behind

    def link_free(self, rank: int, number: int) -> float:
        """When the rank's link is free for the sends of a step."""
        times = self.free[rank]
        for earlier in range(max(times), number):
            sends = [Posting(earlier, slot) for slot in range(len(self.schedules[rank].steps[earlier].sends))]
            ends = [self.start(rank, place) + self.facts(rank, place)["busy"] for place in sends]
            times[earlier + 1] = max([times[earlier], *ends])
        return times[number]

    def complete(self, rank: int, number: int) -> None:
        step = self.schedules[rank].steps[number]
        for slot in range(len(step.sends)):
            facts = self.facts(rank, Posting(number, slot))
            if facts["waits"]:
                through = self.start(rank, Posting(number, slot)) + facts["transfer"]
                self.clock[rank] = max(self.clock[rank], through)
        arrivals, after = [], 0.0
        for slot, recv in enumerate(step.recvs):
            peer, sent_at = self.sender_of[rank][Posting(number, slot)]
            facts = self.facts(peer, sent_at)
            arrivals.append((self.start(peer, sent_at) + facts["latency"], facts["transfer"]))
            after += facts["receiving"] + (facts["reduce"] if recv.reduce is not Reduce.COPY else 0.0)
        for head, transfer in sorted(arrivals):
            self.into[rank] = max(head, self.into[rank]) + transfer
            self.clock[rank] = max(self.clock[rank], self.into[rank])
        self.clock[rank] += after
