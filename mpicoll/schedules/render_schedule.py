"""Rendering of schedules as text: the table of steps, the traffic per rank, the data after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.quantities import counted, table
from mpicoll.schedules.algorithms import Algorithm
from mpicoll.schedules.cost import Machine, price, traffic
from mpicoll.schedules.replay import Event, Posting, Replay, initial_vectors
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step

SENT_ON = "_"
"""Shown for a chunk whose sum was passed on, or that the rank does not hold."""

_MARK = {Reduce.COPY: "", Reduce.REPLACE: "", Reduce.RECEIVED_FIRST: "+", Reduce.OWN_FIRST: "+"}


def _chunks(message: Send | Recv) -> str:
    if message.start == message.stop:
        return "·"
    last = message.stop - 1
    return f"{message.start}" if last == message.start else f"{message.start}-{last}"


def _cell(step: Step) -> str:
    sends = [f"{_chunks(send)}→{send.peer}" for send in step.sends]
    recvs = [f"{_MARK[recv.reduce]}{_chunks(recv)}←{recv.peer}" for recv in step.recvs]
    return " ".join(sends + recvs)


def step_table(schedules: Sequence[Schedule]) -> list[str]:
    """Return one line per step and one column per rank: ``2→1`` chunk 2 goes to rank 1, ``+3←0`` 3 is added."""
    count = max(len(schedule.steps) for schedule in schedules)
    rows = [["step", *(f"rank {schedule.rank}" for schedule in schedules)]]
    for number in range(count):
        cells = [_cell(s.steps[number]) if number < len(s.steps) else "" for s in schedules]
        rows.append([str(number + 1), *cells])
    return table(rows, names=len(rows[0]))


def traffic_table(schedules: Sequence[Schedule], nbytes: int) -> list[str]:
    """Return one line per rank: steps, messages, bytes sent, received and reduced."""
    rows = [["rank", "steps", "messages", "sent (B)", "of n", "received (B)", "reduced (B)"]]
    for schedule in schedules:
        load = traffic(schedule)
        numbers = [f"{float(part) * nbytes:.0f}" for part in (load.sent, load.received, load.reduced)]
        rows.append([str(load.rank), str(load.steps), str(load.messages), numbers[0], str(load.sent), *numbers[1:]])
    return table(rows, names=len(rows[0]))


def cost_lines(schedules: Sequence[Schedule], nbytes: int, machine: Machine) -> list[str]:
    """Return the cost on the longest chain of steps, as formula and as time."""
    cost = price(schedules, nbytes, machine)
    total = f"{cost.formula()} = {cost.seconds * 1e6:.1f} us"
    return [f"cost on the longest chain: {total}", f"  with {machine.describe(nbytes)}"]


def cost_table(
    algorithms: Sequence[Algorithm], size: int, nbytes: int, machine: Machine, *, root: int, segments: int
) -> list[str]:
    """Return one line per algorithm: cost of the longest chain of steps, as formula and as time, and its summary."""
    rows = []
    for algorithm in algorithms:
        schedules = [algorithm.schedule(size, rank, root=root, segments=segments) for rank in range(size)]
        cost = price(schedules, nbytes, machine)
        rows.append((cost.seconds, [algorithm.name, f"{cost.seconds * 1e6:.1f}", cost.formula(), algorithm.summary]))
    header = ["algorithm", "us", "cost on the longest chain", ""]
    return table([header, *(row for _, row in sorted(rows, key=lambda row: row[0]))], names=len(header))


def _names(size: int) -> list[str]:
    """Letters for up to 26 ranks, then numbers."""
    return [chr(ord("A") + rank) if size <= 26 else str(rank) for rank in range(size)]


def _grid(label: str, vectors: Sequence[Sequence[Any]], lengths: Sequence[int], width: int) -> list[str]:
    """Return one line a rank; `lengths` are the elements of each chunk, None stands for a chunk that is not there."""
    lines = []
    for rank, name in enumerate(_names(len(vectors))):
        cells: list[str] = []
        for chunk, length in zip(vectors[rank], lengths, strict=True):
            cells += [SENT_ON] * length if chunk is None else [str(value) for value in chunk]
        lines.append(f"{label if rank == 0 else '':8s}{name} " + " ".join(cell.rjust(width) for cell in cells))
    return lines


class _Film:
    """Takes a picture of all vectors after every step that all ranks have completed."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        size = len(replay.vectors)
        self.gone: list[set[int]] = [set() for _ in range(size)]
        self.pictures: list[list[list[Any]]] = [[] for _ in range(size)]
        self._reduced_away = self._find_reduced()

    def _find_reduced(self) -> list[dict[int, list[Send]]]:
        """Per rank and step the sends whose receiver adds them to its own: the sender's copy is then stale."""
        ensemble = self.replay.ensemble
        away: list[dict[int, list[Send]]] = [{} for _ in ensemble.schedules]
        for rank, matches in enumerate(ensemble.sender_of):
            for place, (peer, sent_at) in matches.items():
                recv = ensemble.schedules[rank].steps[place.step].recvs[place.slot]
                if recv.reduce is not Reduce.COPY:
                    away[peer].setdefault(sent_at.step, []).append(_send_at(ensemble.schedules[peer], sent_at))
        return away

    def watch(self, event: Event) -> None:
        if event.posts:
            return
        gone, rank = self.gone[event.rank], event.rank
        for send in self._reduced_away[rank].get(event.step, ()):
            gone.update(range(send.start, send.stop))
        for recv in self.replay.ensemble.schedules[rank].steps[event.step].recvs:
            gone.difference_update(range(recv.start, recv.stop))
        vector = self.replay.vectors[rank]
        self.pictures[rank].append([None if chunk in gone else value for chunk, value in enumerate(vector)])


