"""Programs of others, unmodified, end with mpicoll as with plain mpi4py; `make test-programs` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.execute import execute, measure
from tests.programs.outcomes import compare
from tests.programs.sources import Unavailable
from tests.programs.table import PROGRAMS, Program

TESTS = """
from mpi4py import MPI

def test_sum():
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size

def test_of_the_class():
    assert type(MPI.COMM_WORLD) is MPI.Intracomm

def test_that_fails_anyway():
    assert MPI.COMM_WORLD.rank == 0
"""


def test_a_test_that_passes_with_mpi4py_only_is_found(tmp_path: Path) -> None:
    (tmp_path / "test_program.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    program = Program("written here==1", "", ("test_program.py",), seconds=60)
    plain, ours = (execute(program, tmp_path, 2, mpicoll=mpicoll) for mpicoll in (False, True))
    found = compare([plain], [ours])
    assert not found.troubles
    assert set(found.worse) == {(rank, "test_program.py::test_of_the_class") for rank in range(2)}
    assert found.failed_plain == {(1, "test_program.py::test_that_fails_anyway")}
    assert plain.counts()["passed"] == 5
    assert plain.seconds > 0


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program.quick], ids=lambda found: found.name)
def test_quick_programs_end_as_with_mpi4py(program: Program) -> None:
    try:
        found = measure(program, 3, 1).comparison
    except Unavailable as error:
        pytest.skip(str(error))
    assert found.good, f"{found.worse}\n{found.troubles}"
