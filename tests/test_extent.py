"""Division of the MPI tests between the two libraries."""

from __future__ import annotations

import pytest

from tests import extent

NODES = [
    *(f"tests/mpi/test_moves.py::test_every_element[{number}]" for number in range(40)),
    "tests/mpi/test_moves.py::test_without_cases",
    *(f"tests/mpi/training/test_resume.py::test_bits[{number}]" for number in range(5)),
    *(f"tests/mpi/test_shared.py::test_arrays[{number}]" for number in range(5)),
    "tests/mpi/test_shared_calls.py::test_one",
    *(f"tests/mpi/test_exact.py::test_allreduce[{number}]" for number in range(5)),
]


def test_every_case_runs_under_one_library_and_every_function_under_both(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {}
    for second in (False, True):
        monkeypatch.setattr(extent, "SECOND_LIBRARY", second)
        run[second] = set(NODES) - extent.left_out(NODES)
    assert run[False] | run[True] == set(NODES)
    alike = {node for node in NODES if "training" in node or "test_shared.py" in node}
    exact = {node for node in NODES if "test_exact" in node}
    assert alike <= run[False]
    assert not alike & run[True]
    functions = [{node.partition("[")[0] for node in run[second] - alike} for second in (False, True)]
    assert functions[0] == functions[1]
    both = run[False] & run[True] - exact
    assert both == {NODES[0], NODES[40], "tests/mpi/test_shared_calls.py::test_one"}
