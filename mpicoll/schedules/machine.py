"""Machine model of the simulator: parameters of links, cores and kernels, and their file.

The model is LogGP (Alexandrov, Ionescu, Schauser, Scheiman, "LogGP: incorporating long messages into the LogP model",
JPDC 44, 1997): a message of m bytes costs its sender and its receiver an *overhead* o of processor time each, occupies
the sender's link for max(gap g, m G) and arrives after the *latency* L and m G. Every parameter depends on the length
of the message; from some length on the transfer waits until the receiver is ready (*rendezvous*).

All times are in seconds, all lengths in bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mpicoll.environment import cache_folder, read_file, write_measurement
from mpicoll.errors import MachineFileError

FORMAT, VERSION = "mpicoll machine", 1
UNBOUNDED = 1 << 62
_MAX_NBYTES = 1 << 20


@dataclass(frozen=True)
class SizeClass:
    """LogGP parameters of messages of fewer than `below` bytes that belong to no earlier class.

    Attributes
    ----------
    latency, overhead, gap
        L, o and g in seconds.
    per_byte
        G in seconds per byte.
    rendezvous
        Whether a transfer waits until the receive is posted.
    """

    below: int
    latency: float
    overhead: float
    gap: float
    per_byte: float
    rendezvous: bool = False


@dataclass(frozen=True)
class Link:
    """Size classes, shortest first.

    Attributes
    ----------
    streams
        Number of senders of a node that get the full speed at the same time.
    oversubscribed
        The same classes where :attr:`MachineDescription.crowd` ranks share the cores; empty if that was not measured.
    """

    classes: tuple[SizeClass, ...]
    streams: float = 1.0
    oversubscribed: tuple[SizeClass, ...] = ()

    def at(self, crowd: float) -> Link:
        """Return the link between `crowd` 0 (a core for every rank) and 1 (`oversubscribed`), or extrapolated."""
        if not self.oversubscribed or crowd <= 0:
            return self
        rows = zip(self.classes, self.oversubscribed, strict=True)
        return replace(self, classes=tuple(_mixed(alone, oversubscribed, crowd) for alone, oversubscribed in rows))


@dataclass(frozen=True)
class ReduceClass:
    """Seconds for each byte that is reduced, in pieces of fewer than `below` bytes."""

    below: int
    per_byte: float


@dataclass(frozen=True)
class SharedPoint:
    """Measured time of a collective of `ranks` ranks on shared memory, which no schedule describes."""

    collective: str
    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Correction:
    """Factors that correct a prediction: of its latency part, and of its volume part (bytes sent and reduced)."""

    latency: float = 1.0
    volume: float = 1.0


@dataclass(frozen=True)
class Fitted:
    """Range of the measurements; predictions outside of it are extrapolations.

    Attributes
    ----------
    ranks, nodes
        Numbers of ranks that were measured, and the number of nodes.
    min_nbytes, max_nbytes
        Smallest and largest message size.
    median_error
        Median of ``abs(predicted / measured - 1)`` over measurements that were not used for the fit.
    points
        Number of measurements.
    """

    ranks: tuple[int, ...]
    nodes: int
    min_nbytes: int
    max_nbytes: int
    median_error: float
    points: int


@dataclass(frozen=True)
class MachineDescription:
    """A machine for :mod:`mpicoll.schedules.simulate`.

    Attributes
    ----------
    inside, between
        Links between ranks of one node and of different nodes.
    reduce
        Seconds per byte of the reduction kernels, by length.
    call, step
        Seconds of processor time of the executor for each collective and for each of its steps.
    cores
        Cores of a node; more ranks than cores share them in turn. If `one_host`, all nodes share them, as in an
        emulated cluster; predictions are then limited to the measured numbers of ranks.
    crowd
        Number of ranks that shared the cores when a link's `oversubscribed` was measured.
    shared
        Measured times of collectives on shared memory.
    corrections
        Corrections by ``"collective/algorithm"``.
    fitted
        Range of the measurements; None if nothing was measured.
    """

    name: str
    inside: Link
    between: Link
    reduce: tuple[ReduceClass, ...]
    call: float
    step: float
    cores: int
    one_host: bool = False
    crowd: int = 0
    shared: tuple[SharedPoint, ...] = ()
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    fitted: Fitted | None = None

    def without(self, *, sending: bool = False, reducing: bool = False) -> MachineDescription:
        """Return the machine with a cost of zero for bytes sent (`sending`), or reduced (`reducing`)."""
        found = self
        if sending:
            found = replace(found, inside=_weightless(found.inside), between=_weightless(found.between))
        if reducing:
            found = replace(found, reduce=(ReduceClass(UNBOUNDED, 0.0),))
        return found

    def with_network(self, per_byte: float, delay: float) -> MachineDescription:
        """Return the machine with another network between nodes, of which nothing has been measured.

        Parameters
        ----------
        per_byte
            Seconds of a node's link for each byte, each way.
        delay
            Seconds that a message takes from node to node beyond the latency of this machine.
        """

        def over(rows: tuple[SizeClass, ...]) -> tuple[SizeClass, ...]:
            return tuple(replace(row, latency=row.latency + delay, per_byte=per_byte) for row in rows)

        between = Link(over(self.between.classes), oversubscribed=over(self.between.oversubscribed))
        return replace(self, between=between, corrections={}, fitted=None)

    def to_json(self) -> str:
        """Return the text of its file."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


