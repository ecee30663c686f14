"""Memory that the processes of a machine, or of a control group, may still take."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mpicoll.environment import UNLIMITED


class MemoryLimit(NamedTuple):
    """Limit on the memory of several processes.

    Attributes
    ----------
    what
        Name of the limit, for messages.
    key
        A number that is equal where processes share the limit.
    left
        Bytes that these processes may still take together.
    """

    what: str
    key: int
    left: int


def machine_limit(root: Path = Path("/")) -> MemoryLimit:
    """Return the limit of the machine: memory that is free or can be freed, and swap space."""
    key = _key("machine", platform.node())
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        found = {words[0]: int(words[1]) << 10 for words in lines if len(words) > 1}
        return MemoryLimit("the node", key, found["MemAvailable:"] + found.get("SwapFree:", 0))
    except (OSError, ValueError, KeyError):
        return MemoryLimit("the node", key, UNLIMITED)


def group_limit(root: Path = Path("/")) -> MemoryLimit:
    """Return the limit of this process' control group (version 1 or 2), or of a group around it, if that is less."""
    found = [*_groups(root)]
    places = "".join(str(place) for place, _ in found)
    space = root / "proc/self/ns/cgroup"
    key = _key("group", platform.node(), places, str(space.stat().st_ino) if space.exists() else "")
    return MemoryLimit("its control group", key, min((left for _, left in found), default=UNLIMITED))


def _key(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:7], "little")


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the control groups of this process that limit memory, and what is left of each limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for place in _upwards(top, path):
            left = _left_of(place, *names)
            if left is not None:
                yield place, left


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """Yield a group and those around it; the top alone where the path is one of outside this container."""
    place = top / path.strip("/")
    while place != top and top in place.parents:
        yield place
        place = place.parent
    yield top


def _left_of(place: Path, maximum: str, current: str, cached: str) -> int | None:
    """Return what is left of a group's limit, with the pages of files that can be dropped; None without a limit."""
    try:
        limit = (place / maximum).read_text().strip()
        if limit == "max":
            return None
        used = int((place / current).read_text())
        lines = (line.split() for line in (place / "memory.stat").read_text().splitlines())
        droppable = next((int(words[1]) for words in lines if words[0] == cached), 0)
        return max(0, int(limit) - used + droppable)
    except (OSError, ValueError, IndexError):
        return None
