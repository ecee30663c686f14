"""Ratios that runs keep for later ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpicoll.shared_memory import kept_times

SHAPE = (2, 3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPICOLL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _keep(*values: float, size: int = 4) -> None:
    for value in values:
        kept_times.add(size, np.full(SHAPE, value))


def test_the_median_counts_once_there_are_enough(folder: Path) -> None:
    _keep(1.0, 9.0)
    assert kept_times.median(4, SHAPE) is None
    _keep(2.0)
    np.testing.assert_array_equal(kept_times.median(4, SHAPE), np.full(SHAPE, 2.0))
    assert kept_times.median(5, SHAPE) is None
    assert kept_times.median(4, (3, 2)) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # no draft is left


def test_what_is_no_ratio_is_not_kept() -> None:
    _keep(1.0, np.inf, np.nan, 0.0, -1.0, 2.0)
    assert kept_times.median(4, SHAPE) is None
    _keep(3.0)
    np.testing.assert_array_equal(kept_times.median(4, SHAPE), np.full(SHAPE, 2.0))


HUGE = '{"format": 1, "facts": %s, "ratios": [[1' + 400 * "0" + "]]}"


@pytest.mark.parametrize(
    "text", [HUGE, "", "{}", "[]", "[" * 60_000, "x" * 100_000, '{"format": 1, "facts": {}}', "\xff"]
)
def test_a_damaged_file_counts_as_none_and_is_replaced(folder: Path, text: str) -> None:
    _keep(1.0, 1.0, 1.0)
    (path,) = folder.iterdir()
    facts = json.dumps(json.loads(path.read_text())["facts"])
    path.write_text(text.replace("%s", facts), encoding="latin-1")
    assert kept_times.median(4, SHAPE) is None
    _keep(2.0, 2.0, 2.0)
    np.testing.assert_array_equal(kept_times.median(4, SHAPE), np.full(SHAPE, 2.0))


def test_other_cores_have_other_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    _keep(1.0, 1.0, 1.0)
    monkeypatch.setattr(kept_times, "core_numbers", lambda: {7})
    assert kept_times.median(4, SHAPE) is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("a file")
    _keep(1.0, 1.0, 1.0)
    assert kept_times.median(4, SHAPE) is None
