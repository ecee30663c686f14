"""``mpirun -n 8 python -m mpicoll predict --fit``: measure a machine, fit its description, validate predictions.

Some message sizes and numbers of ranks are for fitting, others only for validation. All ranks fit the same description
from the same measurements; rank 0 prints and saves it.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import select
from mpicoll.comm import Intracomm
from mpicoll.communicator import abort
from mpicoll.communicator.topology import node_ids
from mpicoll.environment import core_numbers, cores
from mpicoll.measure import SAMPLE_SECONDS, compare
from mpicoll.predict import fit, probe
from mpicoll.predict.fit import Sample
from mpicoll.predict.predictor import PredictedCase, names
from mpicoll.predict.probe import Probe, Route
from mpicoll.quantities import format_nbytes, table
from mpicoll.schedules import machine as machines
from mpicoll.schedules.machine import Fitted, Link, MachineDescription, SharedPoint

_USUAL_SECONDS = 60.0
_EMULATED_FACTOR = 20.0
"""Factor on the length of samples there: an idle link may pass its first bytes at once, which must not count."""
_LENGTHS = tuple(1 << power for power in (3, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21))
_TRAIN = tuple(1 << power for power in (3, 10, 13, 16, 18, 21))
_VALIDATE = tuple(1 << power for power in (7, 12, 15, 17, 20))
_KERNEL_LENGTHS = (32 << 10, 512 << 10, 8 << 20)
_SHARED = ("allreduce", "reduce_scatter", "allgather")
_LONGEST_SECONDS = 20e-3
_SPECIAL = (select.SHARED, select.HIERARCHY)


class RankPlacement(NamedTuple):
    """Placement of the ranks: node of each rank, cores of a node, and whether all nodes are one machine."""

    nodes: tuple[int, ...]
    cores: int
    one_host: bool

    @property
    def per_node(self) -> int:
        """Ranks of the fullest node."""
        return max(self.nodes.count(node) for node in set(self.nodes))

    @property
    def crowd(self) -> int:
        """Ranks that share the cores of a node."""
        return len(self.nodes) if self.one_host else self.per_node


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, validate, print and save; collective over COMM_WORLD. Returns the exit status, 1 on one rank."""
    if MPI.COMM_WORLD.size == 1:
        sys.stderr.write("mpicoll predict: one rank has nothing to measure; start this with mpirun\n")
        return 1
    watch = _watch(arguments.deadline)
    session = _Session(arguments.seconds)
    machine, trained, validated = session.machine()
    watch.cancel()
    if MPI.COMM_WORLD.rank == 0:
        path = arguments.save or machines.default_path()
        machines.save(machine, path)
        lines = [*_about(machine), *_comparison(machine, validated, trained), f"saved to {path}"]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _watch(seconds: float) -> threading.Timer:
    """Start a timer that aborts the job after `seconds`."""

    def give_up() -> None:
        abort.end(f"mpicoll predict: --fit has not ended within {seconds:.0f} s\n", 124)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