@dataclass(frozen=True)
class Wire:
    """Model of a compressor: payload bytes per byte (`ratio`), seconds per uncompressed byte to encode and decode."""

    ratio: float = 1.0
    encode: float = 0.0
    decode: float = 0.0


IDENTITY = Wire()


def _weightless(link: Link) -> Link:
    classes, oversubscribed = (
        tuple(replace(row, per_byte=0.0) for row in rows) for rows in (link.classes, link.oversubscribed)
    )
    return replace(link, classes=classes, oversubscribed=oversubscribed)


def _mixed(one: SizeClass, other: SizeClass, share: float) -> SizeClass:
    def between(low: float, high: float) -> float:
        return max(0.0, low + (high - low) * share)

    return SizeClass(
        one.below,
        between(one.latency, other.latency),
        between(one.overhead, other.overhead),
        between(one.gap, other.gap),
        between(one.per_byte, other.per_byte),
        one.rendezvous,
    )


def textbook() -> MachineDescription:
    """Return a machine that is not measured: a network of 10 Gbit/s and nodes of 16 cores."""
    inside = (
        SizeClass(8 << 10, 0.5e-6, 0.3e-6, 0.2e-6, 0.1e-9),
        SizeClass(UNBOUNDED, 1.5e-6, 0.3e-6, 0.2e-6, 0.1e-9, rendezvous=True),
    )
    between = (
        SizeClass(64 << 10, 10e-6, 1e-6, 1e-6, 0.8e-9),
        SizeClass(UNBOUNDED, 25e-6, 1e-6, 1e-6, 0.8e-9, rendezvous=True),
    )
    kernels = (ReduceClass(256 << 10, 0.05e-9), ReduceClass(UNBOUNDED, 0.15e-9))
    return MachineDescription(
        "textbook 10 Gbit/s cluster, not measured", Link(inside, 4.0), Link(between), kernels, 5e-6, 2e-6, 16
    )


def default_path() -> Path:
    """Return the path of a fitted machine's file, in the folder of the tuning tables."""
    return cache_folder() / "machine.json"


def save(machine: MachineDescription, path: Path) -> None:
    """Write the file of a machine; an old file is replaced atomically."""
    write_measurement(path, machine.to_json())


def load(path: Path) -> MachineDescription:
    """Return the machine of a file.

    Raises
    ------
    MachineFileError
        If the file cannot be used; the message names it and the reason.
    """
    try:
        return parse(read_file(path, _MAX_NBYTES))
    except (OSError, ValueError, RecursionError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise MachineFileError(f"{path}: cannot be used as a machine file: {reason}") from None


def parse(text: str) -> MachineDescription:
    """Return the machine of a file's text; ValueError if the text is wrong."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it does not describe a machine")
    if content.get("version") != VERSION:
        raise ValueError(f"its version is {content.get('version')!r}, not {VERSION}")
    try:
        return _machine({key: value for key, value in content.items() if key not in ("format", "version")})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from None


def _machine(fields: dict[str, Any]) -> MachineDescription:
    fitted = fields.pop("fitted")
    if fitted is not None:
        fitted = Fitted(**{**fitted, "ranks": tuple(int(size) for size in fitted["ranks"])})
    machine = MachineDescription(
        inside=_link(fields.pop("inside")),
        between=_link(fields.pop("between")),
        reduce=_classes(ReduceClass, fields.pop("reduce")),
        shared=tuple(_point(point) for point in fields.pop("shared")),
        corrections={str(key): _checked(Correction(**row)) for key, row in fields.pop("corrections").items()},
        fitted=fitted and _checked(fitted),
        **fields,
    )
    _checked(machine)
    if not isinstance(machine.name, str) or machine.cores < 1:
        raise ValueError(f"its name is {machine.name!r}, its cores are {machine.cores!r}")
    return machine


def _point(fields: dict[str, Any]) -> SharedPoint:
    point: SharedPoint = _checked(SharedPoint(**fields))
    if not point.seconds:
        raise ValueError(f"seconds: {point.seconds!r} is not a time")
    return point


def _link(fields: dict[str, Any]) -> Link:
    oversubscribed = fields.pop("oversubscribed" if "oversubscribed" in fields else "crowded")  # an older name
    classes = _classes(SizeClass, fields.pop("classes"))
    link = _checked(
        Link(classes, oversubscribed=_classes(SizeClass, oversubscribed) if oversubscribed else (), **fields)
    )
    if link.oversubscribed and [row.below for row in link.oversubscribed] != [row.below for row in classes]:
        raise ValueError("oversubscribed: its classes are not the link's")
    if link.streams <= 0:
        raise ValueError(f"streams: {link.streams!r} is not positive")
    return link


def _classes(kind: Any, rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Read rows that together hold for all lengths."""
    found = tuple(_checked(kind(**row)) for row in rows)
    bounds = [row.below for row in found]
    if not bounds or bounds != sorted(set(bounds)) or bounds[-1] != UNBOUNDED:
        raise ValueError(f"below: {bounds} are not ascending bounds up to {UNBOUNDED}")
    return found


def _checked(row: Any) -> Any:
    """Return `row`; ValueError unless its numbers are finite and not negative, and its flags are booleans."""
    for name, value in vars(row).items():
        kind = type(row).__dataclass_fields__[name].type
        if kind in ("int", "float"):
            number = isinstance(value, int if kind == "int" else (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}: {value!r} is not a valid number")
        elif kind == "bool" and not isinstance(value, bool):
            raise ValueError(f"{name}: {value!r} is neither true nor false")
    return row
