"""Division of the MPI tests between the two libraries."""

from __future__ import annotations

import pytest

from tests import extent

NODES = [
    *(f"tests/mpi/test_moves.py::test_every_element[{number}]" for number in range(40)),
    "tests/mpi/test_moves.py::test_without_cases",
    *(f"tests/mpi/training/test_resume.py::test_bits[{number}]" for number in range(15)),
    *(f"tests/mpi/test_shared.py::test_arrays[{number}]" for number in range(5)),
    "tests/mpi/test_shared_calls.py::test_one",
    *(f"tests/mpi/test_exact.py::test_allreduce[{number}]" for number in range(5)),
]


def test_addresses_in_names_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent, "SECOND_LIBRARY", False)
    left_out = []
    for first in (0x7FCC90967060, 0x7E4012000000):
        nodes = [f"tests/mpi/training/test_x.py::test_y[<f at {first + case:#x}>-{case}]" for case in range(30)]
        left_out.append([node in extent.left_out(nodes) for node in nodes])
    assert left_out[0] == left_out[1]
    assert 0 < sum(left_out[0]) < 20


def test_every_case_runs_under_one_library_and_every_function_under_both(monkeypatch: pytest.MonkeyPatch) -> None:
    run = {}
    for second in (False, True):
        monkeypatch.setattr(extent, "SECOND_LIBRARY", second)
        run[second] = set(NODES) - extent.left_out(NODES)
    alike = {node for node in NODES if "training" in node or "test_shared.py" in node}
    exact = {node for node in NODES if "test_exact" in node}
    assert run[False] | run[True] | alike == set(NODES)
    assert not alike & run[True]
    assert {node.partition("[")[0] for node in alike & run[False]} == {node.partition("[")[0] for node in alike}
    assert 8 < len(alike & run[False]) < len(alike)
    functions = [{node.partition("[")[0] for node in run[second] - alike} for second in (False, True)]
    assert functions[0] == functions[1]
    both = run[False] & run[True] - exact
    assert both == {NODES[0], NODES[40], "tests/mpi/test_shared_calls.py::test_one"}
