"""Predictor of an algorithm's time: schedules by simulation, shared memory from measurements, the hierarchy from both.

Collectives on shared memory have no schedule; their times are interpolated in a table of measured points. Predictions
of other algorithms are corrected by two factors for each algorithm, one for latency and one for volume, which are
fitted with the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from mpicoll.collectives import select
from mpicoll.errors import UnknownAlgorithm
from mpicoll.schedules import ALGORITHMS, Algorithm, find
from mpicoll.schedules.all_ranks import Rotation, Structure
from mpicoll.schedules.cost import bus_factor
from mpicoll.schedules.machine import IDENTITY, Correction, Link, MachineDescription, SharedPoint, Wire
from mpicoll.schedules.node_composition import segments_for
from mpicoll.schedules.simulate import run
from mpicoll.schedules.types import Recv, Send, Step

_STRUCTURES = 64


@dataclass(frozen=True)
class PredictedCase:
    """A collective to predict: `nodes` has each rank's node, `nbytes` is the message size."""

    collective: str
    nodes: tuple[int, ...]
    nbytes: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one collective: `latency`, the time of an empty message, and `sending` and `reducing`."""

    case: PredictedCase
    algorithm: str
    latency: float
    sending: float
    reducing: float

    @property
    def seconds(self) -> float:
        """Predicted time in seconds: the sum of the components."""
        return self.latency + self.sending + self.reducing

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth: message size over time, in bytes per second."""
        return self.case.nbytes / self.seconds if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """Bus bandwidth as in nccl-tests: `algbw` times the bytes that an optimal algorithm sends a rank and byte."""
        return self.algbw * bus_factor(self.case.collective, self.case.size)


