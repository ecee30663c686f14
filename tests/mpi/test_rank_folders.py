"""Every rank of a test run has a root of its own for temporary folders."""

from __future__ import annotations

import os

import pytest
from mpi4py import MPI

pytestmark = pytest.mark.mpi


@pytest.mark.skipif("MPICOLL_TEST_FOLDER" not in os.environ, reason="launched by something else than tests.mpirun")
def test_no_rank_cleans_up_the_folders_of_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    roots = MPI.COMM_WORLD.allgather(str(tmp_path_factory.getbasetemp().parent))
    assert len(set(roots)) == len(roots)
