"""Lengths of arguments in the profile of `python -m mpicoll run`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll.program.call_arguments import measure

DATA = np.zeros(12)


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (DATA, 96),
        ([DATA, MPI.DOUBLE], 96),
        ([DATA, 5, MPI.DOUBLE], 40),
        ([DATA, [1, 2, 3], MPI.DOUBLE], 48),
        ([DATA, np.array([1, 2]), MPI.DOUBLE], 24),
        ([DATA, [1, 2], [0, 4], MPI.DOUBLE], 24),
        ([DATA, ([1, 2, 3], [0, 4, 8]), MPI.DOUBLE], 48),
        ([DATA, (np.array([1, 2, 3]), np.array([0, 4, 8])), MPI.DOUBLE], 48),
        ([DATA, (np.array([1, 2, 3]), None), MPI.DOUBLE], 48),
        ([DATA, (3, 4)], 56),
        ([DATA, ("a", "b"), MPI.DOUBLE], 96),
        ([DATA, object(), MPI.DOUBLE], 96),
        ([DATA, ([1, 2], [0, 8]), [MPI.DOUBLE, MPI.INT]], 16),
        ([DATA, [1, 2], [0, 8], [MPI.DOUBLE, MPI.INT]], 16),
        ([DATA, [MPI.DOUBLE, MPI.INT]], 96),
    ],
)
def test_bytes_of_a_specification(spec: Any, nbytes: int) -> None:
    assert measure(spec)[0] == nbytes