def blocks(size: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return each rank's node, with `ranks_per_node` consecutive ranks on a node."""
    return tuple(rank // ranks_per_node for rank in range(size))


def names(machine: MachineDescription, case: PredictedCase) -> tuple[str, ...]:
    """Return the algorithms whose time can be predicted for a case on a machine."""
    ranks = per_node(case)
    known = {point.collective for point in machine.shared if point.ranks > 1}
    found = [*ALGORITHMS[case.collective]]
    if ranks == case.size > 1 and case.collective in known:
        found.insert(0, select.SHARED)
    if 1 < ranks < case.size and case.collective == "allreduce" and {"reduce_scatter", "allgather"} <= known:
        found.insert(0, select.HIERARCHY)
    return tuple(found)


def _why_unknown(name: str, case: PredictedCase) -> str:
    """Return why a machine has no time of an algorithm that uses shared memory, to follow its name and collective."""
    ranks, nodes = per_node(case), len(set(case.nodes))
    if name == select.SHARED and nodes > 1:
        return f"is for ranks of one node, and these are on {nodes}; give --ranks-per-node {case.size}"
    if name == select.HIERARCHY and not 1 < ranks < case.size:
        return f"is for several nodes of several ranks, and these are {nodes} with {ranks or 'different numbers'} each"
    return "is not known for this machine; predict --fit measures it"


def taken(case: PredictedCase) -> str:
    """Return the algorithm that ``"auto"`` takes for a case where nothing was tuned."""
    nodes = len(set(case.nodes))
    means = select.Capabilities(case.size, apart=nodes == case.size)
    if nodes == 1 < case.size:
        means = means._replace(shared_nbytes=math.inf, in_memory=(case.collective,))
    elif nodes < case.size:
        means = means._replace(hierarchy=True, blocked=True, even=per_node(case) > 0)
    return select.choose(case.collective, case.nbytes, means)


def predict(
    machine: MachineDescription,
    case: PredictedCase,
    name: str,
    *,
    wire: Wire = IDENTITY,
    segments: int | None = None,
    split: bool = True,
) -> Prediction:
    """Return the predicted time of an algorithm.

    Parameters
    ----------
    machine
        Description of the machine.
    case
        Collective, placement of the ranks and message size.
    name
        Name of the algorithm.
    wire
        Compression: ratio of sizes, seconds per byte to encode and to decode.
    segments
        Number of segments of pipelined algorithms; None for the number that a call uses.
    split
        True to predict the components of a schedule's time, which takes three times as long. Otherwise all of it counts
        as latency, unless a correction needs the components.

    Raises
    ------
    UnknownAlgorithm
        If there is no algorithm of this name, or the machine has no measurements of it for this case.
    """
    key = f"{case.collective}/{name}"
    if name == select.SHARED and name in names(machine, case):
        latency = shared_seconds(machine.shared, case.collective, case.size, 0)
        whole = shared_seconds(machine.shared, case.collective, case.size, case.nbytes)
        found = Prediction(case, name, latency, whole - latency, 0.0)
    elif name == select.HIERARCHY and name in names(machine, case):
        found = _hierarchy(machine, case, wire)
    elif name == select.TWO_SHOT and case.collective == "allreduce":
        found = _two_shot(machine, case, wire, _turns(machine, case))
    elif name in (select.SHARED, select.HIERARCHY):
        raise UnknownAlgorithm(f"algorithm: the time of {name!r} for {case.collective} {_why_unknown(name, case)}")
    else:
        split = split or key in machine.corrections
        found = _simulated(machine, case, find(case.collective, name), wire, segments, split)
    factor = machine.corrections.get(key, Correction())
    return replace(
        found,
        latency=found.latency * factor.latency,
        sending=found.sending * factor.volume,
        reducing=found.reducing * factor.volume,
    )


def _simulated(
    machine: MachineDescription, case: PredictedCase, row: Algorithm, wire: Wire, segments: int | None, split: bool
) -> Prediction:
    segments = select.segments(row, case.nbytes, case.size) if segments is None else segments
    structure = _structure(row, case.size, segments)
    if not split:
        return Prediction(case, row.name, run(structure, case.nbytes, machine, case.nodes, wire), 0.0, 0.0)
    whole, free, weightless = (
        run(structure, case.nbytes, one, case.nodes, coding)
        for one, coding in (
            (machine, wire),
            (machine.without(reducing=True), wire),
            (machine.without(reducing=True, sending=True), replace(wire, encode=0.0, decode=0.0)),
        )
    )
    return Prediction(case, row.name, weightless, free - weightless, whole - free)


@lru_cache(maxsize=_STRUCTURES)
def _structure(row: Algorithm, size: int, segments: int) -> Structure:
    return row.structure(size, segments=segments)


def per_node(case: PredictedCase) -> int:
    """Return the number of ranks on every node; 0 if nodes have different numbers."""
    counts = {case.nodes.count(node) for node in set(case.nodes)} if case.size <= 64 else _counts(case.nodes)
    return counts.pop() if len(counts) == 1 else 0


def _counts(nodes: Sequence[int]) -> set[int]:
    found: dict[int, int] = {}
    for node in nodes:
        found[node] = found.get(node, 0) + 1
    return set(found.values())


def _hierarchy(machine: MachineDescription, case: PredictedCase, wire: Wire) -> Prediction:
    """Price a hierarchical allreduce: shared memory inside nodes, a schedule between them, pipelined by segments."""
    ranks = per_node(case)
    count = segments_for(case.nbytes)
    piece = case.nbytes // count
    inside = [shared_seconds(machine.shared, kind, ranks, piece) for kind in ("reduce_scatter", "allgather")]
    idle = [shared_seconds(machine.shared, kind, ranks, 0) for kind in ("reduce_scatter", "allgather")]
    lane_case = PredictedCase(case.collective, tuple(range(case.size // ranks)), piece // ranks)
    between = Link(machine.between.classes, machine.between.streams / ranks)
    lanes = replace(machine, between=between)
    if wire == IDENTITY:
        name = select.choose(case.collective, lane_case.nbytes, select.Capabilities(lane_case.size, apart=True))
        lane = predict(lanes, lane_case, name)
    else:
        lane = _two_shot(lanes, lane_case, wire, _turns(machine, case))
    hidden = (count - 1) * max(lane.seconds, sum(inside))
    latency = sum(idle) + lane.latency
    whole = sum(inside) + lane.seconds + hidden
    return Prediction(case, select.HIERARCHY, latency, whole - latency - lane.reducing, lane.reducing)


def _two_shot(machine: MachineDescription, case: PredictedCase, wire: Wire, turns: float) -> Prediction:
    """Price a compressed allreduce: two all-to-all exchanges, and the compressor's work.

    Each rank encodes the vector and then its chunk of the sum, and decodes twice as many elements as the vector has.

    Parameters
    ----------
    turns
        Number of ranks that share a core.
    """
    structure = _exchanges(case.size)
    packed, still = Wire(wire.ratio), machine.without(sending=True)
    whole, latency = (run(structure, case.nbytes, one, case.nodes, packed) for one in (machine, still))
    coding = case.nbytes * turns * (wire.encode * (1 + 1 / case.size) + 2 * wire.decode)
    return Prediction(case, select.TWO_SHOT, latency, whole - latency, coding)


@lru_cache(maxsize=_STRUCTURES)
def _exchanges(size: int) -> Structure:
    """Return the structure of two exchanges, in which rank r sends to r + 1, r + 2, ... at once."""
    steps = tuple(
        Step((Send(distance, distance, distance + 1),), (Recv(-distance % size, 0, 1),)) for distance in range(1, size)
    )
    return Structure(size, size, (Rotation(steps, window=max(1, size - 1)),) * 2)


def _turns(machine: MachineDescription, case: PredictedCase) -> float:
    ranks = case.size if machine.one_host else max(map(case.nodes.count, set(case.nodes[:1])))
    if machine.one_host and machine.fitted:
        ranks = min(ranks, max(machine.fitted.ranks))
    return max(1.0, ranks / machine.cores)


def shared_seconds(points: Sequence[SharedPoint], collective: str, ranks: int, nbytes: int) -> float:
    """Return a collective's time on shared memory in seconds, interpolated between measured points.

    Between two lengths the time is a power of the length; beyond the longest it is proportional to it, below the
    shortest it is constant. Between and beyond numbers of ranks it is a power of that number, and never falls.
    """
    counts = sorted({point.ranks for point in points if point.collective == collective})
    times = [_at_length([p for p in points if (p.collective, p.ranks) == (collective, own)], nbytes) for own in counts]
    if len(counts) == 1:
        return times[0]
    place = min(max(1, sum(own < ranks for own in counts)), len(counts) - 1)
    low, high = counts[place - 1], counts[place]
    slope = max(0.0, math.log(times[place] / times[place - 1]) / math.log(high / low))
    return times[place - 1] * (ranks / low) ** slope


def _at_length(points: list[SharedPoint], nbytes: int) -> float:
    points = sorted(points, key=lambda point: point.nbytes)
    if nbytes <= points[0].nbytes:
        return points[0].seconds
    for low, high in pairwise(points):
        if nbytes <= high.nbytes:
            power = math.log(high.seconds / low.seconds) / math.log(high.nbytes / low.nbytes)
            return low.seconds * (nbytes / low.nbytes) ** power
    return points[-1].seconds * nbytes / points[-1].nbytes


def extrapolates(machine: MachineDescription, case: PredictedCase) -> str:
    """Return the quantities in which a case lies outside the measurements, as text; "" if it lies inside."""
    known = machine.fitted
    if known is None:
        return "nothing was measured"
    beyond = []
    if not min(known.ranks) <= case.size <= max(known.ranks):
        beyond.append("ranks")
    if len(set(case.nodes)) > known.nodes:
        beyond.append("nodes")
    if not known.min_nbytes <= case.nbytes <= known.max_nbytes:
        beyond.append("bytes")
    return f"extrapolated in {', '.join(beyond)}" if beyond else ""
