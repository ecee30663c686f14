"""Table of algorithms: ``ALGORITHMS[collective][name]``.

Selection, command line, tests of the verifier and documentation all read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mpicoll.errors import MpicollError, UnknownAlgorithm
from mpicoll.schedules.all_ranks import Part, Rotation, Structure, written_down
from mpicoll.schedules.types import Schedule


class Builder(Protocol):
    """A pure function that returns the schedule of one rank; an algorithm may ignore `root` and `segments`."""

    def __call__(self, size: int, rank: int, *, root: int, segments: int) -> Schedule:  # noqa: D102
        ...


PartsBuilder = Callable[[int, int], tuple[Part, ...]]
"""``(size, root)`` -> the parts of an algorithm with one chunk for each rank."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of a collective: a row of the table.

    Attributes
    ----------
    collective, name
        The names under which the algorithm is registered.
    build
        The function that returns the schedule of a rank.
    ordered
        True if operands are combined in rank order, so that operations that do not commute may use the algorithm.
    segmented
        True if ``segments`` divides each chunk for pipelining; otherwise the argument is ignored.
    min_segments
        The smallest number of segments with which the pipeline is correct.
    rotates
        True if the schedule of rank r is that of rank 0 with peers and chunks shifted by r.
    parts
        For algorithms of which only a part rotates, a function that describes all ranks' steps compactly; else None.
    """

    collective: str
    name: str
    build: Builder
    ordered: bool = False
    segmented: bool = False
    min_segments: int = 1
    rotates: bool = False
    parts: PartsBuilder | None = None

    @property
    def summary(self) -> str:
        """The first line of the builder's docstring."""
        return (self.build.__doc__ or "").strip().partition("\n")[0]

    def schedule(self, size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
        """Build the schedule of `rank` out of `size` ranks.

        Raises
        ------
        ValueError
            If an argument is out of range; the message names it and its value.
        """
        if size < 1:
            raise ValueError(f"size: {size} is not a positive number of ranks")
        if not 0 <= rank < size:
            raise ValueError(f"rank: {rank} is not in 0..{size - 1}")
        if not 0 <= root < size:
            raise ValueError(f"root: {root} is not in 0..{size - 1}")
        return self.build(size, rank, root=root, segments=max(segments, self.min_segments))

    def structure(self, size: int, *, root: int = 0, segments: int = 1) -> Structure:
        """Return a compact description of all ranks' schedules; raises as :meth:`schedule` does."""
        first = self.schedule(size, 0, root=root, segments=segments)
        if self.rotates:
            whole = Rotation(first.steps, first.chunks // size, first.window)
            return Structure(size, first.chunks, (whole,))
        if self.parts is not None:
            return Structure(size, first.chunks_per_vector, self.parts(size, root))
        others = (self.schedule(size, rank, root=root, segments=segments) for rank in range(1, size))
        return written_down([first, *others])


ALGORITHMS: dict[str, dict[str, Algorithm]] = {}


def register(
    collective: str,
    name: str,
    *,
    ordered: bool = False,
    segmented: bool = False,
    min_segments: int = 1,
    rotates: bool = False,
    parts: PartsBuilder | None = None,
) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a builder under `collective` and `name`; see :class:`Algorithm`.

    Raises
    ------
    ValueError
        By the decorator, if another function has this name already; the same function may be defined again, as in a
        notebook.
    """

    def enter(build: Builder) -> Builder:
        known = ALGORITHMS.get(collective, {}).get(name)
        if known is not None and _place(known.build) != _place(build):
            raise ValueError(f"name: {collective!r} has an algorithm {name!r} already, {'.'.join(_place(known.build))}")
        row = Algorithm(collective, name, build, ordered, segmented, min_segments, rotates, parts)
        ALGORITHMS.setdefault(collective, {})[name] = row
        return build

    return enter


def _place(build: Builder) -> tuple[str, str]:
    return build.__module__, getattr(build, "__qualname__", repr(build))


def collectives() -> tuple[str, ...]:
    """Return the names of the collectives that have hand-written algorithms."""
    return tuple(ALGORITHMS)


def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm `name` of `collective`.

    Raises
    ------
    UnknownAlgorithm
        If there is none; the message lists the names.
    """
    table = ALGORITHMS.get(collective, {})
    if name not in table:
        raise UnknownAlgorithm(f"algorithm: {name!r} is not one for {collective}; there are {', '.join(table)}")
    return table[name]


def find_any(name: str, collective: str | None, others: Sequence[str] = ()) -> Algorithm:
    """Return the algorithm `name` of `collective`, or of the first collective that has one of this name if it is None.

    Parameters
    ----------
    others
        Further names that the caller takes, for the message.

    Raises
    ------
    MpicollError
        If there is none; the message lists the names.
    """
    if collective is not None:
        return find(collective, name)
    for table in ALGORITHMS.values():
        if name in table:
            return table[name]
    every = [*sorted({name for table in ALGORITHMS.values() for name in table}), *others]
    raise MpicollError(
        f"algorithm: there is no {name!r}; there are {', '.join(every)}; collectives are {', '.join(ALGORITHMS)}"
    )
