"""Schedules, which are algorithms as data: builders, verifier, cost model and renderer; independent of MPI."""

from __future__ import annotations

# Importing a module of builders enters its algorithms into the table.
from mpicoll.schedules import butterfly, direct, double_tree, prefix, ring, tree  # noqa: F401
from mpicoll.schedules.algorithms import ALGORITHMS, Algorithm, collectives, find, find_any, register
from mpicoll.schedules.collective_table import COLLECTIVES, Collective
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step, chunk_bounds

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Algorithm",
    "Collective",
    "Recv",
    "Reduce",
    "Schedule",
    "Send",
    "Step",
    "chunk_bounds",
    "collectives",
    "find",
    "find_any",
    "register",
]