def _send_at(schedule: Schedule, place: Posting) -> Send:
    return schedule.steps[place.step].sends[place.slot]


def data_after_each_step(
    schedules: Sequence[Schedule],
    values: Sequence[Sequence[tuple[Any, ...]]],
    combine: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]],
) -> list[str]:
    """Return the lines that show every rank's chunks before the first and after each step.

    Parameters
    ----------
    values
        The elements, by rank and chunk.
    combine
        The reduction of two chunks.
    """
    vectors = initial_vectors(schedules[0], lambda rank, chunk: values[rank][chunk])
    start = [list(vector) for vector in vectors]
    replay = Replay(schedules, vectors, combine)
    film = _Film(replay)
    replay.run(film.watch)
    frames = [start]
    for number in range(max(len(schedule.steps) for schedule in schedules)):
        # A rank that is done, or has no such step, keeps its last picture.
        frames.append([[start[rank], *own][: number + 2][-1] for rank, own in enumerate(film.pictures)])
    lengths = [len(chunk) for chunk in values[0]]
    shown = [str(value) for frame in frames for vector in frame for chunk in vector for value in chunk or ()]
    width = max(map(len, shown), default=1)
    lines = []
    for number, frame in enumerate(frames):
        lines += _grid("start:" if number == 0 else f"step {number}:", frame, lengths, width)
    return lines


def goal(schedules: Sequence[Schedule], nbytes: int) -> list[str]:
    """Return the schedules in GOAL, the input language of the simulator LogGOPSim, without the time of reductions.

    Step ``i`` is posted when step ``i - window`` is complete. (Hoefler, Siebert, Lumsdaine, "Group Operation
    Assembly Language: a flexible way to express collective communication", ICPP 2009.)
    """
    lines = [f"num_ranks {len(schedules)}"]
    for schedule in schedules:
        bounds = schedule.bounds(nbytes)
        labels: list[list[str]] = []
        lines += ["", f"rank {schedule.rank} {{"]
        for number, step in enumerate(schedule.steps):
            done = labels[number - schedule.window] if number >= schedule.window else []
            own = [f"l{number}_{place}" for place in range(len(step.recvs) + len(step.sends))]
            kinds = [("recv", "from", recv) for recv in step.recvs] + [("send", "to", send) for send in step.sends]
            for label, (verb, way, message) in zip(own, kinds, strict=True):
                length = bounds[message.stop] - bounds[message.start]
                lines.append(f"{label}: {verb} {length}b {way} {message.peer} tag 0")
            lines += [f"{label} requires {earlier}" for label in own for earlier in done]
            labels.append(own)
        lines.append("}")
    return lines


def explain(
    algorithm: Algorithm, schedules: Sequence[Schedule], shown: Sequence[Schedule], nbytes: int, machine: Machine
) -> list[str]:
    """Return the lines of ``python -m mpicoll explain``: summary, steps of the `shown` ranks, traffic and cost."""
    first = schedules[0]
    window = f", {first.window} steps in flight" if first.window > 1 else ""
    title = f"{algorithm.collective} · {algorithm.name}: {algorithm.summary}"
    shape = f"{counted(first.size, 'rank')}, {counted(first.chunks, 'chunk')}{window}"
    if any(recv.reduce is not Reduce.COPY for s in schedules for step in s.steps for recv in step.recvs):
        shape += "; operands in " + ("rank order" if algorithm.ordered else "a fixed order that is not rank order")
    legend = "c→r: chunk c is sent to rank r;  +c←r: received from r and reduced;  c←r: received and stored"
    lines = [title, shape, "", legend, *step_table(shown), "", *traffic_table(shown, nbytes), ""]
    return lines + cost_lines(schedules, nbytes, machine)