class _Session:
    """All measurements, in an order that is the same on all ranks."""

    def __init__(self, seconds: float) -> None:
        self.plain = MPI.COMM_WORLD.Dup()
        self.comm = Intracomm(MPI.COMM_WORLD)
        self.seconds, self.begin = seconds, time.monotonic()
        self.layout = _layout(self.plain)
        emulated = self.layout.one_host and len(set(self.layout.nodes)) > 1
        self.longer = 1.0 + _EMULATED_FACTOR * min(1.0, seconds / _USUAL_SECONDS) * emulated
        self.probe = Probe(self.plain, self.comm.channel.polls, self.longer * probe.SAMPLE_SECONDS)

    def say(self, what: str) -> None:
        """Report progress."""
        if self.plain.rank == 0:
            sys.stderr.write(f"[{time.monotonic() - self.begin:5.1f} s] {what}\n")
            sys.stderr.flush()

    def machine(self) -> tuple[MachineDescription, list[Sample], list[Sample]]:
        """Return the fitted machine, the samples of the fit, and the samples for validation."""
        machine = self._parts()
        train, held = _rank_counts(self.plain.size)
        longest = _longest(machine)
        trained = [s for size in train for s in self._samples(size, [n for n in _TRAIN if n <= longest], machine)]
        short = [
            s for s in trained if s.case.nbytes <= _TRAIN[1] and s.algorithm not in (select.SHARED, select.HIERARCHY)
        ]
        call, step = fit.executor(replace(machine, call=0.0, step=0.0), short)
        machine = replace(machine, call=call, step=step)
        machine = replace(machine, corrections=fit.corrections(machine, trained))
        lengths = [n for n in _VALIDATE if n <= longest]
        validated = [s for size in (*train, *held) for s in self._samples(size, lengths, machine)]
        every = [s.case.nbytes for s in (*trained, *validated)]
        error = float(np.median(np.abs(fit.errors(machine, validated))))
        known = Fitted((*train, *held), len(set(self.layout.nodes)), min(every), max(every), error, len(validated))
        return replace(machine, fitted=replace(known, ranks=tuple(sorted(known.ranks)))), trained, validated

    def _parts(self) -> MachineDescription:
        """Return a machine with links, kernels and shared memory measured; the executor's costs are still 0."""
        layout = self.layout
        self.say(f"{self.plain.size} ranks, {len(set(layout.nodes))} nodes")
        step = self.probe.step()
        routes = _routes(layout.nodes, self.plain.rank)
        links = {}
        for kind, (alone, together) in routes.items():
            if self.probe.largest([together is not None])[0]:
                self.say(f"links {kind} nodes")
                times = self.probe.link(alone, together, _LENGTHS)
                links[kind] = fit.link(times, step, layout.per_node, layout.crowd > layout.cores)
        inside = links.get("inside") or links["between"]
        between = links.get("between") or inside
        self.say("kernels")
        active = (
            self.plain.rank < layout.cores if layout.one_host else _local(layout.nodes, self.plain.rank) < layout.cores
        )
        kernels = {nbytes: self.probe.reduce(nbytes, active) for nbytes in _KERNEL_LENGTHS}
        machine = MachineDescription(
            _name(self.plain),
            inside,
            between,
            fit.kernel_classes(kernels),
            0.0,
            0.0,
            layout.cores,
            layout.one_host,
            layout.crowd,
        )
        return replace(machine, shared=tuple(self._shared_points()))

    def _shared_points(self) -> Iterator[SharedPoint]:
        """Measure collectives in shared memory on two ranks of a node, and on all of the first node."""
        here = self.layout.nodes.count(self.layout.nodes[0])
        for ranks in sorted({2, here}):
            if ranks > here or ranks < 2:
                continue
            with _Part(self.plain, _first_of_node(self.layout.nodes, ranks)) as comm:
                can = comm is not None and select.SHARED in comm.algorithms("allreduce")
                if self.probe.largest([can])[0]:
                    self.say(f"shared memory, {ranks} ranks")
                    for nbytes in _TRAIN:
                        times = self._times(comm, {name: (name, select.SHARED) for name in _SHARED}, nbytes)
                        yield from (SharedPoint(name, ranks, nbytes, seconds) for name, seconds in times.items())

    def _samples(self, size: int, lengths: Sequence[int], machine: MachineDescription) -> list[Sample]:
        """Measure every algorithm on the first `size` ranks."""
        found = []
        nodes = self.layout.nodes[:size]
        with _Part(self.plain, range(size)) as comm:
            for nbytes in lengths:
                self.say(f"allreduce on {size} ranks, {format_nbytes(nbytes)}")
                case = PredictedCase("allreduce", nodes, nbytes)
                chosen = [name for name in names(machine, case) if name not in _SPECIAL or self._can(comm, name)]
                times = self._times(comm, {name: (case.collective, name) for name in chosen}, nbytes)
                found += [Sample(case, name, seconds) for name, seconds in times.items()]
        return found

    def _can(self, comm: Intracomm | None, name: str) -> bool:
        return bool(self.probe.largest([comm is not None and name in comm.algorithms("allreduce")])[0])

    def _times(self, comm: Intracomm | None, chosen: Mapping[str, tuple[str, str]], nbytes: int) -> dict[str, float]:
        """Time (collective, algorithm) pairs in turns, in seconds; `comm` is None on ranks that only wait."""
        times = np.zeros(len(chosen))
        self.probe.gather()
        if comm is not None:
            calls = {
                name: _call(comm, collective, nbytes, algorithm) for name, (collective, algorithm) in chosen.items()
            }
            budget = self.seconds / 1000 * len(chosen)
            found = compare(MPI.Intracomm(comm), calls, budget, self.longer * SAMPLE_SECONDS)
            times[:] = [found[name].median for name in chosen]
        self.probe.gather()
        return dict(zip(chosen, self.probe.largest(times).tolist(), strict=True))


