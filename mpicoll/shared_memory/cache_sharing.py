"""Caches that ranks have in common, which decide how fast they get each other's data."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpicoll.environment import core_numbers


def last_level_caches(cores: Sequence[int], root: Path = Path("/")) -> list[str]:
    """Return the last-level caches of some cores, each by the list of cores that have it, such as ``"0-7,64-71"``.

    The list is empty where the system does not say.
    """
    found, known = set(), set[int]()
    for core in cores:
        if core not in known:
            levels = sorted((root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index*"))
            try:
                text = (levels[-1] / "shared_cpu_list").read_text().strip() if levels else ""
            except OSError:
                text = ""
            known |= _numbers(text)
            found |= {text} if text else set()
    return sorted(found)


def _numbers(text: str) -> set[int]:
    """Return the numbers in a list such as ``"0-7,64-71"``."""
    numbers = set()
    for first, last in re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", text):
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def sharing(comm: MPI.Intracomm) -> list[list[int]]:
    """Return for each rank the number of its caches, and a number that is the same for ranks with the same ones.

    Collective. Ranks are numbered in the order in which theirs come up, so that the result is the same on all machines
    and for all bindings in which ranks share caches in the same way.
    """
    own = last_level_caches(core_numbers())
    told = np.empty((comm.size, 2), np.int64)
    comm.Allgather(np.array([len(own), zlib.crc32(" ".join(own).encode())], np.int64), told)
    numbers: dict[int, int] = {}
    return [[count, numbers.setdefault(code, len(numbers))] for count, code in told.tolist()]
