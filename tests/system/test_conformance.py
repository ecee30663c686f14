"""mpi4py's own tests of collectives, communicators and requests pass on mpicoll's communicators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import extent
from tests.conformance.__main__ import Report, collect, conform
from tests.conformance.scope import LEFT_OUT_MODULES, MODULES, QUICK
from tests.conformance.sources import Unavailable, folder_of_tests


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return folder_of_tests()
    except Unavailable as error:
        pytest.skip(str(error))


def test_mpi4pys_own_tests_pass(folder: Path) -> None:
    report = conform(3 if extent.ALL else 2, QUICK)
    assert report.good, f"{report.summary()}\n{report.details()}"
    assert not [name for name in QUICK if not any(test.startswith(f"{name}.") for test in report.passed)]


def test_every_module_of_tests_is_run_or_left_out_with_a_reason(folder: Path) -> None:
    assert not set(MODULES) & set(LEFT_OUT_MODULES)
    assert {path.stem for path in folder.glob("test_*.py")} <= {*MODULES, *LEFT_OUT_MODULES}


def test_a_failure_on_one_rank_is_a_failure(tmp_path: Path) -> None:
    outcomes = [
        {"m.good": ["passed", ""], "m.bad": ["passed", ""], "m.some": ["skipped", "no"], "m.none": ["skipped", "no"]},
        {"m.good": ["passed", ""], "m.bad": ["failed", "why"], "m.some": ["passed", ""], "m.none": ["skipped", "no"]},
    ]
    for rank, entries in enumerate(outcomes):
        content = {"entries": entries, "left_out": {"m.omitted": "because"}, "seconds": {}}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(content))
    report = Report(2)
    collect(report, tmp_path)
    assert not report.good
    assert report.failed == {"m.bad": "--- rank 1\nwhy"}
    assert report.passed == {"m.good", "m.some"}
    assert report.skipped == {"m.none": "no"}
    assert report.left_out == {"m.omitted": "because"}