class _Part:
    """Context with a communicator of some ranks, None on the others; freed at its end."""

    def __init__(self, plain: MPI.Intracomm, ranks: Sequence[int]) -> None:
        self.made = plain.Split(0 if plain.rank in ranks else MPI.UNDEFINED, plain.rank)
        self.comm = None if self.made == MPI.COMM_NULL else Intracomm(MPI.Intracomm(self.made))

    def __enter__(self) -> Intracomm | None:
        return self.comm

    def __exit__(self, *_: object) -> None:
        if self.comm is not None:
            self.made.Free()


def _call(comm: Intracomm, collective: str, nbytes: int, algorithm: str) -> Callable[[], None]:
    """Return a call on a whole vector of `nbytes` bytes."""
    part = max(1, nbytes // 4 // comm.size)
    count = part * comm.size if collective != "allreduce" else max(1, nbytes // 4)
    whole, other, own = (np.ones(n, np.float32) for n in (count, count, part))
    calls: dict[str, Callable[[], None]] = {
        "allreduce": lambda: comm.Allreduce(whole, other, algorithm=algorithm),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, own, algorithm=algorithm),
        "allgather": lambda: comm.Allgather(own, whole, algorithm=algorithm),
    }
    return calls[collective]


def _layout(plain: MPI.Intracomm) -> RankPlacement:
    ids = np.unique(node_ids(plain), return_inverse=True)[1].tolist()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = MPI.Get_processor_name().encode()
    mine = np.array([zlib.crc32(boot), cores(), len(core_numbers())], np.int64)
    every = np.empty((plain.size, 3), np.int64)
    plain.Allgather(mine, every)
    one_host = len(set(every[:, 0].tolist())) == 1 and len(set(ids)) > 1
    # Emulated hosts are told that they have a share of the cores; together they have all.
    return RankPlacement(tuple(ids), int(every[:, 2 if one_host else 1].min()), one_host)


def _local(nodes: Sequence[int], rank: int) -> int:
    return list(nodes[:rank]).count(nodes[rank])


def _first_of_node(nodes: Sequence[int], ranks: int) -> list[int]:
    return [rank for rank, node in enumerate(nodes) if node == nodes[0]][:ranks]


def _routes(nodes: Sequence[int], rank: int) -> dict[str, tuple[int | None, Route | None]]:
    """Return this rank's peer in the pair and its neighbours in a ring, inside nodes and between them; None if in none.

    One pair of ranks exchanges alone; then all rings exchange together.
    """
    by_node = [[other for other, node in enumerate(nodes) if node == own] for own in sorted(set(nodes))]
    lanes = min(map(len, by_node))
    rings = {"inside": by_node, "between": [[ranks[lane] for ranks in by_node] for lane in range(lanes)]}
    found: dict[str, tuple[int | None, Route | None]] = {}
    for kind, every in rings.items():
        real = [ring for ring in every if len(ring) > 1]
        pair = real[0][:2] if real else []
        alone = pair[1 - pair.index(rank)] if rank in pair else None
        own = next((ring for ring in real if rank in ring), None)
        found[kind] = alone, None if own is None else _neighbours(own, rank)
    return found


def _neighbours(ring: Sequence[int], rank: int) -> Route:
    place = ring.index(rank)
    return Route(ring[(place + 1) % len(ring)], ring[place - 1])


def _rank_counts(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of ranks for fitting, and those for validation only."""
    train = sorted({2, size, *(count for count in (4, 8, 16) if count < size)})
    held = sorted({(low + high) // 2 for low, high in pairwise(train)} - set(train))
    return tuple(train), tuple(held)


def _longest(machine: MachineDescription) -> float:
    """Return the largest message size in bytes whose collective is short enough to be repeated."""
    per_byte = max(link.classes[-1].per_byte for link in (machine.inside, machine.between))
    return max(float(_TRAIN[2]), _LONGEST_SECONDS / 2 / max(per_byte, 1e-12))


def _name(plain: MPI.Intracomm) -> str:
    library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
    return f"measured on {plain.size} ranks, {library}"


def _link_rows(kind: str, link: Link) -> Iterator[list[str]]:
    for row in link.classes:
        below = "longer" if row.below == machines.UNBOUNDED else f"< {format_nbytes(row.below)}"
        times = [f"{value * 1e6:.2f}" for value in (row.latency, row.overhead, row.gap)]
        yield [kind, below, *times, f"{row.per_byte * 1e9:.3f}", "yes" if row.rendezvous else "", f"{link.streams:.1f}"]


def _about(machine: MachineDescription) -> list[str]:
    head = ["link", "length", "L us", "o us", "g us", "G ns/B", "rendezvous", "streams"]
    rows = [head, *_link_rows("inside", machine.inside), *_link_rows("between", machine.between)]
    kernels = ", ".join(f"{row.per_byte * 1e9:.3f}" for row in machine.reduce)
    lines = [machine.name, "", *table(rows), ""]
    lines.append(
        f"reduce {kernels} ns/B; executor {machine.call * 1e6:.1f} us a call, {machine.step * 1e6:.1f} us a step"
    )
    factors = [
        f"{name.partition('/')[2]} {row.latency:.2f}/{row.volume:.2f}" for name, row in machine.corrections.items()
    ]
    return [*lines, f"corrections, latency/volume: {', '.join(factors)}"]


def _comparison(machine: MachineDescription, validated: Sequence[Sample], trained: Sequence[Sample]) -> list[str]:
    """Return lines with predicted and measured times of the validation, and relative errors."""
    rows = [["algorithm", "ranks", "length", "predicted us", "measured us", "ratio"]]
    for sample, error in zip(validated, fit.errors(machine, validated), strict=True):
        times = [f"{sample.seconds * (1 + error) * 1e6:.1f}", f"{sample.seconds * 1e6:.1f}", f"{1 + error:.2f}"]
        rows.append([sample.algorithm, str(sample.case.size), format_nbytes(sample.case.nbytes), *times])
    known = {sample.case.size for sample in trained}
    groups = {
        "fitted": trained,
        "other lengths": [s for s in validated if s.case.size in known],
        "other lengths and numbers of ranks": [s for s in validated if s.case.size not in known],
    }
    lines = ["", *table(rows), ""]
    for what, samples in groups.items():
        if samples:
            off = np.abs(fit.errors(machine, samples))
            lines.append(
                f"{what}: median error {np.median(off):.1%}, {np.quantile(off, 0.9):.1%} at the 90th percentile, "
                f"{len(samples)} measurements"
            )
    if machine.crowd > machine.cores:
        lines.append(
            f"note: {machine.crowd} ranks share {machine.cores} cores; times of short messages then depend on the "
            "operating system's scheduler"
        )
    return lines
